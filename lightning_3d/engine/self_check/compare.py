"""Compares a whole model with the same model as the ranks run it: outputs, gradients of inputs and
weights, and the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.engine.self_check.stages import RewrittenModel
from lightning_3d.errors import PlanError
from lightning_3d.parallel.nested import tensors_of

LARGEST = 1e-3
"""Relative difference of a tensor, in float32, above which it is not rounding. Rounding gives 1e-7
to 1e-5, a wrong head 1e-1."""

_FLOOR = 1e-5
"""Fraction of the norm of all gradients below which the gradient of one parameter is rounding, such
as that of the bias of keys: the softmax ignores it."""


@dataclass(frozen=True)
class Deviation:
    """The largest difference: of an output, or of the gradient of an input or a parameter.

    Attributes:
        what: what differs, in words.
        error: relative difference.
        parameter: name of the parameter; empty for outputs and inputs.
    """

    what: str
    error: float
    parameter: str = ""


def largest_deviation(
    whole: nn.Module,
    rewritten: RewrittenModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> tuple[Deviation, Deviation]:
    """Find the largest differences (of outputs, of gradients) between both models with the same
    weights and inputs.

    Args:
        dtype: of both models.

    Raises:
        PlanError: the outputs have different shapes.
        Exception: whatever the rewritten model raises.
    """
    inputs, other_inputs = _leaves((args, kwargs), dtype), _leaves((args, kwargs), dtype)
    expected = _outputs(whole(*inputs[0], **inputs[1]))
    found = _outputs(rewritten(*other_inputs[0], **other_inputs[1]))
    shared = [
        name
        for name, value in expected.items()
        if name in found and found[name].shape == value.shape
    ]
    if not shared:
        raise PlanError(
            f"it returns {_shapes(found)} where the whole model returns {_shapes(expected)}."
        )
    outputs = max(
        (
            Deviation(
                f"the output {name}".rstrip(), relative(whole_tensor(found[name]), expected[name])
            )
            for name in shared
        ),
        key=_by_error,
    )
    if not any(value.requires_grad for value in expected.values()):
        return outputs, Deviation("nothing", 0.0)
    project(expected, shared).backward()
    # context-parallel ranks compute the same output: each counts 1/cp of it
    (project(found, shared) / rewritten.layout.cp).backward()
    gradients = [
        *_input_deviations(inputs, other_inputs, rewritten),
        *weight_deviations(whole, rewritten),
    ]
    return outputs, max(gradients, key=_by_error, default=Deviation("nothing", 0.0))


def why_not_comparable(
    whole: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Say why a whole model cannot be compared with anything: it returns no numbers, or different
    ones each time. None where it can.

    Raises:
        Exception: whatever the model raises.
    """
    with torch.no_grad():
        once, again = (_outputs(whole(*args, **kwargs)) for _ in range(2))
    if not once:
        return "the model returns no floating-point tensors."
    differs = [
        name
        for name, value in once.items()
        if value.shape != again[name].shape or not relative(value, again[name]) <= LARGEST
    ]
    return (
        "the model draws random numbers: two calls in evaluation mode have different outputs."
        if differs
        else None
    )


def _by_error(deviation: Deviation) -> float:
    # NaN is the largest
    return deviation.error if deviation.error == deviation.error else float("inf")


