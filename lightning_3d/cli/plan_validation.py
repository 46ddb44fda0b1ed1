"""`lightning-3d plan --validate N`: run the best layouts for a few steps and compare prediction and measurement. Imports no torch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_3d.cli.plan_words import training_words
from lightning_3d.config.cluster import ClusterConfig
from lightning_3d.config.machine import visible_gpus
from lightning_3d.errors import ConfigError
from lightning_3d.planner.machine import Machine
from lightning_3d.planner.search import Candidate
from lightning_3d.planner.tables import describe, table
from lightning_3d.ranks.process_ties import belong_to
from lightning_3d.runs.metrics_file import column, read_rows
from lightning_3d.storage.numbers import show_memory

_LAST_WORDS = 400


def require_here(machine: Machine, cluster: ClusterConfig) -> None:
    """Check that this machine can run the layouts of a plan.

    Raises:
        ConfigError: the plan is for more GPUs or nodes than this machine has.
    """
    there = visible_gpus()
    if cluster.accelerator != "cpu" and there < machine.gpus:
        here, kind = f"{there} GPU{'s' * (there > 1)}" if there else "no GPU", cluster.name.partition("_")[0]
        raise ConfigError(
            f"--validate runs layouts on this machine, which has {here}, but the plan is for {machine.gpus} GPUs ({cluster.name})."
            f" Validate on one node of that kind with cluster={kind}_1x{max(1, there)}, or here with cluster=local_cpu and a profile of"
            " this machine."
        )
    if machine.nodes > 1:
        raise ConfigError(
            f"--validate starts ranks on this machine only, but {cluster.name} has {machine.nodes} nodes. Use a cluster of one node."
        )


@dataclass(frozen=True)
class Measured:
    """Measurements of a run of a few steps.

    Attributes:
        seconds: median of the timed steps.
        memory: bytes of the fullest rank.
        failure: end of the output of a run that failed; then there are no measurements.
    """

    seconds: float | None = None
    memory: float | None = None
    failure: str = ""


def validate(overrides: Sequence[str], candidates: Sequence[Candidate], steps: int) -> int:
    """Run candidates one after the other and print the comparison. Returns 1 if none of them ran."""
    rows, failures = [], []
    for number, one in enumerate(candidates, 1):
        print(f"running layout {number} of {len(candidates)}: {describe(one.job)}", flush=True)
        found = measure(overrides, one, steps)
        if found.failure:
            failures.append(f"{one.job.layout.name} failed: {found.failure}")
        rows.append([one.job.layout.name, *_compared(one.step.seconds, found.seconds), *_of_memory(one.memory.total, found.memory)])
    head = ["layout", "s/step predicted", "measured", "ratio", "memory predicted", "measured", "ratio"]
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
    return [*words, show_memory(measured), f"{predicted / measured:.2f}"] if measured else [*words, "-", "-"]


def measure(overrides: Sequence[str], one: Candidate, steps: int) -> Measured:
    """Run `lightning-3d train` with the layout of a candidate: one step to warm up, some timed ones, and a traced one."""
    last = steps + 2
    with tempfile.TemporaryDirectory(prefix="lightning_3d_validation_") as folder:
        own = [
            *(f"trainer.{key}={last}" for key in ("max_steps", "val_check_interval", "trace_every_n_steps", "checkpoint_every_n_steps")),
            *("trainer.limit_val_batches=0", "callbacks=none", "logger=none", f"hydra.run.dir={folder}/run", "force=true"),
            *("+callbacks.metrics._target_=lightning_3d.training.callbacks.MetricsCSV", f"+callbacks.metrics.path={folder}/metrics.csv"),
        ]
        given = [word for word in overrides if word.partition("=")[0] not in ("callbacks", "logger")]
        command = [sys.executable, "-m", "lightning_3d", "train", *training_words(given, one.job), *own]
        done = subprocess.run(
            command, env=_environment(), check=False, capture_output=True, text=True, preexec_fn=partial(belong_to, os.getpid())
        )
        rows = read_rows(Path(folder) / "metrics.csv")
    if done.returncode or not rows:
        words = (done.stderr.strip() or done.stdout.strip() or "no output")[-_LAST_WORDS:]
        return Measured(failure=f"exit code {done.returncode}: {words}")
    timed = column(rows[1:-1], "step_seconds")
    return Measured(statistics.median(timed), next(iter(column(rows[-1:], "memory")), None))


def _environment() -> dict[str, str]:
    """Return the environment of this process, extended so that the run imports the same packages from any folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
