"""Compare a layout with one process: train a module for some steps both ways, and find the
differences.

The one process is plain Lightning and plain PyTorch: the user's module on whole global batches,
without this package's strategy. Both start from the same weights, see the same rows and draw the
same random numbers for them.
"""

from __future__ import annotations

import copy
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_3d.app.verification.differences import Comparison, compare
from lightning_3d.app.verification.rank_rows import RankRows
from lightning_3d.errors import ConfigError, listed, plural
from lightning_3d.options.blocks import SUPPORTED
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.ranks.progress import task
from lightning_3d.ranks.role import NUDGED, ONE, RANKS, Role
from lightning_3d.ranks.supervisor import can_fork, launch
from lightning_3d.strategy.recorded.attach import attach
from lightning_3d.strategy.recorded.records import Records
from lightning_3d.strategy.silent_trainer import silence, silent_trainer
from lightning_3d.strategy.strategy import Lightning3DStrategy

PRECISIONS = ("32-true", "64-true")


def verify(
    module: pl.LightningModule,
    strategy: Mapping[str, Any],
    batches: Sequence[Any],
    *,
    precision: str = "32-true",
    clip: float | None = None,
    strategy_class: type[Lightning3DStrategy] = Lightning3DStrategy,
) -> Comparison:
    """Train a module on local CPU ranks and in one process, and compare the results.

    On a platform that cannot fork processes, a script must guard the call with `if __name__ ==
    "__main__":`.

    Args:
        module: the user's module before any fit, built in `__init__` or in `configure_model`.
            Dropout and noise inside the model are turned off. The step draws the same random
            numbers for each row both ways.
        strategy: arguments of `Lightning3DStrategy`, with a layout of as many ranks as this machine
            can run.
        batches: one global batch per step, as the module takes it: tensors with rows in dimension
            0, in any nesting of dicts, lists, tuples and dataclasses.
        precision: "32-true" or "64-true".
        clip: gradient_clip_val of the Trainer.
        strategy_class: class of the strategy.

    Returns:
        What differs; `same` is True if rounding alone explains it.

    Raises:
        ConfigError: the precision is unsupported, ranks cannot share a batch equally, or a run
            failed with an error that the user can fix.
        RuntimeError: a run failed for another reason, which the message contains.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            "precision must be 32-true or 64-true for verify, because lower precisions hide"
            f" differences; got {precision}."
        )
    layout = strategy_class(**strategy).layout
    if layout is None:
        raise ConfigError(
            "verify needs a layout in strategy, for example strategy={'layout': 'tp2_pp2_dp2'}."
        )
    _check_batches(batches, layout.dp)
    run = _VerifiedRun(module, dict(strategy), list(batches), precision, clip, strategy_class)
    with tempfile.TemporaryDirectory(prefix="lightning_3d_verify_") as folder:
        _start(_on_rank, (run, folder), layout.world_size, Path(folder))
        _start(_on_one, (run, folder), 1, Path(folder))
        found: Comparison = torch.load(Path(folder) / _RESULT, weights_only=False)
    return found


def _check_batches(batches: Sequence[Any], dp: int) -> None:
    if not batches:
        raise ConfigError("verify needs one global batch for each step; got none.")
    for index, batch in enumerate(batches):
        rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_of(batch)}
        if len(rows) != 1 or 0 in rows or min(rows) % dp:
            found = f"tensors with {listed(sorted(rows))} rows" if rows else "no tensors"
            raise ConfigError(
                "All tensors of a global batch must have the same number of rows in dimension 0,"
                f" divisible by dp={dp}; batch {index} has {found}."
            )


_RESULT = "comparison.pt"


@dataclass(frozen=True)
class _VerifiedRun:
    """Training job that all processes run."""

    module: pl.LightningModule
    strategy: dict[str, Any]
    batches: list[Any]
    precision: str
    clip: float | None
    strategy_class: type[Lightning3DStrategy]

    @property
    def seed(self) -> int:
        seed = self.strategy.get("seed")
        return 0 if seed is None else int(seed)


def _start(job: Any, arguments: tuple[Any, ...], count: int, folder: Path) -> None:
    outcome = launch(job, arguments, count, logs=folder / "logs", fork=can_fork(), threads=1)
    if outcome.exit_code and outcome.message is None:  # a signal
        raise (
            KeyboardInterrupt
            if outcome.exit_code == 128 + signal.SIGINT
            else SystemExit(outcome.exit_code)
        )
    if outcome.exit_code:
        kind = ConfigError if outcome.exit_code == ConfigError.exit_code else RuntimeError
        raise kind(str(outcome.message).removeprefix("lightning_3d: "))


def _fit(
    run: _VerifiedRun,
    module: pl.LightningModule,
    ranks: int,
    role: Role,
    what: str,
    **arguments: Any,
) -> None:
    """Train on all batches, with the rows of one of `ranks` data-parallel ranks. `what` names the
    run for the user."""
    with silence(), task(what):
        trainer = silent_trainer(
            precision=run.precision,
            max_steps=len(run.batches),
            gradient_clip_val=run.clip,
            default_root_dir=str(role.own),
            **arguments,
        )
        attach(trainer, role)
        trainer.fit(module, datamodule=RankRows(lambda epoch: run.batches, ranks))


def _role(run: _VerifiedRun, name: str, folder: str) -> Role:
    return Role(name, Path(folder), len(run.batches))


def _on_rank(run: _VerifiedRun, folder: str) -> None:
    """Train one rank."""
    strategy = run.strategy_class(**{**run.strategy, "seed": run.seed})
    # ranks on GPUs have it by default, and they are what matters
    if run.strategy.get("sequence_parallel") is None:
        blocks = replace(strategy.options.blocks, sequence_parallel=SUPPORTED)  # type: ignore[arg-type]
        strategy.options = replace(strategy.options, blocks=blocks)
    assert strategy.layout is not None
    count = strategy.layout.world_size
    what = f"training on {plural(count, 'rank')}"
    _fit(
        run,
        run.module,
        strategy.layout.dp,
        _role(run, RANKS, folder),
        what,
        strategy=strategy,
        devices=count,
    )


def _on_one(run: _VerifiedRun, folder: str) -> None:
    """Train in this process, and compare with the records of the ranks."""
    for name in (ONE, NUDGED):
        role = _role(run, name, folder)
        _fit(run, copy.deepcopy(run.module), 1, role, f"training with {role.meaning}", devices=1)
    ranks, [one], [nudged] = (Records.load(Path(folder) / name) for name in (RANKS, ONE, NUDGED))
    torch.save(compare(ranks, one, nudged, role.facts()), Path(folder) / _RESULT)
