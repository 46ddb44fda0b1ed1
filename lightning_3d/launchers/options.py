"""What a launcher must know beside the configuration of the run: `launch.KEY=VALUE` on the command line, with types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.config.keys import explain_value, unknown_key
from lightning_3d.errors import ConfigError
from lightning_3d.layout.sizes import check_sizes

PREFIX = "launch."

Kind = TypeVar("Kind", bound="Options")


@dataclass
class Options:
    """Of every launcher.

    Attributes:
        name: of the job; None takes the recipe's, or the model's and the layout's.
        python: the interpreter on the nodes.
        env: environment variables of the ranks.
    """

    name: str | None = None
    python: str = "python"
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class TorchrunOptions(Options):
    """`lightning-3d launch torchrun`.

    Attributes:
        python: None is the interpreter that runs the launcher.
        endpoint: HOST or HOST:PORT of the first node, where the nodes meet; must be given for several nodes.
        address: of this node, as the others reach it; None is its name, which then must mean the same on all nodes.
        restarts: how often all ranks are started again after a failure.
    """

    python: str | None = None  # type: ignore[assignment]
    endpoint: str | None = None
    address: str | None = None
    restarts: int = 0


@dataclass
class SlurmOptions(Options):
    """`lightning-3d launch slurm`. What is None is left to the site's defaults.

    Attributes:
        python: None is the interpreter that runs the launcher.
        partition, account, qos, time: as `sbatch` takes them.
        cpus_per_task: of each rank.
        memory: of each node, as SLURM writes it: 500G; 0 is all.
        exclusive: whether the nodes run nothing else.
        requeue: whether a job that was preempted, or whose node failed, starts again and goes on.
        output: file of what the job prints; %j is its number.
        sbatch, srun: further options, each as `--option=value`.
        setup: lines of shell that run once on the first node before the ranks start: `module load ...`.
    """

    python: str | None = None  # type: ignore[assignment]
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    exclusive: bool = False
    requeue: bool = True
    output: str = "slurm-%j.out"
    sbatch: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)


@dataclass
class KubernetesOptions(Options):
    """`lightning-3d launch jobset` and `pytorchjob`.

    Attributes:
        namespace: where the job is made; None: kubectl's own.
        image: with this package, its dependencies and torchrun; must be given.
        volumes: path in the container by name of a persistent volume claim. The run folder must lie in one.
        shm: size of /dev/shm, which NCCL and data loaders use.
        gpu: name of the resource.
        cpu, memory: requested for each node; None requests none.
        secrets: names of secrets whose entries become environment variables.
        node_selector, labels: of the pods; labels of the job too (queues).
        restarts: how often all pods are started again after a failure.
        port: where the nodes meet.
        patience: seconds that a node waits for the others, whose images may still be on their way.
    """

    image: str | None = None
    namespace: str | None = None
    volumes: dict[str, str] = field(default_factory=dict)
    shm: str = "64Gi"
    gpu: str = "nvidia.com/gpu"
    cpu: str | None = None
    memory: str | None = None
    secrets: list[str] = field(default_factory=list)
    node_selector: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    port: int = 29500
    patience: int = 1800


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options of the launcher, overrides of the run), each in order."""
    options = [line for line in arguments if line.lstrip("+").startswith(PREFIX)]
    return options, [line for line in arguments if line not in options]


def read_options(kind: type[Kind], lines: Sequence[str]) -> Kind:
    """The options of a launcher from its part of the command line, which is written as Hydra's overrides are.

    Raises:
        ConfigError: an option that does not exist, of a wrong type, or out of range.
    """
    config = OmegaConf.structured(kind)
    known = [option.name for option in fields(kind)]
    for line in lines:
        key, value = _parse(line)
        name = key.removeprefix(PREFIX)
        if name.partition(".")[0] not in known:
            raise ConfigError(unknown_key(PREFIX + name.partition(".")[0], known))
        try:
            OmegaConf.update(config, name, value, force_add=True)
        except OmegaConfBaseException as error:
            reason = str(explain_value(error)).partition(": ")[2] or str(explain_value(error))
            raise ConfigError(f"{PREFIX}{name}: {reason}") from error
    options = OmegaConf.to_object(config)
    assert isinstance(options, kind)
    for name in ("cpus_per_task", "port", "patience"):
        check_sizes(**{PREFIX + name: getattr(options, name, None)})
    if getattr(options, "restarts", 0) < 0:
        raise ConfigError(f"launch.restarts is {options.restarts}; it must be at least 0.")  # type: ignore[attr-defined]
    return options


def _parse(line: str) -> tuple[str, Any]:
    try:
        override: Override = OverridesParser.create().parse_override(line.lstrip("+"))
    except HydraException as error:
        raise ConfigError(f'The option "{line}" is not understood: {" ".join(str(error).split())}') from error
    if override.is_sweep_override():
        raise ConfigError(f'The option "{line}" has several values; a launch has one. Lists are written [A,B].')
    return override.key_or_group, override.value()
