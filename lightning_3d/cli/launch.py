"""`lightning-3d launch KIND`: hands a run to the nodes of its cluster, by torchrun, SLURM or Kubernetes.

`target` is what is launched, `options` what a launcher must know beside it; `torchrun`, `slurm` and `kubernetes` each write what
their program takes. The nodes get the overrides of the command line and compose the same configuration again. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lightning_3d.cli.exit_codes import guarded
from lightning_3d.errors import ConfigError, did_you_mean, listed
from lightning_3d.launchers import kubernetes, slurm, torchrun
from lightning_3d.launchers.options import KubernetesOptions, Options, SlurmOptions, TorchrunOptions, read_options, split
from lightning_3d.launchers.target import Target, find_target

USAGE = """\
lightning-3d launch KIND [--dry] [launch.KEY=VALUE ...] [OVERRIDES]

Checks a configuration as `lightning-3d train ... trainer.dry=true` does and hands the run to the nodes of its cluster.

  torchrun     becomes torchrun on this node; run the same command on every node
  slurm        submits a job with sbatch, in which srun starts the ranks
  jobset       creates a JobSet on Kubernetes with kubectl
  pytorchjob   creates a PyTorchJob of the Kubeflow training operator with kubectl

  --dry        prints what would be run or submitted, and nothing else

Nodes, GPUs and ranks are those of the cluster: cluster=h100_32x8. Everything else is an option:

"""


@dataclass(frozen=True)
class Kind:
    """A launcher.

    Attributes:
        counted: whether the cluster must say what it has.
        elsewhere: whether its nodes see other files than this machine.
    """

    options: type[Options]
    render: Callable[[Target, Any], str]
    submit: Callable[[Target, Any], int]
    counted: bool = True
    elsewhere: bool = False


KINDS = {
    "torchrun": Kind(TorchrunOptions, torchrun.render, torchrun.submit, counted=False),
    "slurm": Kind(SlurmOptions, slurm.render, slurm.submit),
    "jobset": Kind(KubernetesOptions, kubernetes.render_jobset, kubernetes.submit_jobset, elsewhere=True),
    "pytorchjob": Kind(KubernetesOptions, kubernetes.render_pytorchjob, kubernetes.submit_pytorchjob, elsewhere=True),
}


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    if not arguments or set(arguments) & {"--help", "-h"}:
        print(USAGE + options_text(), end="")
        return 0
    return guarded(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    dry = "--dry" in arguments
    rest = [line for line in arguments if line != "--dry"]
    kind = _kind(rest)
    options, overrides = split([line for line in rest if line != kind])
    launcher = KINDS[kind]
    chosen = read_options(launcher.options, options)
    target = find_target(overrides, counted=launcher.counted, elsewhere=launcher.elsewhere)
    if dry:
        print(launcher.render(target, chosen), end="", flush=True)
        return 0
    return launcher.submit(target, chosen)


def _kind(arguments: list[str]) -> str:
    """The word of the command line that is neither an option nor an override."""
    words = [line for line in arguments if "=" not in line and not line.startswith(("-", "~", "+"))]
    if len(words) != 1 or words[0] not in KINDS:
        what = f'"{words[0]}" is none.{did_you_mean(words[0], KINDS)}' if words else "None was given."
        what = f"{listed(words)} are several." if len(words) > 1 else what
        raise ConfigError(f"A launch has one kind: {listed(KINDS, last='or')}. {what}")
    return words[0]


def options_text() -> str:
    """The options of all launchers, with their types and defaults."""
    names: dict[type[Options], list[str]] = {}
    for name, kind in KINDS.items():
        names.setdefault(kind.options, []).append(name)
    blocks = [f"{listed(of)}\n{_defaults(asdict(kind()))}" for kind, of in names.items()]
    return "\n\n".join(blocks) + "\n"


def _defaults(options: dict[str, Any]) -> str:
    return "\n".join(f"  launch.{key}={json.dumps(value)}" for key, value in options.items())
