"""A callback that makes ranks fail in the ways of a plan, each once in a run with all of its
restarts, and notes the time of each step."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

_BALLAST = "ballast"
_SMALL_FILES = 128 * 1024  # bytes
_SLOW_SECONDS = 0.2


class Faults(pl.Callback):
    """Injects faults.

    Args:
        plan: JSON file with a list of {"kind", "step", "rank", "lasts"}; "step" counts optimizer
            steps from 1.
        notes: folder with a file for each fault that has happened, `N` with the time; and `steps`,
            where rank 0 notes "time step" after each step.
    """

    def __init__(self, plan: str, notes: str) -> None:
        self._faults = list(enumerate(json.loads(Path(plan).read_text())))
        self._notes = Path(notes)
        self._slow_until = self._full_until = 0
        self._ballast: Path | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # of an attempt that ended meanwhile
        (Path(trainer.default_root_dir) / _BALLAST).unlink(missing_ok=True)
        step = module.training_step

        def spoiled_step(*args: Any, **kwargs: Any) -> Any:
            if self._take(trainer, "hang"):
                time.sleep(3600)
            if self._take(trainer, "slow"):
                self._slow_until = trainer.global_step + self._lasts("slow")
            if trainer.global_step < self._slow_until:
                time.sleep(_SLOW_SECONDS)
            return step(*args, **kwargs)

        module.training_step = spoiled_step  # type: ignore[method-assign]

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any
    ) -> None:
        if self._take(trainer, "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._take(trainer, "stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._take(trainer, "raise"):
            raise ArithmeticError("a fault of the chaos run")
        if self._take(trainer, "terminate"):
            os.kill(os.getppid(), signal.SIGTERM)
        if self._take(trainer, "kill supervisor"):
            os.kill(os.getppid(), signal.SIGKILL)
        if self._take(trainer, "flip"):
            _flip_a_bit(module)
        if self._take(trainer, "nan"):
            _spoil_an_activation(module)
        self._take(trainer, "cut")  # the network, by `chaos.py`, which waits for the note
        if self._take(trainer, "full disk"):
            self._fill(trainer)
        if self._ballast is not None and trainer.global_step >= self._full_until:
            self._ballast.unlink(missing_ok=True)
            self._ballast = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 0:
            with (self._notes / "steps").open("a") as file:
                file.write(f"{time.time()} {trainer.global_step}\n")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._take(trainer, "kill in a save", later=True):
            threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    def _fill(self, trainer: pl.Trainer) -> None:
        """Leave room on the disk of the run for the small files only, for as long as it takes to
        save twice."""
        folder = Path(trainer.default_root_dir)
        self._ballast, self._full_until = (
            folder / _BALLAST,
            trainer.global_step + self._lasts("full disk"),
        )
        space = os.statvfs(folder)
        with self._ballast.open("wb") as file:
            os.posix_fallocate(
                file.fileno(), 0, max(1, space.f_bavail * space.f_frsize - _SMALL_FILES)
            )

    def _lasts(self, kind: str) -> int:
        return next(int(fault["lasts"]) for _, fault in self._faults if fault["kind"] == kind)

    def _take(self, trainer: pl.Trainer, kind: str, later: bool = False) -> bool:
        """Return whether a fault of this kind happens now on this rank, and note it.

        Args:
            later: whether a step after that of the fault will do.
        """
        for number, fault in self._faults:
            note = self._notes / str(number)
            here = (fault["kind"], fault["rank"]) == (kind, trainer.global_rank)
            step = fault["step"] - 1
            if (
                here
                and (step <= trainer.global_step if later else step == trainer.global_step)
                and not note.exists()
            ):
                draft = note.with_suffix(".draft")
                draft.write_text(str(time.time()))
                draft.rename(note)
                return True
        return False


def _flip_a_bit(module: pl.LightningModule) -> None:
    """Flip the lowest bit of the exponent of the first element of this rank's first weight."""
    weight = next(parameter for parameter in module.parameters() if parameter.numel())
    weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 23)


def _spoil_an_activation(module: pl.LightningModule) -> None:
    """Make the next output of the first layer of this rank that has weights of its own NaN,
    once."""
    layer = next(
        one
        for one in module.modules()
        if any(parameter.numel() for parameter in one.parameters(recurse=False))
    )

    def spoil(layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * math.nan

    handle = layer.register_forward_hook(spoil)
