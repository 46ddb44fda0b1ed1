"""One optimizer step of a rank, read from top to bottom: batches are added, numbers published and
judged, then the weights change."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.engine.built_model import BuiltModel
from lightning_3d.engine.first_nonfinite import repeat_failed_step
from lightning_3d.engine.nonfinite import StepGuard, find_nonfinite, trained_weights
from lightning_3d.engine.spikes import judge_spike
from lightning_3d.engine.step import StepResult
from lightning_3d.engine.step.runner import Computed
from lightning_3d.options.reliability import IGNORE


class OptimizerStep:
    """Lives for one optimizer step. Call `add` and `publish` for each of its batches, after the
    last one `measure` before `publish`, then `take`. Where the optimizer is launched before the
    numbers of the step are read, `take` publishes the last batch.

    All ranks make the same calls, and losses and norms are the same on all of them, so that all
    take the same branches.

    Attributes:
        has_all: whether the last batch of the step was added.
        launches_first: whether the optimizer is launched before the numbers of the step are read
            and judged.
        result: numbers of the latest batch, and of the step after its last batch; None before the
            first batch.
    """

    def __init__(self, built: BuiltModel) -> None:
        self._built = built
        self._batches: list[Computed] = []
        self._outputs: dict[str, Any] = {}
        self.has_all = self.launches_first = False
        self.result: StepResult | None = None

    def add(self, batch: Any, rest: tuple[Any, ...] = (), *, ends: bool) -> dict[str, Any]:
        """Run forward and backward of a batch, and after the last one the reduction of gradients.

        Args:
            rest: further arguments of the user's `training_step`.
            ends: whether it is the last batch of the step.

        Returns:
            What `training_step` returned, which `publish` completes.
        """
        built, place = self._built, len(self._batches)
        built.known.begin_batch(begins=place == 0)
        with built.known.following():  # micro-batches are rows of the batch
            origin = built.loop.origin("training")
            micro_batches = built.splitter.split(batch, origin, "training", begins=place == 0)
        built.describe(micro_batches)
        steps, backend = built.loop.steps, built.backend
        with (
            built.proof.watching(batch, micro_batches, rest, steps),
            built.tracer.batch(steps + 1, place, backend),
        ):
            built.repeatable.remember(
                micro_batches, rest, steps, place, anyway=built.twice.is_due(steps)
            )
            with built.twice.first_run(steps, place):
                # Where the number is not known, the batches are weighed as if more could come.
                of = built.loop.accumulates or 2
                computed = built.runner.compute(
                    micro_batches, rest, backend, steps, place=place, ends=ends, of=of
                )
        if ends:
            computed = built.twice.verify(computed, steps)
        self._batches.append(computed)
        self._outputs = built.runner.outputs(micro_batches, computed)
        self.has_all = ends
        self.result = StepResult(computed, backend.grad_norm if ends else None)
        if ends:
            built.warn_of_graph_breaks()
        return self._outputs

    @property
    def count(self) -> int:
        """Number of batches that were added."""
        return len(self._batches)

    def end(self) -> None:
        """Reduce the gradients, where no batch was known to be the last one of the step."""
        built = self._built
        computed = built.runner.end_step(built.backend, self._batches)
        self._batches[-1] = built.twice.verify(computed, built.loop.steps)
        self.has_all = True
        self.result = StepResult(self._batches[-1], built.backend.grad_norm)
        built.warn_of_graph_breaks()

    def measure(self, *, launch_first: bool) -> None:
        """Launch the computation of the gradient norm, and let the device decide about the step
        where it can.

        Args:
            launch_first: whether the caller can do without the numbers of the step until its
                optimizer is launched.
        """
        built, computed = self._built, self._batches[-1]
        # Before anything is read: the host waits only when all work of the backward and of the
        # reduction is under way.
        with built.tracer.optimizer():
            norm = built.backend.norm_on_device()
        self.launches_first = launch_first and self._can_judge_later()
        if self.launches_first and built.guard is not None and built.guard.how != IGNORE:
            built.backend.skip_where((~(computed.finite & norm.isfinite())).to(torch.float32))

    def _can_judge_later(self) -> bool:
        """Whether loss and norm cannot stop the optimizer, or the device can skip it. The same on
        all ranks."""
        guard = self._built.guard
        if guard is None or not guard.can_judge_later:
            return False
        return guard.how == IGNORE or self._built.backend.can_skip_on_device

    def publish(self) -> dict[str, Any]:
        """Log what the batch that was added last has logged. After the last batch, read the numbers
        of all of them, and judge the step. Collective, once for each batch.

        Numbers of earlier batches are read with those of the last one: the device need not wait for
        the host.

        Returns:
            What `training_step` returned, on ranks before the last stage the scalars of it.

        Raises:
            NonFiniteError: a loss or the gradient norm is not finite, and the guard is to stop
                then.
        """
        built = self._built
        if not self.has_all:
            built.runner.report_early(self._outputs)
            return self._outputs
        assert self.result is not None
        # one after the other, so that a hang is told from several batches that take long
        for batch in self._batches:
            _ = batch.totals
            built.tracer.recorder.heartbeat.beat()
        self.result.read()
        built.runner.report(self._batches[-1], self._outputs)
        if built.guard is not None:
            self._judge(built.guard, self.result)
        return self._outputs

    def _judge(self, guard: StepGuard, result: StepResult) -> None:
        """Stop, or mark the step to be skipped, if a loss or the norm is not finite. The optimizer
        has not changed anything then."""
        built = self._built
        assert result.grad_norm is not None
        guard.begin_step()
        for batch in self._batches:
            loss = batch.totals.mean_loss
            lost_here = not isfinite(loss) and batch.is_lost_here()
            guard.note(loss, batch.totals.weight, lost_here)
        if guard.accepts(result.grad_norm):
            judge_spike(built, guard, result)
            return
        layout, loop = built.mesh.layout, built.loop
        gradients, weights = (
            built.backend.reduced_gradients(),
            trained_weights(built.module, built.backend),
        )
        found = find_nonfinite(guard, gradients, weights, layout, built.mesh.rank, built.device)
        repeated = repeat_failed_step(built) if guard.looks_again and not found.weights else None
        words = repeated.words if repeated is not None else ""
        number, rate = loop.steps + 1, loop.learning_rate
        rank_zero_warn(
            guard.refuse(number, result.grad_norm, found, layout, rate, built.precision, words)
        )
        result.skipped = True

    def totals(self) -> tuple[float, float]:
        """Return the mean loss over all batches of the step, as its gradients weigh them, and their
        weight. Waits for the device."""
        totals = [batch.totals for batch in self._batches]
        scaled = sum(each.scaled for each in totals)
        counted = [each.mean_loss * each.scaled for each in totals if each.weight > 0]
        return sum(counted) / scaled if scaled > 0 else float("nan"), sum(
            each.weight for each in totals
        )

    def take(self, before: Callable[[], object], publish: Callable[[], object]) -> None:
        """Take the step, or skip it.

        Args:
            before: function that clips the reduced gradients; the user's hooks run there too. Not
                called in a step that is skipped.
            publish: function that calls `publish`, where the optimizer is launched first.
        """
        built = self._built
        assert self.result is not None and self.has_all
        if self.result.skipped:
            built.skip_optimizer()
            return
        before()
        built.step_optimizer()
        if self.launches_first:
            publish()
        built.end_step(self.result)
