"""The order in which the modules of a model run, and why a pipeline cannot run them, found by
running the model once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.transformers import is_transformers_model
from lightning_3d.engine.plan_draft.inputs import Inputs
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.pipeline.gates import hidden_states_of


@dataclass(frozen=True)
class PipelineOrder:
    """Modules with parameters before and after the blocks, and parameters that the model reads by
    itself.

    Attributes:
        before: names of modules and parameters.
        after: names of modules and parameters.
        loose: names of parameters that are read outside of the forward of their module.
        problems: reasons why a pipeline cannot run the model.
        carried: those of `before` whose outputs are read where the blocks have begun, other than as
            their first hidden states.
        sides: places of values behind the hidden states that a block returns and a later one reads.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    loose: tuple[str, ...]
    problems: tuple[str, ...]
    carried: tuple[str, ...] = ()
    sides: tuple[int, ...] = ()


def find_order(model: nn.Module, layers: str, kept: Iterable[int], inputs: Inputs) -> PipelineOrder:
    """Find the order of execution.

    Args:
        model: whole model with values on the CPU, in which other blocks than those `kept` pass on
            their input.
        layers: name of the list of blocks.
        inputs: inputs with which it runs.
    """
    blocks = [f"{layers}.{index}" for index in kept]
    around = [name for name, child in model.named_modules() if _is_around(name, child, layers)]
    every = [f"{layers}.{index}" for index, _ in model.get_submodule(layers).named_children()]
    record = _record(model, around, every, inputs)
    calls = record.calls
    loose = [name for name in record.loose if not name.startswith(f"{layers}.")]
    order = [name for name in calls if name in blocks]
    if order != blocks:
        problems = [
            f"{_whose(model, name)} is read outside of the forward of a module. {_ADVICE}"
            for name in loose
        ]
        return PipelineOrder(
            (), (), tuple(loose), (*problems, _why_out_of_order(model, order, blocks))
        )
    both = [name for name in loose if name in record.early and name in record.late]
    problems = [
        f"{_whose(model, name)} is read both before and after the blocks. {_ADVICE}"
        for name in both
    ]
    first, last = calls.index(blocks[0]), calls.index(blocks[-1])
    # A vision or audio tower, which random tokens do not reach. What it makes goes into the
    # embeddings, so it is on the first stage.
    idle = is_transformers_model(model)
    towers = [
        name for name in around if name not in calls and idle and not record.reads_within(name)
    ]
    before = [
        *towers,
        *(name for name in calls[:first] if name in around),
        *(name for name in loose if name in record.early),
    ]
    after = [
        *(name for name in calls[last + 1 :] if name in around),
        *(name for name in loose if name in record.late),
    ]
    for name in around:
        parameters = [
            f"{name}.{key}" for key, _ in model.get_submodule(name).named_parameters(recurse=False)
        ]
        crossing = {name, *parameters}
        if name in calls[first:last] or (crossing & {*before} and crossing & {*after}):
            problems.append(
                f"'{name}' runs or is read between or inside the blocks, or both before and after"
                f" them. {_ADVICE}"
            )
        elif name not in calls and name not in towers and not set(loose).issuperset(parameters):
            problems.append(f"'{name}' has parameters, but does not run with the inputs {inputs}")
    raw = [
        name
        for name, _ in model.named_parameters()
        if f"{layers}.".startswith(f"{name.rpartition('.')[0]}.".lstrip("."))
    ]
    unread = [name for name in raw if name not in loose]
    before += unread if idle else []
    problems += [
        f"{_whose(model, name)} is not in a module before or after the blocks. {_ADVICE}"
        for name in unread
        if not idle
    ]
    outermost = _outermost(before)
    carried = tuple(name for name in outermost if name in record.carried)
    return PipelineOrder(
        outermost,
        _outermost(after),
        tuple(loose),
        tuple(problems),
        carried,
        tuple(sorted(record.sides)),
    )


def _outermost(names: list[str]) -> tuple[str, ...]:
    """Each name once, without those inside of others."""
    return tuple(
        name
        for name in dict.fromkeys(names)
        if not any(name.startswith(f"{other}.") for other in names)
    )


_ADVICE = (
    "Move it into a module of its own that the forward calls, such as nn.Linear for an output head"
    " (for positions, see docs/attention.md)"
)


def _is_around(name: str, child: nn.Module, layers: str) -> bool:
    """True for a module outside of the blocks that has parameters of its own and does not contain
    the blocks."""
    contains = name == "" or f"{layers}.".startswith(f"{name}.")
    return (
        not contains
        and not name.startswith(f"{layers}.")
        and next(child.parameters(recurse=False), None) is not None
    )


def _why_out_of_order(model: nn.Module, order: list[str], blocks: list[str]) -> str:
    missing = [name for name in blocks if name not in order]
    if missing:
        kind = type(model.get_submodule(missing[0])).__name__
        return (
            f"'{missing[0]}' ({kind}) is not called as a module. Make each block one module, and"
            " let the model call block(x)"
        )
    return (
        f"the blocks run in the order {', '.join(order)}; a pipeline runs each block once, in order"
    )


