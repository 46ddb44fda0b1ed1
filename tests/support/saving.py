"""Fits that write down the loss of every step, and what must hold of the checkpoints that they
leave.

Asserted here with nothing of the product's own reading: hashes by hashlib, steps by the manifests,
losses and gradient norms by those of a run that nobody disturbed and that writes no checkpoints.
"""

import csv
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from parity import Cell, Data, Module, Rows, quiet_trainer, strategy_arguments
from reference import data
from starts import start

Values = dict[int, tuple[float, float]]
"""Loss and gradient norm by step."""


def check_values(found: Values, expected: Values, what: str, exact: bool = True) -> None:
    """The same steps gave the same: to the last bit, or to rounding."""
    for step, values in found.items():
        wanted = expected[step]
        same = (
            values == wanted
            if exact
            else all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(values, wanted, strict=True))
        )
        assert same, f"{what}\nstep {step} has loss and gradient norm {values}, not {wanted}"


def check_checkpoints(run: Path, pattern: str = "checkpoints/[!.]*") -> int:
    """Everything that is taken for a checkpoint is whole, to the last bit. Returns the step of the
    newest, 0 where there is none."""
    steps = [0]
    for manifest in run.glob(f"{pattern}/manifest.json"):
        known = json.loads(manifest.read_text())
        steps.append(known["global_step"])
        assert {path.name for path in manifest.parent.iterdir()} == {
            *known["files"],
            manifest.name,
        }, manifest.parent
        for name, file in known["files"].items():
            contents = (manifest.parent / name).read_bytes()
            assert (len(contents), hashlib.sha256(contents).hexdigest()) == (
                file["bytes"],
                file["sha256"],
            ), manifest.parent / name
    return max(steps)


def undisturbed(cell: Cell, steps: int, folder: Path) -> Values:
    """The values of each step of a run that writes no checkpoints. In a process of
    `starts.in_fresh_process`."""
    folder.mkdir()
    path = folder / "values.csv"
    ended = start(fit, (cell, steps, path), cell.world_size, folder / "logs")
    assert ended.codes == [0] * cell.world_size, str(ended)
    return read_values(path)


def read_values(path: Path) -> Values:
    if not path.exists():
        return {}
    with path.open() as file:
        rows = [row for row in csv.reader(file) if len(row) == 4]  # the last may have been cut off
    return {int(step): (float(loss), float(norm)) for step, loss, norm, _ in rows}


# What follows runs in the ranks.


class WriteValues(pl.Callback):
    """Writes loss and gradient norm of every step, as soon as it is over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            step = trainer.strategy.last_step  # type: ignore[attr-defined]
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step},{step.loss!r},{step.grad_norm!r},\n")


def fit(
    cell: Cell,
    steps: int,
    values: Path,
    callbacks: Sequence[pl.Callback] = (),
    resume: str | None = None,
    *,
    trainer: dict[str, Any] | None = None,
    **strategy: Any,
) -> pl.Trainer:
    """Run the first steps of the cell's recipe through a Trainer.

    Args:
        values: file for loss and gradient norm of each step.
        trainer, strategy: further arguments of these.
    """
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = replace(cell.recipe, steps=72)  # as many rows for all, so that the data is the same
    plan = Lightning3DStrategy(**{**strategy_arguments(cell), **strategy}, seed=recipe.seed)
    arguments: dict[str, Any] = {
        "strategy": plan,
        "devices": cell.world_size,
        "max_steps": steps,
        "gradient_clip_val": recipe.clip,
        "callbacks": [WriteValues(values), *callbacks],
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
    }
    made = quiet_trainer(**{**arguments, **(trainer or {})})
    made.fit(
        Module(recipe),
        datamodule=Data(Rows(data(recipe)), recipe.global_batch // cell.dp),
        ckpt_path=resume,
    )
    return made
