"""Tasks of SkyPilot and dstack: what the files say, what runs on each node, what is submitted, and
what is refused."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_3d.app.cli import launch
from lightning_3d.app.launchers import dstack, skypilot
from lightning_3d.app.launchers.options import DstackOptions, SkyPilotOptions, read_options
from lightning_3d.app.launchers.target import LaunchTarget
from lightning_3d.errors import ConfigError

AWKWARD = (
    "+a='it is'",
    '+b="x y"',
    "+c=$(touch pwned)",
    "+e=`id`",
    "+f=a\nb",
    "+g=${now:%Y}",
    "+h=$HOME",
    "+i=\\,;&|",
)
TARGET = LaunchTarget("tune", 2, 4, 4, AWKWARD, None, "NVIDIA H100 SXM")
ALONE = LaunchTarget("tune", 1, 4, 4, ("a=1",), None, "NVIDIA A100 80GB SXM")
CORES = LaunchTarget("tune", 2, 4, 0, ("a=1",), None)
RUNS = {"runs": "/mnt/runs"}


def skypilot_task(target: LaunchTarget = TARGET, **options: Any) -> dict[str, Any]:
    return yaml.safe_load(skypilot.render(target, SkyPilotOptions(**{"volumes": RUNS, **options})))


def dstack_task(target: LaunchTarget = TARGET, **options: Any) -> dict[str, Any]:
    return yaml.safe_load(dstack.render(target, DstackOptions(**{"volumes": RUNS, **options})))


def test_skypilot_task() -> None:
    task = skypilot_task(
        image="registry/train:1",
        infra="k8s",
        cpu="64+",
        memory="500+",
        disk="512",
        env={"NCCL_DEBUG": "INFO"},
    )
    assert set(task) == {"name", "num_nodes", "resources", "envs", "volumes", "run"}
    assert (task["name"], task["num_nodes"], task["volumes"]) == ("tune", 2, {"/mnt/runs": "runs"})
    assert task["envs"] == {"PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "INFO"}
    assert task["resources"] == {
        "infra": "k8s",
        "accelerators": "H100:4",
        "cpus": "64+",
        "memory": "500+",
        "disk_size": 512,
        "image_id": "docker:registry/train:1",
    }


def test_other_options_of_skypilot() -> None:
    task = skypilot_task(
        spot=True,
        managed=True,
        restarts=3,
        workdir=".",
        files={"/data": "s3://bucket/corpus"},
        secrets=["WANDB_API_KEY"],
        setup=["pip install -e .", "nvidia-smi"],
        shm="64g",
        labels={"team": "ml"},
    )
    assert task["resources"] == {
        "accelerators": "H100:4",
        "use_spot": True,
        "labels": {"team": "ml"},
        "job_recovery": {"max_restarts_on_errors": 3},
    }
    assert (task["workdir"], task["file_mounts"]) == (".", {"/data": "s3://bucket/corpus"})
    assert task["secrets"] == {"WANDB_API_KEY": None}, (
        "its value comes with the command, not in the file"
    )
    assert task["setup"].splitlines() == ["set -e", "pip install -e .", "nvidia-smi"]
    assert task["config"] == {"docker": {"run_options": ["--shm-size=64g"]}}
    assert "--max-restarts=0" in task["run"], "SkyPilot restarts a managed job"
    assert "--max-restarts=3" in skypilot_task(restarts=3)["run"]


def test_dstack_task() -> None:
    task = dstack_task(
        image="registry/train:1",
        volumes={"/nfs/runs": "/mnt/runs", "corpus": "/mnt/data"},
        cpu="64..",
        memory="500GB..",
        disk="1TB",
        env={"NCCL_DEBUG": "INFO"},
        secrets=["WANDB_API_KEY"],
        files={"/work": "."},
        setup=["cd /work"],
        retry="1d",
        max_duration="2d",
        fleets=["gpus"],
        backends=["aws"],
        regions=["eu-west-1"],
        spot=True,
    )
    (script,) = task.pop("commands")
    assert task == {
        "type": "task",
        "name": "tune",
        "nodes": 2,
        "image": "registry/train:1",
        "env": {
            "PYTHONUNBUFFERED": "1",
            "NCCL_DEBUG": "INFO",
            "WANDB_API_KEY": "${{ secrets.WANDB_API_KEY }}",
        },
        "files": [{"local_path": ".", "path": "/work"}],
        "volumes": [
            {"instance_path": "/nfs/runs", "path": "/mnt/runs"},
            {"name": "corpus", "path": "/mnt/data"},
        ],
        "resources": {
            "cpu": "64..",
            "memory": "500GB..",
            "disk": "1TB",
            "gpu": "H100:4",
            "shm_size": "64GB",
        },
        "spot_policy": "spot",
        "retry": {"on_events": ["no-capacity", "interruption"], "duration": "1d"},
        "max_duration": "2d",
        "fleets": ["gpus"],
        "backends": ["aws"],
        "regions": ["eu-west-1"],
    }
    assert script.splitlines()[:2] == ["set -eu", "cd /work"]


def test_names_of_gpus() -> None:
    assert skypilot_task(ALONE)["resources"]["accelerators"] == "A100-80GB:4"
    assert dstack_task(ALONE)["resources"]["gpu"] == "A100:80GB:4"
    assert skypilot_task(gpu="L4")["resources"]["accelerators"] == "L4:4"
    assert "resources" not in skypilot_task(CORES) and dstack_task(CORES)["resources"]["gpu"] == 0


SCRIPTS = [
    pytest.param(
        lambda target, **more: skypilot_task(target, **more)["run"],
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NODE_IPS",
        id="skypilot",
    ),
    pytest.param(
        lambda target, **more: dstack_task(target, **more)["commands"][0],
        "DSTACK_NODE_RANK",
        "DSTACK_NODES_IPS",
        id="dstack",
    ),
]


def words_on_node(script: str, variables: dict[str, str], folder: Path) -> list[str]:
    """What python is called with, where it is a program that prints its arguments."""
    stub = folder / "bin" / "python"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    stub.chmod(0o755)
    there = {**variables, "HOME": "/root", "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", script], cwd=folder, env=there, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(("script_of", "rank", "addresses"), SCRIPTS)
@pytest.mark.parametrize("node", [0, 1])
def test_nodes_meet_at_the_first(
    script_of: Any, rank: str, addresses: str, node: int, tmp_path: Path
) -> None:
    words = words_on_node(
        script_of(TARGET), {rank: str(node), addresses: "10.0.0.7\n10.0.0.9"}, tmp_path
    )
    assert words[:2] == ["-m", "torch.distributed.run"]
    assert {
        "--nnodes=2",
        "--nproc-per-node=4",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.0.0.7:29500",
        "--rdzv-id=tune",
    } <= set(words)
    assert f"--local-addr={('10.0.0.7', '10.0.0.9')[node]}" in words
    assert f"--rdzv-conf=read_timeout=1800,join_timeout=1800,is_host={int(node == 0)}" in words
    given = words[words.index("train") + 1 :]
    assert tuple(given) == (*AWKWARD, "hydra.run.dir=/mnt/runs/tune", "trainer.auto_resume=true")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(("script_of", "rank", "addresses"), SCRIPTS)
def test_one_node_needs_no_address(
    script_of: Any, rank: str, addresses: str, tmp_path: Path
) -> None:
    words = words_on_node(script_of(ALONE, restarts=2), {}, tmp_path)
    assert (
        "--standalone" in words
        and "--max-restarts=2" in words
        and not any("rdzv" in word for word in words)
    )


def test_torchrun_reads_the_words_of_a_node(tmp_path: Path) -> None:
    from torch.distributed.run import config_from_args, parse_args

    words = words_on_node(
        skypilot_task()["run"],
        {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9"},
        tmp_path,
    )
    config, _, _ = config_from_args(parse_args(words[2:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 4)
    assert (config.rdzv_endpoint, config.local_addr) == ("10.0.0.7:29500", "10.0.0.9")
    assert config.rdzv_configs["is_host"] == "0" and config.rdzv_configs["join_timeout"] == "1800"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"volumes": {}, "image": "x"}, "run folder would be inside the machine .*launch.volumes="),
        ({"volumes": {}}, "run folder would be inside the machine"),
        ({"volumes": {"runs": "mnt"}}, "must be absolute"),
        ({"gpu": "H100:8"}, "without a count.* got 'H100:8'"),
        ({"name": "My_Run"}, "for example my-run; got 'My_Run'"),
        ({"env": {"A B": "1"}}, "must name environment variables"),
        ({"secrets": ["A=1"]}, "must name environment variables.* got 'A=1'"),
        ({"env": {"A": "1"}, "secrets": ["A"]}, "A is in launch.env and in launch.secrets"),
        ({"sky": ["yes"]}, r'launch.sky must be a list of options, for example \["--yes"\]'),
    ],
)
def test_what_skypilot_would_not_take_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        skypilot_task(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"volumes": {}}, "run folder would be inside the machine"),
        ({"name": "a" * 42}, "2 to 41"),
        ({"name": "a"}, "2 to 41 .* for example run-1"),
        ({"gpu": "H100:8"}, "with its memory or without, for example A100:80GB"),
        (
            {"retry": "1d", "retry_on": ["failure"]},
            "launch.retry_on must be a list of no-capacity, interruption and error; got 'failure'",
        ),
        ({"retry": "1d", "retry_on": []}, "launch.retry_on"),
        ({"retry": "often"}, "launch.retry must be a duration .* got 'often'"),
        ({"max_duration": "1 year"}, "launch.max_duration must be a duration"),
        ({"setup": ["echo ${{ run.args }}"]}, "dstack would replace them"),
        ({"setup": ["echo $$"]}, "dstack would replace them"),
        ({"env": {"A": "${{ x.y }}"}}, "launch.env, .* dstack would replace them"),
        ({"dstack": ["yes"]}, "launch.dstack must be a list of options"),
    ],
)
def test_what_dstack_would_not_take_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dstack_task(**options)


def test_unknown_gpu_and_folder_of_the_machine() -> None:
    unknown = LaunchTarget("tune", 1, 4, 4, (), None, "NVIDIA L40S")
    with pytest.raises(
        ConfigError,
        match="launch.gpu must be given, because the name of NVIDIA L40S .* sky show-gpus",
    ):
        skypilot_task(unknown)
    named = LaunchTarget("tune", 1, 4, 4, ("hydra.run.dir=/nfs/a",), "/nfs/a", "NVIDIA H100 SXM")
    assert "volumes" not in skypilot_task(named, volumes={}), (
        "a machine may have a shared file system"
    )
    for task in (
        lambda: skypilot_task(named, volumes={}, image="x"),
        lambda: dstack_task(named, volumes={}),
    ):
        with pytest.raises(ConfigError, match="/nfs/a is not in a volume"):
            task()


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs sky and dstack that write their arguments and the file that they get, and fail if
    the file asks for it."""
    for program in ("sky", "dstack"):
        stub = tmp_path / "bin" / program
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(
            '#!/bin/sh\nprintf "%s\\0" "$0" "$@" > words\nfor last; do :; done\ncp "$last" file\n!'
            ' grep -q "name: fails" file\n'
        )
        stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded(folder: Path) -> tuple[list[str], str]:
    program, *words = (folder / "words").read_text().split("\0")[:-1]
    assert not (folder / words[-1]).exists(), "the file is temporary"
    return [Path(program).name, *words[:-1]], (folder / "file").read_text()


