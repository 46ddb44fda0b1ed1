"""Layout-independent weights: every meta parameter becomes this rank's shard of a value that does
not depend on the layout.

The value of a parameter is a function of (seed, its full name, the module's own initializer). Each
whole parameter is drawn on the CPU, one at a time, and then sharded. So one process, any stage and
any tensor-parallel rank get the same numbers, and a rank never needs more memory than its own
shards and one full parameter. `blueprint` runs an initializer for one tensor only. Parameters with
pretrained values are read from files, one shard at a time: see `pretrained`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.peft_layers import origin
from lightning_3d.compat.torch import put_values
from lightning_3d.errors import ConfigError, listed
from lightning_3d.parallel.sharding import ShardSpec, replicated
from lightning_3d.parallel.undone import isolated_generators
from lightning_3d.weights.blueprint import (
    BUILD_IN_MEMORY,
    Blueprint,
    BlueprintSlot,
    Target,
    other_tensors,
    seed_of,
)
from lightning_3d.weights.pretrained import Stored, stored_values
from lightning_3d.weights.stored import StoredReader

if TYPE_CHECKING:
    from lightning_3d.parallel.mesh import Mesh


def initialize(
    module: nn.Module,
    seed: int = 0,
    *,
    specs: Mapping[str, ShardSpec] | None = None,
    blueprint: Blueprint | None = None,
    stored: Mapping[str, Stored] | None = None,
    prefix: str = "",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Give every parameter and buffer of `module` that is on the meta device its initial value, in
    place.

    Parameters get values from the module's own initializers: first `reset_parameters()` of the
    module that owns them, then, as in an ordinary construction, the initializers of the modules
    that contain it (`reset_parameters()`, Transformers' `_init_weights(module)`, `init_weights()`).
    Buffers are written by the same initializers (or `reset_buffers()`), or copied from a second
    instance of their module; they keep their dtype. Tensors that are not on meta are not changed,
    so a second call does nothing. Ranks do not communicate, and the states of the random number
    generators do not change.

    Args:
        module: the module, whole or partitioned and rewritten.
        seed: seed of all weights.
        specs: sharding of each parameter, by name in `module`; a parameter without an entry is
            unsharded.
        blueprint: blueprint of the whole module, taken before it was partitioned and rewritten.
            None: initializers see only the sizes and modules of this rank.
        stored: places of pretrained values, by name in the whole module (`stored_values`), taken
            before it was partitioned. None: those that `load_pretrained` gave to `module`, which
            must be whole.
        prefix: prefix of the names in `module`, if the layout-independent names are longer
            ("model.").
        device: device of parameters and buffers. None: the CPU.
        dtype: dtype of floating-point parameters. None: their own. Types narrower than float32 are
            drawn in float32 and rounded.

    Raises:
        ConfigError: nothing initializes a parameter or buffer; the message names it and says what
            to add.
        CheckpointError: pretrained values cannot be read.
    """
    specs = specs or {}
    homes = {name: parameter for name, parameter in module.named_parameters() if parameter.is_meta}
    buffers = _buffers_on_meta(module)
    if not homes and not buffers:
        return
    stored = stored_values(module) if stored is None else stored
    with isolated_generators(), torch.no_grad(), torch.device("cpu"):
        blueprint = blueprint or Blueprint(module, specs)
        canonical = {name: _canonical(name, specs, blueprint) for name in homes}
        drawn = [name for name in canonical.values() if name not in stored]
        rebuilt = {name: slots for name, slots in buffers.items() if name not in stored}
        blueprint.prepare([*drawn, *rebuilt])
        _fill_buffers(rebuilt, blueprint, seed, prefix, torch.device(device or "cpu"))
        reader = StoredReader()
        for name in buffers.keys() - rebuilt.keys():
            _read_buffer(buffers[name], reader, stored[name], device or "cpu")
        for name, parameter in homes.items():
            final_dtype = (
                dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            )
            if canonical[name] in stored:
                spec = specs.get(name) or replicated(name, parameter.shape, 1)
                local = reader.read(stored[canonical[name]], spec, final_dtype, device or "cpu")
            else:
                local = _draw(blueprint, canonical[name], final_dtype, seed, prefix)
                local = _local(local, specs.get(name))  # the full tensor is freed from here on
                local = local.to(device or "cpu", final_dtype)
            _require_shape(local, parameter, name)
            put_values(parameter, local)


