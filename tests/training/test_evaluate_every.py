"""`trainer.evaluate_every`: validation after every n-th optimizer step, whatever number of batches
a step takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run_commands
from lightning.pytorch import Callback, LightningModule, Trainer
from parity import quiet_trainer
from quick_runs import QUICK
from torch import Tensor, nn

from lightning_3d.app.runs.check import check_shapes
from lightning_3d.app.runs.metrics_file import read_rows
from lightning_3d.app.training.callbacks.evaluate_every import EvaluateEvery
from lightning_3d.app.training.data.base import PackedDataModule
from lightning_3d.app.training.data.packing import Tokens
from lightning_3d.errors import ConfigError

LENGTH, ROWS = 2, 44
RAMP = {"from": 2, "step": 2, "tokens": 60 * LENGTH}
"""Batches of 2 to row 60, then of 4: epochs of 44 rows have 22, 14 and then 11 batches."""


class Numbers(PackedDataModule):
    def __init__(self, ramp: Any) -> None:
        super().__init__(sequence_length=LENGTH, global_batch_size=4, batch_ramp=ramp)

    def load_tokens(self) -> tuple[Tokens, Tokens]:
        ids = np.arange((ROWS + 8) * LENGTH, dtype=np.uint16)
        return Tokens(ids[: ROWS * LENGTH], "numbers"), Tokens(ids[ROWS * LENGTH :], "others")


class Validated(LightningModule):
    """Notes after which optimizer steps it is validated."""

    def __init__(self, saves: Path | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.after: list[int] = []
        self.saves = saves

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        if index == 0:
            self.after.append(self.trainer.global_step)
        if self.saves is not None:
            self.trainer.save_checkpoint(self.saves / f"in_{self.trainer.global_step}_{index}.ckpt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveAfter(Callback):
    """Saves after each batch of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.batches = folder, 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches += 1
        trainer.save_checkpoint(self.folder / f"{self.batches}_{trainer.global_step}.ckpt")


def fit(
    every: int,
    steps: int,
    start: Path | None = None,
    ramp: Any = None,
    more: tuple[Callback, ...] = (),
    **options: Any,
) -> list[int]:
    """The steps after which a run is validated."""
    module = Validated()
    run(module, every, steps, start, ramp, more, **options)
    return module.after


def run(
    module: Validated,
    every: int,
    steps: int,
    start: Path | None = None,
    ramp: Any = None,
    more: tuple[Callback, ...] = (),
    **options: Any,
) -> Trainer:
    callbacks = [EvaluateEvery(every), *more]
    options = {
        "check_val_every_n_epoch": None,
        "val_check_interval": steps,
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        **options,
    }
    trainer = quiet_trainer(
        max_steps=steps, callbacks=callbacks, use_distributed_sampler=False, **options
    )
    trainer.fit(module, datamodule=Numbers(ramp), ckpt_path=start)
    assert trainer.global_step == steps
    return trainer


@pytest.mark.parametrize("ramp", [None, RAMP], ids=["no ramp", "ramp"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_validation_follows_steps_across_epochs(accumulate: int, ramp: Any) -> None:
    """The 22, 14 and 11 batches of an epoch are no multiples of 3, so its last step has fewer
    batches than the others."""
    options = {"accumulate_grad_batches": accumulate, "ramp": ramp}
    assert fit(4, 20, **options) == [4, 8, 12, 16, 20]
    assert fit(7, 20, **options) == [7, 14, 20], "the last step is validated too"
    assert fit(50, 20, **options) == [20]
    assert fit(1, 9, **options) == list(range(1, 10))


def test_an_interval_of_batches_does_not_follow_steps() -> None:
    """What `val_check_interval` does: epochs of 11 batches have 6 steps, so the 8th batch of two
    epochs is not always the 4th step."""
    module = Validated()
    options = {
        "check_val_every_n_epoch": None,
        "val_check_interval": 8,
        "accumulate_grad_batches": 2,
        "num_sanity_val_steps": 0,
    }
    trainer = quiet_trainer(max_steps=12, max_epochs=-1, use_distributed_sampler=False, **options)
    trainer.fit(module, datamodule=Numbers(None))
    assert module.after != [4, 8, 12]


def test_a_trainer_with_lightnings_defaults() -> None:
    assert fit(
        4, 13, check_val_every_n_epoch=1, val_check_interval=1.0, accumulate_grad_batches=2
    ) == [4, 8, 12, 13]


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "ramp"), [(1, None), (2, None), (3, RAMP)])
def test_a_run_that_resumes_validates_after_the_same_steps(
    accumulate: int, ramp: Any, tmp_path: Path
) -> None:
    """From after each batch: in the middle of a step, where a validation was due, and at the end of
    an epoch."""
    options = {"accumulate_grad_batches": accumulate, "ramp": ramp}
    whole = fit(4, 14, more=(SaveAfter(tmp_path),), **options)
    assert whole == [4, 8, 12, 14]
    checkpoints = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("_")[0]))
    assert len(checkpoints) > 10 * accumulate
    for path in checkpoints:
        step = int(path.stem.split("_")[1])
        if step < 14:
            assert fit(4, 14, path, **options) == [due for due in whole if due > step], path.name


