"""TrainJobs of Kubeflow Trainer v2."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_3d.app.launchers import kubernetes, trainjob
from lightning_3d.app.launchers.options import KubernetesOptions, TrainJobOptions
from lightning_3d.app.launchers.target import LaunchTarget
from lightning_3d.errors import ConfigError

TARGET = LaunchTarget("tune", 4, 8, 8, ("a=1",), None)
RUNS = {"runs": "/mnt/runs"}


def documents(**options: Any) -> list[dict[str, Any]]:
    return list(
        yaml.safe_load_all(
            trainjob.render(
                TARGET, TrainJobOptions(**{"image": "registry/train:1", "volumes": RUNS, **options})
            )
        )
    )


def test_job_brings_its_own_runtime() -> None:
    runtime, job = documents(
        restarts=3,
        secrets=["wandb"],
        node_selector={"gpu": "h100"},
        labels={"queue": "q"},
        namespace="ml",
    )
    assert {document["apiVersion"] for document in (runtime, job)} == {
        "trainer.kubeflow.org/v1alpha1"
    }
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["metadata"] == {"name": "tune", "namespace": "ml", "labels": {"queue": "q"}}
    assert runtime["metadata"]["name"] == "tune" and runtime["metadata"]["namespace"] == "ml", (
        "a TrainJob finds it in its own namespace"
    )
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": "tune",
    }
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 4, "torch": {}}
    jobset = runtime["spec"]["template"]["spec"]
    assert jobset["failurePolicy"] == {"maxRestarts": 3}
    (group,) = jobset["replicatedJobs"]
    assert (group["name"], group["replicas"]) == ("node", 1), "Trainer looks for this name"
    assert group["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert group["template"]["spec"]["backoffLimit"] == 0, "the JobSet restarts all pods together"
    pod = group["template"]["spec"]["template"]
    assert pod["metadata"]["labels"] == {"queue": "q"}
    assert (pod["spec"]["restartPolicy"], pod["spec"]["nodeSelector"]) == ("Never", {"gpu": "h100"})
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "node", "Trainer looks for this name"
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
        "shm": "/dev/shm",
        "runs": "/mnt/runs",
    }
    assert pod["spec"]["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
    ]


def test_trainer_starts_torchrun_as_in_a_jobset() -> None:
    """Trainer gives the JobSet the name of the TrainJob, so the pods and their addresses have the
    same names."""
    trainer = documents()[-1]["spec"]["trainer"]
    options = KubernetesOptions(image="registry/train:1", volumes=RUNS)
    pod = kubernetes.jobset(TARGET, options)["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"]
    (container,) = pod["containers"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == (
        "registry/train:1",
        4,
        8,
    )
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    assert trainer["command"] == container["command"] and trainer["env"] == container["env"]
    assert "--rdzv-endpoint=tune-node-0-0.tune:29500" in trainer["command"]
    reserved = {
        "PET_NNODES",
        "PET_NPROC_PER_NODE",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
    }
    assert not reserved & {variable["name"] for variable in trainer["env"]}, "Trainer refuses them"


def test_runtime_of_the_cluster_is_patched() -> None:
    (job,) = documents(
        runtime="torch-distributed", labels={"queue": "q"}, node_selector={"gpu": "h100"}
    )
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": "torch-distributed",
    }
    (patch,) = job["spec"]["runtimePatches"]
    assert patch["manager"]
    (group,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = group["template"]["spec"]["template"]
    assert group["name"] == "node" and template["metadata"] == {"labels": {"queue": "q"}}
    assert set(template["spec"]) == {
        "containers",
        "volumes",
        "nodeSelector",
    }, "what Trainer lets a TrainJob patch"
    (container,) = template["spec"]["containers"]
    assert set(container) == {"name", "volumeMounts"} and container["name"] == "node"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": None}, "launch.image must be given"),
        ({"volumes": {}}, "would be inside the pod"),
        ({"env": {"PET_NNODES": "1"}}, "launch.env must not contain PET_NNODES"),
        (
            {"runtime": "torch-distributed", "restarts": 2},
            "torch-distributed decides launch.restarts, .* leave out launch.runtime",
        ),
        (
            {"runtime": "torch-distributed", "restarts": 2, "secrets": ["a"]},
            "decides launch.restarts and launch.secrets",
        ),
    ],
)
def test_what_a_trainjob_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        documents(**options)


def test_submitting_applies_both_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "kubectl"
    stub.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\ncat > {tmp_path}/file\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = TrainJobOptions(image="x", volumes=RUNS)
    assert trainjob.submit(TARGET, options) == 0
    assert (tmp_path / "words").read_text().split() == ["apply", "-f", "-"]
    assert (tmp_path / "file").read_text() == trainjob.render(TARGET, options)
