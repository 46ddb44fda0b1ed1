"""Private torchmetrics APIs (tried with 1.9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def forward_value(metric: Any) -> Any:
    """The value that the last call of a torchmetrics object returned; None if it was only updated.

    torchmetrics 1.x keeps it in `_forward_cache`, which Lightning reads for `on_step` logging;
    there is no public reader.
    """
    return metric._forward_cache


def set_forward_value(metric: Any, value: Tensor) -> None:
    """Set the value that Lightning logs for a torchmetrics object with `on_step=True` (see
    `forward_value`)."""
    metric._forward_cache = value


def mark_updated(metric: Any) -> None:
    """Mark a torchmetrics object (1.x) as updated on this rank.

    Ranks before the last stage never update it; computing it there, from the last stages' states,
    would warn. `_update_count` has no public setter.
    """
    metric._update_count = max(metric._update_count, 1)
    metric._computed = None


def sync_metric_with(metric: Any, gather: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
    """Make a torchmetrics object (1.x) compute its value from the states that `gather` returns.

    Its own `_sync_dist` gathers tensor by tensor, which hangs where ranks have lists of different
    lengths. `_reductions` says how each state is reduced.
    """
    import torch

    def sync(dist_sync_fn: Any = None, process_group: Any = None) -> None:
        states = gather({name: getattr(metric, name) for name in metric._reductions})
        for name, reduction in metric._reductions.items():
            values = [state[name] for state in states]
            if isinstance(values[0], list):
                joined: Any = [tensor for value in values for tensor in value]
            else:
                joined = torch.stack(values)
            setattr(
                metric, name, reduction(joined) if reduction is not None and len(joined) else joined
            )

    if metric._reductions:  # others, such as sums of two metrics, have no state of their own
        metric._sync_dist = sync


_SWITCHES = ("_to_sync", "_should_unsync", "_enable_grad", "_is_synced", "compute_on_cpu")
"""Attributes that `Metric.forward` changes for a time, and leaves so if `update` fails. Without
`_to_sync`, `compute` is not collective."""


def metric_state(metric: Any) -> tuple[dict[str, Any], int]:
    """Copy what a torchmetrics object (1.x) has accumulated, and its switches: `_copy_state_dict`,
    `_update_count` and most of the switches have no public form.
    """
    return (
        metric._copy_state_dict() | {name: getattr(metric, name) for name in _SWITCHES},
        metric._update_count,
    )


def restore_metric_state(metric: Any, state: tuple[dict[str, Any], int]) -> None:
    """Restore what `metric_state` copied."""
    values, count = state
    for name, value in values.items():
        setattr(metric, name, value)
    metric._update_count = count
    metric._computed = None
