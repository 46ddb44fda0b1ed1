"""Run one rank of a job without its hardware, to measure what it holds, sends and computes in a
training step.

The user's module runs through Lightning's Trainer and this package's strategy, rewrites and
schedule, as in training. Its tensors have a shape but no values (`shapes`), its process groups send
nothing, and its ZeRO backend works on shapes. `meter` watches every operation.

Because nothing has values, it is assumed that routers send equally many tokens to every rank, no
gradient is missing and no loss is NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from typing_extensions import override

from lightning_3d.app.dryrun.gpu_attention import gpu_attention
from lightning_3d.app.dryrun.rank_report import Measured, RankReport
from lightning_3d.app.dryrun.shapes import FoundResult, ShapeMeter, alone
from lightning_3d.engine.loop import BatchOrigin
from lightning_3d.engine.step import MicroBatches
from lightning_3d.engine.step.splitter import BatchSplitter
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.schedules import find_schedule, rank_of_stage
from lightning_3d.options.zero import NONE
from lightning_3d.parallel.expert.dispatch import DispatchedExperts
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline.schedule import Action, Kind, Order, training_order
from lightning_3d.parallel.pipeline.transport import AHEAD
from lightning_3d.ranks.progress import task
from lightning_3d.strategy.exponential_average import ExponentialAverage
from lightning_3d.strategy.silent_trainer import Batches, silence, silent_trainer
from lightning_3d.strategy.strategy import Lightning3DStrategy

STEPS = 2
"""The first step creates the optimizer's state and shows the shapes of messages and what is logged.
The second one is measured."""


class DryStrategy(Lightning3DStrategy):
    """Strategy of a rank that runs alone, on tensors without values."""

    _shape_only = True
    meter: ShapeMeter
    found: FoundResult
    report: RankReport
    micro_batches: tuple[int, ...]
    for_gpus: bool
    _is_metered = False

    @property
    @override
    def optimizer_device(self) -> torch.device:
        """Device on which the optimizer of the job steps, whose tensors are here on the CPU and
        have no values."""
        return (
            torch.device("cuda")
            if self.for_gpus and self.zero.offload == NONE
            else torch.device("cpu")
        )

    @property
    @override
    def _on_accelerator(self) -> bool:
        return self.for_gpus

    @override
    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self._mesh = Mesh(self.layout or Layout(), node_size=self._node_size)
        self._mesh.shard_data(self.zero.shard_size)

    def _materialize(self, root: nn.Module, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.meter.materialize(root)

    @override
    def _build(self) -> None:
        module = self.user_module
        super()._build()
        built = self.built
        size = built.parts.size
        self.report.whole = size.count(built.parts.name)
        self.report.second = size.count() - self.report.whole
        self.report.second_here = sum(parameter.numel() for parameter in module.parameters())
        self.report.second_here -= sum(
            parameter.numel() for parameter in built.parts.module.parameters()
        )
        built.splitter = _FirstMicroBatches(cast(BatchSplitter, built.splitter), self.micro_batches)
        for layer in module.modules():
            if isinstance(layer, DispatchedExperts):
                layer.expert_parallel.balanced = True
        self.report.parameters = sum(parameter.numel() for parameter in module.parameters())
        self.report.stages = tuple(built.parts.parameters)
        built.runner.after_first_backward = None
        if not self.engine.owns_last:
            built.runner.known_totals = self.found.totals

    @override
    def model_to_device(self) -> None:
        with self.meter:
            self.built.shard()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with self.meter:
            super().setup_optimizers(trainer)
        for group in (
            self.optimizers[0].param_groups if self.optimizer_device.type == "cuda" else ()
        ):
            if group.get("foreach", False) is None and group.get("fused") is None:
                group["foreach"] = True  # torch's default on GPUs

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.metered():
            result = super().training_step(*args, **kwargs)
        if self.engine.owns_last:
            self.found.totals = self.built.runner.totals
            self.found.known("totals")
        return result

    @override
    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        # nothing can be compiled here, and torch would warn of that
        with self.metered(), torch.compiler.set_stance("force_eager"):
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Enter the meter, but only once: the optimizer's step calls the training step."""
        if self._is_metered:
            yield
            return
        self._is_metered = True
        try:
            with self.meter, gpu_attention(self.for_gpus):
                yield
        finally:
            self._is_metered = False

    @override
    def _hold_checkpoint_folders(self, trainer: pl.Trainer) -> None:
        """Hold no folders: no checkpoint is read or written."""

    @override
    def teardown(self) -> None:
        """Do nothing: nothing is kept."""