def _canonical(name: str, specs: Mapping[str, ShardSpec], blueprint: Blueprint) -> str:
    """The name under which a parameter is initialized: for a tied one, here or on another stage,
    its first name."""
    spec = specs.get(name)
    if spec is not None and spec.tied_to:
        return spec.tied_to
    return blueprint.targets[name].name if name in blueprint.targets else name


def _draw(blueprint: Blueprint, name: str, dtype: torch.dtype, seed: int, prefix: str) -> Tensor:
    """The full value of the parameter `name`, on CPU. Types narrower than float32 are drawn in
    float32."""
    target = blueprint.targets.get(name)
    if target is None:
        raise ConfigError(
            f"A parameter is tied to '{prefix}{name}', but the model to initialize does not contain"
            " that parameter. Initialize with the blueprint of the whole model."
        )
    if dtype.is_floating_point:
        dtype = torch.float32 if dtype.itemsize < 4 else dtype
        # temporaries of an initializer have the precision of its parameter
        torch.set_default_dtype(dtype)
    value = _draw_alone_or_with_siblings(blueprint, target, dtype, seed, prefix)
    if value is None:
        owner = type(target.owner).__name__
        key = target.slots[0].key
        raise ConfigError(
            f"The parameter '{prefix}{name}' of shape {tuple(target.blank.shape)} is on the meta"
            " device, and no initializer writes all of it. Add `def reset_parameters(self):"
            f" nn.init.ones_(self.{key})`, with your values, to {owner}. Other ways: handle {owner}"
            f" in the `_init_weights(self, module)` of a module that contains it, {BUILD_IN_MEMORY}"
        )
    return value.detach()


def _draw_alone_or_with_siblings(
    blueprint: Blueprint, target: Target, dtype: torch.dtype, seed: int, prefix: str
) -> Tensor | None:
    """Draw one parameter; if its initializer needs them, all parameters of its module, always in
    the same way."""
    siblings = blueprint.siblings(target)
    if not blueprint.depends_on_siblings(target):
        try:
            return blueprint.draw([target], [dtype], seed_of(seed, prefix + origin(target.name)))[0]
        except ConfigError:
            if len(siblings) == 1:
                raise
    values = blueprint.draw(
        siblings, [dtype] * len(siblings), seed_of(seed, prefix + origin(siblings[0].name))
    )
    return values[siblings.index(target)]


def _local(full: Tensor, spec: ShardSpec | None) -> Tensor:
    """This rank's shard of a full parameter."""
    return full if spec is None or not spec.is_cut else spec.cut(full)


def _require_shape(local: Tensor, parameter: nn.Parameter, name: str) -> None:
    if local.shape != parameter.shape:
        raise ConfigError(
            f"The initial value of '{name}' on this rank has shape {tuple(local.shape)}, but the"
            f" parameter has shape {tuple(parameter.shape)}. Let its initializer keep the shape."
        )


def _buffers_on_meta(module: nn.Module) -> dict[str, list[BlueprintSlot]]:
    """By first name: the places of every buffer, and of every plain attribute that is a tensor, on
    meta."""
    names: dict[int, str] = {}
    slots: dict[str, list[BlueprintSlot]] = {}
    for prefix, owner in module.named_modules():
        for slot, tensor in other_tensors(owner):
            if tensor.is_meta:
                name = names.setdefault(id(tensor), f"{prefix}.{slot.key}" if prefix else slot.key)
                slots.setdefault(name, []).append(slot)
    return slots


def _fill_buffers(
    buffers: dict[str, list[BlueprintSlot]],
    blueprint: Blueprint,
    seed: int,
    prefix: str,
    device: torch.device,
) -> None:
    """Rebuild all buffers, module by module: they are small, and some are computed from one
    another."""
    groups: dict[str, list[str]] = {}
    for name in buffers:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    for names in groups.values():
        targets = [blueprint.targets[name] for name in names]
        metas = [buffers[name][0].get() for name in names]
        drawn = blueprint.draw(
            targets, [meta.dtype for meta in metas], seed_of(seed, prefix + targets[0].name)
        )
        rebuilt = (
            _rebuilt_buffers(buffers[names[0]][0].module)
            if any(value is None for value in drawn)
            else {}
        )
        for name, meta, value in zip(names, metas, drawn, strict=True):
            places = buffers[name]
            value = rebuilt.get(places[0].key) if value is None else value
            if value is not None and value.shape == meta.shape:
                value = value.detach().to(device, meta.dtype)
                for place in places:
                    place.put(value)
            elif places[0].kind == "_buffers":
                # torch itself refuses to compute with an attribute that stays on meta
                _refuse_buffer(prefix + name, places[0])


