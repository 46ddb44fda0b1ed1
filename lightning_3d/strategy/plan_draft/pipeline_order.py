"""The order in which the modules of a model run, and why a pipeline cannot run them, found by running the model once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.transformers import is_transformers_model
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.strategy.plan_draft.inputs import Inputs


@dataclass(frozen=True)
class PipelineOrder:
    """Modules with parameters before and after the blocks.

    Attributes:
        before: names of modules.
        after: names of modules.
        loose: names of parameters that are read outside of the forward of their module.
        problems: reasons why a pipeline cannot run the model.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    loose: tuple[str, ...]
    problems: tuple[str, ...]


def find_order(model: nn.Module, layers: str, kept: Iterable[int], inputs: Inputs) -> PipelineOrder:
    """Find the order of execution.

    Args:
        model: whole model with values on the CPU, in which other blocks than those `kept` pass on their input.
        layers: name of the list of blocks.
        inputs: inputs with which it runs.
    """
    blocks = [f"{layers}.{index}" for index in kept]
    around = [name for name, child in model.named_modules() if _is_around(name, child, layers)]
    calls, read = _record(model, [*around, *blocks], inputs)
    loose = [name for name in read if not name.startswith(f"{layers}.")]
    order = [name for name in calls if name in blocks]
    problems = [f"{_whose(model, name)} is read outside of the forward of a module. {_ADVICE}" for name in loose]
    if order != blocks:
        problems.append(_why_out_of_order(model, order, blocks))
        return PipelineOrder((), (), tuple(loose), tuple(problems))
    first, last = calls.index(blocks[0]), calls.index(blocks[-1])
    # A vision or audio tower, which random tokens do not reach. What it makes goes into the embeddings, so it is on the first stage.
    towers = [name for name in around if name not in calls and is_transformers_model(model)]
    before = [*towers, *(name for name in calls[:first] if name in around)]
    after = [name for name in calls[last + 1 :] if name in around]
    known = set(loose)
    for name in around:
        parameters = [f"{name}.{key}" for key, _ in model.get_submodule(name).named_parameters(recurse=False)]
        if name in calls[first:last] or (name in before and name in after):
            problems.append(f"'{name}' runs between or inside the blocks, or both before and after them")
        elif name not in calls and name not in towers and not known.issuperset(parameters):
            problems.append(f"'{name}' has parameters, but does not run with the inputs {inputs}")
    raw = [name for name, _ in model.named_parameters() if f"{layers}.".startswith(f"{name.rpartition('.')[0]}.".lstrip("."))]
    problems += [f"{_whose(model, name)} is not in a module before or after the blocks. {_ADVICE}" for name in raw if name not in known]
    return PipelineOrder(_outermost(before), _outermost(after), tuple(loose), tuple(problems))


def _outermost(names: list[str]) -> tuple[str, ...]:
    """Each name once, without those inside of others."""
    return tuple(name for name in dict.fromkeys(names) if not any(name.startswith(f"{other}.") for other in names))


_ADVICE = (
    "Move it into a module of its own that the forward calls, such as nn.Linear for an output head (for positions, see docs/attention.md)"
)


def _is_around(name: str, child: nn.Module, layers: str) -> bool:
    """True for a module outside of the blocks that has parameters of its own and does not contain the blocks."""
    contains = name == "" or f"{layers}.".startswith(f"{name}.")
    return not contains and not name.startswith(f"{layers}.") and next(child.parameters(recurse=False), None) is not None


def _why_out_of_order(model: nn.Module, order: list[str], blocks: list[str]) -> str:
    missing = [name for name in blocks if name not in order]
    if missing:
        kind = type(model.get_submodule(missing[0])).__name__
        return f"'{missing[0]}' ({kind}) is not called as a module. Make each block one module, and let the model call block(x)"
    return f"the blocks run in the order {', '.join(order)}; a pipeline runs each block once, in order"


def _record(model: nn.Module, names: list[str], inputs: Inputs) -> tuple[list[str], list[str]]:
    """Run the model. Returns the calls of the modules in order, and the parameters that are read outside of them.

    What the modules return is cut off from its gradient. A gradient in their inputs, or in the output of the model, then comes from
    a parameter that is read elsewhere.
    """
    calls: list[str] = []
    seen: list[Tensor] = []
    with _watched(model, names, calls, seen), torch.enable_grad():
        seen += inputs.run(model)
    read = [tensor for tensor in seen if tensor.requires_grad]
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.requires_grad_(parameter.is_floating_point())
    total = sum(tensor.sum() for tensor in read)
    if not isinstance(total, Tensor):
        return calls, []
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return calls, [name for name, gradient in zip(named, found, strict=True) if gradient is not None]


@contextmanager
def _watched(model: nn.Module, names: list[str], calls: list[str], seen: list[Tensor]) -> Iterator[None]:
    handles = []
    for name in names:

        def enter(child: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls.append(name)
            seen.extend(tensors_of((args, kwargs)))

        def leave(child: nn.Module, args: Any, output: Any) -> Any:
            return _detached(output)

        child = model.get_submodule(name)
        handles += [child.register_forward_pre_hook(enter, with_kwargs=True), child.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return type(value)((key, _detached(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_detached(item) for item in value)
    return value


def _whose(model: nn.Module, name: str) -> str:
    owner = name.rpartition(".")[0]
    return f"'{name}' of {type(model.get_submodule(owner)).__name__}"

