"""Adapts Lightning's callbacks that copy the module, or assume that each rank has a batch of its
own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)

from lightning_3d.compat.lightning import throughputs_of
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout

AVERAGING = (WeightAveraging, StochasticWeightAveraging)
"""Callbacks that copy the module in their `setup` and average the parameters of the copy with those
that are trained."""


def defer_averaging(trainer: pl.Trainer) -> None:
    """Delay the `setup` of callbacks that copy the module until `set_up_callbacks`, when this rank
    has its part of the module.

    Called before Lightning sets up callbacks.
    """
    for callback in _averaging(trainer):
        callback.setup = _later


def set_up_callbacks(trainer: pl.Trainer, layout: Layout) -> None:
    """Set up deferred callbacks, and correct how throughput is counted.

    Called when this rank has its part of the model.
    """
    module = trainer.lightning_module
    for callback in _averaging(trainer):
        if vars(callback).pop("setup", None) is not None:
            with _model_is_built(module):
                callback.setup(trainer, module, trainer.state.fn)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for throughput in throughputs_of(callback):
                # else an earlier fit or test has corrected it
                if "compute" not in vars(throughput):
                    throughput.compute = partial(
                        _shared_rates, throughput.compute, layout.tp * layout.pp * layout.cp
                    )


def forget_deferred(trainer: pl.Trainer) -> None:
    """Undo `defer_averaging` where a fit ended before `set_up_callbacks`."""
    for callback in _averaging(trainer):
        vars(callback).pop("setup", None)


def _averaging(trainer: pl.Trainer) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, AVERAGING)]  # type: ignore[attr-defined]


def _later(*args: Any, **kwargs: Any) -> None:
    """Take the place of the `setup` of a callback."""


@contextmanager
def _model_is_built(module: pl.LightningModule) -> Iterator[None]:
    """Make `configure_model` count as not overridden: `WeightAveraging.setup` would call it again
    and warn about a whole model."""
    own = vars(module).get("configure_model")
    module.configure_model = MethodType(pl.LightningModule.configure_model, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.configure_model
        if own is not None:
            module.configure_model = own  # type: ignore[method-assign]


def _shared_rates(
    compute: Callable[[], dict[str, float]], ranks_of_a_batch: int
) -> dict[str, float]:
    """Correct the rates of a `Throughput`, where `ranks_of_a_batch` ranks work on the same rows (tp
    * pp * cp).

    Lightning counts the rows of one rank as the work of one device, and multiplies by the number of
    ranks. Ranks that share rows count them once each, so that both rates are too large by their
    number.
    """
    shared = ("_per_sec", "mfu")
    return {
        key: value / ranks_of_a_batch if key.endswith(shared) else value
        for key, value in compute().items()
    }


# Checkpoints


def without_average(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a checkpoint without the average of `StochasticWeightAveraging`, because it is only one
    rank's part, stored in the callback's plain state."""
    states = dict(checkpoint.get("callbacks") or {})
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging) and callback.state_key in states:
            states[callback.state_key] = {**states[callback.state_key], "average_model_state": None}
    return {**checkpoint, "callbacks": states} if states else dict(checkpoint)


def restore_average(trainer: pl.Trainer, checkpoint: MutableMapping[str, Any]) -> None:
    """Undo `without_average`, where averaging had not begun.

    Raises:
        ConfigError: averaging had begun.
    """
    states = checkpoint.get("callbacks") or {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging) and callback.state_key in states:
            state = states[callback.state_key]
            if state["n_averaged"] > 0:
                raise ConfigError(
                    "This checkpoint was written after StochasticWeightAveraging began to average,"
                    " and training cannot resume from it: Lightning could not restore the scheduler"
                    " of the averaging. Resume from a checkpoint of an epoch before"
                    " swa_epoch_start, or use EMAWeightAveraging or WeightAveraging, which resume"
                    " from any epoch."
                )
            state["average_model_state"] = callback.state_dict()["average_model_state"]


def averages(trainer: pl.Trainer) -> bool:
    """Return whether a callback needs the tensors of a checkpoint themselves, to restore its
    average from them."""
    return any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]
