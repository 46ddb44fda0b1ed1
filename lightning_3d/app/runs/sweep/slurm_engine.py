"""Engine that runs each job of a sweep as a SLURM job, submitted by submitit (extra `slurm`).

submitit starts one task for each rank with srun. A task runs the job's command, which sees in
SLURM's variables that it is a rank. squeue, which needs no accounting database, shows whether a job
has ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_3d.app.runs.slurm_request import SlurmRequest
from lightning_3d.app.runs.status import read_status
from lightning_3d.app.runs.sweep.jobs import SweepJob
from lightning_3d.app.runs.sweep.local_engine import Began, Ended, Event, Going, Interrupted
from lightning_3d.errors import ConfigError, install
from lightning_3d.layout.sizes import check_number, check_sizes
from lightning_3d.ranks.process_ties import belong_to

SUBMITIT_FOLDER = ".submitit"
_LATE_SECONDS = 20.0  # until a file that another node wrote is visible here
_CANCEL_SECONDS = 60.0


@dataclass
class SlurmResources(SlurmRequest):
    """Keys of `hydra/launcher=slurm`: what each job of a sweep asks SLURM for.

    Attributes:
        minutes: time limit of a job.
        sbatch: further options of sbatch, by name.
        executor: of submitit: slurm, or local, where a job is a process of this machine that starts
            its ranks.
    """

    minutes: int = 1440
    sbatch: dict[str, Any] = field(default_factory=dict)
    executor: str = "slurm"

    def parameters(self, job: SweepJob) -> dict[str, Any]:
        """Parameters of submitit's executor for a job."""
        nodes = int(job.config["cluster"]["nodes"])
        asked = {
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_qos": self.qos,
            "slurm_mem": self.memory,
            "slurm_setup": list(self.setup) or None,
            "slurm_srun_args": self.srun_options() or None,
            "slurm_additional_parameters": dict(self.sbatch) or None,
            "cpus_per_task": self.cpus_per_task,
            "gpus_per_node": job.config["cluster"]["gpus_per_node"] or None,
        }
        alone = self.executor != "slurm"
        tasks = {
            "nodes": 1 if alone else nodes,
            "tasks_per_node": 1 if alone else job.ranks // nodes,
        }
        fixed = {
            "name": f"lightning-3d-{job.number}",
            "timeout_min": self.minutes,
            "stderr_to_stdout": True,
        }
        return {
            **fixed,
            **tasks,
            **{key: value for key, value in asked.items() if value is not None},
        }


