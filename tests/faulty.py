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


class KillInSave(Callback):
    """Ends processes with SIGKILL in a phase of a save.

    Args:
        phase: "begin", "shard", "metadata", "rename", "prune", or "between" for the step after the save.
        rank: which rank gets there and is killed; -1: all, as soon as rank 0 gets there.
        save: which save, counted from 1.
    """

    def __init__(self, phase: str, rank: int, save: int = 2) -> None:
        self.phase, self.rank, self.save = phase, rank, save
        self.saves = 0
        self.ranks: list[Any] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        import torch.distributed as dist

        self.ranks = [None] * trainer.world_size
        dist.all_gather_object(self.ranks, os.getpid())
        if trainer.global_rank == max(0, self.rank):
            self._wait_in_ambush()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.phase == "between" and self.saves >= self.save and trainer.global_rank == max(0, self.rank):
            self._kill()

    def _kill(self) -> None:
        for process in self.ranks if self.rank < 0 else []:
            if process != os.getpid():
                os.kill(process, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _wait_in_ambush(self) -> None:
        from lightning_3d.checkpoint import folder
        from lightning_3d.checkpoint.hashes import HashedFile
        from lightning_3d.checkpoint.writing import TensorSave

        plan, write, put = TensorSave.plan, TensorSave.write, HashedFile.write

        def planned(save: Any, collect: Any) -> None:
            self.saves += 1
            if self._now("begin"):
                self._kill()
            plan(save, collect)

        def written(save: Any, where: Any) -> Any:
            result = write(save, where)
            if self._now("metadata"):
                self._kill()
            return result

        def half(file: Any, data: Any) -> int:
            if self._now("shard") and file.position > 1000:
                put(file, bytes(data)[: len(data) // 2])
                file._file.flush()
                self._kill()
            return put(file, data)

        TensorSave.plan, TensorSave.write, HashedFile.write = planned, written, half  # type: ignore[method-assign]
        for name, phase in (("flush", "rename"), ("remove", "prune")):
            setattr(folder, name, self._before(getattr(folder, name), phase))

    def _before(self, function: Any, phase: str) -> Any:
        def call(*args: Any) -> Any:
            if self._now(phase):
                self._kill()
            return function(*args)

        return call

    def _now(self, phase: str) -> bool:
        return self.phase == phase and self.saves >= self.save
