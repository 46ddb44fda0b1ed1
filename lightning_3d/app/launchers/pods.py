"""Pods of a job on Kubernetes: one pod is a node of the cluster, in which torchrun starts the
ranks.

The pods meet at the first one, whose name Kubernetes resolves (c10d rendezvous). They are stopped
and restarted together, and then resume the newest checkpoint in the run folder, which all of them
see.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lightning_3d.app.launchers.options import KubernetesOptions
from lightning_3d.app.launchers.run_folder import folder_in_a_volume
from lightning_3d.app.launchers.target import LaunchTarget, as_name
from lightning_3d.app.launchers.torchrun import torchrun_command
from lightning_3d.errors import ConfigError

# torchrun would know pod 0 by its name in the headless service, which may not resolve yet when the
# pod begins.
FIRST_POD_HOSTS = (
    "sh",
    "-c",
    'export PET_RDZV_CONF="$PET_RDZV_CONF,is_host=$((JOB_COMPLETION_INDEX == 0))"; exec "$@"',
    "sh",
)
"""Words before torchrun in an indexed Job: the first pod hosts the rendezvous."""

NODE = "node"
"""Name of the replicated job of a JobSet."""

_LABEL = 63  # letters of a DNS label (RFC 1035): names of pods and services
_PORT = "pytorchjob-port"
_QUANTITY = r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|[kmunp])?"


def metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    """Name, namespace and labels of a job."""
    space = {"namespace": options.namespace} if options.namespace is not None else {}
    labels = {"labels": dict(options.labels)} if options.labels else {}
    return {"name": name, **space, **labels}


def pod(
    target: LaunchTarget,
    options: KubernetesOptions,
    name: str,
    *,
    master: str,
    before: Sequence[str] = (),
    container: str = "pytorch",
) -> dict[str, Any]:
    """Build the pod of a node, the same on every node.

    Args:
        master: host name of the first pod.
        before: words before torchrun: a command that replaces itself with torchrun.
        container: name of the container. The training operator v1 asks for "pytorch".
    """
    if not options.image:
        raise ConfigError(
            "launch.image must be given: set it to a container image with this package and its"
            " dependencies."
        )
    if options.env.keys() & {"MASTER_ADDR", "MASTER_PORT"}:
        raise ConfigError(
            "launch.env must not contain MASTER_ADDR or MASTER_PORT, because the launcher sets"
            " them. Use launch.port."
        )
    command = torchrun_command(
        target,
        options.python,
        endpoint=f"{master}:{options.port}",
        run=name,
        folder=_run_folder(target, options, name),
    )
    environment = {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(options.port),
        "PET_RDZV_CONF": f"read_timeout={options.patience},join_timeout={options.patience}",
        "PYTHONUNBUFFERED": "1",
        **options.env,
    }
    content: dict[str, Any] = {
        "name": container,
        "image": options.image,
        "command": [_literal(word) for word in (*before, *command)],
        "env": [{"name": key, "value": _literal(value)} for key, value in environment.items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in options.secrets],
        "ports": [{"name": _PORT, "containerPort": options.port}],
        "resources": _resources(target, options),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": claim, "mountPath": path} for claim, path in options.volumes.items()),
        ],
    }
    volumes: list[dict[str, Any]] = [
        {
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": _quantity("shm", options.shm)},
        }
    ]
    volumes += [
        {"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in options.volumes
    ]
    built = {
        "containers": [{key: value for key, value in content.items() if value != []}],
        "volumes": volumes,
    }
    return built | ({"nodeSelector": dict(options.node_selector)} if options.node_selector else {})


def _run_folder(target: LaunchTarget, options: KubernetesOptions, name: str) -> str:
    for claim in options.volumes:
        _require_label("launch.volumes", claim)
    return folder_in_a_volume(target, options.volumes, name, inside="the pod")


def _resources(target: LaunchTarget, options: KubernetesOptions) -> dict[str, Any]:
    """Request all GPUs of the node, and the other resources that the options set."""
    asked = {"cpu": options.cpu, "memory": options.memory}
    requests = {key: _quantity(key, value) for key, value in asked.items() if value is not None}
    limits = {options.gpu: target.gpus_per_node} if target.gpus_per_node else {}
    return {key: value for key, value in (("limits", limits), ("requests", requests)) if value}


def job_name(target: LaunchTarget, options: KubernetesOptions, *, before: str, after: str) -> str:
    """Choose the name of the job, short enough for the names that Kubernetes derives from it."""
    room = _LABEL - len(f"{before}{target.nodes - 1}{after}")
    if options.namespace is not None:
        _require_label("launch.namespace", options.namespace)
    if options.name is None:
        return target.name[:room].rstrip("-")
    near = as_name(options.name)[:room].rstrip("-")
    if options.name != near:
        raise ConfigError(
            f"launch.name must start with a letter and have at most {room} lower-case letters,"
            f" digits and dashes, for example {near}; got {options.name!r}."
        )
    return near


def _require_label(key: str, name: str) -> None:
    if len(name) > _LABEL or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        raise ConfigError(
            f"A name in {key} must have at most {_LABEL} lower-case letters, digits and dashes; got"
            f" {name!r}."
        )


def _quantity(key: str, value: str) -> str:
    if not re.fullmatch(_QUANTITY, value):
        example = "8" if key == "cpu" else "64Gi"
        raise ConfigError(
            f"launch.{key} must be a Kubernetes quantity, for example {example}; got {value!r}."
        )
    return value


def _literal(word: str) -> str:
    """Escape a word: Kubernetes replaces $(NAME) by a variable, and $$ by $."""
    return word.replace("$", "$$")