class SlurmEngine:
    """Engine that submits jobs and waits for them.

    Args:
        resources: resources that each job asks for.
        at_once: most jobs that are queued or running at the same time; None: all.
        poll_seconds: seconds between checks of the queue.

    Raises:
        ConfigError: submitit or SLURM's programs are not installed, or a number is out of range.
    """

    def __init__(
        self, resources: SlurmResources, at_once: int | None = None, *, poll_seconds: float = 5.0
    ) -> None:
        check_sizes(
            **{"hydra.launcher.jobs_at_once": at_once, "hydra.launcher.minutes": resources.minutes}
        )
        check_number("hydra.launcher.poll_seconds", poll_seconds)
        try:
            import submitit
        except ImportError as error:
            raise ConfigError(
                f"hydra/launcher=slurm needs the package submitit. {install('slurm')}."
            ) from error
        absent = [
            program
            for program in ("sbatch", "srun", "squeue", "scancel")
            if shutil.which(program) is None
        ]
        if resources.executor == "slurm" and absent:
            raise ConfigError(
                f"hydra/launcher=slurm needs SLURM, but {absent[0]} is not installed on this"
                " machine. Start the sweep on a SLURM node."
            )
        self._submitit: Any = submitit
        self._resources = resources
        self._at_once = at_once
        self._poll_seconds = poll_seconds

    def run(self, jobs: Sequence[SweepJob]) -> Generator[Event, None, None]:
        waiting = deque(jobs)
        running: dict[SweepJob, Any] = {}  # jobs compare by identity
        gone: dict[SweepJob, float] = {}
        try:
            while waiting or running:
                while waiting and (self._at_once is None or len(running) < self._at_once):
                    job = waiting.popleft()
                    try:
                        self._submit_into(running, job)
                    except (
                        OSError,
                        subprocess.SubprocessError,
                        self._submitit.core.utils.FailedSubmissionError,
                    ) as error:
                        yield Began(job)
                        yield Ended(job, 1, f"cannot submit it: {_last_line(error)}")
                    else:
                        yield Began(
                            job,
                            (
                                f"SLURM job {running[job].job_id}"
                                if self._resources.executor == "slurm"
                                else ""
                            ),
                        )
                time.sleep(self._poll_seconds)
                alive = self._alive(running)
                for job, submitted in list(running.items()):
                    ended = (
                        None
                        if job in alive
                        else _ended(job, submitted, gone.setdefault(job, time.monotonic()))
                    )
                    if ended is not None:
                        del running[job]
                    yield ended or Going(job)
        except BaseException:
            self._cancel(running)
            raise

    def _submit_into(self, running: dict[SweepJob, Any], job: SweepJob) -> None:
        """Submit in a thread, which no signal interrupts, so that a job that SLURM accepted is
        cancelled however the sweep ends."""
        failed: list[Exception] = []
        over = threading.Event()

        def submit() -> None:
            try:
                running[job] = self._submit(job)
            except Exception as error:
                failed.append(error)
            finally:
                over.set()

        try:
            threading.Thread(target=submit, daemon=True).start()
            over.wait()
        except Interrupted:
            over.wait(_CANCEL_SECONDS)
            raise
        if failed:
            raise failed[0]

    def _submit(self, job: SweepJob) -> Any:
        executor = self._submitit.AutoExecutor(
            folder=job.folder / SUBMITIT_FOLDER, cluster=self._resources.executor
        )
        executor.update_parameters(**self._resources.parameters(job))
        return executor.submit(
            run_task,
            list(job.command),
            str(job.log),
            dict(job.environment),
            job.work_folder and str(job.work_folder),
        )

    def _alive(self, running: Mapping[SweepJob, Any]) -> set[SweepJob]:
        """Return the jobs that are queued or running."""
        if self._resources.executor != "slurm":
            return {job for job, submitted in running.items() if not submitted.done()}
        try:
            done = subprocess.run(
                ["squeue", "--noheader", "--me", "--format=%A"],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
        except subprocess.TimeoutExpired:
            return set(running)
        if done.returncode != 0:  # the controller does not answer now
            return set(running)
        queued = set(done.stdout.split())
        return {job for job, submitted in running.items() if submitted.job_id in queued}

    def _cancel(self, running: Mapping[SweepJob, Any]) -> None:
        for submitted in running.values():
            submitted.cancel(check=False)
        deadline = time.monotonic() + _CANCEL_SECONDS
        while self._alive(running) and time.monotonic() < deadline:
            time.sleep(0.5)


def _ended(job: SweepJob, submitted: Any, since: float) -> Ended | None:
    """Return how a job ended that left the queue; None while its result may not be visible here
    yet."""
    codes = [_code_of(submitted.task(number)) for number in range(submitted.num_tasks)]
    failed = [code for code in codes if code]
    if failed:
        return Ended(job, failed[0])
    if None not in codes:
        return Ended(job, 0)
    if time.monotonic() - since < _LATE_SECONDS:
        return None
    status = read_status(job.folder)
    code = status.exit_code if status is not None else None
    return Ended(
        job,
        code or 1,
        "SLURM ended the job: it was cancelled, exceeded its time or memory, or a node failed (see"
        " sacct).",
    )


def _code_of(task: Any) -> int | None:
    """Read the exit code of a task; None if it left none."""
    from submitit.core.utils import pickle_load

    path = Path(task.paths.result_pickle)
    if not path.exists():
        return None
    kind, value = pickle_load(path)
    return int(value) if kind == "success" else 1


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def run_task(command: list[str], log: str, environment: dict[str, str], folder: str | None) -> int:
    """Run the job's command in its own process, as a task of SLURM, and return its exit code."""
    parent = os.getpid()

    def prepare() -> None:
        belong_to(parent)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    # by which submitit asks to save and exit, long before SLURM's own SIGTERM
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **environment},
            preexec_fn=prepare,
        )
    code = process.wait()
    return code if code >= 0 else 128 - code
