"""Options of launchers besides the configuration of the run: `launch.KEY=VALUE` on the command
line, with types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.app.config.keys import explain_value, unknown_key
from lightning_3d.app.runs.slurm_request import SlurmRequest
from lightning_3d.errors import ConfigError
from lightning_3d.layout.sizes import check_sizes

PREFIX = "launch."

Kind = TypeVar("Kind", bound="Options")


@dataclass
class Options:
    """Options of every launcher.

    Attributes:
        name: name of the job. null uses the name of the recipe, or else the names of the model and
            the layout.
        python: Python interpreter on the nodes.
        env: environment variables of the ranks.
    """

    name: str | None = None
    python: str = "python"
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class TorchrunOptions(Options):
    """Options of `lightning-3d launch torchrun`.

    Attributes:
        python: Python interpreter on the nodes. null uses the one that runs the launcher.
        endpoint: HOST or HOST:PORT of the first node, to which the others connect. Must be given
            for several nodes.
        address: address at which the other nodes reach this one. null uses its host name, which all
            nodes must then be able to resolve.
        restarts: number of times that all ranks are restarted after a failure.
    """

    python: str | None = None  # type: ignore[assignment]
    endpoint: str | None = None
    address: str | None = None
    restarts: int = 0


@dataclass
class SlurmOptions(SlurmRequest, Options):
    """Options of `lightning-3d launch slurm`. Null: the site's default.

    Attributes:
        python: Python interpreter on the nodes. null uses the one that runs the launcher.
        time: time limit in sbatch's notation, such as 24:00:00.
        exclusive: true keeps other jobs off the nodes.
        requeue: true restarts and resumes the job after it was preempted or one of its nodes
            failed.
        output: file for the output of the job. %j is the job's number.
        sbatch: further options of sbatch, each as "--option=value".
    """

    python: str | None = None  # type: ignore[assignment]
    time: str | None = None
    exclusive: bool = False
    requeue: bool = True
    output: str = "slurm-%j.out"
    sbatch: list[str] = field(default_factory=list)


@dataclass
class KubernetesOptions(Options):
    """Options of `lightning-3d launch jobset` and `pytorchjob`.

    Attributes:
        image: container image with this package, its dependencies and torchrun. Must be given.
        namespace: namespace of the job. null uses kubectl's current namespace.
        volumes: names of persistent volume claims, each with its path in the container. The run
            folder must be in one of them.
        shm: size of /dev/shm, which NCCL and data loaders use.
        gpu: name of the GPU resource.
        cpu: CPU cores requested for each node. null requests none.
        memory: memory requested for each node. null requests none.
        secrets: names of secrets whose entries become environment variables.
        node_selector: node selector of the pods.
        labels: labels of the pods and of the job, for example the name of a queue.
        restarts: number of times that all pods are restarted after a failure.
        port: port at which the nodes connect to each other.
        patience: seconds that a node waits for the others, which may still be pulling the image.
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


@dataclass
class TrainJobOptions(KubernetesOptions):
    """Options of `lightning-3d launch trainjob`.

    Attributes:
        runtime: name of the cluster's ClusterTrainingRuntime for PyTorch, such as
            torch-distributed. null creates a TrainingRuntime of the job's name. With a runtime of
            the cluster, launch.restarts and launch.secrets are decided by the runtime and cannot be
            set.
    """

    runtime: str | None = None


@dataclass
class CloudOptions(Options):
    """Options of launchers that rent machines.

    Attributes:
        image: Docker image with this package and its dependencies.
        gpu: name of the GPU in the launcher's catalog. null takes it from the cluster.
        cpu: CPU cores of each node.
        memory: memory of each node.
        disk: disk of each node.
        spot: true uses spot machines, which can be preempted.
        volumes: names of volumes, each with its path on the nodes. The run folder must be in one of
            them.
        files: paths on the nodes, each with the local path to copy there.
        secrets: names of secrets that become environment variables.
        setup: shell lines that run on every node before the ranks start, such as ["pip install -e
            ."].
        restarts: number of times that all ranks are restarted on their nodes after a failure.
        port: port at which the nodes connect to each other.
        patience: seconds that a node waits for the others.
    """

    image: str | None = None
    gpu: str | None = None
    cpu: str | None = None
    memory: str | None = None
    disk: str | None = None
    spot: bool = False
    volumes: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    restarts: int = 0
    port: int = 29500
    patience: int = 1800