def _read_buffer(
    places: list[BlueprintSlot], reader: StoredReader, stored: Stored, device: torch.device | str
) -> None:
    """Fill a buffer that is saved with the weights; every rank that has its module holds it
    unsharded."""
    meta = places[0].get()
    value = reader.read(stored, replicated("", meta.shape, 1), meta.dtype, device)
    for place in places:
        place.put(value)


def _rebuilt_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers of a second instance of `module`, made from its attributes that are named like its
    constructor's arguments.

    Only of a module that holds nothing but buffers, and only if the second instance ends up with
    the same attributes, which shows that they are what the constructor was given; else nothing.
    """
    if module._parameters or module._modules:
        return {}
    kind = type(module)
    expected = [name for name in inspect.signature(kind).parameters if name != "device"]
    if not all(name in vars(module) for name in expected):
        return {}
    second = kind(**{name: vars(module)[name] for name in expected})
    return (
        dict(second.named_buffers())
        if _plain_attributes(second) == _plain_attributes(module)
        else {}
    )


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings and the like, which a constructor computes from its arguments."""
    plain = (bool, int, float, str, bytes, tuple, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, plain) and name != "training"
    }


def _refuse_buffer(name: str, slot: BlueprintSlot) -> None:
    owner = type(slot.module).__name__
    raise ConfigError(
        f"The buffer '{name}' of shape {tuple(slot.get().shape)} is on the meta device, and no"
        f" function rebuilds it. Add `def reset_buffers(self): self.{slot.key}.copy_(...)`, with"
        f" your values, to {owner}, {BUILD_IN_MEMORY}"
    )


def broadcast_eager(module: nn.Module, mesh: Mesh) -> None:
    """Broadcast every parameter and buffer that is not on meta from rank 0, so that all ranks start
    from the same model.

    Every rank must hold the whole model, unpartitioned. Communicates over all ranks: one small
    object and one flag, then each tensor by itself, as bytes. Nothing is sent when no rank holds
    values.

    Raises:
        ConfigError, on every rank: the model differs between ranks in names, shapes, dtypes, or in
            what is on meta.
    """
    if mesh.layout.world_size == 1:
        return
    tensors = _in_memory(module)
    described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    _require_same_model(described)
    for tensor in tensors.values():
        _broadcast(tensor)


def _in_memory(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that hold values, by first name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if not tensor.is_meta}


def _require_same_model(described: list[tuple[str, tuple[int, ...], str]]) -> None:
    first: list[Any] = [described]
    dist.broadcast_object_list(first, src=0)
    same = torch.tensor(int(first[0] == described), device=_communication_device())
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if not same.item():
        differing = sorted({name for name, *_ in set(described) ^ set(first[0])})
        where = (
            f"on this rank; they differ in {listed(map(repr, differing[:3]))}"
            if differing
            else "on this rank, but another rank differs"
        )
        raise ConfigError(
            f"Not all ranks built the same model: {len(first[0])} tensors are in memory on rank 0"
            f" and {len(described)} {where}. Build the same model on every rank; its values come"
            " from rank 0."
        )


def _broadcast(tensor: Tensor) -> None:
    """Broadcast a tensor from rank 0 in place, as bytes: not every backend supports every dtype."""
    device = _communication_device()
    wire = tensor.to(device).contiguous()
    dist.broadcast(wire.reshape(-1).view(torch.uint8), src=0)
    if wire.data_ptr() != tensor.data_ptr():
        tensor.copy_(wire)


def _communication_device() -> torch.device:
    """Move the tensor to the GPU for NCCL; a model in memory may still be on the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in dist.get_backend()
        else torch.device("cpu")
    )
