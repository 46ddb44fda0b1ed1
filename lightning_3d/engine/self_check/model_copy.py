"""A second instance of a model for the self-check: the same modules and buffers in little memory,
with weights chosen so that errors become visible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.models.code_description import CodeDescription, Indescribable
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.pipeline.gates import hidden_states_of, plain_values
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.trials.clone import clone
from lightning_3d.parallel.trials.values import draw
from lightning_3d.weights.initialize import initialize
from lightning_3d.weights.pretrained import forget_pretrained


def copy_without_values(module: nn.Module) -> nn.Module:
    """Copy a whole module, with floating-point parameters as float32 on the meta device; buffers
    keep their values.

    The copy does not draw random numbers: it is in evaluation mode, and its dropout probabilities
    are 0.
    """
    copied: nn.Module = clone(module, _blank)
    forget_pretrained(copied)
    for child in copied.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.float()
    return copied


def _blank(name: str, parameter: nn.Parameter) -> Tensor:
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    return torch.empty_like(parameter, device="meta", dtype=dtype)


def fill(
    module: nn.Module,
    specs: Mapping[str, ShardSpec],
    seed: int,
    device: torch.device,
    blueprint: Any = None,
) -> None:
    """Give the parameters of a copy the values of `parallel.trials.values.draw` for their canonical
    names, and rebuild its buffers.

    Args:
        specs: shard of each parameter; one without a specification is whole.
        seed: seed of the values.
        device: device of the values.
        blueprint: initializers of the whole model, for buffers; None takes those of `module`.
    """
    shared: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        if id(parameter) not in shared:
            shared[id(parameter)] = _filled(parameter, name, specs.get(name), seed, device)
        setattr(module.get_submodule(owner), last, shared[id(parameter)])
    initialize(module, seed, device=device, blueprint=blueprint)  # what is left on meta: buffers
    for child in module.modules():
        for key, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[key] = buffer.to(device)


def _filled(
    parameter: nn.Parameter, name: str, spec: ShardSpec | None, seed: int, device: torch.device
) -> nn.Parameter:
    canonical = (spec.tied_to or spec.name) if spec is not None else name
    shape = spec.global_shape if spec is not None else tuple(parameter.shape)
    full = draw(canonical, shape, seed, torch.float32)
    local = spec.cut(full) if spec is not None and spec.is_cut else full
    real = nn.Parameter(local.to(device, parameter.dtype), requires_grad=parameter.requires_grad)
    vars(real).update(vars(parameter))
    return real


class Skipped(nn.Module):
    """Stands for a block that a check skips: passes on the hidden states in the form in which
    blocks return them.

    It keeps the attributes of `original` that are plain values, because some models read a block's
    attention kind.
    """

    def __init__(self, original: nn.Module, tuples: dict[str, int]) -> None:
        super().__init__()
        self.__dict__.update(plain_values(original))
        self._tuples = tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, length = hidden_states_of(args, kwargs), self._tuples.get("length", 0)
        return (hidden, *([None] * (length - 1))) if length else hidden


def kinds_of(
    blocks: list[nn.Module], description: CodeDescription | None = None
) -> list[tuple[int, ...]]:
    """Group the indices of blocks by kind. Blocks of one kind run the same code, in modules with
    the same shapes and attributes; an attribute that is the index of its block (`layer_idx`) is
    ignored.

    Args:
        blocks: all blocks of a model.
        description: description of the whole model; None makes one of the blocks.
    """
    entries = []
    for block in blocks:
        try:
            entries.append(described(block, description or CodeDescription(block)))
        except Indescribable:  # a kind of its own
            entries.append({"block": len(entries)})
    every: set[str] = set().union(*(entry.keys() for entry in entries))
    positional = {key for key in every if _counts_blocks([entry.get(key) for entry in entries])}
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, entry in enumerate(entries):
        signature = tuple(
            sorted((key, repr(value)) for key, value in entry.items() if key not in positional)
        )
        kinds.setdefault(signature, []).append(index)
    return [tuple(indices) for indices in kinds.values()]


def _counts_blocks(values: list[Any]) -> bool:
    """Return whether an attribute rises by one from block to block."""
    numbers = [
        value - index
        for index, value in enumerate(values)
        if isinstance(value, int) and not isinstance(value, bool)
    ]
    return len(numbers) > 1 and len(set(numbers)) == 1


def described(block: nn.Module, description: CodeDescription) -> dict[str, Any]:
    """Plain attributes, code, hooks, objects and buffers, and shapes of parameters in a module, by
    name.

    Raises:
        Indescribable: it computes with something of which nothing is known.
    """
    found: dict[str, Any] = {}
    for name, child in block.named_modules():
        found |= {f"{name}.{key}": value for key, value in description.plain_of(child).items()}
        found[f"{name} code"] = description.of_module(child)
    for name, parameter in block.named_parameters():
        found[f"{name} shape"] = tuple(parameter.shape)
    return found


def kept_blocks(kinds: list[tuple[int, ...]]) -> tuple[list[int], int]:
    """Choose the blocks that a check runs: the first and the last of each kind, so that two stages
    have one of each where there are two.

    Returns:
        Indices of the blocks, rising, and the index at which a second stage begins.
    """
    firsts, lasts = [kind[0] for kind in kinds], [kind[-1] for kind in kinds]
    kept = sorted({*firsts, *lasts})
    boundary = max(firsts) + 1
    return kept, boundary if boundary <= kept[-1] else kept[len(kept) // 2]


def leave_out_blocks(
    module: nn.Module, plan: ParallelPlan, kept: list[int], tuples: dict[str, int]
) -> None:
    """Replace all blocks except those of these indices by stubs that pass on the hidden states, in
    place.

    Args:
        kept: indices of the blocks that stay.
        tuples: dictionary shared by all copies of a model: the first block that runs notes the
            length of the tuple that blocks return.
    """
    layers: Any = module.get_submodule(plan.layers)

    def notice(block: nn.Module, args: Any, output: Any) -> None:
        tuples["length"] = len(output) if isinstance(output, (tuple, list)) else 0

    for index, block in enumerate(list(layers)):
        if index in kept:
            block.register_forward_hook(notice)
        else:
            layers[index] = Skipped(block, tuples)
