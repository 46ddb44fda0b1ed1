"""A sampler is read no further than the batches need: what it draws later, or at its end, is drawn
when one process draws it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from parity import quiet_trainer
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

from lightning_3d.engine.data_order import OneProcessOrder

ROWS, GLOBAL_BATCH, EPOCHS = 24, 8, 3


class Drawn(Sampler):
    """Draws each row when it is read, from a generator of its own of another library."""

    def __init__(self, data: Any) -> None:
        self.numbers = np.random.default_rng(3)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        for _ in range(ROWS):
            yield int(self.numbers.integers(ROWS))


class Endless(Drawn):
    """Ends as little as a stream of data does."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(self.numbers.integers(ROWS))


class Curriculum(Drawn):
    """Its rows depend on what the training has written by then."""

    level = 0

    def __iter__(self) -> Iterator[int]:
        for place in range(ROWS):
            yield (place + self.level) % ROWS


class Script(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append([int(number) for number in batch.flatten()])
        sampler = self.trainer.train_dataloader.sampler
        sampler = getattr(sampler, "sampler", sampler)
        if isinstance(sampler, Curriculum):
            sampler.level += 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


def loader(kind: str, rows: int) -> DataLoader:
    data = [torch.tensor([float(number)]) for number in range(ROWS)]
    own = torch.Generator().manual_seed(5)
    if kind == "replacement":
        return DataLoader(
            data, rows, sampler=RandomSampler(data, replacement=True, num_samples=70, generator=own)
        )
    for sampler in (Drawn, Endless, Curriculum):
        if kind == sampler.__name__:
            return DataLoader(data, rows, sampler=sampler(data))
    return DataLoader(data, rows, shuffle=True, generator=own)


def seen_rows(
    kinds: list[str], dp: int, saved: str = "", resume: str = ""
) -> dict[str, list[list[int]]]:
    """The rows of each batch of this rank, by kind; `dp` 0 is plain Lightning.

    Args:
        saved: folder for a checkpoint in the second epoch.
        resume: folder of one to resume.
    """
    from lightning_3d.strategy import Lightning3DStrategy

    found = {}
    for kind in kinds:
        pl.seed_everything(7, verbose=False)
        module, data = Script(), loader(kind, GLOBAL_BATCH // max(dp, 1))
        limit = 1.0 if kind == "whole epochs" else 2
        # The first fit ends inside an epoch, the second begins a new one.
        steps = [5, -1] if kind == "two fits" else [-1]
        for max_steps in steps:
            options: dict[str, Any] = (
                {"strategy": Lightning3DStrategy(f"dp{dp}"), "devices": dp}
                if dp
                else {"devices": 1}
            )
            callbacks = [SaveInTheMiddle(saved)] if saved else []
            trainer = quiet_trainer(
                max_epochs=EPOCHS,
                max_steps=max_steps,
                limit_train_batches=limit,
                callbacks=callbacks,
                **options,
            )
            trainer.fit(module, data, ckpt_path=f"{resume}/middle" if resume else None)
        found[kind] = module.seen
    return found


class SaveInTheMiddle(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(f"{self.folder}/middle")


def global_batches(parts: list[dict[str, list[list[int]]]], kind: str) -> list[list[int]]:
    """The rows of all ranks, in the order of one process."""
    return [
        [row for rows in zip(*batches, strict=True) for row in rows]
        for batches in zip(*(part[kind] for part in parts), strict=True)
    ]


OWN_GENERATOR = ["limited", "whole epochs", "two fits", "replacement"]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    kinds = [*OWN_GENERATOR, "Drawn", "Endless", "Curriculum"]
    return run_ranks(seen_rows, 1, kinds, 0, process_group=False)[0]


@pytest.mark.parametrize("dp", [1, 2])
def test_rows_are_those_of_one_process(dp: int, alone: dict[str, list[list[int]]]) -> None:
    kinds = list(alone) if dp == 1 else OWN_GENERATOR
    parts = run_ranks(seen_rows, dp, kinds, dp, process_group=False)
    for kind in kinds:
        assert global_batches(parts, kind) == alone[kind], kind


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_fit_reads_what_one_process_reads(
    dp: int, alone: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    run_ranks(seen_rows, dp, ["limited"], dp, str(tmp_path), process_group=False)
    parts = run_ranks(seen_rows, dp, ["limited"], dp, "", str(tmp_path), process_group=False)
    assert global_batches(parts, "limited") == alone["limited"][3:]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rows", [21, 24, 25])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_generator_is_where_one_process_has_it(
    rows: int, drop_last: bool, workers: int
) -> None:
    """After each batch of two epochs, of which the first is not read to its end."""

    def states(ranks: int) -> list[Tensor]:
        own = torch.Generator().manual_seed(5)
        sampler: Any = RandomSampler(range(rows), generator=own)
        if ranks:
            options = {
                "num_replicas": ranks,
                "rank": ranks - 1,
                "drop_last": drop_last,
                "device": torch.device("cpu"),
                "seed": 0,
            }
            sampler = OneProcessOrder(sampler, range(rows), **options)  # type: ignore[arg-type]
        data = DataLoader(
            range(rows),
            8 // max(ranks, 1),
            sampler=sampler,
            drop_last=drop_last,
            num_workers=workers,
            generator=own,
        )
        found = []
        for limit in (2, 4):
            for _, _ in zip(range(limit), data, strict=False):
                found.append(own.get_state())
        return found

    expected = states(0)
    for ranks in (1, 2):
        found = states(ranks)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), (
            ranks
        )
