"""`lightning-3d launch KIND`: start a run on the nodes of its cluster with torchrun, SLURM,
Kubernetes, SkyPilot or dstack.

The nodes get the overrides of the command line and compose the same configuration again. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_3d.app.cli.options import OVERRIDES, Command
from lightning_3d.app.launchers import dstack, kubernetes, skypilot, slurm, torchrun, trainjob
from lightning_3d.app.launchers.options import (
    PREFIX,
    DstackOptions,
    KubernetesOptions,
    Options,
    SkyPilotOptions,
    SlurmOptions,
    TorchrunOptions,
    TrainJobOptions,
    meanings,
    read_options,
    split,
)
from lightning_3d.app.launchers.target import LaunchTarget, find_target
from lightning_3d.app.runs.check import CheckedMachine
from lightning_3d.errors import ConfigError, did_you_mean, listed


@dataclass(frozen=True)
class LauncherKind:
    """A launcher.

    Attributes:
        meaning: what it does, for `--help`.
        options: its `launch.KEY=VALUE` options.
        render: writes what would be run or submitted.
        submit: runs or submits it, and returns the exit code.
        machine: the nodes that the configuration is checked for.
    """

    meaning: str
    options: type[Options]
    render: Callable[[LaunchTarget, Any], str]
    submit: Callable[[LaunchTarget, Any], int]
    machine: CheckedMachine


KINDS = {
    "torchrun": LauncherKind(
        "run torchrun on this node; you start the same command on every node",
        TorchrunOptions,
        torchrun.render,
        torchrun.submit,
        CheckedMachine.NODES,
    ),
    "slurm": LauncherKind(
        "submit a job with sbatch; srun starts the ranks in it",
        SlurmOptions,
        slurm.render,
        slurm.submit,
        CheckedMachine.COUNTED_NODES,
    ),
    "jobset": LauncherKind(
        "create a JobSet on Kubernetes with kubectl",
        KubernetesOptions,
        kubernetes.render_jobset,
        kubernetes.submit_jobset,
        CheckedMachine.REMOTE_NODES,
    ),
    "trainjob": LauncherKind(
        "create a TrainJob of Kubeflow Trainer v2 with kubectl",
        TrainJobOptions,
        trainjob.render,
        trainjob.submit,
        CheckedMachine.REMOTE_NODES,
    ),
    "pytorchjob": LauncherKind(
        "create a PyTorchJob of the Kubeflow training operator v1 with kubectl",
        KubernetesOptions,
        kubernetes.render_pytorchjob,
        kubernetes.submit_pytorchjob,
        CheckedMachine.REMOTE_NODES,
    ),
    "skypilot": LauncherKind(
        "rent the nodes with SkyPilot (sky launch) and start torchrun on them",
        SkyPilotOptions,
        skypilot.render,
        skypilot.submit,
        CheckedMachine.REMOTE_NODES,
    ),
    "dstack": LauncherKind(
        "rent or reuse the nodes with dstack (dstack apply) and start torchrun on them",
        DstackOptions,
        dstack.render,
        dstack.submit,
        CheckedMachine.REMOTE_NODES,
    ),
}


def option_rows() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """List the options of each group of launchers, with defaults and meanings: (names of the
    launchers, rows)."""
    for options in dict.fromkeys(kind.options for kind in KINDS.values()):
        names = [name for name, kind in KINDS.items() if kind.options is options]
        meant = meanings(options)
        defaults = (
            (f"{PREFIX}{key}={json.dumps(value)}", meant.get(key, "").rstrip("."))
            for key, value in asdict(options()).items()
        )
        yield listed(names), list(defaults)


_ONE_RUN = (
    "lightning-3d launch starts one run, so it has no option -m."
    " To run a sweep on SLURM, use lightning-3d train -m hydra/launcher=slurm ..."
)
_SHOW = (
    "lightning-3d launch does not show the configuration. Use lightning-3d train --cfg job, or"
    " lightning-3d train --info."
)
COMMAND = Command(
    "launch",
    "Check a configuration as lightning-3d train ... trainer.dry=true does, then start the run on"
    " the nodes of its cluster. The numbers of nodes, GPUs and ranks come from the cluster"
    " (cluster=h100_32x8). Set everything else with options launch.KEY=VALUE.",
    takes=f"KIND {OVERRIDES}",
    examples=[
        "slurm --dry model=llama3_1_8b cluster=h100_2x8 parallelism=tp8_dp2 launch.partition=gpu"
    ],
    progress=False,
    hints={"-m": _ONE_RUN, "--multirun": _ONE_RUN, "--cfg": _SHOW, "-c": _SHOW, "--info": _SHOW},
)
COMMAND.section("KIND", [(name, kind.meaning) for name, kind in KINDS.items()], first=True)
COMMAND.flag("--dry", "print what would be run or submitted, and do nothing else")
for _kinds, _rows in option_rows():
    COMMAND.section(f"Options of {_kinds}", _rows)


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code. Without arguments, show the help."""
    return COMMAND.run(arguments or ["--help"], lambda options, words: _run(options.dry, words))


def _run(dry: bool, words: list[str]) -> int:
    kind = _kind(words)
    options, overrides = split([word for word in words if word != kind])
    launcher = KINDS[kind]
    chosen = read_options(launcher.options, options)
    target = find_target(overrides, launcher.machine)
    if dry:
        print(launcher.render(target, chosen), end="", flush=True)
        return 0
    return launcher.submit(target, chosen)


def _kind(words: list[str]) -> str:
    """Find the one word that is not an override; it may be anywhere on the command line."""
    kinds = [word for word in words if "=" not in word and not word.startswith(("~", "+"))]
    if len(kinds) == 1 and kinds[0] in KINDS:
        return kinds[0]
    if not kinds:
        what = "got none."
    elif len(kinds) > 1:
        what = f"got {listed(kinds)}."
    else:
        what = f'got "{kinds[0]}".{did_you_mean(kinds[0], KINDS)}'
    raise ConfigError(f"lightning-3d launch needs one KIND ({listed(KINDS, last='or')}); {what}")
