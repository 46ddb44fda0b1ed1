"""A Trainer on the CPU that prints, draws and writes nothing, for dry runs and comparisons."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

_LOGGERS = ("lightning.pytorch", "lightning.fabric")


def silent_trainer(**arguments: Any) -> pl.Trainer:
    """Make a Trainer without logger, checkpoints, progress bar and evaluation."""
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **arguments,
    )


@dataclass(frozen=True)
class Batches:
    """A data loader of batches in memory. (Lightning takes a list for several loaders.)"""

    batches: Sequence[Any]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@contextmanager
def silence() -> Iterator[None]:
    """Suppress Lightning's announcements and all warnings."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
