"""`lightning-3d launch jobset` and `pytorchjob`: manifests for kubectl, in whose pods torchrun starts the ranks.

A pod is a node of the cluster. The pods meet at the first one, whose name Kubernetes resolves (c10d rendezvous). They are stopped and
restarted together, and then resume the newest checkpoint in the run folder, which all of them see.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from lightning_3d.errors import ConfigError
from lightning_3d.launchers.options import KubernetesOptions
from lightning_3d.launchers.submit import hand_to
from lightning_3d.launchers.target import Target, as_name
from lightning_3d.launchers.torchrun import torchrun_command

# torchrun would know pod 0 by its name in the headless service, which may not resolve yet when the pod begins.
_FIRST_POD_HOSTS = 'export PET_RDZV_CONF="$PET_RDZV_CONF,is_host=$((JOB_COMPLETION_INDEX == 0))"; exec "$@"'
_LABEL = 63  # letters of a DNS label (RFC 1035): names of pods and services
_NODE = "node"
_CONTAINER = "pytorch"  # the name that the training operator asks for
_PORT = "pytorchjob-port"
_QUANTITY = r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|[kmunp])?"


def jobset(target: Target, options: KubernetesOptions) -> dict[str, Any]:
    """Build a JobSet (jobset.x-k8s.io/v1alpha2) with one indexed Job and a pod for each node.

    Its headless service gives pod 0 the name NAME-node-0-0.NAME.
    """
    name = _name(target, options, before=f"-{_NODE}-0-", after="-abcde")  # Kubernetes appends five letters to names of pods
    pod = _pod(target, options, name, master=f"{name}-{_NODE}-0-0.{name}", before=["sh", "-c", _FIRST_POD_HOSTS, "sh"])
    job = {
        "parallelism": target.nodes,
        "completions": target.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"labels": dict(options.labels)}, "spec": pod | {"restartPolicy": "Never"}},
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": options.restarts},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(options, name), "spec": spec}


def pytorchjob(target: Target, options: KubernetesOptions) -> dict[str, Any]:
    """Build a PyTorchJob (kubeflow.org/v1) with a fixed number of workers and no master. Worker 0 has a service of its name."""
    name = _name(target, options, before="-worker-", after="")
    pod = _pod(target, options, name, master=f"{name}-worker-0")
    worker = {
        "replicas": target.nodes,
        "restartPolicy": "OnFailure" if options.restarts else "Never",
        "template": {"metadata": {"labels": dict(options.labels)}, "spec": pod},
    }
    spec = {
        "nprocPerNode": str(target.ranks_per_node),
        # The operator adds up the restarts of all pods.
        "runPolicy": {"backoffLimit": options.restarts * target.nodes, "cleanPodPolicy": "Running"},
        "elasticPolicy": {"rdzvBackend": "c10d", "rdzvPort": options.port, "minReplicas": target.nodes, "maxReplicas": target.nodes},
        "pytorchReplicaSpecs": {"Worker": worker},
    }
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _metadata(options, name), "spec": spec}


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    space = {"namespace": options.namespace} if options.namespace is not None else {}
    labels = {"labels": dict(options.labels)} if options.labels else {}
    return {"name": name, **space, **labels}


def _pod(target: Target, options: KubernetesOptions, name: str, master: str, before: Sequence[str] = ()) -> dict[str, Any]:
    """Build the pod of a node, the same on every node.

    Args:
        master: host name of the first pod.
        before: words before torchrun: a command that replaces itself with torchrun.
    """
    if not options.image:
        raise ConfigError("launch.image must be given: set it to a container image with this package and its dependencies.")
    if options.env.keys() & {"MASTER_ADDR", "MASTER_PORT"}:
        raise ConfigError("launch.env must not contain MASTER_ADDR or MASTER_PORT, because the launcher sets them. Use launch.port.")
    command = torchrun_command(
        target,
        options.python,
        endpoint=f"{master}:{options.port}",
        run=name,
        folder=_folder(target, options, name),
    )
    environment = {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(options.port),
        "PET_RDZV_CONF": f"read_timeout={options.patience},join_timeout={options.patience}",
        "PYTHONUNBUFFERED": "1",
        **options.env,
    }
    container: dict[str, Any] = {
        "name": _CONTAINER,
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
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _quantity("shm", options.shm)}}]
    volumes += [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in options.volumes]
    pod = {"containers": [{key: value for key, value in container.items() if value != []}], "volumes": volumes}
    return pod | ({"nodeSelector": dict(options.node_selector)} if options.node_selector else {})


def _resources(target: Target, options: KubernetesOptions) -> dict[str, Any]:
    """Request all GPUs of the node, and the other resources that the options set."""
    asked = {"cpu": options.cpu, "memory": options.memory}
    requests = {key: _quantity(key, value) for key, value in asked.items() if value is not None}
    limits = {options.gpu: target.gpus_per_node} if target.gpus_per_node else {}
    return {key: value for key, value in (("limits", limits), ("requests", requests)) if value}


def _folder(target: Target, options: KubernetesOptions, name: str) -> str:
    """Choose the run folder: in a volume, where all pods see it, also restarted ones."""
    for claim, path in options.volumes.items():
        _require_label("launch.volumes", claim)
        if not path.startswith("/") or ":" in path:
            raise ConfigError(f"The path of {claim} in launch.volumes must be absolute, for example /mnt/{claim}; got {path!r}.")
    folder = target.folder or next((f"{path.rstrip('/')}/{name}" for path in options.volumes.values()), None)
    inside = folder is not None and any(PurePosixPath(folder).is_relative_to(path) for path in options.volumes.values())
    if folder is None or not inside:
        where = f"{folder} is not in a volume" if folder is not None else "would be inside the pod and would be lost with it"
        raise ConfigError(
            f"The run folder {where}. All nodes write checkpoints there, so it must be in a shared volume: "
            + ("launch.volumes={CLAIM: /mnt/runs}" if not options.volumes else f"hydra.run.dir={[*options.volumes.values()][0]}/NAME")
            + "."
        )
    return folder


def _name(target: Target, options: KubernetesOptions, *, before: str, after: str) -> str:
    """Choose the name of the job, short enough for the names that Kubernetes derives from it."""
    room = _LABEL - len(f"{before}{target.nodes - 1}{after}")
    if options.namespace is not None:
        _require_label("launch.namespace", options.namespace)
    if options.name is None:
        return target.name[:room].rstrip("-")
    near = as_name(options.name)[:room].rstrip("-")
    if options.name != near:
        raise ConfigError(
            f"launch.name must start with a letter and have at most {room} lower-case letters, digits and dashes, for example {near};"
            f" got {options.name!r}."
        )
    return near


def _require_label(key: str, name: str) -> None:
    if len(name) > _LABEL or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        raise ConfigError(f"A name in {key} must have at most {_LABEL} lower-case letters, digits and dashes; got {name!r}.")


def _quantity(key: str, value: str) -> str:
    if not re.fullmatch(_QUANTITY, value):
        example = "8" if key == "cpu" else "64Gi"
        raise ConfigError(f"launch.{key} must be a Kubernetes quantity, for example {example}; got {value!r}.")
    return value


def _literal(word: str) -> str:
    """Escape a word: Kubernetes replaces $(NAME) by a variable, and $$ by $."""
    return word.replace("$", "$$")


def as_yaml(manifest: dict[str, Any]) -> str:
    """Write the manifest as text for kubectl."""
    return yaml.safe_dump(manifest, sort_keys=False, width=10_000, allow_unicode=True)


def render_jobset(target: Target, options: KubernetesOptions) -> str:
    return as_yaml(jobset(target, options))


def render_pytorchjob(target: Target, options: KubernetesOptions) -> str:
    return as_yaml(pytorchjob(target, options))


def submit_jobset(target: Target, options: KubernetesOptions) -> int:
    return hand_to(["kubectl", "create", "-f", "-"], render_jobset(target, options))


def submit_pytorchjob(target: Target, options: KubernetesOptions) -> int:
    return hand_to(["kubectl", "create", "-f", "-"], render_pytorchjob(target, options))
