"""Bytes of Python's standard library as an ordinary LightningDataModule."""

import json
from pathlib import Path

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split


class StandardLibrary(LightningDataModule):
    """Rows of bytes from the first files of the standard library.

    Args:
        files: number of files to read.
        length: bytes per row.
        split: numbers of training, validation and test rows.
        batch_size: rows of one optimizer step, over all devices.
        shuffle: whether each epoch has another order of training rows.
        num_workers: processes that read ahead.
    """

    def __init__(
        self,
        files: int,
        length: int,
        split: tuple[int, int, int],
        batch_size: int,
        shuffle: bool = True,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.parts: list[Dataset[Tensor]] = []

    def setup(self, stage: str | None = None) -> None:
        if self.parts:
            return
        names = sorted(Path(json.__file__).parents[1].glob("*.py"))[: self.hparams.files]
        text = torch.tensor(list(b"".join(name.read_bytes() for name in names)))
        rows = text[: len(text) // self.hparams.length * self.hparams.length].view(
            -1, self.hparams.length
        )
        wanted = sum(self.hparams.split)
        self.parts = list(
            random_split(
                rows[:wanted], list(self.hparams.split), generator=torch.Generator().manual_seed(42)
            )
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(0, shuffle=self.hparams.shuffle)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(2)

    def _loader(self, part: int, shuffle: bool = False) -> DataLoader[Tensor]:
        """Make a loader of this device's share of a batch, for any strategy: Lightning splits the
        rows over data-parallel devices."""
        sampling = (
            self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        ) or {}
        devices = sampling.get("num_replicas", 1)
        if self.hparams.batch_size % devices:
            raise ValueError(
                f"batch_size {self.hparams.batch_size} is not divisible by the {devices} devices"
                " that share it."
            )
        size, workers = self.hparams.batch_size // devices, self.hparams.num_workers
        return DataLoader(
            self.parts[part], batch_size=size, shuffle=shuffle, num_workers=workers, drop_last=True
        )