def _leaves(value: Any, dtype: torch.dtype) -> Any:
    """Copy a container, with floating-point tensors as leaves that have gradients where training
    needs them (not masks)."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        return value.detach().to(dtype).clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _leaves(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_leaves(item, dtype) for item in value)
    return value


def _outputs(value: Any) -> dict[str, Tensor]:
    """Collect the floating-point tensors of an output, by name or place.

    Containers in it (hidden states, router logits of all layers) are skipped where there are
    tensors next to them.
    """
    if isinstance(value, Tensor):
        return {"": value} if value.is_floating_point() else {}
    if not isinstance(value, (Mapping, list, tuple)):
        value = dict(getattr(value, "__dict__", {}))  # a dataclass, or an object of a user's class
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    found = {
        str(key): item
        for key, item in items
        if isinstance(item, Tensor) and item.is_floating_point()
    }
    nested = (tensor for tensor in tensors_of(value) if tensor.is_floating_point())
    return found or {str(place): tensor for place, tensor in enumerate(nested)}


def _shapes(outputs: Mapping[str, Tensor]) -> str:
    return (
        ", ".join(f"{name} {tuple(value.shape)}".strip() for name, value in outputs.items())
        or "no tensor"
    )


def project(outputs: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """Make a scalar whose gradient reaches every element of the outputs, with a different factor
    each."""
    total: Any = 0.0
    for name in names:
        whole = whole_tensor(outputs[name])
        if whole.requires_grad:
            total = total + (whole * _direction(whole)).sum()
    return total


def _direction(like: Tensor) -> Tensor:
    numbers = torch.arange(1, like.numel() + 1, dtype=torch.float32, device=like.device)
    return torch.sin(numbers * 12.9898).view(like.shape) / max(like.numel(), 1) ** 0.5


def whole_tensor(tensor: Any) -> Tensor:
    """Gather tensors that report the full shape and hold one shard: sequences first, then the
    vocabulary."""
    while hasattr(tensor, "full"):
        tensor = tensor.full()
    return tensor


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference of two tensors of one shape, relative to that of `expected`."""
    scale = expected.detach().double().norm()
    return float(
        (found.detach().double() - expected.detach().double()).norm() / scale.clamp(min=1e-30)
    )


def _input_deviations(inputs: Any, others: Any, rewritten: RewrittenModel) -> Iterator[Deviation]:
    for place, (one, other) in enumerate(zip(_tensors(inputs), _tensors(others), strict=True)):
        if one.grad is None or other.grad is None:
            continue
        yield Deviation(
            f"the gradient of input {place}",
            relative(rewritten.total_of_input(other.grad), one.grad),
        )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return [tensor for item in items for tensor in _tensors(item)]


def weight_deviations(whole: nn.Module, rewritten: RewrittenModel) -> Iterator[Deviation]:
    """Yield the difference of the gradient of each parameter. Communicates before the first one."""
    expected = {
        name: parameter.grad
        for name, parameter in whole.named_parameters()
        if parameter.grad is not None
    }
    if not expected:
        return
    everything = (
        torch.stack([gradient.double().square().sum() for gradient in expected.values()])
        .sum()
        .sqrt()
    )
    for name, (gradient, spec) in rewritten.gradients().items():
        wanted = spec.cut(expected[name]) if name in expected else torch.zeros_like(gradient)
        difference = (gradient.double() - wanted.double()).norm()
        yield Deviation(
            f"the gradient of '{name}'",
            float(
                difference
                / (wanted.double().norm() + _FLOOR / LARGEST * everything).clamp(min=1e-30)
            ),
            name,
        )


def first_different(
    whole: nn.Module, rewritten: RewrittenModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Find the module whose output is the first to differ, of those whose outputs can be compared.
    None where there is none.

    An exception of the rewritten model ends the search: modules that have returned by then are
    compared.
    """
    expected: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    with torch.no_grad(), _noted(whole, expected):
        whole(*args, **kwargs)
    with torch.no_grad(), ExitStack() as stages:
        for stage in rewritten.modules():
            stages.enter_context(_noted(stage, found))
        with suppress(Exception):
            rewritten(*args, **kwargs)
    for name, value in expected.items():
        part = rewritten.sequence_part(found[name], value) if name in found else None
        if part is None:
            continue
        own = found[name][:, : part.shape[1]] if part.ndim > 1 else found[name]
        if own.shape != part.shape or not relative(own, part) <= LARGEST:
            return name
    return None


@contextmanager
def _noted(module: nn.Module, into: dict[str, Tensor]) -> Iterator[None]:
    """Note the first tensor that each module with parameters returns at its first call, in the
    order in which they return."""
    handles = []
    for name, child in module.named_modules():
        if next(child.parameters(), None) is None:  # stubs of other stages too
            continue

        def note(child: nn.Module, args: Any, output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if type(first) is Tensor and first.is_floating_point():
                into.setdefault(name, first.detach())

        handles.append(child.register_forward_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
