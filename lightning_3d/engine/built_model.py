"""This rank's part of the model with everything that trains it. `engine.build` makes it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_3d.checkpoint import Names
from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.engine.double_check import DoubleCheck
from lightning_3d.engine.local_model import LocalModel, Partition
from lightning_3d.engine.loop import Loop
from lightning_3d.engine.model_size import share_of_rank
from lightning_3d.engine.nonfinite import StepGuard
from lightning_3d.engine.step import MicroBatches, StepResult, StepRunner
from lightning_3d.engine.step.again import RepeatableStep
from lightning_3d.engine.step.known_values import KnownValues
from lightning_3d.engine.step.loss_finding import summary
from lightning_3d.engine.step.loss_proof import LossProof
from lightning_3d.engine.step.outside_reads import OutsideReads
from lightning_3d.engine.step.splitter import Splitter
from lightning_3d.engine.step.tracer import StepTracer
from lightning_3d.layout.batch_rules import few_micro_batches
from lightning_3d.parallel.blocks import Compilation
from lightning_3d.parallel.context import forget_masks
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.nested import named_tensors
from lightning_3d.parallel.pipeline import PipelineEngine, runs_now
from lightning_3d.parallel.zero import DataParallelBackend


@dataclass(eq=False)
class BuiltModel:
    """This rank's part of the model, and what runs and trains it.

    Attributes:
        module: the user's module, partitioned in place.
        parts: the parts of the pipelined module that this rank holds.
        loop: the loop around this.
        precision: name of the precision, as the user wrote it.
        backend: gradients, optimizer states and sharded parameters of the data-parallel ranks.
        engine: the pipeline schedule.
        runner: the user's step on micro-batches, driven by the engine.
        splitter: batches to micro-batches.
        known: values on the device that the host knows.
        reads: sees parameters that the user's step reads outside of the model.
        tracer: records steps that are traced.
        guard: judges losses and gradient norms that are not finite; None where nothing has values
            (a dry run).
        proof: proves in the first step of a fit that the loss may be split.
        compilation: of the blocks; None without `compile`.
        group_names: names of the parameters in each group of the optimizer; empty before
            `setup_optimizers`.
        split: rows of a micro-batch, number of micro-batches and tensors of one of them, for the
            first batch of the fit.
    """

    module: nn.Module
    parts: LocalModel
    mesh: Mesh
    device: torch.device
    schedule: str
    loop: Loop
    precision: str
    backend: DataParallelBackend
    engine: PipelineEngine
    runner: StepRunner
    splitter: Splitter
    known: KnownValues
    reads: OutsideReads
    tracer: StepTracer
    guard: StepGuard | None
    proof: LossProof
    compilation: Compilation | None = None
    group_names: Names = field(default_factory=list)
    split: tuple[int, int, str] = field(default=(1, 1, ""), init=False)

    def __post_init__(self) -> None:
        self._advised = self._warned_of_breaks = False
        self.repeatable = RepeatableStep(
            self.module, self.runner, self.backend, self.parts.routers, self.device
        )
        # Hooks on layers inside compiled blocks would compile them again.
        self.twice = DoubleCheck(
            self.module, self.repeatable, self.backend, self.device, layers=self.compilation is None
        )
        self.begin_fit()

    def is_of(self, module: nn.Module) -> bool:
        """Return whether `module` is the one that was built, and its partition is still there."""
        earlier = Partition.of(module)
        return earlier is not None and earlier.parts is self.parts

    @property
    def share(self) -> dict[str, int]:
        """Elements that this rank keeps of each parameter of its part."""
        return share_of_rank(self.module, self.backend)

    def begin_fit(self) -> None:
        """Forget an earlier fit."""
        self._described = False
        self.proof.begin_fit()
        self.runner.carried.begin()
        self.runner.left.begin_fit()
        self.known.begin(self.module)
        self.reads.begin()
        self.runner.scale.begin_fit()
        self.runner.activations.begin_fit()
        self.repeatable.wanted = self.guard is not None and self.guard.may_look_again

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

    def warn_of_graph_breaks(self) -> None:
        """Warn once, after the first step, where compiled blocks have graph breaks."""
        if self.compilation is not None and not self._warned_of_breaks:
            self._warned_of_breaks = True
            self.compilation.warn()

    def evaluate(self, hook: str, batch: Any, rest: tuple[Any, ...]) -> Any:
        """Run the forward of a batch. `hook` is "validation", "test" or "predict". Returns what the
        user's step returned."""
        micro_batches = self.splitter.split(batch, self.loop.origin(hook), hook)
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

    def clip(self, limit: float, algorithm: str = "norm", *, changed: bool = False) -> None:
        """Clip the reduced gradients by their norm over all ranks ("norm"), or each element
        ("value").

        Args:
            changed: whether code of the user's may have changed the gradients since they were
                reduced.
        """
        if changed:
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
        self.reads.end()
        self.runner.activations.end()
        if whole:
            self.backend.make_whole()
        else:
            self.parts.lost = self.backend.abandon()
        self.backend.teardown()

    def describe(self, micro_batches: MicroBatches) -> None:
        """Print once per fit how a global batch is split, and warn once when a pipeline is
        predicted to idle."""
        self._advise(micro_batches)
        if self._described:
            return
        self._described = True
        count = max(1, len(micro_batches) - micro_batches.fillers)
        self.split = micro_batches.rows, count, named_tensors(micro_batches.batches[0])
        if self.mesh.rank == 0 and self.guard is not None:
            accumulated = self.loop.accumulates or 1
            line = summary(self.mesh.size("dp"), count, micro_batches.rows, accumulated)
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