@dataclass
class SkyPilotOptions(CloudOptions):
    """Options of `lightning-3d launch skypilot`. Null: SkyPilot's default.

    Attributes:
        image: Docker image with this package and its dependencies. null uses SkyPilot's image of
            the machine.
        gpu: SkyPilot's name of the GPU, such as H100 or A100-80GB. null takes it from the cluster.
        cpu: CPU cores of each node, such as 64 or 64+ (at least 64).
        memory: memory of each node in GiB, such as 500 or 500+ (at least 500).
        disk: disk of each node, such as 500 (GB) or 1TB.
        volumes: names of SkyPilot volumes, each with its path on the nodes. The run folder must be
            in one of them, or on a file system of the machines that you name with hydra.run.dir.
        files: paths on the nodes, each with the local path or bucket to copy there, such as {/data:
            "s3://bucket/corpus"}.
        secrets: names of environment variables of this machine that become secrets of the job.
        restarts: number of times that all ranks are restarted after a failure. In a managed job,
            SkyPilot restarts them, also on new nodes.
        infra: cloud, region or Kubernetes context, such as aws/us-east-1 or k8s. null lets SkyPilot
            choose the cheapest.
        managed: true submits a managed job (sky jobs launch), which SkyPilot recovers after
            preemption. It returns the nodes at the end.
        workdir: local folder to copy to the nodes. The run starts in it.
        shm: size of /dev/shm in a Docker container on a virtual machine, such as 64g.
        labels: labels of the machines.
        sky: further options of sky launch or sky jobs launch, each as "--option" or
            "--option=value".
    """

    infra: str | None = None
    managed: bool = False
    workdir: str | None = None
    shm: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    sky: list[str] = field(default_factory=list)


@dataclass
class DstackOptions(CloudOptions):
    """Options of `lightning-3d launch dstack`. Null: dstack's default.

    Attributes:
        image: Docker image with this package and its dependencies. null uses dstack's image, in
            which launch.setup must install them.
        gpu: dstack's name of the GPU and its memory, such as H100 or A100:80GB. null takes it from
            the cluster.
        cpu: CPU cores of each node, such as 64 or 64.. (at least 64).
        memory: memory of each node, such as 500GB or 500GB.. (at least 500 GB).
        disk: disk of each node, such as 500GB or 500GB.. (at least 500 GB).
        volumes: names of network volumes or paths on the machines, each with its path in the
            container. The run folder must be in one of them. Several nodes need a volume that all
            of them can write to.
        files: paths in the container, each with the local path to copy there, such as {/work: .}.
        secrets: names of dstack's secrets that become environment variables.
        shm: size of /dev/shm, which NCCL and data loaders use.
        retry: how long dstack tries to resubmit the run on all nodes, such as 1d. null does not
            retry.
        retry_on: events after which it does: no-capacity, interruption, error. dstack does not
            count retries, so with error it also resubmits, again and again, a run that cannot work.
        max_duration: most time that the run may take, such as 2d.
        fleets: fleets whose machines may be used.
        backends: clouds to consider.
        regions: regions to consider.
        dstack: further options of dstack apply, each as "--option" or "--option=value".
    """

    shm: str = "64GB"
    retry: str | None = None
    retry_on: list[str] = field(default_factory=lambda: ["no-capacity", "interruption"])
    max_duration: str | None = None
    fleets: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)
    dstack: list[str] = field(default_factory=list)


def meanings(kind: type) -> dict[str, str]:
    """Read the meaning of each option from the `Attributes:` of a dataclass and its bases, for
    `--help` and the documentation."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = (
            inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        )
        for entry in re.split(r"\n(?=    \w)", text):
            names, _, meaning = " ".join(entry.split()).partition(": ")
            found |= {name: meaning for name in names.split(", ") if meaning}
    return found


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate a command line into (options of the launcher, overrides of the run), each in
    order."""
    options = [line for line in arguments if line.lstrip("+").startswith(PREFIX)]
    return options, [line for line in arguments if line not in options]


def read_options(kind: type[Kind], lines: Sequence[str]) -> Kind:
    """Read the options of a launcher from its part of the command line, which uses the grammar of
    Hydra's overrides.

    Raises:
        ConfigError: an option does not exist, has a wrong type, or is out of range.
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
        raise ConfigError(f"launch.restarts must be at least 0; got {options.restarts}.")  # type: ignore[attr-defined]
    return options


def _parse(line: str) -> tuple[str, Any]:
    try:
        override: Override = OverridesParser.create().parse_override(line.lstrip("+"))
    except HydraException as error:
        raise ConfigError(
            f'The option "{line}" cannot be parsed: {" ".join(str(error).split())}'
        ) from error
    if override.is_sweep_override():
        raise ConfigError(
            f'The option "{line}" has several values, but lightning-3d launch uses one. Write a'
            " list as [A,B]."
        )
    return override.key_or_group, override.value()