class _Average(ExponentialAverage):
    """Average of weights without values."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, DryStrategy)
        with strategy.metered():
            super().on_train_batch_end(trainer, *args)


@dataclass(frozen=True)
class _FirstMicroBatches:
    """The first micro-batches of each batch, without the checks that compare this rank's data with
    others'.

    Attributes:
        counts: how many of each batch.
    """

    splitter: BatchSplitter
    counts: tuple[int, ...]

    def split(
        self, batch: Any, origin: BatchOrigin, hook: str, *, begins: bool = True
    ) -> MicroBatches:
        whole = self.splitter.split_unchecked(batch, origin, training=hook == "training")
        return replace(whole, batches=whole.batches[: self.counts[origin.index]])


class _Environment(ClusterEnvironment):
    """Cluster environment of a rank in a world that does not exist."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    creates_processes_externally = True
    main_address, main_port = "localhost", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


@dataclass(frozen=True)
class DryJob:
    """A training job for a dry run.

    Attributes:
        module: makes the user's module.
        strategy: makes its strategy from the class that it is given, a `DryStrategy`.
        batch: makes the batch of one data-parallel rank for an optimizer step of so many
            micro-batches.
        layout: resolved layout.
        schedule: resolved pipeline schedule.
        micro_batches: micro-batches of an optimizer step.
        precision: precision, as Lightning's Trainer takes it.
        clip: gradient_clip_val of the Trainer.
        gpu: whether the job is for GPUs, over NCCL.
        average_decay: decay of the average of the weights that the job keeps
            (`ExponentialAverage`); None if it keeps none.
        whole: whether to run every micro-batch of a step, also those that add nothing new.
    """

    module: Callable[[], pl.LightningModule]
    strategy: Callable[[type[DryStrategy]], DryStrategy]
    batch: Callable[[int], Any]
    layout: Layout
    schedule: str
    micro_batches: int
    precision: str = "32-true"
    clip: float | None = None
    gpu: bool = False
    average_decay: float | None = None
    whole: bool = False

    def order(self, micro_batches: int) -> Order:
        """Return the actions of all pipeline ranks in a step."""
        return training_order(self.schedule, self.layout.pp, self.layout.vp, micro_batches)

    def accepted(self) -> list[int]:
        """List the numbers of micro-batches that the schedule accepts, up to those of a step."""
        accepts = find_schedule(self.schedule).accepts
        return [
            count
            for count in range(1, self.micro_batches + 1)
            if accepts(self.layout.pp, self.layout.vp, count)
        ]


def representative(job: DryJob, index: int) -> tuple[int, bool]:
    """Find how many micro-batches a rank must run to pass through every state of a whole step.

    The state of a rank consists of its next action, the number of micro-batches of each stage that
    wait for their backward, and the stages that already have gradients. Memory depends on nothing
    else. If all micro-batches wait at once (GPipe), each adds the same memory, so a few of them are
    enough.

    Args:
        job: the job.
        index: index of the rank in its pipeline.

    Returns:
        The number; and whether further micro-batches leave the number in flight unchanged.
    """
    counts = job.accepted()
    most = counts[-1]
    enough = next(
        count for count in counts if count >= min(2 * job.layout.pp * job.layout.vp + 1, most)
    )
    if job.whole or enough == most:
        return most, True
    states = _states(job.order(most)[index])
    for count in (count for count in counts if 3 <= count < most):
        if states <= _states(job.order(count)[index]):  # and as many more as are received ahead
            return next((larger for larger in counts if larger >= count + AHEAD), most), True
    return enough, False


