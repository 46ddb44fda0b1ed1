"""A run whose processes stop at one phase of their life, so that the process that started them can
be killed there.

`Run` starts a command with a folder in its environment, by which all its processes are found, and
with this file's folder and a `sitecustomize` in front of their search path. Who reaches the phase
writes a marker. Rank 0 stays there and sleeps; the others go on and wait for it, in the C++ of a
rendezvous or a collective. In the phases of a fresh interpreter the child sleeps.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

PHASE, FOLDER = "ORPHANS_PHASE", "ORPHANS_FOLDER"
PATIENCE_SECONDS = 10.0
"""How long processes may take to end after the kill. Those that sleep or wait for the dead would
take ten minutes."""

_SITE = """
import orphans
orphans.stop_fresh_interpreter()
"""


def reach(phase: str, sleeps: bool) -> None:
    """Say that this process has come to a phase, where the run is to be killed, and stay there or
    go on."""
    if os.environ.get(PHASE) == phase:
        (Path(os.environ[FOLDER]) / f"{phase} {os.getpid()}").touch()
        if sleeps:
            time.sleep(600)


def is_rank_0() -> bool:
    """Of ranks of every launcher."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def stop_fresh_interpreter() -> None:
    """Called when an interpreter starts: a rank that was started as one sleeps before its first
    line, or when it imports torch."""
    if "LOCAL_RANK" not in os.environ and "--multiprocessing-fork" not in sys.orig_argv:
        return
    reach("exec", sleeps=True)

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == "torch":
                reach("imports", sleeps=True)

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


class Run:
    """A command that is to be killed at a phase.

    Args:
        arguments: of the interpreter.
        phase: where processes write markers.
    """

    def __init__(self, arguments: list[str], phase: str, folder: Path) -> None:
        from command_line import environment

        self.folder, self.phase = folder, phase
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(_SITE)
        given = environment()
        given["PYTHONPATH"] = os.pathsep.join([str(folder / "site"), given["PYTHONPATH"]])
        self.log = folder / "output.txt"
        with self.log.open("wb") as output:
            given |= {PHASE: phase, FOLDER: str(folder)}
            command = [sys.executable, "-W", "ignore", *arguments]
            self.process = subprocess.Popen(
                command, env=given, cwd=folder, stdout=output, stderr=subprocess.STDOUT
            )

    def members(self) -> list[psutil.Process]:
        """Processes of this run that live, whoever their parent is."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get(FOLDER) == str(self.folder)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill_at(self, markers: int, seconds: float = 150.0) -> None:
        """Kill the process that was started once so many others, or it too, have reached the phase,
        and see all others end.

        Raises:
            AssertionError: they do not, or the phase is never reached.
        """
        try:
            deadline = time.monotonic() + seconds
            while len(list(self.folder.glob(f"{self.phase} *"))) < markers:
                assert self.process.poll() is None and time.monotonic() < deadline, (
                    f"{self.phase} not reached:\n{self.log.read_text()}"
                )
                time.sleep(0.05)
            self.kill()
        finally:
            for process in self.members():
                process.kill()
            self.process.wait()

    def kill(self) -> None:
        """Kill the process that was started, and see all others end."""
        assert len(self.members()) > 1, (
            f"there is nobody who could outlive it:\n{self.log.read_text()}"
        )
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, (
            f"killed at {self.phase}, these are left:"
            f" {[process.cmdline() for process in left]}\n{self.log.read_text()}"
        )


def phase_callback() -> Any:
    """A callback whose making and hooks reach the phases of a rank."""
    import torch
    from lightning.pytorch import Callback

    from lightning_3d.engine import build

    def before(module: Any, name: str, phase: str) -> None:
        function = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            reach(phase, sleeps=is_rank_0())
            if os.environ[PHASE] == "failure" and is_rank_0():
                raise ArithmeticError("rank 0 fails while the others wait for it")
            return function(*args, **kwargs)

        setattr(module, name, wrapped)

    before(torch.distributed, "init_process_group", "rendezvous")
    before(build, "assemble", "build")

    class Phases(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            reach("step", sleeps=is_rank_0())

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            reach("save", sleeps=is_rank_0())

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            reach("teardown", sleeps=is_rank_0())

    return Phases()


class Rows:
    """A data set that a worker process cannot finish reading: the later samples take ten minutes
    each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        import torch

        if index >= 8 and os.environ[PHASE] == "step":
            time.sleep(600)
        return torch.ones(4)


def script() -> None:
    """A script of one's own, which rank 0 starts again for rank 1."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from lightning_3d import Lightning3DStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    strategy = Lightning3DStrategy("dp2")
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=2,
        callbacks=[phase_callback()],
        **quiet,
    )
    trainer.fit(Module(), DataLoader(Rows(), batch_size=2, num_workers=1))  # type: ignore[arg-type]
    trainer.save_checkpoint("saved.ckpt")
    if not is_rank_0():
        reach("end", sleeps=True)


if __name__ == "__main__":
    script()
