"""Refuse features that `Lightning3DStrategy` does not support, each with one message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec

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
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lightning_3d.errors import ConfigError, listed
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.pipeline.absent_values import AbsentValue
from lightning_3d.strategy.exponential_average import average_of

P = ParamSpec("P")


def refuse_unsupported(trainer: pl.Trainer) -> None:
    """Refuse a module or a callback that this strategy cannot fit with. Raises ConfigError."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ConfigError(
            "automatic_optimization=False is not supported: Lightning3DStrategy runs forward,"
            " backward and optimizer step itself. Return the loss from training_step instead."
        )
    if is_overridden("backward", module):
        raise ConfigError(
            "The module overrides backward, which Lightning3DStrategy never calls: it runs the"
            " backward of each micro-batch itself. Move that code to training_step,"
            " on_before_optimizer_step or configure_gradient_clipping."
        )
    if is_overridden("optimizer_zero_grad", module):
        raise ConfigError(
            "The module overrides optimizer_zero_grad, which Lightning3DStrategy never calls: it"
            " removes all gradients after each optimizer step. Change gradients in"
            " on_before_optimizer_step, or keep what you need of them in a tensor of your own."
        )
    lazy = [
        name
        for name, parameter in module.named_parameters()
        if isinstance(parameter, UninitializedParameter)
    ]
    if lazy:
        raise ConfigError(
            f"{listed(lazy[:4])} {'have' if len(lazy) > 1 else 'has'} no shape before the first"
            " forward, so it cannot be sharded. Run the model once on a row of data before"
            " trainer.fit, or use layers with known sizes."
        )
    averaged = any(
        isinstance(callback, StochasticWeightAveraging)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
    if averaged and StochasticWeightAveraging.pl_module_contains_batch_norm(module):
        raise ConfigError(
            "StochasticWeightAveraging ends with a pass over the data that recomputes the"
            " statistics of batch norms, and each rank would see only its own micro-batches. Use"
            " WeightAveraging or EMAWeightAveraging, which average the statistics."
        )


def refuse_surroundings(environment: Mapping[str, str]) -> None:
    """Refuse a process that `accelerate launch` started for FSDP, by its environment variables.

    Transformers reads them too: inside `from_pretrained`, each node would load the weights on its
    first rank only.

    Raises:
        ConfigError: with what works.
    """
    if environment.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes", "on"):
        raise ConfigError(
            "accelerate launch started this process for FSDP (ACCELERATE_USE_FSDP=true), but"
            " Lightning3DStrategy shards the model itself. Use torchrun, or accelerate launch"
            " --multi_gpu with a configuration without FSDP. ZeRO-3 (zero_stage=3) is this"
            " strategy's counterpart of FSDP."
        )


def refuse_callbacks(trainer: pl.Trainer, zero_stage: int) -> None:
    """Refuse a callback that this strategy cannot fit with, before any callback is set up. Raises
    ConfigError."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _CALLBACK_REFUSALS.items():
            if isinstance(callback, kind):
                raise ConfigError(f"{type(callback).__name__} {reason}")
        if zero_stage == 3 and isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ConfigError(
                f"{type(callback).__name__} averages parameters between batches, when each rank"
                " holds only a shard of them (zero_stage=3). Use lightning_3d.ExponentialAverage,"
                " which averages shards, or zero_stage=2."
            )
    if average_of(trainer) is not None and any(
        isinstance(callback, WeightAveraging)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    ):
        raise ConfigError(
            "ExponentialAverage (trainer.average_decay) and WeightAveraging would both put their"
            " average in the place of the weights for a validation. Use one of them."
        )


_CALLBACK_REFUSALS: dict[type, str] = {
    BaseFinetuning: (
        "unfreezes parameters during a fit, which is not supported: their gradients would not be"
        " reduced, and the optimizer has no state for them. Train in two fits, and unfreeze between"
        " them."
    ),
    ModelPruning: (
        "replaces parameters by masked ones before the model is sharded, and the parallel plan does"
        " not name those. Prune after the fit."
    ),
    BatchSizeFinder: (
        "increases the batch size until one rank runs out of memory, while the others wait for it."
        " Choose the batch size yourself, and a micro_batch_size that fits in memory."
    ),
}
"""Ends of messages that begin with the name of a callback of this kind."""


@contextmanager
def optimizers_of_a_stage(pp_rank: int) -> Iterator[None]:
    """Wrap `configure_optimizers`, because the errors that torch and Lightning raise there do not
    mention stages, or recommend what this strategy refuses.

    An optimizer that gets no parameters at all (`filter(lambda p: p.requires_grad, ...)` on a stage
    that is frozen) is made with one group without parameters. Other errors are explained.
    """
    try:
        with _empty_lists_allowed():
            yield
    except Exception as error:
        reason = next(
            (text for sign, text in _OPTIMIZER_REFUSALS.items() if sign in str(error)), None
        )
        if reason is None:
            raise
        raise ConfigError(
            "configure_optimizers"
            f" {reason.format(where=f'on pipeline rank {pp_rank}', cause=_cause(error))}"
        ) from error


def _cause(error: BaseException) -> str:
    """The first line of the error at the start of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


@contextmanager
def _empty_lists_allowed() -> Iterator[None]:
    """Let optimizers made in here take an empty list, which torch refuses, as one group without
    parameters, which it accepts."""
    original = Optimizer.__init__

    def initialize(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        parameters = params if isinstance(params, Tensor) else list(params)
        if any(isinstance(value, AbsentValue) for value in tensors_of(parameters)):
            raise TypeError("one of the params is NoneType")  # as where a module has None
        original(
            self,
            [{"params": []}] if isinstance(parameters, list) and not parameters else parameters,
            defaults,
        )

    Optimizer.__init__ = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = original  # type: ignore[method-assign]


def check_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Refuse several optimizers, and a fit that trains nothing on any rank. One all-reduce of a
    number over all ranks.

    Raises:
        ConfigError: on all ranks.
    """
    if len(optimizers) != 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers; Lightning3DStrategy"
            " drives exactly one. Use parameter groups of one optimizer instead."
        )
    trained = sum(
        parameter.requires_grad
        for group in optimizers[0].param_groups
        for parameter in group["params"]
    )
    total = torch.tensor(trained, device=device)
    dist.all_reduce(total)
    if not total.item():
        raise ConfigError(
            "The optimizer of configure_optimizers trains nothing: it has no parameter with"
            " requires_grad=True on any rank. Unfreeze what you want to train before trainer.fit,"
            " and pass self.parameters(): frozen ones are skipped."
        )


_OPTIMIZER_REFUSALS = {
    "one of the params is NoneType": (
        "passed a parameter that does not exist {where}: parameters outside the pipelined model are"
        " on the last stage only. Select parameters from self.named_parameters()."
    ),
    "multiple optimizers is only supported": (
        "returned several optimizers; Lightning3DStrategy drives exactly one. Use parameter"
        " groups of one optimizer instead."
    ),
    "requires the cpu_adam op": (
        "made DeepSpeedCPUAdam, whose C++ code is compiled at its first use on a machine, and that"
        " failed ({cause}). It needs a C++ compiler with OpenMP and ninja. torch.optim.AdamW with"
        " fused=True needs neither and is as fast (with the app: optimizer.name=adamw"
        " optimizer.fused=true)."
    ),
}
"""Ends of messages that begin with "configure_optimizers", by a part of the message of torch (2.11
to 2.13), Lightning (2.6) or DeepSpeed (0.19)."""