def _states(actions: Sequence[Action]) -> set[Any]:
    waiting: Counter[tuple[int, Kind]] = Counter()
    graded: set[int] = set()
    seen = set()
    for action in actions:
        seen.add((action.kind, action.stage, frozenset((+waiting).items()), frozenset(graded)))
        if action.kind is Kind.FORWARD:
            waiting[action.stage, Kind.FORWARD] += 1
            continue
        ends = action.kind is Kind.BACKWARD_WEIGHT
        waiting[action.stage, Kind.BACKWARD_INPUT if ends else Kind.FORWARD] -= 1
        if action.kind is Kind.BACKWARD_INPUT:
            waiting[action.stage, Kind.BACKWARD_INPUT] += 1
        else:
            graded.add(action.stage)
    return seen


def dry_run(job: DryJob, rank: int, found: FoundResult | None = None) -> RankReport:
    """Run one rank of a job without values, in this process, which must have no process groups.

    Args:
        job: the job.
        rank: global rank.
        found: facts from ranks of the same pipeline that ran before. Missing facts from the first
            and last stage are added.
    """
    found = FoundResult() if found is None else found
    layout = job.layout
    pipeline = layout.group_of(rank, "pp")
    first, last = pipeline[0], pipeline[_owner_of_last(job)]
    if layout.pp > 1 and first != last and not found.objects.get(0):
        _run_until_known(job, first, found, "shape")
    if rank != last and found.totals is None:
        _run_until_known(job, last, found, "totals")
    return _run(job, rank, found, f"running rank {rank}")


def _owner_of_last(job: DryJob) -> int:
    """Return the index in the pipeline of the rank with the last stage."""
    v_shaped = find_schedule(job.schedule).v_shaped and job.layout.pp > 1
    return rank_of_stage(job.layout.pp * job.layout.vp - 1, job.layout.pp, job.layout.vp, v_shaped)


class _KnownShapes(BaseException):
    """Exception that ends a run which was started to find out one fact."""


def _run_until_known(job: DryJob, rank: int, found: FoundResult, wanted: str) -> None:
    """Run a rank only for facts that others need: the first rank for the shape of messages, the
    last one for what is logged."""

    def stop(what: str) -> None:
        if what == wanted:
            raise _KnownShapes

    found.known = stop
    with suppress(_KnownShapes):
        _run(job, rank, found, f"finding what other ranks receive from rank {rank}")
    found.known = lambda what: None


def _run(job: DryJob, rank: int, found: FoundResult, what: str) -> RankReport:
    layout = job.layout
    report = RankReport(rank, layout.coordinates(rank))
    pipeline = layout.group_of(rank, "pp")
    found.objects.pop(pipeline.index(rank), None)
    with (
        alone(rank, layout.world_size, pipeline, found, gloo=not job.gpu),
        isolate_rng(),
        silence(),
    ):
        strategy = job.strategy(DryStrategy)
        if job.gpu and strategy.zero.stage and strategy.zero.reduce_scatter is None:
            strategy.zero = replace(strategy.zero, reduce_scatter=True)
        meter = ShapeMeter()
        strategy.meter, strategy.found, strategy.report = meter, found, report
        measured = Measured(meter, report, STEPS - 1)
        report.micro_batches, bounded = representative(job, pipeline.index(rank))
        strategy.for_gpus = job.gpu
        strategy.micro_batches = (job.accepted()[0], report.micro_batches)
        averages = [] if job.average_decay is None else [_Average(job.average_decay)]
        batches = Batches([job.batch(job.micro_batches)] * STEPS)
        actions = sum(
            len(job.order(count)[pipeline.index(rank)]) for count in strategy.micro_batches
        )
        trainer = silent_trainer(
            devices=layout.world_size,
            strategy=strategy,
            plugins=[_Environment(rank, layout.world_size)],
            precision=job.precision,
            max_steps=STEPS,
            gradient_clip_val=job.clip,
            callbacks=[measured.follow(strategy), *averages],
            use_distributed_sampler=False,
        )
        with task(what, actions, "actions") as measured.advance:
            trainer.fit(job.module(), train_dataloaders=batches)
    if report.micro_batches < job.micro_batches:
        measured.add_micro_batches(job.micro_batches - report.micro_batches, bounded)
    return report
