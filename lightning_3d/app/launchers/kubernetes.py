"""`lightning-3d launch jobset` and `pytorchjob`: manifests for kubectl."""

from __future__ import annotations

from typing import Any

from lightning_3d.app.launchers.options import KubernetesOptions
from lightning_3d.app.launchers.pods import FIRST_POD_HOSTS, NODE, job_name, metadata, pod
from lightning_3d.app.launchers.submit import as_yaml, hand_to
from lightning_3d.app.launchers.target import LaunchTarget


def jobset(target: LaunchTarget, options: KubernetesOptions) -> dict[str, Any]:
    """Build a JobSet (jobset.x-k8s.io/v1alpha2) with one indexed Job and a pod for each node.

    Its headless service gives pod 0 the name NAME-node-0-0.NAME.
    """
    # Kubernetes appends five letters to names of pods
    name = job_name(target, options, before=f"-{NODE}-0-", after="-abcde")
    node = pod(target, options, name, master=f"{name}-{NODE}-0-0.{name}", before=FIRST_POD_HOSTS)
    job = {
        "parallelism": target.nodes,
        "completions": target.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": dict(options.labels)},
            "spec": node | {"restartPolicy": "Never"},
        },
    }
    spec = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {"maxRestarts": options.restarts},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(options, name),
        "spec": spec,
    }


def pytorchjob(target: LaunchTarget, options: KubernetesOptions) -> dict[str, Any]:
    """Build a PyTorchJob (kubeflow.org/v1) with a fixed number of workers and no master. Worker 0
    has a service of its name."""
    name = job_name(target, options, before="-worker-", after="")
    node = pod(target, options, name, master=f"{name}-worker-0")
    worker = {
        "replicas": target.nodes,
        "restartPolicy": "OnFailure" if options.restarts else "Never",
        "template": {"metadata": {"labels": dict(options.labels)}, "spec": node},
    }
    spec = {
        "nprocPerNode": str(target.ranks_per_node),
        # The operator adds up the restarts of all pods.
        "runPolicy": {"backoffLimit": options.restarts * target.nodes, "cleanPodPolicy": "Running"},
        "elasticPolicy": {
            "rdzvBackend": "c10d",
            "rdzvPort": options.port,
            "minReplicas": target.nodes,
            "maxReplicas": target.nodes,
        },
        "pytorchReplicaSpecs": {"Worker": worker},
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(options, name),
        "spec": spec,
    }


def render_jobset(target: LaunchTarget, options: KubernetesOptions) -> str:
    return as_yaml(jobset(target, options))


def render_pytorchjob(target: LaunchTarget, options: KubernetesOptions) -> str:
    return as_yaml(pytorchjob(target, options))


def submit_jobset(target: LaunchTarget, options: KubernetesOptions) -> int:
    return hand_to(["kubectl", "create", "-f", "-"], render_jobset(target, options))


def submit_pytorchjob(target: LaunchTarget, options: KubernetesOptions) -> int:
    return hand_to(["kubectl", "create", "-f", "-"], render_pytorchjob(target, options))