@dataclass
class _Record:
    """What one run of a model shows.

    Attributes:
        calls: the modules in the order of their calls.
        loose: names of parameters that are read outside of the modules.
        early: those of them that are read before the first block was entered, or in its hidden
            states.
        late: those of them that are read later.
        carried: names of modules around the blocks whose outputs are read after the first block was
            entered.
        sides: places of values behind the hidden states that blocks return and that are read.
    """

    calls: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    early: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)
    sides: set[int] = field(default_factory=set)

    def reads_within(self, name: str) -> bool:
        """Whether parameters of a module are read outside of its forward."""
        return any(parameter.startswith(f"{name}.") for parameter in self.loose)


def _record(model: nn.Module, around: list[str], blocks: list[str], inputs: Inputs) -> _Record:
    """Run the model, in which what the modules return is cut off from its gradient.

    A gradient in their inputs, or in the output of the model, then comes from a parameter that is
    read elsewhere. A gradient of what a module returned shows that something reads it.
    """
    record, watch = _Record(), _Watch(blocks)
    with watch.watching(model, [*around, *blocks], record.calls), torch.enable_grad():
        watch.see(inputs.run(model))
    named = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    for parameter in named.values():
        parameter.requires_grad_(True)
    reached = [_reached(seen, list(named.values())) for seen in (watch.early, watch.late)]
    record.early, record.late = (
        {name for name, is_read in zip(named, found, strict=True) if is_read} for found in reached
    )
    record.loose = [name for name in named if name in record.early | record.late]
    record.carried = {name for name, made in watch.made.items() if any(_reached(watch.late, made))}
    record.sides = {place for place, made in watch.sides.items() if any(_reached(watch.late, made))}
    return record


def _reached(tensors: list[Tensor], sources: list[Tensor]) -> list[bool]:
    """For each source, whether it has a gradient in the tensors, or is one of them."""
    total = sum(tensor.sum() for tensor in tensors if tensor.requires_grad)
    if not isinstance(total, Tensor) or not sources:
        return [False] * len(sources)
    return [
        gradient is not None
        for gradient in torch.autograd.grad(total, sources, retain_graph=True, allow_unused=True)
    ]


class _Watch:
    """Sees what modules are given and return.

    Attributes:
        early: tensors that modules are given until the first block is entered, and its hidden
            states.
        late: tensors that later stages of a pipeline read: what the model returns, and what modules
            are given after that.
        made: what modules other than blocks return, by name.
        sides: values that blocks return behind the hidden states, by place.
    """

    def __init__(self, blocks: list[str]) -> None:
        self._blocks = set(blocks)
        self.early: list[Tensor] = []
        self.late: list[Tensor] = []
        self.made: dict[str, list[Tensor]] = {}
        self.sides: dict[int, list[Tensor]] = {}
        self._begun = False

    def see(self, value: Any) -> None:
        """Note tensors that are read now."""
        (self.late if self._begun else self.early).extend(
            tensor for tensor in tensors_of(value) if tensor.is_floating_point()
        )

    @contextmanager
    def watching(self, model: nn.Module, names: list[str], calls: list[str]) -> Iterator[None]:
        """Watch these modules, and note their calls."""
        handles = []
        for name in names:

            def enter(child: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                calls.append(name)
                self._enter(name, args, kwargs)

            def leave(child: nn.Module, args: Any, output: Any, name: str = name) -> Any:
                return self._leave(name, output)

            child = model.get_submodule(name)
            handles += [
                child.register_forward_pre_hook(enter, with_kwargs=True),
                child.register_forward_hook(leave),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in self._blocks and not self._begun:
            self._begun = True
            hidden = hidden_states_of(args, kwargs)
            self.early.append(hidden)
            args = tuple(value for value in args if value is not hidden)
            kwargs = {key: value for key, value in kwargs.items() if value is not hidden}
        self.see((args, kwargs))

    def _leave(self, name: str, output: Any) -> Any:
        cut = _detached(output)
        if name not in self._blocks:
            self.made.setdefault(name, []).extend(
                tensor for tensor in tensors_of(cut) if tensor.requires_grad
            )
        elif isinstance(cut, (tuple, list)):
            for place, side in enumerate(cut[1:]):
                self.sides.setdefault(place, []).extend(
                    tensor for tensor in tensors_of(side) if tensor.requires_grad
                )
        # A copy, so that the model may change it in place.
        return _mapped(cut, lambda tensor: tensor.clone() if tensor.requires_grad else tensor)


def _detached(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)((key, _mapped(item, function)) for key, item in value.items())
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, function) for item in value)
    return value


def _whose(model: nn.Module, name: str) -> str:
    owner = name.rpartition(".")[0]
    return f"'{name}' of {type(model.get_submodule(owner)).__name__}"
