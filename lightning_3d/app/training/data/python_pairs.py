"""Pairs for preference optimization that every machine has: true and false continuations of Python
source code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_3d.app.training.data.documents import IGNORE_INDEX
from lightning_3d.app.training.data.entropy import Entropy
from lightning_3d.app.training.data.packing import PackedDataset, Tokens, spread
from lightning_3d.app.training.data.python_stdlib import PythonStdlib


class PythonPairs(PythonStdlib):
    """The samples of `PythonStdlib`, each with a second continuation of its first half, the second
    half of a distant sample.

    A sample has `input_ids` and `labels` (the chosen text), and `rejected_ids` and
    `rejected_labels`, each (sequence,). Labels of the first half, the prompt, are -100.

    Args:
        **kwargs: see `PythonStdlib`.
    """

    unit = "pair"

    @override
    def _pack(self, tokens: Tokens, wanted: int | None) -> PackedDataset:
        samples = spread(len(tokens) // self.sequence_length, wanted)
        return PairedDataset(
            tokens, self.sequence_length, vocab_size=self.vocab_size, samples=samples
        )

    @override
    def entropy(self) -> Entropy | None:
        """Return None: token frequencies say nothing about the loss of a pair."""
        return None


class PairedDataset(PackedDataset):
    """Samples whose second half is also replaced by that of the sample half the data set away."""

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chosen = super().__getitem__(index)["input_ids"]
        other = super().__getitem__((index + len(self) // 2) % len(self))["input_ids"]
        half = self.sequence_length // 2
        rejected = torch.cat([chosen[:half], other[half:]])
        return {
            "input_ids": chosen,
            "labels": _answer(chosen, half),
            "rejected_ids": rejected,
            "rejected_labels": _answer(rejected, half),
        }


def _answer(ids: Tensor, start: int) -> Tensor:
    labels: Any = ids.clone()
    labels[:start] = IGNORE_INDEX
    return labels
