"""Bytes of Python's standard library, which are there without a download. Put your own data
here."""

import json
from pathlib import Path

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Bytes(LightningDataModule):
    """Rows of bytes from files of the standard library.

    Args:
        length: bytes per row.
        train_rows, val_rows: numbers of rows.
        batch_size: rows of one optimizer step, over all devices.
    """

    def __init__(self, length: int, train_rows: int, val_rows: int, batch_size: int) -> None:
        super().__init__()
        self.length, self.train_rows, self.val_rows, self.batch_size = (
            length,
            train_rows,
            val_rows,
            batch_size,
        )
        self.rows: Tensor | None = None

    def setup(self, stage: str | None = None) -> None:
        if self.rows is None:
            files = sorted(Path(json.__file__).parents[1].glob("*.py"))
            text = torch.tensor(list(b"".join(file.read_bytes() for file in files[:60])))
            wanted = self.train_rows + self.val_rows
            self.rows = text[: wanted * self.length].view(wanted, self.length)

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.rows is not None
        return self._loader(self.rows[: self.train_rows], shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Tensor]:
        assert self.rows is not None
        return self._loader(self.rows[self.train_rows :])  # type: ignore[arg-type]

    def _loader(self, rows: Dataset[Tensor], shuffle: bool = False) -> DataLoader[Tensor]:
        """Make a loader of this device's share of a batch. Only devices along dp read different
        rows, and Lightning knows how many."""
        sampling = (
            self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        ) or {}
        replicas = sampling.get("num_replicas", 1)
        if self.batch_size % replicas:
            raise ValueError(
                f"batch_size must be divisible by the {replicas} replicas that share a batch; got"
                f" {self.batch_size}."
            )
        return DataLoader(
            rows, batch_size=self.batch_size // replicas, shuffle=shuffle, drop_last=True
        )
