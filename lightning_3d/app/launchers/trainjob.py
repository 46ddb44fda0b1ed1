"""`lightning-3d launch trainjob`: a TrainJob of Kubeflow Trainer v2
(trainer.kubeflow.org/v1alpha1), from which Trainer makes a JobSet.

A TrainJob gets its pods from a runtime. Without `launch.runtime`, a TrainingRuntime of the job's
name comes with it, which Trainer 2.0 and newer accept. A runtime of the cluster is patched instead
(`runtimePatches`, Trainer 2.2 and newer).
"""

from __future__ import annotations

from typing import Any

from lightning_3d.app.launchers.options import TrainJobOptions
from lightning_3d.app.launchers.pods import FIRST_POD_HOSTS, NODE, job_name, metadata, pod
from lightning_3d.app.launchers.submit import as_yaml, hand_to
from lightning_3d.app.launchers.target import LaunchTarget
from lightning_3d.errors import ConfigError, listed

_VERSION = "trainer.kubeflow.org/v1alpha1"
# the job of the runtime that a TrainJob configures
_TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
# Trainer refuses them
_RESERVED = {
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
}
_MANAGER = "lightning-3d.launch"


def documents(target: LaunchTarget, options: TrainJobOptions) -> list[dict[str, Any]]:
    """Build the TrainJob, after its TrainingRuntime unless the cluster has one.

    Raises:
        ConfigError: an option is missing or wrong, or only the runtime of the cluster can set it.
    """
    if reserved := sorted(_RESERVED & set(options.env)):
        raise ConfigError(
            f"launch.env must not contain {listed(reserved)}, because Trainer sets it."
        )
    # those of the JobSet that Trainer makes
    name = job_name(target, options, before=f"-{NODE}-0-", after="-abcde")
    node = pod(
        target,
        options,
        name,
        master=f"{name}-{NODE}-0-0.{name}",
        before=FIRST_POD_HOSTS,
        container=NODE,
    )
    (container,) = node["containers"]
    trainer = {
        "numNodes": target.nodes,
        "numProcPerNode": target.ranks_per_node,
        "image": container["image"],
        "command": container["command"],
        "env": container["env"],
        "resourcesPerNode": container["resources"],
    }
    if options.runtime is None:
        ref = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
        return [
            _runtime(target, options, name, node),
            _trainjob(options, name, {"runtimeRef": ref, "trainer": trainer}),
        ]
    _refuse_what_a_runtime_decides(options)
    ref = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": options.runtime,
    }
    return [
        _trainjob(
            options,
            name,
            {"runtimeRef": ref, "trainer": trainer, "runtimePatches": [_patch(options, node)]},
        )
    ]


def _trainjob(options: TrainJobOptions, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": _VERSION,
        "kind": "TrainJob",
        "metadata": metadata(options, name),
        "spec": spec,
    }


def _runtime(
    target: LaunchTarget, options: TrainJobOptions, name: str, node: dict[str, Any]
) -> dict[str, Any]:
    """Build the TrainingRuntime: what a TrainJob itself cannot set."""
    (container,) = node["containers"]
    kept = {
        key: container[key]
        for key in ("name", "image", "envFrom", "volumeMounts")
        if key in container
    }
    job = {
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": dict(options.labels)},
            "spec": node | {"containers": [kept], "restartPolicy": "Never"},
        },
    }
    jobset = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {"maxRestarts": options.restarts},
        "replicatedJobs": [
            {
                "name": NODE,
                "replicas": 1,
                "template": {"metadata": {"labels": _TRAINER}, "spec": job},
            }
        ],
    }
    labels = {**options.labels, "trainer.kubeflow.org/framework": "torch"}
    return {
        "apiVersion": _VERSION,
        "kind": "TrainingRuntime",
        "metadata": {**metadata(options, name), "labels": labels},
        "spec": {"mlPolicy": {"numNodes": target.nodes, "torch": {}}, "template": {"spec": jobset}},
    }


def _patch(options: TrainJobOptions, node: dict[str, Any]) -> dict[str, Any]:
    """Build the patch that adds volumes, node selector and labels to the pods of a runtime."""
    (container,) = node["containers"]
    spec = {**node, "containers": [{"name": NODE, "volumeMounts": container["volumeMounts"]}]}
    template = (
        {"spec": spec}
        if not options.labels
        else {"metadata": {"labels": dict(options.labels)}, "spec": spec}
    )
    jobs = [{"name": NODE, "template": {"spec": {"template": template}}}]
    return {
        "manager": _MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }


def _refuse_what_a_runtime_decides(options: TrainJobOptions) -> None:
    asked = [f"launch.{key}" for key in ("restarts", "secrets") if getattr(options, key)]
    if asked:
        raise ConfigError(
            f"The runtime {options.runtime} decides {listed(asked)}, which a TrainJob cannot"
            f" change. Leave out {listed(asked)}, or leave out launch.runtime: then the job brings"
            " its own runtime."
        )


def render(target: LaunchTarget, options: TrainJobOptions) -> str:
    return as_yaml(*documents(target, options))


def submit(target: LaunchTarget, options: TrainJobOptions) -> int:
    """Create the TrainJob, and create or update its runtime, which stays when a TrainJob is
    deleted."""
    return hand_to(["kubectl", "apply", "-f", "-"], render(target, options))