def test_a_run_that_resumes_within_a_validation_does_it_again(tmp_path: Path) -> None:
    """As with `val_check_interval`. A checkpoint of the same step from before or after the
    validation does not."""
    run(Validated(tmp_path), 4, 8, more=(SaveAfter(tmp_path),))
    for name in ("in_4_0", "in_4_1"):
        assert fit(4, 8, tmp_path / f"{name}.ckpt") == [4, 8], name
    for name in ("3_3", "4_4", "5_5"):
        assert fit(4, 8, tmp_path / f"{name}.ckpt") == ([4, 8] if name == "3_3" else [8]), name


def test_lightnings_count_of_validation_batches_is_that_of_a_run_without_a_resume(
    tmp_path: Path,
) -> None:
    """A resumed run counts the batches of the validation that it does not repeat."""

    def count(trainer: Trainer) -> int:
        return int(trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.completed)

    whole = count(run(Validated(), 4, 8, more=(SaveAfter(tmp_path),)))
    assert whole == 4  # 8 sequences in batches of 4, twice
    for batch in (3, 4, 5):
        assert count(run(Validated(), 4, 8, tmp_path / f"{batch}_{batch}.ckpt")) == whole, batch


@pytest.mark.parametrize(
    "options", [{"check_val_every_n_epoch": 2}, {"val_check_interval": "00:00:01:00"}], ids=str
)
def test_a_trainer_that_leaves_validations_out_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "EvaluateEvery counts optimizer steps, but this Trainer validates by time or not in"
            " every epoch"
        ),
    ):
        fit(4, 8, **{"val_check_interval": 1.0, "check_val_every_n_epoch": 1} | options)


REFUSED: dict[str, tuple[list[str], str]] = {
    "zero": (["trainer.evaluate_every=0"], r"trainer\.evaluate_every must be at least 1; got 0"),
    "both": (
        ["trainer.evaluate_every=5", "trainer.val_check_interval=10"],
        (
            r"trainer\.evaluate_every=5 and trainer\.val_check_interval=10 both say when to"
            r" validate\. .* default here is 20"
        ),
    ),
    "extra": (
        ["trainer.evaluate_every=5", "+trainer.extra.val_check_interval=0.5"],
        (
            r"evaluate_every=5 and trainer\.extra\.val_check_interval=0\.5 both say when to"
            r" validate\. Leave one of them out\."
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_second_key_for_the_same_is_refused(case: str) -> None:
    words, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        check_shapes(["trainer.max_steps=20", "parallelism=dp1", *words])


@pytest.mark.slow
def test_a_run_is_validated_after_steps_and_at_its_end(tmp_path: Path) -> None:
    job = ["train", *QUICK, "parallelism=pp2", "trainer.max_steps=5", "trainer.evaluate_every=2"]
    job += [
        "+trainer.extra.accumulate_grad_batches=2",
        "trainer.checkpoint_every_n_steps=3",
        "data.val_sequences=4",
    ]
    resume = f"trainer.resume={tmp_path}/a/checkpoints/step_3.ckpt"
    done = run_commands(
        [[*job, f"hydra.run.dir={tmp_path}/a"], [*job, resume, f"hydra.run.dir={tmp_path}/b"]],
        timeout=300,
        warm=True,
    )
    assert [one.code for one in done] == [0, 0], done[0].output + done[1].output
    for name, expected in (("a", ["2", "4", "5"]), ("b", ["4", "5"])):
        rows = read_rows(tmp_path / name / "metrics.csv")
        assert [row["step"] for row in rows if row["val_loss"]] == expected
