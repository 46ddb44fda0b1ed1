"""What the launchers write, and what they refuse. Two nodes and SLURM for real: test_two_nodes.py,
test_slurm.py."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_3d.app.cli import launch as launchers
from lightning_3d.app.launchers import kubernetes, slurm, torchrun
from lightning_3d.app.launchers.options import (
    KubernetesOptions,
    SlurmOptions,
    TorchrunOptions,
    read_options,
    split,
)
from lightning_3d.app.launchers.submit import as_yaml
from lightning_3d.app.launchers.target import LaunchTarget, find_target
from lightning_3d.app.runs.check import CheckedMachine
from lightning_3d.app.runs.folder import CONFIG_FILE, RunFolder
from lightning_3d.errors import ConfigError, Lightning3DError

LARGE = ["recipe=llama3_70b_256xa100", "data.train_path=/data/corpus.bin"]
ADAPTERS = [
    "recipe=mistral_7b_lora_8xa100",
    "data.path=/data/answers.jsonl",
    "data.tokenizer=/models/tokenizer",
]
CPU = ["cluster=local_cpu", "cluster.nodes=2", "parallelism=tp2_dp2"]
IN_PODS = KubernetesOptions(image="registry/train:1", volumes={"runs": "/mnt/runs"})


@pytest.fixture(scope="module")
def large() -> LaunchTarget:
    return find_target(LARGE, CheckedMachine.REMOTE_NODES)


def target_of(*overrides: str) -> LaunchTarget:
    return LaunchTarget("run", 2, 4, 4, overrides, None)


def test_target_is_the_cluster_of_the_configuration(large: LaunchTarget) -> None:
    assert (large.nodes, large.ranks_per_node, large.gpus_per_node) == (32, 8, 8)
    assert large.name == "llama3-70b-256xa100"
    cpu = find_target(CPU, CheckedMachine.COUNTED_NODES)
    assert (cpu.nodes, cpu.ranks_per_node, cpu.gpus_per_node, cpu.name) == (
        2,
        2,
        0,
        "llama-tiny-tp2-dp2",
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=local"], r"size of the cluster local is unknown.*cluster=h100_1x8"),
        (
            [*CPU, "cluster.nodes=3"],
            r"4 ranks, which cannot be split equally over 3 nodes.*1, 2 or 4",
        ),
        (
            ["cluster=h100_2x8"],
            r"8 ranks, but the cluster h100_2x8 has 16 GPUs .*Layouts for 16 ranks",
        ),
        ([LARGE[0]], r"^data.train_path must be given"),
        ([*ADAPTERS], r"model.pretrained"),
        ([*LARGE, "trainer.dry=true"], "--dry"),
        (["cluster=h100_1x8", "parallelism=tp3"], "3 ranks"),
    ],
)
def test_what_cannot_be_launched_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(Lightning3DError, match=message):
        find_target(overrides, CheckedMachine.COUNTED_NODES)


@pytest.mark.slow
def test_weights_that_only_the_nodes_see_are_looked_at_there() -> None:
    weights = "model.pretrained=/mnt/models/Mistral-7B-v0.1"
    assert weights in find_target([*ADAPTERS, weights], CheckedMachine.REMOTE_NODES).arguments()
    with pytest.raises(Lightning3DError, match="There is no folder /mnt/models/Mistral-7B-v0.1"):
        find_target([*ADAPTERS, weights], CheckedMachine.COUNTED_NODES)
    with pytest.raises(ConfigError, match="but it does not exist here"):
        find_target([*ADAPTERS, weights, "model=pretrained"], CheckedMachine.REMOTE_NODES)


def test_torchrun_on_one_node_needs_no_cluster() -> None:
    target = find_target(["cluster=local", "parallelism=tp2_dp2"], CheckedMachine.NODES)
    words = shlex.split(torchrun.render(target, TorchrunOptions()))
    assert (
        "--standalone" in words
        and "--nproc-per-node=4" in words
        and words[-2:] == ["cluster=local", "parallelism=tp2_dp2"]
    )


def test_torchrun_on_several_nodes(large: LaunchTarget) -> None:
    words = shlex.split(torchrun.render(large, TorchrunOptions(endpoint="10.0.0.1", restarts=2)))
    assert {
        "--nnodes=32",
        "--nproc-per-node=8",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.0.0.1:29500",
        "--max-restarts=2",
    } <= set(words)
    assert not any("is_host" in word for word in words), "torchrun finds out"
    first = torchrun.render(
        large,
        TorchrunOptions(endpoint="10.0.0.1:1234", address="10.0.0.1", env={"NCCL_DEBUG": "INFO"}),
    )
    assert "--rdzv-conf=is_host=1" in first and first.startswith("env NCCL_DEBUG=INFO ")
    for endpoint, message in (
        (None, "launch.endpoint=HOST:29500"),
        ("host:port", "must be HOST:PORT"),
        (":1", "must be HOST:PORT"),
    ):
        with pytest.raises(ConfigError, match=message):
            torchrun.render(large, TorchrunOptions(endpoint=endpoint))


AWKWARD = [
    "+a='it is'",
    '+b="x y"',
    "+c=$(touch pwned)",
    "+d={k: [1, 2]}",
    "+e=`id`",
    "+f=a\nb",
    "+g=${now:%Y}",
    "+h=$HOME",
    "+i=\\,;&|",
]


def test_shell_passes_overrides_on_as_they_were(tmp_path: Path) -> None:
    """The script runs where srun is a program that prints its arguments."""
    stub = tmp_path / "bin" / "srun"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    stub.chmod(0o755)
    script = slurm.render(
        target_of(*AWKWARD), SlurmOptions(python="python", env={"X": "a 'b' $c"}, setup=["echo -n"])
    )
    variables = {**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash"],
        input=script,
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\0")
    assert words[words.index("train") + 1 :][: len(AWKWARD)] == AWKWARD
    assert "hydra.run.dir=outputs/run_${oc.env:SLURM_JOB_ID}" in words, (
        "OmegaConf resolves it on the node"
    )
    assert not (tmp_path / "pwned").exists()


def test_slurm_script(large: LaunchTarget) -> None:
    options = SlurmOptions(
        partition="gpu",
        account="me",
        time="2-00:00:00",
        cpus_per_task=12,
        sbatch=["--reservation=mine"],
        setup=["module load cuda"],
    )
    lines = slurm.render(large, options).splitlines()
    assert lines[0] == "#!/bin/bash"
    given = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    wanted = (
        "--nodes=32 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 --partition=gpu"
        " --account=me --time=2-00:00:00 --requeue"
    )
    assert {*wanted.split(), "--job-name=llama3-70b-256xa100", "--reservation=mine"} <= given
    ranks = shlex.split(lines[-1])
    assert (
        lines[-2] == "module load cuda"
        and ranks[:2] == ["exec", "srun"]
        and "--cpus-per-task=12" in ranks
    )
    assert ranks[-2:] == [
        "hydra.run.dir=outputs/llama3-70b-256xa100_${oc.env:SLURM_JOB_ID}",
        "trainer.auto_resume=true",
    ]


def test_slurm_script_without_gpus_and_with_a_folder_of_the_users() -> None:
    target = find_target(
        [*CPU, "hydra.run.dir=/runs/mine", "trainer.auto_resume=false"],
        CheckedMachine.COUNTED_NODES,
    )
    script = slurm.render(target, SlurmOptions(requeue=False))
    assert "gpus" not in script and "--no-requeue" in script
    assert script.count("hydra.run.dir") == script.count("auto_resume") == 1


@pytest.mark.parametrize(
    "options",
    [
        SlurmOptions(partition="a b"),
        SlurmOptions(name="x\ny"),
        SlurmOptions(sbatch=["qos=high"]),
        SlurmOptions(env={"A B": "1"}),
    ],
)
def test_values_that_a_script_cannot_hold_are_refused(
    large: LaunchTarget, options: SlurmOptions
) -> None:
    with pytest.raises(ConfigError, match="launch."):
        slurm.render(large, options)


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    if manifest["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def expanded(words: list[str], variables: dict[str, str]) -> list[str]:
    """What Kubernetes makes of a command (kubernetes.io/docs: define a command and arguments):
    $(NAME) is replaced, $$ is a dollar."""
    out = []
    for word in words:
        text, at = "", 0
        while at < len(word):
            end = word.find(")", at)
            if word.startswith("$$", at):
                text, at = text + "$", at + 2
            elif word.startswith("$(", at) and end > 0 and word[at + 2 : end] in variables:
                text, at = text + variables[word[at + 2 : end]], end + 1
            else:
                text, at = text + word[at], at + 1
        out.append(text)
    return out


@pytest.mark.parametrize("make", [kubernetes.jobset, kubernetes.pytorchjob])
def test_pods_are_nodes(large: LaunchTarget, make: Any) -> None:
    manifest = yaml.safe_load(as_yaml(make(large, IN_PODS)))
    pod = pod_of(manifest)
    (container,) = pod["containers"]
    assert container["image"] == "registry/train:1" and container["resources"] == {
        "limits": {"nvidia.com/gpu": 8}
    }
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in pod["volumes"]
    assert (
        {mount["name"] for mount in container["volumeMounts"]}
        == {volume["name"] for volume in pod["volumes"]}
        == {"shm", "runs"}
    )
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert all(isinstance(value, str) for value in variables.values())
    command = container["command"]
    assert f"--rdzv-endpoint={variables['MASTER_ADDR']}:29500" in command
    assert {"--nnodes=32", "--nproc-per-node=8", "--rdzv-backend=c10d", *LARGE} <= set(command)
    assert command[-2:] == [
        "hydra.run.dir=/mnt/runs/llama3-70b-256xa100",
        "trainer.auto_resume=true",
    ]


def test_jobset(large: LaunchTarget) -> None:
    manifest = kubernetes.jobset(large, IN_PODS)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (group,) = manifest["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert (group["replicas"], job["completions"], job["parallelism"], job["completionMode"]) == (
        1,
        32,
        32,
        "Indexed",
    )
    assert job["backoffLimit"] == 0 and pod_of(manifest)["restartPolicy"] == "Never", (
        "pods are started again together"
    )
    name, service = manifest["metadata"]["name"], manifest["spec"]["network"]["subdomain"]
    master = {entry["name"]: entry["value"] for entry in pod_of(manifest)["containers"][0]["env"]}[
        "MASTER_ADDR"
    ]
    assert master == f"{name}-{group['name']}-0-0.{service}", (
        "JobSet: <jobset>-<replicatedJob>-<job index>-<pod index>.<subdomain>"
    )


@pytest.mark.parametrize("index", [0, 1, 12])
def test_pod_0_of_a_jobset_hosts_the_rendezvous(index: int, tmp_path: Path) -> None:
    """The command runs as Kubernetes would start it, where python is a program that prints what it
    was given."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nprintf "%s\\0" "$PET_RDZV_CONF" "$@"\n')
    stub.chmod(0o755)
    (container,) = pod_of(kubernetes.jobset(target_of(*AWKWARD), IN_PODS))["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    there = {
        **variables,
        "HOME": "/root",
        "JOB_COMPLETION_INDEX": str(index),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        expanded(container["command"], there), env=there, capture_output=True, text=True, check=True
    )
    conf, *words = done.stdout.split("\0")
    assert conf == f"read_timeout=1800,join_timeout=1800,is_host={int(index == 0)}"
    assert words[words.index("train") + 1 :][: len(AWKWARD)] == AWKWARD


