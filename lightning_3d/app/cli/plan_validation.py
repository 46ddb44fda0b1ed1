"""`lightning-3d plan --validate N`: run the best layouts for a few steps and compare prediction and
measurement. Imports no torch.

This process starts the ranks of one node. srun starts the ranks of several nodes, in the SLURM job
in which the command runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_3d.app.cli.plan_words import training_words
from lightning_3d.app.config.cluster import ClusterConfig
from lightning_3d.app.config.machine import visible_gpus
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.search import Candidate
from lightning_3d.app.planner.tables import describe, table
from lightning_3d.app.runs.metrics_file import column, read_rows
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.process_ties import belong_to
from lightning_3d.storage.numbers import show_memory

_LAST_WORDS = 400
_END_SECONDS = 30
"""Seconds that srun has to kill ranks of other nodes after an interruption."""


def require_here(machine: Machine, cluster: ClusterConfig) -> None:
    """Check that this machine, or the SLURM job in which this command runs, can run the layouts of
    a plan.

    Raises:
        ConfigError: the plan is for more GPUs than this machine has, or for several nodes outside
            of a job that has them.
    """
    if cluster.nodes > 1:
        _require_job(cluster.nodes, machine.gpus // cluster.nodes)
        return
    there = visible_gpus()
    if cluster.accelerator != "cpu" and there < machine.gpus:
        here, kind = (
            f"{there} GPU{'s' * (there > 1)}" if there else "no GPU",
            cluster.name.partition("_")[0],
        )
        raise ConfigError(
            f"--validate runs layouts on this machine, which has {here}, but the plan is for"
            f" {machine.gpus} GPUs ({cluster.name}). Validate on one node of that kind with"
            f" cluster={kind}_1x{max(1, there)}, or here with cluster=local_cpu and a profile of"
            " this machine."
        )


def _require_job(nodes: int, ranks_per_node: int) -> None:
    """Refuse several nodes outside of a SLURM job that has as many."""
    start = f"salloc --nodes={nodes} --ntasks-per-node={ranks_per_node}"
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise ConfigError(
            f"The plan is for {nodes} nodes, and --validate starts ranks on several nodes with"
            f" srun, in a SLURM job. Run this command in a job ({start}), or use a cluster of one"
            " node."
        )
    there = os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES", "1"))
    if there.isdecimal() and int(there) < nodes:
        raise ConfigError(
            f"The plan is for {nodes} nodes, but this SLURM job has {there}. Use a job with more"
            f" ({start}), or a smaller cluster."
        )


def starter(machine: Machine, cluster: ClusterConfig) -> list[str]:
    """Return the words before a command that start it on all ranks of several nodes; none for one
    node."""
    if cluster.nodes == 1:
        return []
    ranks = machine.gpus // cluster.nodes
    return [
        "srun",
        "--kill-on-bad-exit=1",
        "--quit-on-interrupt",
        f"--nodes={cluster.nodes}",
        f"--ntasks-per-node={ranks}",
    ]


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of a run of a few steps.

    Attributes:
        seconds: median of the timed steps.
        memory: bytes of the fullest rank.
        failure: end of the output of a run that failed; then there are no measurements.
    """

    seconds: float | None = None
    memory: float | None = None
    failure: str = ""


def validate(
    overrides: Sequence[str],
    candidates: Sequence[Candidate],
    steps: int,
    start: Sequence[str],
    shared: Path,
) -> int:
    """Run candidates one after the other and print the comparison. Returns 1 if none of them ran.

    Args:
        overrides: those of the plan.
        candidates: ways to train.
        steps: timed steps of each.
        start: words before a command; see `starter`.
        shared: folder that all nodes see, if there are several.
    """
    rows, failures = [], []
    for number, one in enumerate(candidates, 1):
        print(f"running layout {number} of {len(candidates)}: {describe(one.job)}", flush=True)
        with tempfile.TemporaryDirectory(
            prefix="lightning_3d_validation_", dir=shared if start else None
        ) as folder:
            found = measure(overrides, one, steps, start, Path(folder).resolve())
        if found.failure:
            failures.append(f"{one.job.layout.name} failed: {found.failure}")
        rows.append(
            [
                one.job.layout.name,
                *_compared(one.step.seconds, found.seconds),
                *_of_memory(one.memory.total, found.memory),
            ]
        )
    head = [
        "layout",
        "s/step predicted",
        "measured",
        "ratio",
        "memory predicted",
        "measured",
        "ratio",
    ]
    print("\n" + "\n".join(table(head, rows)))
    for failure in failures:
        print(failure)
    return 1 if len(failures) == len(candidates) else 0


def _compared(predicted: float, measured: float | None) -> list[str]:
    if not measured:
        return [f"{predicted:.3g}", "-", "-"]
    return [f"{predicted:.3g}", f"{measured:.3g}", f"{predicted / measured:.2f}"]


def _of_memory(predicted: float, measured: float | None) -> list[str]:
    words = [show_memory(predicted)]
    return (
        [*words, show_memory(measured), f"{predicted / measured:.2f}"]
        if measured
        else [*words, "-", "-"]
    )


def measure(
    overrides: Sequence[str], one: Candidate, steps: int, start: Sequence[str], folder: Path
) -> MeasuredRun:
    """Run `lightning-3d train` with the layout of a candidate: one step to warm up, some timed
    ones, and a traced one."""
    last = steps + 2
    own = [
        *(
            f"trainer.{key}={last}"
            for key in (
                "max_steps",
                "val_check_interval",
                "trace_every_n_steps",
                "checkpoint_every_n_steps",
            )
        ),
        *(
            "trainer.limit_val_batches=0",
            "callbacks=none",
            "logger=none",
            f"hydra.run.dir={folder}/run",
            "force=true",
        ),
        *(
            "+callbacks.metrics._target_=lightning_3d.app.training.callbacks.MetricsCSV",
            f"+callbacks.metrics.path={folder}/metrics.csv",
        ),
    ]
    given = [word for word in overrides if word.partition("=")[0] not in ("callbacks", "logger")]
    command = [
        *start,
        sys.executable,
        "-m",
        "lightning_3d",
        "train",
        *training_words(given, one.job).words,
        *own,
    ]
    code, output, errors = _finished(command, alone=not start)
    rows = read_rows(folder / "metrics.csv")
    if not code and not rows and start:
        return MeasuredRun(
            failure=(
                f"it trained, but {folder} has no numbers: the folder of --out must be on storage"
                " that all nodes share"
            )
        )
    if code or not rows:
        return MeasuredRun(
            failure=(
                f"exit code {code}:"
                f" {(errors.strip() or output.strip() or 'no output')[-_LAST_WORDS:]}"
            )
        )
    timed = column(rows[1:-1], "step_seconds")
    return MeasuredRun(statistics.median(timed), next(iter(column(rows[-1:], "memory")), None))


def _finished(command: Sequence[str], *, alone: bool) -> tuple[int, str, str]:
    """Run a command, and return its exit code and what it printed. An interruption kills it with
    its ranks: they have nothing to save.

    Args:
        alone: whether all of its ranks are on this machine, where they die with it. Else srun kills
            them.
    """
    with subprocess.Popen(
        command,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(belong_to, os.getpid()),
    ) as process:
        try:
            output, errors = process.communicate()
        except BaseException:
            if not alone:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # until the last rank has closed its output: nobody writes into the folder any more
            process.communicate()
            raise
    return process.returncode, output, errors


def _environment() -> dict[str, str]:
    """Return the environment of this process, extended so that the run imports the same packages
    from any folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
