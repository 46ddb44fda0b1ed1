"""Run a model's own initializers for one tensor at a time.

The model is copied module by module into a blueprint whose tensors are all on meta: a blueprint of
any model costs kilobytes. To draw one tensor, only this tensor of the blueprint is materialized.
Then the initializers of its module and of the modules around it run, in the order of an ordinary
construction. All other tensors that they write are on meta, which costs nothing and draws no random
numbers.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_3d.compat.peft_layers import (
    adapters_of,
    is_lora,
    lora_initializations,
    lora_variant,
    own,
)
from lightning_3d.compat.torch import storage_key, watch_operations
from lightning_3d.compat.transformers import is_transformers_model
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.sharding import ShardSpec

BUILD_IN_MEMORY = "or build the model in memory (in __init__ rather than in configure_model)."
CONSTRUCTION_HOOKS = ("reset_parameters", "_reset_parameters", "reset_buffers")
OVERWRITING = frozenset(
    {
        "normal_",
        "uniform_",
        "fill_",
        "zero_",
        "copy_",
        "random_",
        "bernoulli_",
        "exponential_",
        "log_normal_",
        "cauchy_",
    }
)


@dataclass(frozen=True)
class BlueprintSlot:
    """The place of a tensor in a module: in `_parameters`, in `_buffers`, or (kind "") a plain
    attribute."""

    module: nn.Module
    kind: str
    key: str

    def get(self) -> Any:
        return self._table().get(self.key)

    def put(self, value: Tensor) -> None:
        self._table()[self.key] = value

    def _table(self) -> dict[str, Any]:
        return vars(self.module)[self.kind] if self.kind else vars(self.module)


@dataclass(eq=False)
class Target:
    """A tensor of the blueprint.

    Attributes:
        name: first name in the module tree.
        slots: its places. A tied parameter is initialized in its first place only, a shared buffer
            in all of them.
        blank: meta tensor that is there until the value is drawn.
    """

    name: str
    slots: list[BlueprintSlot]
    blank: Tensor

    @property
    def owner(self) -> nn.Module:
        return self.slots[0].module


@dataclass(frozen=True)
class Call:
    """One call of one initializer."""

    label: str
    run: Callable[[], Any]


class Blueprint:
    """A full-sized copy of a model on meta, with its initializers.

    Args:
        root: the model. It is not changed, and may be partitioned and rewritten afterwards: names
            stay the same.
        specs: global shapes by name, for a model that is already sharded; a tensor without an entry
            has its own shape.

    Attributes:
        targets: every parameter, and every buffer or plain attribute on meta, by each of its names.
    """

    def __init__(self, root: nn.Module, specs: Mapping[str, ShardSpec] | None = None) -> None:
        self.targets: dict[str, Target] = {}
        self._specs = specs or {}
        self._copies: dict[int, nn.Module] = {}
        self._targets_by_id: dict[int, Target] = {}
        # Children before parents: name, copy, and the module whose `_init_weights` initializes it.
        self._modules: list[tuple[str, nn.Module, nn.Module | None]] = []
        self._calls: list[Call] = []
        self._calls_of: dict[str, list[int]] = {}
        # id of a copied module -> parameters that it owns
        self._parameters_of: dict[int, list[Target]] = {}
        self._read: set[str] = set()  # targets that some initializer reads
        # target -> the last call known to begin by overwriting all of it
        self._overwritten: dict[str, int] = {}
        self._lora = lora_initializations(root)
        self._copy(root, "", None)

    def prepare(self, names: Iterable[str]) -> None:
        """Find the initializers of these tensors, and run each once on meta to see after which one
        earlier ones are wasted.

        Raises:
            ConfigError: an initializer cannot run on a model whose tensors are on meta.
        """
        needed = _with_ancestors(self.targets[name].name for name in names if name in self.targets)
        for step in (_construction, _model_wide, self._adapters):
            for name, copy, initializer in self._modules:
                for call in step(name, copy, initializer) if name in needed else ():
                    self._calls_of.setdefault(name, []).append(len(self._calls))
                    self._calls.append(call)
        watched = {storage_key(target.blank): target for target in self._targets_by_id.values()}
        for index, call in enumerate(self._calls):
            notes = _Notes(watched)
            with watch_operations(notes):
                _run(call)
            self._overwritten.update(dict.fromkeys(notes.overwritten(), index))
            self._read |= notes.read

    def _adapters(
        self, name: str, module: nn.Module, initializer: nn.Module | None
    ) -> Iterator[Call]:
        """Yield PEFT's initialization of a LoRA layer. The adapters themselves are made like any
        `nn.Linear`."""
        for adapter in adapters_of(module) if is_lora(module) else ():
            how = self._lora.get(adapter, True)
            if (variant := lora_variant(module)) is not None:
                raise ConfigError(
                    f"LoRA with {variant} computes adapters of '{name}' from weights that are on"
                    f" the meta device. Use plain LoRA, {BUILD_IN_MEMORY}"
                )
            if how is not True and how is not False and how != "gaussian":
                raise ConfigError(
                    f"init_lora_weights={how!r} computes the adapters of '{name}' from weights that"
                    f" are on the meta device. Use True, False or 'gaussian', {BUILD_IN_MEMORY}"
                )
            yield Call(
                f"LoRA of '{name}'", partial(cast(Any, module).reset_lora_parameters, adapter, how)
            )

    def siblings(self, target: Target) -> list[Target]:
        """All parameters of the module that owns `target`, including it."""
        return self._parameters_of[id(target.owner)]

    def depends_on_siblings(self, target: Target) -> bool:
        """Return whether an initializer computes parameters of this module from one another
        (`self.b.copy_(2 * self.a)`)."""
        return any(sibling.name in self._read for sibling in self.siblings(target))

    def draw(
        self, targets: Sequence[Target], dtypes: Sequence[torch.dtype], seed: int
    ) -> list[Tensor | None]:
        """Draw the values of some tensors on CPU: only they are real while their initializers run.

        A tensor that no initializer writes, or not all of it, comes back as None.

        Raises:
            ConfigError: an initializer needs another tensor than these.
        """
        calls = sorted({call for target in targets for call in self._program(target)})
        drawn = [
            _real(target.blank, dtype, filled=target.name not in self._overwritten)
            for target, dtype in zip(targets, dtypes, strict=True)
        ]
        for target, tensor in zip(targets, drawn, strict=True):
            for slot in target.slots:
                slot.put(tensor)
        seed_everything(seed)
        try:
            for call in calls:
                _run(self._calls[call])
            return [
                self._written(target, tensor) for target, tensor in zip(targets, drawn, strict=True)
            ]
        finally:
            for target in targets:
                for slot in target.slots:
                    slot.put(target.blank)

    def _written(self, target: Target, placed: Tensor) -> Tensor | None:
        """The value that initializers gave a tensor, which they may have replaced; None if part of
        it is unwritten."""
        value = next((now for slot in target.slots if (now := slot.get()) is not placed), placed)
        if target.name in self._overwritten or value is not placed:
            return value
        return value if value.is_floating_point() and not value.isnan().any() else None

    def _program(self, target: Target) -> list[int]:
        """Calls that may write a tensor: of its module and of the modules around it, without those
        that are overwritten later."""
        modules = _with_ancestors([target.name])
        first = self._overwritten.get(target.name, 0)
        return [
            call for module in modules for call in self._calls_of.get(module, ()) if call >= first
        ]

    def _copy(self, module: nn.Module, name: str, initializer: nn.Module | None) -> nn.Module:
        """Copy `module` and its submodules. `initializer` is the copy of the nearest module that
        initializes others."""
        if id(module) in self._copies:
            return self._copies[id(module)]
        copy = object.__new__(type(module))
        vars(copy).update(vars(module), _parameters={}, _buffers={}, _modules={})
        self._copies[id(module)] = copy
        if _module_hook(copy) is not None:
            initializer = copy
        prefix = f"{name}." if name else ""
        self._copy_parameters(module, copy, prefix)
        self._copy_others(module, copy, prefix)
        for key, child in module._modules.items():
            # A model's own initializers ran before PEFT put adapters into it.
            around = initializer if key == "base_layer" or not is_lora(module) else None
            copy._modules[key] = (
                None if child is None else self._copy(child, f"{prefix}{key}", around)
            )
        self._modules.append((name, copy, initializer))
        return copy

    def _copy_parameters(self, module: nn.Module, copy: nn.Module, prefix: str) -> None:
        for key, parameter in module._parameters.items():
            copy._parameters[key] = None
            if parameter is None:
                continue
            name = f"{prefix}{key}"
            blank = self._blank_parameter(parameter, name)
            copy._parameters[key] = blank
            new = Target(name, [BlueprintSlot(copy, "_parameters", key)], blank)
            self.targets[name] = self._targets_by_id.setdefault(id(parameter), new)
            if self.targets[name] is new:
                self._parameters_of.setdefault(id(copy), []).append(new)

    def _copy_others(self, module: nn.Module, copy: nn.Module, prefix: str) -> None:
        """Buffers, and plain attributes that are tensors on meta. Buffers in memory become blanks,
        never targets."""
        copy._buffers.update(module._buffers)
        for slot, tensor in other_tensors(module):
            here = BlueprintSlot(copy, slot.kind, slot.key)
            if not tensor.is_meta:
                here.put(torch.empty_like(tensor, device="meta"))
                continue
            name = f"{prefix}{slot.key}"
            target = self._targets_by_id.setdefault(
                id(tensor), Target(name, [], torch.empty_like(tensor))
            )
            target.slots.append(here)
            here.put(target.blank)
            self.targets[name] = target

    def _blank_parameter(self, parameter: nn.Parameter, name: str) -> nn.Parameter:
        shape = self._specs[name].global_shape if name in self._specs else parameter.shape
        empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
        blank = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        # Some initializers look at attributes (Mamba's `_no_reinit`); Transformers' own flag would
        # make them skip it.
        vars(blank).update(
            {key: value for key, value in vars(parameter).items() if key != "_is_hf_initialized"}
        )
        return blank


class _Notes:
    """Callback of `watch_operations`: records what one initializer does to the blanks of the
    targets.

    That it overwrites a tensor is certain; that it does not is no proof, because functions of
    `torch.nn.init` may pass over tensors on meta (`trunc_normal_` since torch 2.13).
    """

    def __init__(self, watched: dict[int, Target]) -> None:
        self._watched = watched
        self._began_with_overwriting: dict[str, bool] = {}
        self.read: set[str] = set()

    def __call__(self, operator: str, read: list[Tensor], written: list[Tensor]) -> None:
        for tensor in read:
            if target := self._note(tensor, overwritten=False):
                self.read.add(target.name)
        kind, _, overload = operator.partition(".")
        for tensor in written:
            self._note(tensor, overwritten=kind in OVERWRITING or overload.endswith("out"))

    def overwritten(self) -> list[str]:
        return [name for name, overwriting in self._began_with_overwriting.items() if overwriting]

    def _note(self, tensor: Tensor, *, overwritten: bool) -> Target | None:
        target = self._watched.get(storage_key(tensor)) if tensor.is_meta else None
        if target is not None:
            whole = tensor.numel() == target.blank.numel()
            self._began_with_overwriting.setdefault(target.name, overwritten and whole)
        return target


def _run(call: Call) -> None:
    try:
        call.run()
    except Exception as error:
        raise ConfigError(
            f"{call.label} could not run with one tensor in memory and all others on the meta"
            f" device ({type(error).__name__}: {error}). Let it fill parameters in place"
            " (nn.init.normal_(self.weight), ...) without reading those of other modules,"
            f" {BUILD_IN_MEMORY}"
        ) from error


def _construction(name: str, module: nn.Module, initializer: nn.Module | None) -> Iterator[Call]:
    """Yield what the constructor of a module would have done to its own tensors."""
    for hook in CONSTRUCTION_HOOKS:
        function: Any = own(module, hook)
        if _required_arguments(function) == 0:
            yield Call(f"{type(module).__name__}.{hook}() of '{name}'", function)


def _model_wide(name: str, module: nn.Module, initializer: nn.Module | None) -> Iterator[Call]:
    """Yield what a model does to a module once all exist: Transformers' `_init_weights(module)`, or
    `init_weights()`."""
    hook = None if initializer is None else _module_hook(initializer)
    if hook is not None:
        label = f"{type(initializer).__name__}.{hook.__name__}({type(module).__name__}) of '{name}'"
        yield Call(label, lambda: hook(module))
    function: Any = own(module, "init_weights")
    # That of Transformers only walks over all modules, as we do, and skips those it has flagged, as
    # we must not.
    if _required_arguments(function) == 0 and not is_transformers_model(module):
        yield Call(f"{type(module).__name__}.init_weights() of '{name}'", function)


def _module_hook(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """The method of `module` that initializes any module passed to it, as in
    `self.apply(self._init_weights)`."""
    for hook in ("_init_weights", "init_weights"):
        function = own(module, hook)
        if _required_arguments(function) == 1:
            return function
    return None


def _required_arguments(function: Any) -> int | None:
    """Number of required arguments of a method; None if it is not callable."""
    if not callable(function) or isinstance(function, nn.Module):
        return None
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    parameters = inspect.signature(function).parameters.values()
    return sum(
        parameter.kind in kinds and parameter.default is parameter.empty for parameter in parameters
    )


def other_tensors(module: nn.Module) -> Iterator[tuple[BlueprintSlot, Tensor]]:
    """Buffers, and meta tensors that a module keeps as plain attributes."""
    for key, buffer in list(module._buffers.items()):
        if buffer is not None:
            yield BlueprintSlot(module, "_buffers", key), buffer
    for key, value in list(vars(module).items()):
        if isinstance(value, Tensor) and value.is_meta:
            yield BlueprintSlot(module, "", key), value


def _with_ancestors(names: Iterable[str]) -> set[str]:
    """Names of all modules that hold one of these tensors, at any depth; the root is ''."""
    modules: set[str] = set()
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            modules.add(name)
    return modules


def _real(blank: Tensor, dtype: torch.dtype, *, filled: bool) -> Tensor:
    """Make a real tensor for a blank; filled with NaN to find what initializers leave unwritten."""
    tensor = torch.empty_like(blank, dtype=dtype, device="cpu", requires_grad=False)
    if filled:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    if not isinstance(blank, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=blank.requires_grad)
    vars(parameter).update(vars(blank))
    return parameter


def seed_of(seed: int, name: str) -> int:
    """Compute a 64-bit seed for the tensor called `name`, the same on every machine."""
    return int.from_bytes(blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed the CPU generators that an initializer may use: torch, Python, and NumPy if it is
    loaded."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
