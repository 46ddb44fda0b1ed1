"""A run that is resumed does what it would have done: the same batches, the same random numbers,
the same bits."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import parity
import pytest
import torch
from parity import Data, Module, StepValues, micro_batch_rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_3d.errors import DataError
from lightning_3d.layout import Layout

EPOCHS, BATCHES = 2, 6
PLACES = {"middle": 4, "end": BATCHES, "second": BATCHES + 2}
"""Where checkpoints are saved: in the first epoch, at its end, in the second epoch."""


class NoisyRows(parity.Rows):
    """Each sample is changed by a random number of every kind."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {key: value.clone() for key, value in super().__getitem__(index).items()}
        token = (
            int(torch.randint(60, ())) + int(numpy.random.randint(60)) + random.randrange(60)
        ) % 60
        row["input_ids"][3] = row["labels"][3] = token
        return row


class ShuffledData(Data):
    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        sampler: DistributedSampler = DistributedSampler(
            self.rows, shuffle=True, **self.trainer.distributed_sampler_kwargs or {}
        )
        return DataLoader(self.rows, batch_size=self.batch_size, sampler=sampler)


class SaveAt(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save(self, trainer: pl.Trainer, wanted: tuple[str, ...]) -> None:
        for name, step in PLACES.items():
            if name in wanted and trainer.global_step == step:
                trainer.save_checkpoint(f"{self.folder}/{name}")

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        seed = 1000 + trainer.strategy.mesh.index("dp")  # type: ignore[attr-defined]
        torch.manual_seed(seed), numpy.random.seed(seed), random.seed(seed)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, ("middle", "second"))

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, ("end",))


def fit(
    folder: str, resume: str | None, layout: str, rows_of_a_batch: int = 16, **strategy: Any
) -> list[float]:
    """Losses and gradient norms of the steps, and a number that the generators give afterwards."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(steps=BATCHES)
    values = StepValues()
    size = Layout.parse(layout)
    plan = Lightning3DStrategy(
        layout,
        micro_batch_size=micro_batch_rows(size.dp, size.pp, rows_of_a_batch),
        **strategy,
        seed=0,
    )
    assert plan.layout is not None
    callbacks = [values, SaveAt(folder)]
    trainer = quiet_trainer(
        strategy=plan, devices=plan.layout.world_size, max_epochs=EPOCHS, callbacks=callbacks
    )
    rows = ShuffledData(NoisyRows(data(recipe)), rows_of_a_batch // plan.layout.dp)
    trainer.fit(Module(recipe), datamodule=rows, ckpt_path=f"{folder}/{resume}" if resume else None)
    return [
        *values.losses,
        *values.grad_norms,
        float(torch.rand(())),
        float(numpy.random.rand()),
        random.random(),
    ]


@pytest.fixture(
    scope="module",
    params=[("tp2_dp2", 1), pytest.param(("pp2_dp2", 3), marks=pytest.mark.full)],
    ids=str,
)
def uninterrupted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, int, list[list[float]]]:
    layout, zero = request.param
    folder = tmp_path_factory.mktemp("resume")
    return folder, layout, zero, run_ranks(fit, 4, str(folder), None, layout, zero_stage=zero)


@pytest.mark.parametrize("place", by_default(list(PLACES), 0, 1))
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(place: str, uninterrupted: Any) -> None:
    folder, layout, zero, expected = uninterrupted
    steps, done = EPOCHS * BATCHES, PLACES[place]
    found = run_ranks(fit, 4, str(folder), place, layout, zero_stage=zero)
    for rank in range(4):
        whole = expected[rank]
        assert found[rank] == [
            *whole[done:steps],
            *whole[steps + done : 2 * steps],
            *whole[2 * steps :],
        ]
    assert expected[0][-3:] != expected[-1][-3:], "data-parallel ranks draw their own numbers"


@pytest.mark.slow
def test_f26_a_position_that_means_nothing_is_refused(uninterrupted: Any) -> None:
    folder, layout, zero, _ = uninterrupted
    with pytest.raises(DataError, match="after 4 of 6 batches of an epoch, but an epoch now has 3"):
        run_ranks(fit, 4, str(folder), "middle", layout, 32, zero_stage=zero)
