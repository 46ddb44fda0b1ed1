"""`lightning-3d launch dstack`: a task of dstack, which rents or reuses the nodes of a cluster and
starts torchrun on each of them.

The file follows `type: task` of dstack 0.21 (dstack.ai/docs/reference/dstack.yml/task).
"""

from __future__ import annotations

import re
from typing import Any

from lightning_3d.app.launchers.node_script import (
    NodeVariables,
    check_lists,
    gpu_of,
    node_script,
    run_folder,
)
from lightning_3d.app.launchers.options import DstackOptions
from lightning_3d.app.launchers.submit import as_yaml, hand_file_to
from lightning_3d.app.launchers.target import LaunchTarget, as_name
from lightning_3d.errors import ConfigError, listed

_GPUS = {
    "NVIDIA A100 80GB SXM": "A100:80GB",
    "NVIDIA H100 SXM": "H100",
    "NVIDIA H200 SXM": "H200",
    "NVIDIA GB200": "GB200",
}
_NODE = NodeVariables(rank="DSTACK_NODE_RANK", addresses="DSTACK_NODES_IPS")
_NAME = 41  # letters of the name of a run
_EVENTS = ("no-capacity", "interruption", "error")
_DURATION = r"[0-9]+ *[smhdw]?"


def task(target: LaunchTarget, options: DstackOptions) -> dict[str, Any]:
    """Build the task.

    Raises:
        ConfigError: an option is missing, or dstack would not take it.
    """
    check_lists(options, "dstack")
    name = _name(target, options)
    folder = run_folder(target, options.volumes, name, nodes_have_others=False)
    script = node_script(
        target,
        options,
        _NODE,
        name=name,
        folder=folder,
        setup=options.setup,
        restarts=options.restarts,
    )
    for text in (script, *options.env.values()):
        _refuse_variables(text)
    content: dict[str, Any] = {
        "type": "task",
        "name": name,
        "nodes": target.nodes,
        "image": options.image,
        "env": {
            "PYTHONUNBUFFERED": "1",
            **options.env,
            **{secret: f"${{{{ secrets.{secret} }}}}" for secret in options.secrets},
        },
        "files": [{"local_path": source, "path": path} for path, source in options.files.items()],
        "volumes": [_volume(source, path) for source, path in options.volumes.items()],
        "commands": [script],
        "resources": _resources(target, options),
        "spot_policy": "spot" if options.spot else "on-demand",
        "retry": _retry(options),
        "max_duration": _duration("max_duration", options.max_duration),
        "fleets": list(options.fleets),
        "backends": list(options.backends),
        "regions": list(options.regions),
    }
    return {key: value for key, value in content.items() if value not in (None, {}, [])}


def _resources(target: LaunchTarget, options: DstackOptions) -> dict[str, Any]:
    gpu = gpu_of(target, options.gpu, _GPUS, "launch.gpu=H100; dstack offer shows the catalog")
    if gpu is not None and not re.fullmatch(r"[A-Za-z][\w-]*(:[0-9.]+[GM]B(\.\.)?)?", gpu):
        raise ConfigError(
            "launch.gpu must be the name of a GPU, with its memory or without, for example"
            f" A100:80GB; got {gpu!r}."
        )
    given = {
        "cpu": options.cpu,
        "memory": options.memory,
        "disk": options.disk,
        "gpu": f"{gpu}:{target.gpus_per_node}" if gpu is not None else 0,
        "shm_size": options.shm,
    }
    return {key: value for key, value in given.items() if value is not None}


def _volume(source: str, path: str) -> dict[str, str]:
    """Build a mount of a network volume, or of a folder of the machine if the name is a path."""
    return {"instance_path" if "/" in source else "name": source, "path": path}


def _retry(options: DstackOptions) -> dict[str, Any] | None:
    if options.retry is None:
        return None
    for event in options.retry_on or ("none",):
        if event not in _EVENTS:
            raise ConfigError(
                f"launch.retry_on must be a list of {listed(_EVENTS)}; got {event!r}."
            )
    return {"on_events": list(options.retry_on), "duration": _duration("retry", options.retry)}


def _duration(key: str, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(_DURATION, value):
        raise ConfigError(
            f"launch.{key} must be a duration in dstack's notation, for example 90m, 12h or 2d; got"
            f" {value!r}."
        )
    return value


def _name(target: LaunchTarget, options: DstackOptions) -> str:
    if options.name is None:
        return target.name[:_NAME].rstrip("-")
    near = as_name(options.name)[:_NAME].rstrip("-")
    if options.name != near or len(near) < 2:
        raise ConfigError(
            f"launch.name must start with a letter and have 2 to {_NAME} lower-case letters, digits"
            f" and dashes, for example {near if len(near) > 1 else 'run-1'}; got {options.name!r}."
        )
    return near


def _refuse_variables(text: str) -> None:
    """Refuse a text that dstack would change: it replaces `${{ }}`, and `$$` where nothing with a
    dollar sign comes before."""
    if "${{" in text or text.find("$") == text.find("$$") != -1:
        raise ConfigError(
            "launch.env, launch.setup and the overrides must not contain ${{ or $$, because dstack"
            " would replace them."
        )


def render(target: LaunchTarget, options: DstackOptions) -> str:
    return as_yaml(task(target, options))


def submit(target: LaunchTarget, options: DstackOptions) -> int:
    """Run dstack apply, which shows offers and asks before it rents machines."""
    text = render(target, options)
    return hand_file_to(
        ["dstack", "apply", *options.dstack, "-f"], text, suffix=".dstack.yml", package="dstack"
    )
