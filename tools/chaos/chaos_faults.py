"""A callback that makes ranks fail in the ways of a list, each once in a run with all of its restarts."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


class Faults(pl.Callback):
    """Injects faults.

    Args:
        plan: JSON file with a list of {"kind", "step", "rank"}; "step" counts optimizer steps from 1.
        done: folder with a file for each fault that has happened, `N.json` with the time.
    """

    def __init__(self, plan: str, done: str) -> None:
        self._faults = list(enumerate(json.loads(Path(plan).read_text())))
        self._done = Path(done)
        self._slow_until = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = module.training_step

        def spoiled(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            return loss * math.nan if self._take(trainer, "nan") else loss

        module.training_step = spoiled  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if self._take(trainer, "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._take(trainer, "stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._take(trainer, "hang"):
            time.sleep(3600)
        if self._take(trainer, "raise"):
            raise ArithmeticError("a fault of the chaos run")
        if self._take(trainer, "terminate"):
            os.kill(os.getppid(), signal.SIGTERM)
        if self._take(trainer, "kill supervisor"):
            os.kill(os.getppid(), signal.SIGKILL)
        if self._take(trainer, "flip"):
            _flip_a_bit(module)
        if self._take(trainer, "slow"):
            self._slow_until = trainer.global_step + 40
        if trainer.global_step < self._slow_until:
            time.sleep(0.1)

    def _take(self, trainer: pl.Trainer, kind: str) -> bool:
        """Return whether a fault of this kind happens now on this rank, and note it."""
        for number, fault in self._faults:
            note = self._done / f"{number}.json"
            here = (fault["kind"], fault["step"] - 1, fault["rank"]) == (kind, trainer.global_step, trainer.global_rank)
            if here and not note.exists():
                note.write_text(json.dumps({"time": time.time()}))
                return True
        return False


def _flip_a_bit(module: pl.LightningModule) -> None:
    """Flip the lowest bit of the exponent of the first element of this rank's first weight."""
    weight = next(parameter for parameter in module.parameters() if parameter.numel())
    weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 23)