def test_submitting_to_skypilot(recorder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    options = SkyPilotOptions(volumes=RUNS, sky=["--yes"], secrets=["WANDB_API_KEY"])
    assert skypilot.submit(TARGET, options) == 0
    words, file = recorded(recorder)
    assert words == ["sky", "launch", "--cluster", "tune", "--secret", "WANDB_API_KEY", "--yes"]
    assert file == skypilot.render(TARGET, options) and "secret" not in words[6:]
    assert skypilot.submit(TARGET, SkyPilotOptions(volumes=RUNS, managed=True)) == 0
    assert recorded(recorder)[0] == ["sky", "jobs", "launch"]
    assert skypilot.submit(TARGET, SkyPilotOptions(volumes=RUNS, name="fails")) == 1
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(
        ConfigError,
        match="launch.secrets names WANDB_API_KEY, but no such environment variable is set",
    ):
        skypilot.submit(TARGET, options)


def test_submitting_to_dstack(recorder: Path) -> None:
    options = DstackOptions(volumes=RUNS, dstack=["--yes", "--detach"])
    assert dstack.submit(TARGET, options) == 0
    words, file = recorded(recorder)
    assert words == ["dstack", "apply", "--yes", "--detach", "-f"] and file == dstack.render(
        TARGET, options
    )
    last = (recorder / "words").read_text().split("\0")[-2]
    assert last.endswith(".dstack.yml") and Path(last).absolute().parent == recorder, (
        "dstack resolves local paths from the file's folder"
    )
    assert dstack.submit(TARGET, DstackOptions(volumes=RUNS, name="fails")) == 1


def test_folder_that_cannot_be_written_is_refused(
    recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.raises(
        ConfigError,
        match="sky needs a file in the current folder, .*No space left.* in another folder",
    ):
        skypilot.submit(TARGET, SkyPilotOptions(volumes=RUNS))
    assert not (recorder / "words").exists()


@pytest.mark.slow
def test_command_line_of_clouds(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["cluster=h100_2x8", "parallelism=tp8_dp2", "launch.volumes={runs: /mnt/runs}"]
    for kind, program, package in (("skypilot", "sky", "skypilot"), ("dstack", "dstack", "dstack")):
        assert launch.run([kind, *run, "--dry"]) == 0
        task = yaml.safe_load(capfd.readouterr().out)
        assert (
            task["name"] == "llama-tiny-tp8-dp2"
            and task["resources"].get("accelerators", task["resources"].get("gpu")) == "H100:8"
        )
        with monkeypatch.context() as without:
            without.setenv("PATH", "/nowhere")
            assert launch.run([kind, *run]) == 2
        assert (
            f"{program} is not installed on this machine. Install it with pip install {package}, or"
            " add --dry" in capfd.readouterr().err
        )


def test_options_of_clouds_are_read() -> None:
    lines = [
        'launch.files={/data: "s3://bucket/x"}',
        "launch.cpu=64+",
        'launch.setup=["pip install -e ."]',
    ]
    options = read_options(SkyPilotOptions, lines)
    assert (options.files, options.cpu, options.setup) == (
        {"/data": "s3://bucket/x"},
        "64+",
        ["pip install -e ."],
    )
    chosen = read_options(
        DstackOptions,
        ["launch.volumes={/nfs/runs: /mnt/runs}", "launch.memory=500GB..", "launch.gpu=A100:80GB"],
    )
    assert (chosen.volumes, chosen.memory, chosen.gpu) == (
        {"/nfs/runs": "/mnt/runs"},
        "500GB..",
        "A100:80GB",
    )
