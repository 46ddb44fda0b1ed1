"""Splits the batches of a rank into micro-batches, after checking that the ranks agree about
them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from lightning_3d.engine.data_order import require_equal_orders
from lightning_3d.engine.loop import BatchOrigin
from lightning_3d.engine.step.checks import SameBatch, check_equal_batches, most_micro_batches
from lightning_3d.engine.step.micro_batches import (
    MicroBatches,
    repeated_rows,
    require_token_ids,
    require_whole_micro_batches,
    samples_of,
    split_into_micro_batches,
)
from lightning_3d.layout.schedules import find_schedule
from lightning_3d.options.script import SplitBatch
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh


class Splitter(Protocol):
    """Splits a rank's batches into micro-batches, see `BatchSplitter.split`."""

    def split(
        self, batch: Any, origin: BatchOrigin, hook: str, *, begins: bool = True
    ) -> MicroBatches: ...


@dataclass
class BatchSplitter:
    """Splits each batch of one data-parallel rank into the micro-batches that its pipeline runs.

    Attributes:
        schedule: name of the pipeline schedule.
        micro_batch_size: rows of a micro-batch; None takes the largest that gives the schedule
            enough of them.
        split_batch: the user's own function, for batches that cannot be split along dimension 0.
    """

    mesh: Mesh
    device: torch.device
    schedule: str
    zero: ZeroOptions
    micro_batch_size: int | None = None
    split_batch: SplitBatch | None = None

    def __post_init__(self) -> None:
        self._same_batch = SameBatch(self.mesh, self.device)

    def split(
        self, batch: Any, origin: BatchOrigin, hook: str, *, begins: bool = True
    ) -> MicroBatches:
        """Check a batch against the other ranks' and split it.

        Args:
            hook: "training", "validation", "test" or "predict".
            begins: whether no other batch of the same optimizer step came before.

        Communicates: a few all-reduces of two numbers, see `checks`.

        Raises:
            DataError: ranks have different numbers of batches, orders of samples or batches, or the
                batch cannot be split.
        """
        layout = self.mesh.layout
        # Data-parallel ranks may predict different numbers of batches, unless a forward of theirs
        # communicates.
        counted = hook != "predict" or self.zero.stage == 3 or layout.ep > 1
        to_come = origin.to_come if counted else None
        # First the number of batches: a rank that has run out of them would not take part in the
        # checks that follow.
        if to_come is not None and layout.dp > 1:
            check_equal_batches(to_come, self.mesh, self.device)
        if to_come is not None and hook != "predict":
            require_equal_orders(origin.loader, self.device)
        self._same_batch.check(batch, begins=begins)
        return self.split_unchecked(batch, origin, training=hook == "training")

    def split_unchecked(self, batch: Any, origin: BatchOrigin, *, training: bool) -> MicroBatches:
        """Split a batch without comparing it with other ranks'.

        Communicates: the number of micro-batches, where data-parallel ranks must run equally many.

        Raises:
            DataError: the batch cannot be split, or its token ids are no integers.
        """
        layout, loader, index = self.mesh.layout, origin.loader, origin.index
        require_token_ids(batch)
        if training and self.split_batch is None:
            require_whole_micro_batches(
                batch, loader, self.micro_batch_size, layout.tp * layout.cp * layout.pp
            )
        return split_into_micro_batches(
            batch,
            self.micro_batch_size,
            repeated=partial(repeated_rows, loader, index),
            agree=(
                partial(most_micro_batches, mesh=self.mesh)
                if self._runs_equally_many(training)
                else None
            ),
            schedule=find_schedule(self.schedule) if training else None,
            pp=layout.pp,
            vp=layout.vp,
            split_batch=self.split_batch,
            samples=samples_of(loader, index),
            alone=layout.dp == 1,
        )

    def _runs_equally_many(self, training: bool) -> bool:
        """Return whether data-parallel ranks communicate in every micro-batch, and so must run
        equally many."""
        zero = self.zero
        return (
            self.mesh.layout.ep > 1
            or zero.gathers_every_micro_batch
            or (training and zero.reduces_every_micro_batch)
        )
