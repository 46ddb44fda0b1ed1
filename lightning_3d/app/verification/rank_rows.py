"""The rows of a data-parallel rank, for the runs that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_3d.parallel.nested import count_rows, rows_of
from lightning_3d.strategy.silent_trainer import Batches


class RankRows(pl.LightningDataModule):
    """Data module with the rows of each global batch that belong to one of `ranks` data-parallel
    ranks.

    Args:
        batches: function of Lightning's number of an epoch that returns its global batches: tensors
            with rows in dimension 0, in any nesting.
    """

    def __init__(self, batches: Callable[[int], Sequence[Any]], ranks: int) -> None:
        super().__init__()
        self._batches = batches
        self._ranks = ranks

    def train_dataloader(self) -> Batches:
        assert self.trainer is not None
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0}
        whole = self._batches(self.trainer.current_epoch)
        return Batches(
            [
                rows_of(batch, slice(place["rank"], None, self._ranks), count_rows(batch))
                for batch in whole
            ]
        )
