"""Measure what one rank does in a training step, in a dry run or in a real run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl

from lightning_3d.app.dryrun.meter import ACTIVATIONS, OTHER, PARAMETERS, Meter, Usage
from lightning_3d.parallel.pipeline.schedule import Action, Kind
from lightning_3d.ranks.progress import Advance

_MESSAGES = ("send", "recv")


@dataclass
class RankReport:
    """Work of one rank in a training step.

    Attributes:
        rank: global rank.
        coordinates: rank along each axis.
        stages: pipeline stages of the rank.
        parameters: parameters in this rank's part of the model, before ZeRO shards them.
        whole: parameters of the whole model.
        second: parameters of the module outside that model, such as those of a frozen teacher.
        second_here: those of them in this rank's part, before ZeRO shards them.
        micro_batches: number of micro-batches that were run. The work of the others is extrapolated
            from them, see `representative`.
        usage: memory, collectives and operations of the whole step.
        flops: floating-point operations of each action that was run.
        kept: bytes by category between two steps.
    """

    rank: int
    coordinates: Mapping[str, int]
    stages: tuple[int, ...] = ()
    parameters: int = 0
    whole: int = 0
    second: int = 0
    second_here: int = 0
    micro_batches: int = 0
    usage: Usage = field(default_factory=Usage)
    flops: dict[Action, int] = field(default_factory=dict)
    kept: Counter[str] = field(default_factory=Counter)


class Measured:
    """Callback and strategy hooks that let a meter follow a rank through its steps.

    Args:
        meter: meter under which the module and its steps run.
        report: report to fill.
        step: batch to measure, from 0.

    Attributes:
        advance: function that takes the number of actions of the schedule that were run.
    """

    def __init__(self, meter: Meter, report: RankReport, step: int) -> None:
        self.meter, self.report, self.step = meter, report, step
        self.by_micro_batch: dict[int, Counter[Any]] = {}
        self.advance: Advance = lambda actions: None
        self.left_behind: Counter[tuple[int, int]] = Counter()
        self.peak_of_schedule: Counter[str] = Counter()

    def follow(self, strategy: Any) -> pl.Callback:
        """Make the callback that measures the batch."""
        measured = self

        class Window(pl.Callback):
            def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
                strategy.engine.recorder.listen(lambda action: measured.around(strategy, action))

            def on_train_batch_start(
                self, trainer: Any, module: Any, batch: Any, batch_idx: int
            ) -> None:
                if batch_idx == measured.step:
                    measured.settle(strategy, OTHER)
                    measured.report.kept = measured.meter.now
                    measured.meter.reset()
                    measured.by_micro_batch.clear()  # those of earlier steps

            def on_train_batch_end(
                self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                measured.settle(strategy, OTHER)
                if batch_idx == measured.step:
                    measured.report.usage = measured.meter.usage
                    measured.meter.reset()

        return Window()

    def settle(self, strategy: Any, category: str) -> None:
        """Assign parameters and the backend's tensors to their categories, and fresh storages to
        `category`."""
        module = strategy.lightning_module
        self.meter.hold(PARAMETERS, [*module.parameters(), *module.buffers()])
        for kind, tensors in strategy.built.backend.held().items():
            self.meter.hold(kind, tensors)
        self.meter.settle(category)

    @contextmanager
    def around(self, strategy: Any, action: Action) -> Iterator[None]:
        """Measure an action of the schedule."""
        self.settle(strategy, OTHER)
        usage, activations = self.meter.usage, self.meter.now[ACTIVATIONS]
        flops, collectives = usage.flops, usage.collectives.copy()
        yield
        self.advance(1)
        self.settle(strategy, ACTIVATIONS)
        self.report.flops[action] = usage.flops - flops
        self.by_micro_batch.setdefault(action.micro_batch, Counter()).update(
            usage.collectives - collectives
        )
        self.peak_of_schedule = usage.peak.copy()
        if action.kind is Kind.FORWARD:
            self.left_behind[action.stage, action.micro_batch] = (
                self.meter.now[ACTIVATIONS] - activations
            )

    def add_micro_batches(self, more: int, bounded: bool) -> None:
        """Add the work of further micro-batches to the report, each like one in the middle.

        Args:
            more: number of further micro-batches.
            bounded: whether they leave the number in flight unchanged. Otherwise all are in flight
                at once.
        """
        report, run = self.report, self.report.micro_batches
        usage, middle = report.usage, run // 2
        for call, count in self.by_micro_batch[middle].items():
            # messages are posted ahead, in the action of another micro-batch
            if call.name not in _MESSAGES:
                usage.collectives[call] += more * count
        for call in [call for call in usage.collectives if call.name in _MESSAGES]:
            usage.collectives[call] += more * usage.collectives[call] // run
        usage.flops += more * sum(
            flops for action, flops in report.flops.items() if action.micro_batch == middle
        )
        if not bounded:
            self.peak_of_schedule[ACTIVATIONS] += more * sum(
                size for (_, index), size in self.left_behind.items() if index == middle
            )
            usage.peak = max(usage.peak, self.peak_of_schedule, key=lambda peak: sum(peak.values()))
