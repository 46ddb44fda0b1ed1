"""What callbacks of Lightning need that copy the module, or count ranks as if each had a batch of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, StochasticWeightAveraging, ThroughputMonitor, WeightAveraging

from lightning_3d.compat.lightning import throughputs_of
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout

AVERAGING = (WeightAveraging, StochasticWeightAveraging)
"""Callbacks that copy the module in their `setup` and average the parameters of the copy with those that are trained."""


def defer_averaging(trainer: pl.Trainer) -> None:
    """Before the `setup` of callbacks: let those that copy the module wait for `set_up_callbacks`, when this rank has its part of it."""
    for callback in _averaging(trainer):
        callback.setup = _later


def set_up_callbacks(trainer: pl.Trainer, layout: Layout) -> None:
    """When the model is cut: set up what was deferred, correct how throughput is counted, and let summaries run no model that no rank
    has."""
    module = trainer.lightning_module
    for callback in _averaging(trainer):
        if vars(callback).pop("setup", None) is not None:
            with _model_is_built(module):
                callback.setup(trainer, module, trainer.state.fn)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for throughput in throughputs_of(callback):
                if "compute" not in vars(throughput):  # of an earlier entry point
                    throughput.compute = partial(_shared_rates, throughput.compute, layout.tp * layout.pp * layout.cp)
        if isinstance(callback, ModelSummary) and layout.pp > 1 and "on_fit_start" not in vars(callback):
            callback.on_fit_start = partial(_without_example, callback.on_fit_start)  # type: ignore[method-assign]


def forget_deferred(trainer: pl.Trainer) -> None:
    """When a fit ended before `set_up_callbacks`: the callbacks are what they were."""
    for callback in _averaging(trainer):
        vars(callback).pop("setup", None)


def _averaging(trainer: pl.Trainer) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, AVERAGING)]  # type: ignore[attr-defined]


def _later(*args: Any, **kwargs: Any) -> None:
    """In the place of the `setup` of a callback."""


@contextmanager
def _model_is_built(module: pl.LightningModule) -> Iterator[None]:
    """`configure_model` counts as not overridden: `WeightAveraging.setup` would call it once more and warn of a whole model."""
    own = vars(module).get("configure_model")
    module.configure_model = MethodType(pl.LightningModule.configure_model, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.configure_model
        if own is not None:
            module.configure_model = own  # type: ignore[method-assign]


def _shared_rates(compute: Callable[[], dict[str, float]], ranks_of_a_batch: int) -> dict[str, float]:
    """Rates of a `Throughput`, where `ranks_of_a_batch` ranks work on the same rows (tp * pp).

    Lightning takes the rows of one rank for what that device works off, and that times the number of ranks for all. Ranks of one
    tensor-parallel group and pipeline work on the same rows, so that both are too large by their number.
    """
    shared = ("_per_sec", "mfu")
    return {key: value / ranks_of_a_batch if key.endswith(shared) else value for key, value in compute().items()}


def _without_example(on_fit_start: Callable[..., None], trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """A summary without the sizes of inputs and outputs, for which it would call the whole model."""
    example, module.example_input_array = module.example_input_array, None
    try:
        on_fit_start(trainer, module)
    finally:
        module.example_input_array = example


# Checkpoints


def without_average(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint without the average of `StochasticWeightAveraging`, which it keeps among plain state: one rank's part of it."""
    states = dict(checkpoint.get("callbacks") or {})
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging) and callback.state_key in states:
            states[callback.state_key] = {**states[callback.state_key], "average_model_state": None}
    return {**checkpoint, "callbacks": states} if states else dict(checkpoint)


def restore_average(trainer: pl.Trainer, checkpoint: MutableMapping[str, Any]) -> None:
    """Undo `without_average`, as long as the average had not begun.

    Raises:
        ConfigError: it had.
    """
    states = checkpoint.get("callbacks") or {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging) and callback.state_key in states:
            state = states[callback.state_key]
            if state["n_averaged"] > 0:
                raise ConfigError(
                    "This checkpoint was written when StochasticWeightAveraging had begun to average, and it cannot go on from there:"
                    " Lightning restores its scheduler only where checkpoints are loaded before setup. Resume from a checkpoint of an"
                    " epoch before swa_epoch_start, or use EMAWeightAveraging or WeightAveraging, which go on from any."
                )
            state["average_model_state"] = callback.state_dict()["average_model_state"]


def averages(trainer: pl.Trainer) -> bool:
    """Whether a callback wants the tensors of a checkpoint themselves, to take an average from them."""
    return any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]
