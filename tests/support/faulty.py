"""A callback that makes one rank fail, for command lines:
`+callbacks.faulty._target_=faulty.FailAtStep`."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class FailAtStep(Callback):
    """Fails on one rank at the start of a step.

    Args:
        how: "raise" an exception, "kill" this process, ask for more "memory" than there is, "hang"
            the other ranks while this one raises, or send SIGTERM to the process that started this
            one, to "end" the run, or SIGINT, to "interrupt" it.
        once: fail in torchrun's first attempt only.
    """

    def __init__(self, rank: int, step: int = 1, how: str = "raise", once: bool = False) -> None:
        self.rank, self.step, self.how, self.once = rank, step, how, once

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self.step or (
            self.once and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        ):
            return
        if trainer.global_rank == self.rank:
            if self.how in ("end", "interrupt"):
                os.kill(os.getppid(), signal.SIGTERM if self.how == "end" else signal.SIGINT)
                return
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "memory":
                torch.empty(2**50)
            raise ArithmeticError(f"rank {self.rank} cannot go on")
        if self.how == "hang":
            time.sleep(600)


class Listens(Callback):
    """Writes to a file of each rank on which addresses its process listens (Linux)."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:  # listens
                    found.add(fields[1].partition(":")[0])
        (self.folder / f"listens-{trainer.global_rank}").write_text("\n".join(sorted(found)))


class KillInSave(Callback):
    """Ends ranks with SIGKILL in a phase of a save.

    Args:
        phase: one of `PHASES`.
        rank: which rank is killed.
        everyone: all ranks are, when that one gets there.
        save: not before this save, counted from 1.
    """

    PHASES = (
        "before the first byte",
        "in a shard",
        "before metadata",
        "before the manifest",
        "before the rename",
        "in pruning",
        "between",
    )
    OF_RANK_ZERO = PHASES[3:6]
    """Phases that only rank 0 comes to; the other ranks are killed when it does."""

    def __init__(self, phase: str, rank: int, everyone: bool = False, save: int = 2) -> None:
        assert phase in self.PHASES
        self.phase, self.rank, self.everyone, self.save = phase, rank, everyone, save
        self.saves = 0
        self.processes: list[Any] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        import torch.distributed as dist

        self.processes = [None] * trainer.world_size
        dist.all_gather_object(self.processes, os.getpid())
        if trainer.global_rank == (0 if self.phase in self.OF_RANK_ZERO else self.rank):
            self._wait_in_ambush(trainer.global_rank)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._come_to("between")

    def _is_at(self, phase: str) -> bool:
        return phase == self.phase and self.saves >= self.save

    def _come_to(self, phase: str) -> None:
        if self._is_at(phase):
            self.phase = "over"
            victims = self.processes if self.everyone else [self.processes[self.rank]]
            # this one last
            for process in sorted(victims, key=lambda process: process == os.getpid()):
                os.kill(process, signal.SIGKILL)

    def _wait_in_ambush(self, rank: int) -> None:
        from lightning_3d.checkpoint import folder
        from lightning_3d.checkpoint.hashes import HashedFile
        from lightning_3d.checkpoint.writing import TensorSave

        begin, plan, write, put = folder.begin, TensorSave.plan, TensorSave.write, HashedFile.write

        def counted() -> None:
            self.saves += 1
            self._come_to("before the first byte")

        def begun(*args: Any, **kwargs: Any) -> Any:
            counted()
            return begin(*args, **kwargs)

        def planned(save: Any, collect: Any) -> None:
            if rank > 0:
                counted()
            plan(save, collect)

        def written(save: Any, where: Any) -> Any:
            result = write(save, where)
            self._come_to("before metadata")
            return result

        def half(file: Any, data: Any) -> int:
            if self._is_at("in a shard") and file.position > 1000:
                put(file, bytes(data)[: len(data) // 2])
                file._file.flush()
                self._come_to("in a shard")
            return put(file, data)

        def delete(path: Any) -> None:
            if path.name.endswith(folder.REMOVED) and path.is_dir():
                if self._is_at("in pruning"):
                    next(path.iterdir()).unlink()
                self._come_to("in pruning")
            remove(path)

        remove = folder._delete
        folder.begin, folder._delete = begun, delete
        TensorSave.plan, TensorSave.write, HashedFile.write = planned, written, half  # type: ignore[method-assign]
        for name, phase in (("commit", "before the manifest"), ("flush", "before the rename")):
            setattr(folder, name, self._before(getattr(folder, name), phase))

    def _before(self, function: Any, phase: str) -> Any:
        def call(*args: Any) -> Any:
            self._come_to(phase)
            return function(*args)

        return call
