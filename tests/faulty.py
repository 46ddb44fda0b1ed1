"""A callback that makes one rank fail, for command lines: `+callbacks.faulty._target_=faulty.FailAtStep`."""

import os
import signal
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class FailAtStep(Callback):
    """Fails on one rank at the start of a step.

    Args:
        how: "raise" an exception, "kill" this process, or "hang" the other ranks while this one raises.
        once: fail in torchrun's first attempt only.
    """

    def __init__(self, rank: int, step: int = 1, how: str = "raise", once: bool = False) -> None:
        self.rank, self.step, self.how, self.once = rank, step, how, once

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step or (self.once and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"):
            return
        if trainer.global_rank == self.rank:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError(f"rank {self.rank} cannot go on")
        if self.how == "hang":
            time.sleep(600)
