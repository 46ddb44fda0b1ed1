"""Chains of starts on one run folder: each goes on from the newest checkpoint and is killed, until one comes to the end.

What must hold after every kill is asserted here, with nothing of the product's own reading: hashes by hashlib, steps by the manifests,
losses and gradient norms by those of a run that nobody disturbed.
"""

import csv
import hashlib
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from faulty import KillInSave
from lightning.pytorch.callbacks import ModelCheckpoint
from parity import Cell, Data, Module, Rows, quiet_trainer, strategy_arguments
from reference import data
from starts import Ended, start

from lightning_3d.run_folder import newest_checkpoint

EVERY = 2
"""Steps from one save to the next."""
Values = dict[int, tuple[float, float]]


@dataclass(frozen=True)
class Kill:
    """When a start ends, see `KillInSave`."""

    phase: str
    rank: int
    everyone: bool
    save: int


@dataclass(frozen=True)
class Chain:
    """Starts on one folder.

    Attributes:
        cells: layouts, one start after the other takes the next; with one layout, what is resumed is the same bit by bit.
        asynchronous: saves are written in the background.
        last: `ModelCheckpoint(save_last=True)`: each save replaces last.ckpt too.
    """

    cells: tuple[Cell, ...]
    asynchronous: bool
    phases: tuple[str, ...] = KillInSave.PHASES
    everyone: tuple[bool, ...] = (False, True)
    last: bool = False

    def kills(self, seed: int) -> list[Kill]:
        """Each phase once with each of `everyone`, in an order that the seed gives."""
        draw = random.Random(seed)
        kinds = [(phase, everyone) for phase in self.phases for everyone in self.everyone]
        draw.shuffle(kinds)
        ranks = min(cell.world_size for cell in self.cells)
        return [Kill(phase, draw.randrange(ranks), all_, 2 if phase == "in pruning" else draw.choice((1, 2))) for phase, all_ in kinds]


def run_chain(chain: Chain, seed: int, folder: Path) -> int:
    """Start, be killed, start again; then to the end. In a process of `starts.in_fresh_process`.

    Returns:
        The number of kills.

    Raises:
        AssertionError: with the seed.
    """
    kills = chain.kills(seed)
    steps = sum(EVERY * (kill.save + (kill.phase == "in pruning")) for kill in kills) + 2 * EVERY  # more than they let pass
    expected = undisturbed(chain.cells[0], steps, folder / "undisturbed")
    run = folder / "run"
    run.mkdir()
    for number, kill in enumerate([*kills, None]):
        cell = chain.cells[number % len(chain.cells)]
        before = check_checkpoints(run)
        what = f"seed {seed}, start {number} of {chain}, from step {before}: {kill}"
        remains = remains_in(run)
        arguments = (cell, steps, run, number, chain.asynchronous, chain.last, kill)
        ended = start(train, arguments, cell.world_size, folder / f"start_{number}")
        values = read_values(run / f"values_{number}.csv")
        after = check_checkpoints(run)
        check_values(values, expected, exact=len(chain.cells) == 1, what=f"{what}\n{ended}")
        assert not values or min(values) == before + 1, f"{what}: it went on with step {min(values)}"
        if kill is None or kill.save > 1:
            assert not remains & remains_in(run), f"{what}: {remains} of the kill before are left"
        if kill is None:
            assert ended.codes == [0] * cell.world_size, f"{what}: {ended}"
            assert max(values) == after == steps, what
            left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
            assert not left, f"{what}: {left} are left"
        else:
            check_end(kill, ended, what)
            lost = max(values, default=before) - after
            assert lost <= EVERY * (2 if chain.asynchronous else 1), f"{what}: {lost} steps are lost\n{ended}"
            assert after >= before, f"{what}: the newest is step {after}"
    return len(kills)


def check_end(kill: Kill, ended: Ended, what: str) -> None:
    """Those that were to be killed were, and nobody else; nobody says that it has finished."""
    for rank, code in enumerate(ended.codes):
        killed = kill.everyone or rank == kill.rank
        assert code == -9 if killed else code > 0, f"{what}: rank {rank} ended with {code}\n{ended}"


def check_values(values: Values, expected: Values, exact: bool, what: str) -> None:
    for step, found in values.items():
        wanted = expected[step]
        same = found == wanted if exact else all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(found, wanted, strict=True))
        assert same, f"{what}\nstep {step} has loss and gradient norm {found}, not {wanted}"


def check_checkpoints(run: Path) -> int:
    """Everything that is taken for a checkpoint is whole, to the last bit. Returns the step of the newest, 0 where there is none."""
    steps = [0]
    for manifest in run.glob("checkpoints/[!.]*/manifest.json"):
        known = json.loads(manifest.read_text())
        steps.append(known["global_step"])
        assert {path.name for path in manifest.parent.iterdir()} == {*known["files"], manifest.name}, manifest.parent
        for name, file in known["files"].items():
            contents = (manifest.parent / name).read_bytes()
            assert (len(contents), hashlib.sha256(contents).hexdigest()) == (file["bytes"], file["sha256"]), manifest.parent / name
    return max(steps)


def remains_in(run: Path) -> set[tuple[str, int]]:
    """Name and inode of what saves and removals have left unfinished."""
    return {(path.name, path.stat().st_ino) for path in run.glob("checkpoints/.*") if path.is_dir()}


def undisturbed(cell: Cell, steps: int, folder: Path) -> Values:
    """Loss and gradient norm of each step of a run that writes no checkpoints."""
    folder.mkdir()
    ended = start(train, (cell, steps, folder, 0, None), cell.world_size, folder / "logs")
    assert ended.codes == [0] * cell.world_size, str(ended)
    return read_values(folder / "values_0.csv")


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


def train(
    cell: Cell, steps: int, run: Path, number: int, asynchronous: bool | None, last: bool = False, kill: Kill | None = None
) -> None:
    """A rank of a start."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = replace(cell.recipe, steps=steps)
    strategy = Lightning3DStrategy(**strategy_arguments(cell), checkpoint_asynchronous=asynchronous is not False, seed=recipe.seed)
    callbacks: list[pl.Callback] = [WriteValues(run / f"values_{number}.csv")]
    if kill is not None:
        callbacks.append(KillInSave(**vars(kill)))
    if asynchronous is not None:
        naming: dict[str, Any] = {"filename": "step_{step}", "auto_insert_metric_name": False}
        callbacks.append(ModelCheckpoint(run / "checkpoints", every_n_train_steps=EVERY, save_last=last, **naming))
    trainer = quiet_trainer(
        strategy=strategy,
        devices=cell.world_size,
        max_steps=steps,
        gradient_clip_val=recipe.clip,
        callbacks=callbacks,
        enable_checkpointing=asynchronous is not None,
    )
    rows = Data(Rows(data(recipe)), recipe.global_batch // cell.dp)
    trainer.fit(Module(recipe), datamodule=rows, ckpt_path=newest_checkpoint(run))
