"""This rank's part of the model with everything that trains it. It exists once
`Lightning3DStrategy.setup` has built it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d.checkpoint import Names
from lightning_3d.compat.lightning import around_hooks, steps_after_this_batch
from lightning_3d.compat.lightning_data import evaluation_place
from lightning_3d.layout.batch_rules import few_micro_batches
from lightning_3d.options.reliability import IGNORE
from lightning_3d.parallel.blocks import Compilation
from lightning_3d.parallel.context import forget_masks
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.nested import named_tensors
from lightning_3d.parallel.pipeline import PipelineEngine, runs_now
from lightning_3d.parallel.zero import DataParallelBackend
from lightning_3d.strategy.double_check import DoubleCheck
from lightning_3d.strategy.first_nonfinite import repeat_failed_step
from lightning_3d.strategy.gradient_hooks import GradientHooks
from lightning_3d.strategy.local_model import LocalModel, Partition
from lightning_3d.strategy.model_size import share_of_rank
from lightning_3d.strategy.nonfinite import StepGuard, find_nonfinite, trained_weights
from lightning_3d.strategy.spikes import judge_spike
from lightning_3d.strategy.step import MicroBatches, StepResult, StepRunner
from lightning_3d.strategy.step.again import RepeatableStep
from lightning_3d.strategy.step.hook_reads import HookReads
from lightning_3d.strategy.step.known_values import KnownValues
from lightning_3d.strategy.step.loss_finding import summary
from lightning_3d.strategy.step.loss_proof import LossProof
from lightning_3d.strategy.step.runner import Computed
from lightning_3d.strategy.step.splitter import Splitter
from lightning_3d.strategy.step.tracer import StepTracer


@dataclass(eq=False)
class BuiltModel:
    """This rank's part of the model, and what runs and trains it.

    Attributes:
        module: the user's module, partitioned in place.
        parts: the parts of the pipelined module that this rank holds.
        backend: gradients, optimizer states and sharded parameters of the data-parallel ranks.
        engine: the pipeline schedule.
        runner: the user's step on micro-batches, driven by the engine.
        splitter: batches to micro-batches.
        known: values on the device that the host knows.
        reads: sees parameters that the user's step and hooks read outside of the model.
        hooks: sees gradients that the user's hooks read and write.
        tracer: records steps that are traced.
        guard: judges losses and gradient norms that are not finite; None where nothing has values
            (a dry run).
        proof: proves in the first step of a fit that the loss may be split.
        compilation: of the blocks; None without `compile`.
        group_names: names of the parameters in each group of the optimizer; empty before
            `setup_optimizers`.
        defers: whether the caller of `train` calls `report` after `step_optimizer` where
            `launches_first`.
        launches_first: whether the optimizer of the step that runs is launched before its numbers
            are read, reported and judged.
        ends: whether the batch that ran last is the last one of its optimizer step.
        split: rows of a micro-batch, number of micro-batches and tensors of one of them, for the
            first batch of the fit.
    """

    module: pl.LightningModule
    parts: LocalModel
    mesh: Mesh
    device: torch.device
    schedule: str
    backend: DataParallelBackend
    engine: PipelineEngine
    runner: StepRunner
    splitter: Splitter
    known: KnownValues
    reads: HookReads
    hooks: GradientHooks
    tracer: StepTracer
    guard: StepGuard | None
    proof: LossProof
    compilation: Compilation | None = None
    group_names: Names = field(default_factory=list)
    defers: bool = field(default=False, init=False)
    launches_first: bool = field(default=False, init=False)
    ends: bool = field(default=False, init=False)
    split: tuple[int, int, str] = field(default=(1, 1, ""), init=False)

    def __post_init__(self) -> None:
        self._advised = self._reported_breaks = False
        self._unreported: Callable[[], dict[str, Any]] | None = None
        self.repeatable = RepeatableStep(
            self.module, self.runner, self.backend, self.parts.routers, self.device
        )
        # Hooks on layers inside compiled blocks would compile them again.
        self.twice = DoubleCheck(
            self.module, self.repeatable, self.backend, self.device, layers=self.compilation is None
        )
        self.begin_fit()

    def is_of(self, module: pl.LightningModule) -> bool:
        """Return whether `module` is the one that was built, and its partition is still there."""
        earlier = Partition.of(module)
        return earlier is not None and earlier.parts is self.parts

    @property
    def share(self) -> dict[str, int]:
        """Elements that this rank keeps of each parameter of its part."""
        return share_of_rank(self.module, self.backend)

    def begin_fit(self) -> None:
        """Expect the first batch of an optimizer step, because an earlier fit may have ended in the
        middle of a step."""
        self._place = 0
        self._unreported = None
        self._described = False
        self.proof.begin_fit()
        self.hooks.begin_fit()
        self.runner.carried.begin()
        self.runner.left.begin_fit()
        self._earlier: list[Computed] = []
        self.known.begin(self.module)
        self.reads.begin()
        around_hooks(self._around_hook)
        self.runner.scale.begin_fit()
        self.runner.activations.begin_fit()
        self.repeatable.wanted = self.guard is not None and self.guard.may_look_again

    def _around_hook(self, trainer: pl.Trainer, name: str) -> AbstractContextManager[None]:
        if trainer.lightning_module is self.module:
            self.runner.left.share_before(name)
        return self.reads.in_hook(trainer, name)

    def shard(self) -> None:
        """Shard parameters over the data-parallel ranks, with ZeRO-3."""
        # a frozen model is on the last stage only, and the user may remove it
        here = {id(module) for module in self.module.modules()}
        frozen = [
            blocks
            for blocks in self.parts.frozen_blocks
            if all(id(block) in here for block in blocks)
        ]
        self.backend.shard(self.module, [self.parts.blocks, *frozen], self.device, runs_now)

    def train(self, batch: Any, rest: tuple[Any, ...]) -> tuple[StepResult, dict[str, Any]]:
        """Run forward and backward of a batch, and after the last batch of an optimizer step the
        reduction of gradients.

        Args:
            rest: further arguments of the user's `training_step`.

        Returns:
            The step, and what `training_step` returned, which `report` completes. Call `report`
            next, but after `step_optimizer` where `launches_first`.
        """
        trainer = self.module.trainer
        place, ends = self._place, steps_after_this_batch(trainer)
        loader, index = trainer.train_dataloader, trainer.fit_loop.batch_idx
        self.known.begin_batch(begins=place == 0)
        with self.known.following():  # micro-batches are rows of the batch
            micro_batches = self.splitter.split(
                batch, trainer, loader, index, training=True, begins=place == 0
            )
        self._advise(micro_batches)
        self._describe(micro_batches)
        self._place, self.ends = 0 if ends else place + 1, ends
        if place == 0:
            self._earlier = []
        steps = trainer.global_step
        with (
            self.proof.watching(batch, micro_batches, rest, steps),
            self.tracer.batch(steps + 1, place, self.backend),
        ):
            self.repeatable.remember(
                micro_batches, rest, steps, place, anyway=self.twice.is_due(steps)
            )
            with self.twice.first_run(steps, place):
                batches = trainer.accumulate_grad_batches
                computed = self.runner.compute(
                    micro_batches, rest, self.backend, steps, place=place, ends=ends, of=batches
                )
        if ends:
            computed = self.twice.verify(computed, steps)
            self._measure(computed)
        self.launches_first = ends and self._may_launch_first()
        result = StepResult(computed, self.backend.grad_norm if ends else None)
        outputs = self.runner.outputs(micro_batches, computed)
        self._unreported = (
            partial(self._report, result, computed, outputs)
            if ends
            else partial(self._report_early, computed, outputs)
        )
        if ends and self.compilation is not None and not self._reported_breaks:
            self._reported_breaks = True
            self.compilation.warn()
        return result, outputs

    def _measure(self, computed: Computed) -> None:
        """Launch the computation of the gradient norm, and let the device decide about the step
        where it can."""
        # Before anything is read: the host waits only when all work of the backward and of the
        # reduction is under way.
        with self.tracer.optimizer():
            norm = self.backend.norm_on_device()
        if self._may_launch_first() and self.guard is not None and self.guard.how != IGNORE:
            self.backend.skip_where((~(computed.finite & norm.isfinite())).to(torch.float32))

    def _may_launch_first(self) -> bool:
        """Whether the optimizer can be launched before the host knows loss and norm: if they cannot
        stop it, or the device can skip it. The same on all ranks."""
        if not self.defers or self.guard is None or not self.guard.can_judge_later:
            return False
        return self.guard.how == IGNORE or self.backend.can_skip_on_device

    def report(self) -> dict[str, Any]:
        """Log what the batch that was computed last has logged. After the last batch of a step,
        read the numbers of all of them, and judge the step. Collective, once for each batch.

        Returns:
            What `training_step` returned, on ranks before the last stage the scalars of it.

        Raises:
            NonFiniteError: see `_judge`.
        """
        assert self._unreported is not None
        report, self._unreported = self._unreported, None
        return report()

    def _report_early(self, computed: Computed, outputs: dict[str, Any]) -> dict[str, Any]:
        """Report a batch that others of its step follow. Its numbers are read with theirs: the
        device need not wait for the host."""
        self._earlier.append(computed)
        self.runner.report_early(outputs)
        return outputs

    def _report(
        self, step: StepResult, computed: Computed, outputs: dict[str, Any]
    ) -> dict[str, Any]:
        batches, self._earlier = [*self._earlier, computed], []
        # one after the other, so that a hang is told from several batches that take long
        for batch in batches:
            _ = batch.totals
            self.tracer.recorder.heartbeat.beat()
        step.read()
        self.runner.report(computed, outputs)
        self._judge(step, batches)
        return outputs

    def _judge(self, step: StepResult, batches: list[Computed]) -> None:
        """Stop, or mark the step to be skipped, if a loss or the gradient norm is not finite. The
        optimizer has not changed anything then.

        Losses and norm are the same on every rank, so that all ranks take the same branches here.

        Args:
            batches: all batches of the step, in order.

        Raises:
            NonFiniteError: one of them is not finite, and the guard is to stop then.
        """
        if self.guard is None:
            return
        assert step.grad_norm is not None
        self.guard.begin_step()
        for batch in batches:
            loss = batch.totals.mean_loss
            self.guard.note(
                loss, batch.totals.weight, lost_here=not isfinite(loss) and batch.is_lost_here()
            )
        if self.guard.accepts(step.grad_norm):
            judge_spike(self, self.guard, step)
            return
        trainer, layout = self.module.trainer, self.mesh.layout
        gradients, weights = (
            self.backend.reduced_gradients(),
            trained_weights(self.module, self.backend),
        )
        found = find_nonfinite(self.guard, gradients, weights, layout, self.mesh.rank, self.device)
        repeated = (
            repeat_failed_step(self) if self.guard.looks_again and not found.weights else None
        )
        what = repeated.words if repeated is not None else ""
        lr = float(trainer.optimizers[0].param_groups[0]["lr"])
        rank_zero_warn(
            self.guard.refuse(
                trainer.global_step + 1,
                step.grad_norm,
                found,
                layout,
                lr,
                str(trainer.precision),
                what,
            )
        )
        step.skipped = True

    def evaluate(self, hook: str, batch: Any, rest: tuple[Any, ...]) -> Any:
        """Run the forward of a batch. `hook` is "validation", "test" or "predict". Returns what the
        user's step returned."""
        trainer = self.module.trainer
        loader, index = evaluation_place(trainer) if hook != "predict" else (None, 0)
        micro_batches = self.splitter.split(batch, trainer, loader, index, training=False)
        with self.backend.parameters_in_use():
            return self.runner.evaluate(hook, micro_batches, rest)

    def step_optimizer(self) -> None:
        """Launch the optimizer with the reduced gradients. `end_step` follows."""
        with self.tracer.optimizer():
            self.backend.step()

    def end_step(self, step: StepResult) -> None:
        """End a step whose optimizer was launched and that has been judged."""
        if step.skipped:  # by the device
            self.skip_optimizer()
            return
        with self.tracer.optimizer():
            self.backend.end_step()
            # After the step, so that a checkpoint has the biases of routers that belong to its
            # weights.
            self.parts.after_optimizer_step()

    def skip_optimizer(self) -> None:
        """Forget the gradients of a step that is not taken."""
        self.backend.discard()
        self.parts.after_skipped_step()

    def clip(self, limit: float, algorithm: str) -> None:
        """Clip the reduced gradients by their norm over all ranks ("norm"), or each element
        ("value")."""
        if self.hooks.change_gradients:
            self.backend.measure_again()
        with self.tracer.optimizer():
            self.backend.clip(**{"value" if algorithm == "value" else "max_norm": limit})

    def close(self, *, whole: bool) -> None:
        """End a fit.

        Args:
            whole: whether to gather sharded parameters, so that the module can be used without a
                strategy; this is collective. If False, parameters whose values are on other ranks
                are lost.
        """
        forget_masks()  # of a step that failed
        self.known.end()
        around_hooks(None)
        self.reads.end()
        self.runner.activations.end()
        if whole:
            self.backend.make_whole()
        else:
            self.parts.lost = self.backend.abandon()
        self.backend.teardown()

    def _describe(self, micro_batches: MicroBatches) -> None:
        """Print once per fit how a global batch is split."""
        if self._described:
            return
        self._described = True
        count = max(1, len(micro_batches) - micro_batches.fillers)
        self.split = micro_batches.rows, count, named_tensors(micro_batches.batches[0])
        if self.mesh.rank == 0 and self.guard is not None:
            line = summary(
                self.mesh.size("dp"),
                count,
                micro_batches.rows,
                self.module.trainer.accumulate_grad_batches,
            )
            print(f"lightning_3d: {line}", file=sys.stderr, flush=True)

    def _advise(self, micro_batches: MicroBatches) -> None:
        """Warn once when the pipeline is predicted to idle for lack of micro-batches."""
        if self._advised:
            return
        self._advised = True
        advice = few_micro_batches(
            self.mesh.layout, self.schedule, len(micro_batches) - micro_batches.fillers
        )
        if advice is not None:
            rank_zero_warn(f"{advice} Use a larger batch_size or a smaller micro_batch_size.")
