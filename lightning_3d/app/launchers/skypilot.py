"""`lightning-3d launch skypilot`: a task of SkyPilot, which rents the nodes of a cluster and starts
torchrun on each of them.

The file follows the task YAML of SkyPilot 0.12
(docs.skypilot.co/en/latest/reference/yaml-spec.html).
"""

from __future__ import annotations

import os
from typing import Any

from lightning_3d.app.launchers.node_script import (
    NodeVariables,
    check_lists,
    gpu_of,
    node_script,
    run_folder,
)
from lightning_3d.app.launchers.options import SkyPilotOptions
from lightning_3d.app.launchers.submit import as_yaml, hand_file_to
from lightning_3d.app.launchers.target import LaunchTarget, as_name
from lightning_3d.errors import ConfigError, listed

_GPUS = {
    "NVIDIA A100 80GB SXM": "A100-80GB",
    "NVIDIA H100 SXM": "H100",
    "NVIDIA H200 SXM": "H200",
    "NVIDIA GB200": "GB200",
}
_NODE = NodeVariables(rank="SKYPILOT_NODE_RANK", addresses="SKYPILOT_NODE_IPS")


def task(target: LaunchTarget, options: SkyPilotOptions) -> dict[str, Any]:
    """Build the task.

    Raises:
        ConfigError: an option is missing, or SkyPilot would not take it.
    """
    check_lists(options, "sky")
    name = _name(target, options)
    folder = run_folder(target, options.volumes, name, nodes_have_others=options.image is None)
    script = node_script(
        target,
        options,
        _NODE,
        name=name,
        folder=folder,
        restarts=0 if options.managed else options.restarts,
    )
    content: dict[str, Any] = {
        "name": name,
        "num_nodes": target.nodes,
        "resources": _resources(target, options),
        "envs": {"PYTHONUNBUFFERED": "1", **options.env},
        "secrets": dict.fromkeys(options.secrets),
        "workdir": options.workdir,
        "file_mounts": dict(options.files),
        "volumes": {path: volume for volume, path in options.volumes.items()},
        "setup": "\n".join(["set -e", *options.setup]) + "\n" if options.setup else None,
        "run": script,
        "config": (
            {"docker": {"run_options": [f"--shm-size={options.shm}"]}}
            if options.shm is not None
            else None
        ),
    }
    return {key: value for key, value in content.items() if value not in (None, {}, [])}


def _resources(target: LaunchTarget, options: SkyPilotOptions) -> dict[str, Any]:
    gpu = gpu_of(target, options.gpu, _GPUS, "launch.gpu=H100; sky show-gpus shows the catalog")
    if gpu is not None and ":" in gpu:
        raise ConfigError(
            f"launch.gpu must be the name of a GPU without a count, for example H100; got {gpu!r}."
        )
    given = {
        "infra": options.infra,
        "accelerators": f"{gpu}:{target.gpus_per_node}" if gpu is not None else None,
        "cpus": options.cpu,
        "memory": options.memory,
        "disk_size": _disk(options.disk),
        "use_spot": options.spot or None,
        "image_id": f"docker:{options.image}" if options.image else None,
        "labels": dict(options.labels) or None,
        "job_recovery": (
            {"max_restarts_on_errors": options.restarts}
            if options.managed and options.restarts
            else None
        ),
    }
    return {key: value for key, value in given.items() if value is not None}


def _disk(size: str | None) -> int | str | None:
    return int(size) if size is not None and size.isdigit() else size


def _name(target: LaunchTarget, options: SkyPilotOptions) -> str:
    if options.name is not None and options.name != as_name(options.name):
        raise ConfigError(
            "launch.name must start with a letter and have only lower-case letters, digits and"
            f" dashes, for example {as_name(options.name)}; got {options.name!r}."
        )
    return options.name or target.name


def command(target: LaunchTarget, options: SkyPilotOptions) -> list[str]:
    """Build the command that submits the file, which is its last argument."""
    if absent := [name for name in options.secrets if name not in os.environ]:
        raise ConfigError(
            f"launch.secrets names {listed(absent)}, but no such environment variable is set on"
            " this machine. Set it first."
        )
    start = (
        ["sky", "jobs", "launch"]
        if options.managed
        else ["sky", "launch", "--cluster", _name(target, options)]
    )
    secrets = [word for name in options.secrets for word in ("--secret", name)]
    return [*start, *secrets, *options.sky]


def render(target: LaunchTarget, options: SkyPilotOptions) -> str:
    return as_yaml(task(target, options))


def submit(target: LaunchTarget, options: SkyPilotOptions) -> int:
    """Run sky launch or sky jobs launch, which shows prices and asks before it rents machines."""
    text = render(target, options)
    return hand_file_to(command(target, options), text, suffix=".sky.yaml", package="skypilot")
