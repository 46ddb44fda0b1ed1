"""What a fit under `Lightning3DStrategy` cannot do, refused in one line each; and what looks like it on one rank and is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.errors import ConfigError


def refuse_unsupported(trainer: pl.Trainer) -> None:
    """Name in one line what a fit of this strategy cannot do."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ConfigError(
            "automatic_optimization=False: Lightning3DStrategy drives forward, backward and step itself and cannot call a manual"
            " optimization. Return the loss from training_step instead."
        )
    if is_overridden("backward", module):
        raise ConfigError(
            "The module overrides backward, which Lightning3DStrategy never calls: it runs the backward of each micro-batch itself."
            " Put what it does into training_step, on_before_optimizer_step or configure_gradient_clipping."
        )
    averaged = any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if averaged and StochasticWeightAveraging.pl_module_contains_batch_norm(module):
        raise ConfigError(
            "StochasticWeightAveraging ends with a pass over the data that computes the statistics of batch norms anew: here each"
            " rank would take those of its own micro-batches. Use WeightAveraging or EMAWeightAveraging, which average the statistics."
        )


def refuse_callbacks(trainer: pl.Trainer, zero_stage: int) -> None:
    """Name in one line the callback that a fit of this strategy cannot have, before any callback is set up."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _CALLBACK_REFUSALS.items():
            if isinstance(callback, kind):
                raise ConfigError(f"{type(callback).__name__} {reason}")
        if zero_stage == 3 and isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ConfigError(
                f"{type(callback).__name__} averages parameters between batches, where zero_stage=3 keeps only a part of them on each"
                " rank. Use zero_stage=2."
            )


_CALLBACK_REFUSALS: dict[type, str] = {
    BaseFinetuning: "is there to unfreeze parameters during a fit, which is not supported: their gradients would not be reduced, and the"
    " optimizer has no state for them. Train in two fits: unfreeze between them.",
    ModelPruning: "replaces parameters by masked ones before the model is cut, and the layout's plan no longer names them. Prune after"
    " the fit.",
    BatchSizeFinder: "searches until one rank runs out of memory, where the others would wait for it. Choose the batch size, and"
    " micro_batch_size for what fits in memory.",
}
"""What follows the name of a callback of this kind."""


@contextmanager
def optimizers_of_a_stage(pp_rank: int) -> Iterator[None]:
    """Holds `configure_optimizers`, where torch and Lightning know nothing of stages or advise what is refused.

    An optimizer that gets no parameters at all (`filter(lambda p: p.requires_grad, ...)` on a stage that is frozen) is made with one
    group without parameters. Other errors are explained.
    """
    try:
        with _empty_lists_allowed():
            yield
    except Exception as error:
        reason = next((text for sign, text in _OPTIMIZER_REFUSALS.items() if sign in str(error)), None)
        if reason is None:
            raise
        raise ConfigError(f"configure_optimizers {reason.format(where=f'on pipeline rank {pp_rank}', cause=_cause(error))}") from error


def _cause(error: BaseException) -> str:
    """The first line of what began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


@contextmanager
def _empty_lists_allowed() -> Iterator[None]:
    """Optimizers that are made meanwhile take an empty list, which torch refuses, as a group without parameters, which it takes."""
    original = Optimizer.__init__

    def initialize(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, Tensor) else list(params)
        original(self, [{"params": []}] if isinstance(given, list) and not given else given, defaults)

    Optimizer.__init__ = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = original  # type: ignore[method-assign]


def require_one_optimizer(optimizers: Sequence[Any]) -> None:
    """Refuse several optimizers, of which gradients and states would be reduced and sharded apart. Raises ConfigError."""
    if len(optimizers) != 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers; Lightning3DStrategy drives exactly one. Use"
            " parameter groups of one optimizer instead."
        )


def require_trained(optimizer: Optimizer, device: torch.device) -> None:
    """Refuse a fit that trains nothing on any rank. One all-reduce of a number over all ranks. Raises ConfigError on all of them."""
    trained = sum(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"])
    total = torch.tensor(trained, device=device)
    dist.all_reduce(total)
    if not total.item():
        raise ConfigError(
            "The optimizer of configure_optimizers trains nothing: on no rank was it given a parameter with requires_grad=True. Unfreeze"
            " what is to be trained before trainer.fit, and give it self.parameters(): frozen ones are left out."
        )


_OPTIMIZER_REFUSALS = {
    "one of the params is NoneType": "named a parameter that does not exist {where}: parameters beside the pipelined model are on"
    " the last stage only. Take what is there from self.named_parameters().",
    "multiple optimizers is only supported": "returned several optimizers; Lightning3DStrategy drives exactly one. Use parameter"
    " groups of one optimizer instead.",
    "requires the cpu_adam op": "made DeepSpeedCPUAdam, which is C++ that is compiled on its first use on a machine, and that failed"
    " ({cause}). It needs a C++ compiler with OpenMP and ninja. torch.optim.AdamW with fused=True needs neither and is as fast"
    " (with the app: optimizer.name=adamw optimizer.fused=true).",
}
"""What follows "configure_optimizers", by a part of the message of torch (2.11 to 2.13), Lightning (2.6) or DeepSpeed (0.19)."""
