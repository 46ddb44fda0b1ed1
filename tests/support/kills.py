"""Chains of starts on one run folder: each goes on from the newest checkpoint and is killed, until
one comes to the end.

What must hold after every kill is asserted here and in `saving`.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from faulty import KillInSave
from lightning.pytorch.callbacks import ModelCheckpoint
from parity import Cell
from saving import check_checkpoints, check_values, fit, read_values, undisturbed
from starts import Ended, start

from lightning_3d.app.runs.folder import newest_checkpoint

EVERY = 2
"""Steps from one save to the next."""


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
        cells: layouts, one start after the other takes the next; with one layout, what is resumed
            is the same bit by bit.
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
        return [
            Kill(
                phase,
                draw.randrange(ranks),
                all_,
                2 if phase == "in pruning" else draw.choice((1, 2)),
            )
            for phase, all_ in kinds
        ]


def run_chain(chain: Chain, seed: int, folder: Path) -> int:
    """Start, be killed, start again; then to the end. In a process of `starts.in_fresh_process`.

    Returns:
        The number of kills.

    Raises:
        AssertionError: with the seed.
    """
    kills = chain.kills(seed)
    # more than they let pass
    steps = sum(EVERY * (kill.save + (kill.phase == "in pruning")) for kill in kills) + 2 * EVERY
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
        check_values(values, expected, f"{what}\n{ended}", exact=len(chain.cells) == 1)
        assert not values or min(values) == before + 1, (
            f"{what}: it went on with step {min(values)}"
        )
        if kill is None or kill.save > 1:
            assert not remains & remains_in(run), f"{what}: {remains} of the kill before are left"
        if kill is None:
            assert ended.codes == [0] * cell.world_size, f"{what}: {ended}"
            assert max(values) == after == steps, what
            left = [
                path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")
            ]
            assert not left, f"{what}: {left} are left"
        else:
            check_end(kill, ended, what)
            lost = max(values, default=before) - after
            assert lost <= EVERY * (2 if chain.asynchronous else 1), (
                f"{what}: {lost} steps are lost\n{ended}"
            )
            assert after >= before, f"{what}: the newest is step {after}"
    return len(kills)


def check_end(kill: Kill, ended: Ended, what: str) -> None:
    """Those that were to be killed were, and nobody else; nobody says that it has finished."""
    for rank, code in enumerate(ended.codes):
        killed = kill.everyone or rank == kill.rank
        assert code == -9 if killed else code > 0, f"{what}: rank {rank} ended with {code}\n{ended}"


def remains_in(run: Path) -> set[tuple[str, int]]:
    """Name and time of what saves and removals have left unfinished."""
    return {
        (path.name, path.stat().st_mtime_ns) for path in run.glob("checkpoints/.*") if path.is_dir()
    }


# What follows runs in the ranks.


def train(
    cell: Cell,
    steps: int,
    run: Path,
    number: int,
    asynchronous: bool,
    last: bool,
    kill: Kill | None,
) -> None:
    """A rank of a start."""
    naming: dict[str, Any] = {"filename": "step_{step}", "auto_insert_metric_name": False}
    callbacks: list[pl.Callback] = [
        ModelCheckpoint(run / "checkpoints", every_n_train_steps=EVERY, save_last=last, **naming)
    ]
    if kill is not None:
        callbacks.append(KillInSave(**vars(kill)))
    fit(
        cell,
        steps,
        run / f"values_{number}.csv",
        callbacks,
        newest_checkpoint(run),
        checkpoint_asynchronous=asynchronous,
    )
