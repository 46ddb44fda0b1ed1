"""`lightning-3d launch slurm`: write a script for sbatch, in which srun starts the ranks."""

from __future__ import annotations

import re
import shlex
import sys

from lightning_3d.app.launchers.options import SlurmOptions
from lightning_3d.app.launchers.submit import hand_to
from lightning_3d.app.launchers.target import LaunchTarget
from lightning_3d.errors import ConfigError

_WORDS = ("partition", "account", "qos", "time", "memory", "output")


def render(target: LaunchTarget, options: SlurmOptions) -> str:
    """Write the script.

    Raises:
        ConfigError: a value does not fit in a line of #SBATCH.
    """
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in directives(target, options)),
        "set -eu",
    ]
    lines += [
        f"export {name}={shlex.quote(value)}" for name, value in _environment(options).items()
    ]
    lines += options.setup
    ranks = [
        "srun",
        "--kill-on-bad-exit=1",
        *options.srun_options(),
        options.python or sys.executable,
        "-m",
        "lightning_3d",
    ]
    name = options.name or target.name
    # The job's number stays the same when it restarts, so it finds its folder again.
    arguments = target.arguments(f"outputs/{name}_${{oc.env:SLURM_JOB_ID}}")
    return "\n".join([*lines, f"exec {shlex.join([*ranks, *arguments])}"]) + "\n"


def directives(target: LaunchTarget, options: SlurmOptions) -> list[str]:
    """List the options of sbatch, without `#SBATCH`."""
    for key in (*_WORDS, "name"):
        _require_word(f"launch.{key}", getattr(options, key))
    for key in ("sbatch", "srun"):
        for line in getattr(options, key):
            if not line.startswith("-") or "\n" in line:
                raise ConfigError(
                    f'launch.{key} must be a list of options, for example ["--reservation=mine"];'
                    f" got {line!r}."
                )
    given = {
        "job-name": options.name or target.name,
        "nodes": target.nodes,
        "ntasks-per-node": target.ranks_per_node,
        "gpus-per-node": target.gpus_per_node or None,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.memory,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "output": options.output,
        "open-mode": "append",
    }
    lines = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [
        *lines,
        *(["--exclusive"] if options.exclusive else []),
        "--requeue" if options.requeue else "--no-requeue",
        *options.sbatch,
    ]


def _environment(options: SlurmOptions) -> dict[str, str]:
    for name in options.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(
                "launch.env must map names of environment variables to values, for example"
                f" {{DEBUG: 1}}; got {name!r}."
            )
    return options.env


def _require_word(key: str, value: str | None) -> None:
    if value is not None and not re.fullmatch(r"[\w.:,/%@+=\[\]-]+", value):
        raise ConfigError(
            f"{key} may contain only letters, digits and _.:,/%@+=[]-, because it becomes a line of"
            f" #SBATCH; got {value!r}."
        )


def submit(target: LaunchTarget, options: SlurmOptions) -> int:
    """Submit the script with sbatch."""
    return hand_to(["sbatch"], render(target, options))
