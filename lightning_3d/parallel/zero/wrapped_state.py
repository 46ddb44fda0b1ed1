"""States of an optimizer that wrap other tensors, such as codes of few bits with the scales of
their blocks.

Such a tensor is a subclass that torch can flatten (`__tensor_flatten__`). Its values cannot be
quantized again to the same bits. So checkpoints, and everything else that reads states, see the
inner tensors as states of their own: "exp_avg:codes" and "exp_avg:scale" are the inner tensors
"codes" and "scale" of the state "exp_avg". They belong to the whole parameter and need not have its
shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_3d.errors import CheckpointError, listed
from lightning_3d.options.optimizer import has_few_bits
from lightning_3d.parallel.zero.elementwise import another_optimizer, options_of

SEPARATOR = ":"
"""Between the key of a state and the name of an inner tensor. Names of parameters, which
checkpoints put before keys, may have dots."""


def inner_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each state that wraps others by its inner tensors: the tensors themselves, without
    copies."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            found.update(
                inner_states({f"{key}{SEPARATOR}{name}": getattr(value, name) for name in names})
            )
        else:
            found[key] = value
    return found


def state_without_values(
    optimizer: Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype
) -> dict[str, Any]:
    """Make the state that an optimizer makes for a parameter in its first step, on the meta device.

    Another optimizer of the same class takes the step. Not compiled: torchao compiles its step for
    each shape.

    Args:
        optimizer: is not changed.
        group: its parameter group that the parameter is in.
        shape: shape of the parameter.
        dtype: type of the parameter.
    """
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    probe = another_optimizer(optimizer, options_of(group), parameter)
    with torch.compiler.set_stance("force_eager"):
        probe.step()
    return dict(probe.state[parameter])


def new_wrapped_states(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    like: Tensor,
    saved: Mapping[str, Tensor | float],
    name: str,
) -> dict[str, Tensor]:
    """Make those states of a parameter that wrap others, of zeros that a checkpoint then fills.

    Args:
        optimizer: the optimizer that will have them.
        group: its parameter group that the parameter is in.
        like: the parameter, or its master weights.
        saved: states in the checkpoint, by the keys of `inner_states`.
        name: name of the parameter, for messages.

    Raises:
        CheckpointError: the checkpoint has other states: of another optimizer, or with other
            blocks.
    """
    kind = type(optimizer)
    if not has_few_bits(f"{kind.__module__}.{kind.__name__}") and not any(
        SEPARATOR in key for key in saved
    ):
        return {}
    states = state_without_values(optimizer, group, like.shape, like.dtype)
    own, there = (_shapes(of) for of in (inner_states(states), saved))
    if own != there:
        raise CheckpointError(
            f"The optimizer state of '{name}' in the checkpoint is {_listed(there)}, but"
            f" {kind.__name__} has {_listed(own)} here. To resume, use the optimizer and the"
            " block_size of the run that saved the checkpoint."
        )
    return {
        key: _zeros(value, like.device)
        for key, value in states.items()
        if is_traceable_wrapper_subclass(value)
    }


def _shapes(states: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in states.items() if isinstance(value, Tensor)}


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return listed(f"{key} {shape}" for key, shape in sorted(shapes.items()))


def _zeros(value: Any, device: torch.device) -> Any:
    """Make a tensor of zeros of the same kind, shape and type."""
    if not is_traceable_wrapper_subclass(value):
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    names, context = value.__tensor_flatten__()
    inner: dict[str, Any] = {name: _zeros(getattr(value, name), device) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
