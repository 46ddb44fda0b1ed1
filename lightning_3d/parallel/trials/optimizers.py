"""Does an optimizer update each element of a parameter by itself, so that ranks may each step a
part of a tensor?

An optimizer of the same class and options steps a small matrix. Two others step its elements in
flat parts of different size, as two ranks would. If the results are equal in float64, the optimizer
is elementwise. The first part ends inside a block of elements with a common scale, so that states
in 8 bits are found too. In the same way, two matrices show whether it steps each tensor by itself,
as pipeline stages need it, which have different tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.compat.torch import real_values
from lightning_3d.options.optimizer import CLOSURE, CPU_ADAM, ELEMENTWISE
from lightning_3d.parallel.trials.tolerances import SAME_STEPS
from lightning_3d.parallel.trials.values import generator_of, normal

SHAPE = (96, 128)

CUT = 5003
"""Elements of the first part: neither rows nor blocks of elements end there."""

_SIZES = (0.1, 0.01, 10.0, 1.0)
"""Size of the gradients of each step. They also grow, and so reach a limit of a tensor's norm."""
_LEARNING_RATE = 0.01

Split = Callable[[Tensor], list[Tensor]]


def is_elementwise(optimizer: Optimizer, device: torch.device) -> bool | None:
    """Find out whether an optimizer updates each element by itself. Local; takes some milliseconds.

    Args:
        optimizer: the optimizer. Neither it nor its parameters are changed.
        device: device of the parameters. Kernels that do not run in float64 on the CPU are tried
            there in float32.

    Returns:
        None if the optimizer could not step the matrix.
    """
    return True if _is_known(optimizer) else _verdict(optimizer, device, _whole, _cut)


def steps_each_tensor_alone(optimizer: Optimizer, device: torch.device) -> bool | None:
    """Find out whether the update of a tensor depends on its own gradients only, not on a norm over
    all tensors. Local.

    Args:
        optimizer: the optimizer. Neither it nor its parameters are changed.
        device: as in `is_elementwise`.

    Returns:
        None if the optimizer could not step two matrices.
    """
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    return (
        True if of_torch or _is_known(optimizer) else _verdict(optimizer, device, _halves, _halves)
    )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer must be given a function that computes the loss."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    required = closure is not None and closure.default is Parameter.empty
    return type(optimizer).__name__ in CLOSURE or required


def _is_known(optimizer: Optimizer) -> bool:
    """Return whether the class itself, not one derived from it, is known to be elementwise."""
    kind = type(optimizer)
    of_torch = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE
    return of_torch or kind.__name__ == CPU_ADAM  # whose objects destroy each other's C++ part


def _distinct_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Options of the parameter groups, each once, with a learning rate that moves the weights."""
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = options_of(group)
        lr = options.get("lr")
        options["lr"] = (
            torch.full_like(lr, _LEARNING_RATE) if isinstance(lr, Tensor) else _LEARNING_RATE
        )
        found.setdefault(repr(options), options)
    return list(found.values())


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "initial_lr")}


def _verdict(
    optimizer: Optimizer, device: torch.device, together: Split, apart: Split
) -> bool | None:
    """Compare one optimizer for all parts of a matrix with one for each part, for the options of
    each parameter group.

    Args:
        together: makes the parts of the one optimizer.
        apart: makes those that have an optimizer each.
    """
    verdicts = [
        _try(optimizer, group, device, together, apart) for group in _distinct_options(optimizer)
    ]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _try(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    device: torch.device,
    together: Split,
    apart: Split,
) -> bool | None:
    generators = [device] if device.type == "cuda" else []
    for dtype, place in ((torch.float64, torch.device("cpu")), (torch.float32, device)):
        with (
            real_values(),
            torch.enable_grad(),
            torch.random.fork_rng(generators),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            values = _values(dtype, place)
            try:
                whole = _trained(optimizer, options, [together(value) for value in values])
            except Exception:  # closures, kernels for other devices, other arguments
                continue
            try:
                parts = [
                    _trained(optimizer, options, [[part] for part in of_each])
                    for of_each in zip(*map(apart, values), strict=True)
                ]
            except Exception:  # takes no flat parameters
                return False
            return torch.allclose(whole, torch.cat(parts), rtol=0, atol=SAME_STEPS[dtype])
    return None


def _values(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Weights, and the gradients of each step. Global random numbers do not depend on them.

    In the gradients the second half of the rows is larger, so that a limit of a norm holds for some
    parts of the matrix only.
    """
    generator = generator_of("gradients")
    rows = torch.ones(SHAPE[0], 1, dtype=torch.float64)
    rows[SHAPE[0] // 2 :] = 5.0
    weights, *gradients = [normal(SHAPE, generator) for _ in (1.0, *_SIZES)]
    gradients = [gradient * rows * size for gradient, size in zip(gradients, _SIZES, strict=True)]
    return [value.to(device, dtype) for value in (weights, *gradients)]


def _whole(matrix: Tensor) -> list[Tensor]:
    return [matrix]


def _cut(whole: Tensor) -> list[Tensor]:
    flat = whole.flatten()
    return [flat[:CUT].clone(), flat[CUT:].clone()]


def _halves(matrix: Tensor) -> list[Tensor]:
    return list(matrix.chunk(2))


def _trained(
    optimizer: Optimizer, options: Mapping[str, Any], values: Sequence[Sequence[Tensor]]
) -> Tensor:
    """Step tensors with an optimizer of their own, and return the results, flat.

    Args:
        values: the weights, and their gradients in each step.
    """
    parameters = [nn.Parameter(value.clone()) for value in values[0]]
    stepper = another_optimizer(optimizer, options, *parameters)
    for gradients in values[1:]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        stepper.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def another_optimizer(
    optimizer: Optimizer, options: Mapping[str, Any], *parameters: nn.Parameter
) -> Optimizer:
    """Build an optimizer of the same class for some parameters, which shares nothing with the
    original."""
    kind: Any = type(optimizer)
    accepted = signature(kind).parameters
    options, defaults = copy.deepcopy((dict(options), optimizer.defaults))
    arguments = {
        key: value
        for key, value in (defaults | options).items()
        if key in accepted and key != "params"
    }
    made: Optimizer = kind([{**options, "params": list(parameters)}], **arguments)
    # Arguments that are not among the defaults, as 8-bit optimizers have them.
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("defaults", "state", "param_groups") and _is_plain(value)
    }
    vars(made).update(copy.deepcopy(own))
    return made


def _is_plain(value: Any, depth: int = 4) -> bool:
    """Return whether a value consists of numbers and names only: it refers to no parameter,
    function or optimizer."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return True
    if depth == 0 or callable(value) or isinstance(value, Tensor | Optimizer):
        return False
    if isinstance(value, list | tuple | set):
        parts: Iterable[Any] = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    else:
        return False
    return all(_is_plain(part, depth - 1) for part in parts)
