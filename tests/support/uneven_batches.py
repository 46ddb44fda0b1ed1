"""Fits on batches of different lengths and on given rows."""

from collections.abc import Sequence
from typing import Any

import models
from parity import Module, Part, Rows, fit_on_rank
from reference import Recipe, cut, data
from torch.utils.data import Dataset


class Batches(Dataset):
    """A data set whose samples are whole batches."""

    def __init__(self, batches: Sequence[models.Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> models.Batch:
        return self.batches[index]


def batches_of_all_lengths(recipe: Recipe, count: int) -> list[models.Batch]:
    """Batches of 4 rows and 5 to 16 tokens."""
    rows = data(recipe)
    lengths = [16, 9, 12, 5, 16, 7, 11, 16, 6, 13, 10, 8, 16, 5, 9, 14]
    batches = []
    for index in range(count):
        batch = cut(rows, 4 * index, 4)
        batches.append(
            {key: value[:, : lengths[index % len(lengths)]] for key, value in batch.items()}
        )
    return batches


def train_rows(recipe: Recipe, rows: models.Batch, **strategy: Any) -> Part:
    return fit_on_rank(recipe, Rows(rows), Module(recipe), **strategy)


def train_batches(recipe: Recipe, batches: list[models.Batch], **strategy: Any) -> Part:
    return fit_on_rank(recipe, Batches(batches), Module(recipe), batches=True, **strategy)
