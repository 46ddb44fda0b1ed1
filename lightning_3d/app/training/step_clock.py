"""Numbers of one optimizer step, under any strategy and with any number of batches; and the last
validation loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_3d.tracing.trace import StepTrace


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of one optimizer step.

    Attributes:
        step: number of the step; the first is 1.
        loss: mean over the global batch, in nats per target token.
        grad_norm: global norm before clipping; None if the strategy does not report it.
        lr: learning rate of the first parameter group in this step. With `CausalLM`, this is the
            group of the parameters that no entry of `optimizer.groups` matches, or that of the
            first entry if there are none.
        tokens: target tokens of the global batch (all its tokens if the strategy does not count
            targets).
        seconds: time from having the batch to the end of the optimizer step, over all its batches;
            without waiting for data, validation and checkpoints. On an accelerator, what the host
            does between the batches of a step counts: the device may compute.
        routers: a `lightning_3d.parallel.expert.RouterStatistics` for a mixture of experts; None
            for a dense model.
        trace: the trace, if the step was traced.
        skipped: True if the optimizer skipped the step (`nonfinite="skip"`).
        slowest: a `lightning_3d.health.slow_ranks.SlowRank`; None where that is not known.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: float
    seconds: float
    routers: Any = None
    trace: StepTrace | None = None
    skipped: bool = False
    slowest: Any = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class StepClock:
    """Clock that measures optimizer steps and reads their numbers from the strategy's `last_step`
    or, under other strategies, from Lightning. A step may have several batches
    (`accumulate_grad_batches`).
    """

    def __init__(self) -> None:
        self._started = 0.0
        self._step = -1
        self._lr = self._seconds = 0.0
        self._goes_on = False
        self._batches: list[Callable[[], tuple[float, float]]] = []

    def start(self, trainer: Trainer) -> None:
        """Record that a batch has arrived."""
        if not self._batches:
            self._step = trainer.global_step
            # Read before the step: schedulers advance before `on_train_batch_end`.
            self._lr = (
                float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else 0.0
            )
        if not self._goes_on:
            self._started = time.perf_counter()

    def stop(self, trainer: Trainer, outputs: Any, batch: Any) -> StepNumbers | None:
        """Record that the batch has ended. Returns the numbers of its step; None while gradients
        accumulate."""
        last = getattr(trainer.strategy, "last_step", None)
        self._batches.append(_reader(last, trainer, outputs, batch))
        ended = trainer.global_step != self._step
        # Read the losses first: on an accelerator, reading one waits for the end of its batch.
        # While further batches follow, nothing is read: the device computes on, and the clock goes
        # on with it.
        numbers = [read() for read in self._batches] if ended else []
        self._goes_on = (
            not ended and last is not None and trainer.strategy.root_device.type != "cpu"
        )
        if not self._goes_on:
            self._seconds += time.perf_counter() - self._started
        if not ended:
            return None
        (losses, counts), seconds = zip(*numbers, strict=True), self._seconds
        self._batches, self._seconds = [], 0.0
        total = sum(counts)
        weights = [count / total for count in counts] if total else [1 / len(counts)] * len(counts)
        loss = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
        norm = getattr(last, "grad_norm", None)
        more = (
            getattr(last, "routers", None),
            getattr(last, "trace", None),
            getattr(last, "skipped", False),
            getattr(last, "slowest", None),
        )
        return StepNumbers(
            trainer.global_step,
            loss,
            None if norm is None else float(norm),
            self._lr,
            total,
            seconds,
            *more,
        )


def _reader(
    last: Any, trainer: Trainer, outputs: Any, batch: Any
) -> Callable[[], tuple[float, float]]:
    """Return a function that reads (loss, tokens) of a batch, from the strategy's `last_step` where
    it has one."""
    if last is not None:
        return lambda: (float(last.loss), float(last.tokens))
    numbers = _loss_of(trainer, outputs), _tokens_of(trainer, batch)
    return lambda: numbers


def _loss_of(trainer: Trainer, outputs: Any) -> float:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is None:
        loss = trainer.callback_metrics.get("loss")
        return float("nan") if loss is None else float(loss)
    return float(loss) * trainer.accumulate_grad_batches  # Lightning has divided it


def _tokens_of(trainer: Trainer, batch: Any) -> float:
    tokens = batch.get("input_ids") if isinstance(batch, dict) else None
    replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
    return float(tokens.numel() * replicas) if isinstance(tokens, Tensor) else 0.0


def last_val_loss(trainer: Trainer) -> float | None:
    """The latest `val_loss` that was logged; None before the first validation."""
    value = trainer.callback_metrics.get("val_loss")
    return None if value is None else float(value)