def test_pytorchjob(large: LaunchTarget) -> None:
    manifest = kubernetes.pytorchjob(
        large, KubernetesOptions(image="x", volumes={"runs": "/mnt"}, restarts=3, namespace="ml")
    )
    assert (manifest["apiVersion"], manifest["kind"], manifest["metadata"]["namespace"]) == (
        "kubeflow.org/v1",
        "PyTorchJob",
        "ml",
    )
    assert set(manifest["spec"]["pytorchReplicaSpecs"]) == {"Worker"}
    worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (
        worker["replicas"] == 32
        and worker["restartPolicy"] == "OnFailure"
        and manifest["spec"]["runPolicy"]["backoffLimit"] == 96
    )
    assert pod_of(manifest)["containers"][0]["name"] == "pytorch", "the operator asks for this name"
    assert (
        manifest["spec"]["elasticPolicy"]["minReplicas"]
        == manifest["spec"]["elasticPolicy"]["maxReplicas"]
        == 32
    )


def test_other_options_of_pods(large: LaunchTarget) -> None:
    options = KubernetesOptions(
        image="x",
        volumes={"runs": "/mnt"},
        cpu="64",
        memory="500Gi",
        secrets=["wandb"],
        node_selector={"gpu": "a100"},
        labels={"queue": "q"},
    )
    manifest = kubernetes.jobset(large, options)
    (container,) = pod_of(manifest)["containers"]
    assert container["resources"]["requests"] == {"cpu": "64", "memory": "500Gi"}
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert pod_of(manifest)["nodeSelector"] == {"gpu": "a100"} and manifest["metadata"][
        "labels"
    ] == {"queue": "q"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (KubernetesOptions(volumes={"runs": "/mnt"}), "launch.image must be given"),
        (KubernetesOptions(image="x"), "would be inside the pod .*launch.volumes"),
        (
            KubernetesOptions(image="x", volumes={"Runs": "/mnt"}),
            "launch.volumes must have at most 63 .* got 'Runs'",
        ),
        (KubernetesOptions(image="x", volumes={"runs": "mnt"}), "must be absolute"),
        (
            KubernetesOptions(image="x", volumes={"runs": "/mnt"}, name="My_Run"),
            "start with a letter .*, for example my-run",
        ),
        (KubernetesOptions(image="x", volumes={"runs": "/mnt"}, name="a" * 60), "at most 47"),
        (
            KubernetesOptions(image="x", volumes={"runs": "/mnt"}, namespace="a.b"),
            "launch.namespace",
        ),
        (KubernetesOptions(image="x", volumes={"runs": "/mnt"}, shm="64 GB"), "launch.shm"),
        (
            KubernetesOptions(image="x", volumes={"runs": "/mnt"}, env={"MASTER_PORT": "1"}),
            "launch.port",
        ),
    ],
)
def test_what_kubernetes_would_not_take_is_refused(
    large: LaunchTarget, options: KubernetesOptions, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kubernetes.jobset(large, options)


def test_names_made_by_kubernetes_are_labels() -> None:
    """The longest it makes: pods of a JobSet have five letters behind, services of a PyTorchJob
    none."""
    long = LaunchTarget("a" * 80, 1000, 8, 8, (), None)
    assert len(f"{kubernetes.jobset(long, IN_PODS)['metadata']['name']}-node-0-999-abcde") == 63
    assert len(f"{kubernetes.pytorchjob(long, IN_PODS)['metadata']['name']}-worker-999") == 63


def test_options_have_types() -> None:
    lines = [
        "launch.partition=gpu",
        "launch.env.NCCL_DEBUG=INFO",
        "+launch.env.N=1",
        "launch.exclusive=true",
        'launch.srun=["--mpi=none"]',
    ]
    options = read_options(SlurmOptions, lines)
    assert (options.partition, options.env, options.exclusive) == (
        "gpu",
        {"NCCL_DEBUG": "INFO", "N": "1"},
        True,
    )
    assert options.srun == ["--mpi=none"]
    for line, message in (
        ("launch.patrition=gpu", 'launch.patrition".* Did you mean "launch.partition"'),
        ("launch.cpus_per_task=many", "launch.cpus_per_task: .*Integer"),
        ("launch.cpus_per_task=0", "launch.cpus_per_task"),
        ("launch.env=[", "cannot be parsed"),
        ("launch.partition=a,b", "several values"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_options(SlurmOptions, [line])
    with pytest.raises(ConfigError, match="at least 0"):
        read_options(TorchrunOptions, ["launch.restarts=-1"])
    assert split(["a=1", "launch.x=2", "+launch.y=3"]) == (["launch.x=2", "+launch.y=3"], ["a=1"])


@pytest.mark.slow
def test_dry_prints_the_script_alone_wherever_it_stands(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    outputs = []
    for line in (["--dry", "slurm", *CPU], ["slurm", *CPU, "--dry"], [*CPU, "--dry", "slurm"]):
        assert launchers.run(line) == 0
        outputs.append(capfd.readouterr())
    assert {output.err for output in outputs} == {""}
    assert {output.out for output in outputs} == {outputs[0].out} and outputs[0].out.startswith(
        "#!/bin/bash\n"
    )
    assert launchers.run(["slurm", *CPU]) == 2
    assert "sbatch is not installed on this machine" in capfd.readouterr().err


def test_a_launch_has_one_kind(capfd: pytest.CaptureFixture[str]) -> None:
    for line, message in (
        (CPU, "got none."),
        (["slrm", *CPU], 'Did you mean "slurm"'),
        (["slurm", "jobset"], "got slurm and jobset."),
    ):
        assert launchers.run(line) == 2
        assert message in capfd.readouterr().err
    assert launchers.run(["--help"]) == 0
    assert "launch.partition=null" in capfd.readouterr().out
    for option, message in (
        ("-m", "starts one run"),
        ("--cfg", "lightning-3d train --cfg job"),
        (
            "--dryy",
            'launch has no option --dryy. Did you mean "--dry"? Its options: --dry, --help.',
        ),
    ):
        assert launchers.run(["slurm", *LARGE, option]) == 2
        assert message in capfd.readouterr().err
    assert launchers.run(["slurm", "modle=x", "--dry"]) == 2
    assert capfd.readouterr().err.count("\n") == 1, "one message"


# A run that is started again

CONFIG = {
    "model": {"a": 1},
    "data": {"b": 2},
    "optimizer": {},
    "seed": 0,
    "trainer": {"auto_resume": True},
}


def new_run(path: Path) -> RunFolder:
    folder = RunFolder.claim(path, numbered=False)
    folder.write_config(yaml.safe_dump(CONFIG))
    return folder


def again(path: Path, **changes: Any) -> RunFolder:
    return RunFolder.take(path, CONFIG | changes, lambda: RunFolder.claim(path, numbered=False))


def save(path: Path, name: str, step: int | None) -> None:
    (path / "checkpoints" / name).mkdir(parents=True)
    if step is not None:
        (path / "checkpoints" / name / "manifest.json").write_text(f'{{"global_step": {step}}}')


def test_run_goes_on_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert again(run).resume is None, "a new folder"
    (run / CONFIG_FILE).write_text(yaml.safe_dump(CONFIG))
    assert again(run).resume is None, "nothing was saved"
    for name, step in (("step_8", 8), ("step_16", 16), ("step_24", None), (".step_32.saving", 32)):
        save(run, name, step)
    assert again(run).resume == str(run / "checkpoints" / "step_16")


def test_folder_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path / "run").path
    with pytest.raises(ConfigError, match=r"data\.b=3 \(was 2\) and seed=1"):
        again(run, data={"b": 3}, seed=1)
    with pytest.raises(ConfigError, match="belongs to a run that is in progress"):
        again(run, trainer={"auto_resume": False})
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert again(run, trainer={"auto_resume": False}).path == run, "SLURM has started the job again"


def test_a_key_of_a_newer_version_that_is_off_is_no_difference(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run").path
    assert again(run, data={**CONFIG["data"], "tokenizer": None, "check_hashes": False}).path == run
    with pytest.raises(ConfigError, match="data.document_separator=0"):
        again(run, data={**CONFIG["data"], "document_separator": 0})


def test_try_after_one_that_was_refused_takes_a_new_folder(tmp_path: Path) -> None:
    """torchrun starts refused ranks again too, and their folder is gone."""
    took = RunFolder.take(
        tmp_path / "new",
        CONFIG,
        lambda: RunFolder.claim(tmp_path / "new", numbered=False),
        tmp_path / "gone",
    )
    assert took.path == tmp_path / "new" and took.resume is None


def test_run_that_has_not_ended_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_3d.app.runs.folder.EARLIER_SECONDS", 0.1)
    run = new_run(tmp_path / "run").path
    if (child := os.fork()) == 0:  # a lock is a process's own
        try:
            again(run)
        except ConfigError as error:
            os._exit(7 if "is in progress" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_layout_may_change_between_tries(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run").path
    assert again(run, parallelism={"layout": "dp4"}).path == run
