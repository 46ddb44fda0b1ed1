"""The global batches of the layout's run, for runs on one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import BatchSampler, DataLoader

from lightning_3d.checkpoint.rng_state import read_generators, set_generators
from lightning_3d.ranks.role import RANKS, Role
from lightning_3d.strategy.recorded.records import Records, merged, rows_in, same_values

_GENERATORS = "generators.pt"
_HOST = torch.device("cpu")


def save_generators(role: Role) -> None:
    """Save the generators of this rank at the beginning of its fit.

    The strategy has reset them where ranks had drawn different random numbers, for example to write
    a file first.
    """
    role.own.mkdir(parents=True, exist_ok=True)
    torch.save(read_generators(_HOST), role.own / _GENERATORS)


class WholeBatches:
    """Joins what the data-parallel ranks of a layout have read.

    Attributes:
        facts: facts of the layout's run.
    """

    def __init__(self, role: Role) -> None:
        self.facts = role.facts()
        self._ranks = role.folder / RANKS
        readers = sorted(
            (rank for rank in Records.load(self._ranks) if rank.batches),
            key=lambda rank: rank.data_index,
        )
        self._read = [reader.batches for reader in readers]

    def prepare(self, trainer: pl.Trainer) -> None:
        """Let the loaders of a Trainer read the rows of all data-parallel ranks in one batch, from
        the generators that the ranks have."""
        set_generators(torch.load(self._ranks / _GENERATORS, weights_only=True), _HOST)
        process = trainer.strategy.process_dataloader

        def enlarged(loader: object) -> object:
            _enlarge(loader, self.facts["loaders"])
            return process(loader)

        trainer.strategy.process_dataloader = enlarged  # type: ignore[method-assign, assignment]

    def instead_of(self, batch: Any, index: int, device: torch.device) -> Any:
        """Return the rows that the ranks have read in their batch `index`; `batch` where they
        cannot be joined."""
        if index >= len(self._read[0]):
            return batch
        parts = [batches[index] for batches in self._read]
        whole = joined(parts, self.facts)
        return (
            batch
            if whole is None or same_values(whole, batch)
            else move_data_to_device(whole, device)
        )


def joined(parts: list[Any], facts: dict[str, Any]) -> Any:
    """Join the batches of all data-parallel ranks in the order of one process; None where they do
    not have equally many rows."""
    if len(parts) == 1:
        return parts[0]
    count = rows_in(parts[0])
    if count is None or any(rows_in(part) != count for part in parts):
        return None
    ranks = len(parts)
    dealt = [list(range(rank, count * ranks, ranks)) for rank in range(ranks)]
    return merged(parts, facts["places"] if count == facts["rows"] else dealt)


def _enlarge(loader: object, ranks: int) -> None:
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batches) is not BatchSampler or ranks == 1:
        return
    batches.batch_size *= ranks
    vars(loader)["batch_size"] = batches.batch_size  # DataLoader refuses to have it set
