"""`lightning-3d profile`, plans that read what it measured, and `lightning-3d plan --validate`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_line import REPOSITORY, Result, run_commands
from made_profile import made

from lightning_3d.app.config.cluster import ClusterConfig
from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys
from lightning_3d.app.config.run_config import complete_run
from lightning_3d.app.planner.advice import machine_of, measured_otherwise
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.profile_file import machine_of_profile, read_profile, stack_of_profile
from lightning_3d.app.planner.search import search
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.models.families import read_spec

TINY = [
    "cluster=local_cpu",
    "data.sequence_length=32",
    "data.global_batch_size=8",
    *(
        f"model.config.{key}={value}"
        for key, value in {"hidden_size": 32, "intermediate_size": 64, "head_dim": 4}.items()
    ),
    "model.config.num_hidden_layers=2",
]
# for the test that is first, and so waits for all command lines
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STATED = ["model=llama3_1_8b", "data.global_batch_size=64", "data.sequence_length=4096"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With files that are no profile of this machine, or none at all."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "h100.json").write_text(json.dumps(made()))
    (folder / "other.json").write_text("{}")
    (folder / "cut.json").write_text(json.dumps(made())[:400])
    (folder / "negative.json").write_text(json.dumps(made(factor=lambda one: -1.0)))
    (folder / "few.json").write_text(json.dumps({**made(), "operations": made()["operations"][:3]}))
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Result]:
    file = folder / "profile.json"
    lines = {
        "profile": ["profile", *TINY, "--repeats", "2", "--ranks", "2", "--out", str(file)],
        "plan": [
            "plan",
            *TINY,
            f"profile={file}",
            "--out",
            str(folder),
            "--validate",
            "1",
            "--steps",
            "1",
        ],
        "auto": [
            "train",
            *TINY[1:],
            "cluster=local",
            "parallelism=auto",
            f"profile={file}",
            "trainer.dry=true",
        ],
        "another machine": ["plan", *STATED, "cluster=h100_1x8", f"profile={file}"],
        "another GPU": ["plan", *STATED, "cluster=a100_1x8", f"profile={folder / 'h100.json'}"],
        "another precision": [
            "plan",
            *STATED,
            "cluster=h100_1x8",
            "precision=fp32",
            f"profile={folder / 'h100.json'}",
        ],
        "no profile": ["plan", *TINY, f"profile={folder / 'none.json'}"],
        "no format": ["plan", *TINY, f"profile={folder / 'other.json'}"],
        "no GPUs": ["profile", *STATED, "cluster=h100_1x8"],
        "no ranks": ["profile", *TINY, "--ranks", "0"],
        "no folder": ["profile", *TINY, "--out", "/nowhere/at/all.json"],
        "no such option": ["profile", *TINY, "--rank=2"],
        "larger than the machine": ["plan", *STATED, "cluster=h100_1x8", "--validate", "2"],
        "larger than a machine": ["plan", *STATED, "cluster=h100_32x8", "--validate", "2"],
        "no number": ["plan", *TINY, "--validate", "some"],
    }
    # they start ranks, so that torch is needed anyway
    warm = {name: lines.pop(name) for name in ("profile", "plan", "auto")}
    answers = dict(
        zip(warm, run_commands(list(warm.values()), timeout=600, warm=True), strict=True)
    )
    return answers | dict(zip(lines, run_commands(list(lines.values()), timeout=600), strict=True))


def test_a_profile_gives_back_the_rates_that_it_was_made_with(folder: Path) -> None:
    profile = read_profile(folder / "h100.json")
    machine = machine_of_profile(profile)
    assert machine.matmul_rate("bf16") == pytest.approx(400e12, rel=1e-6)
    assert machine.efficiency.kernel == pytest.approx(5e-6, rel=1e-4)
    assert machine.peak * machine.efficiency.attention == pytest.approx(200e12)
    assert (machine.bandwidth, machine.memory_rate) == pytest.approx((2.5e12, 2e12))
    assert (machine.link * machine.efficiency.link, machine.link_latency) == pytest.approx(
        (300e9, 2e-6), rel=1e-4
    )
    stack = stack_of_profile(profile, machine, OURS)
    assert (stack.host.block, stack.host.step) == pytest.approx((4e-3, 1e-3), rel=1e-4)
    norm, clipping, copy = 4, 8, 6  # which a step has besides the 30 bytes of the measured AdamW
    assert stack.traffic.parameter == pytest.approx(30 + norm + clipping + copy, rel=1e-4)
    assert stack.footprint.logit == pytest.approx(4e9 / 4096 / 128256)


@pytest.mark.parametrize(
    ("length", "warned"), [(8192, False), (16384, True), (2048, False), (1024, True)]
)
def test_a_profile_of_other_sequences_is_named(folder: Path, length: int, warned: bool) -> None:
    words = [
        *STATED[:2],
        f"data.sequence_length={length}",
        "cluster=h100_1x8",
        f"profile={folder / 'h100.json'}",
        "trainer.dry=true",
    ]
    found = measured_otherwise(complete_run(check_keys(compose(words))))
    assert [
        f"sequences of 4096 tokens, and the plan is for {length}," in line for line in found
    ] == [True] * warned


def test_a_plan_with_slower_products_is_slower(folder: Path) -> None:
    config = yaml.safe_load((REPOSITORY / "conf/model/llama3_1_8b.yaml").read_text())["config"]
    job = Job(Architecture.from_spec(read_spec(config)), Layout(), 4096, 64, 1)
    (folder / "slow.json").write_text(
        json.dumps(made(lambda one: 2.0 if one["kind"] in ("matmul", "model") else 1.0))
    )
    times = []
    for name in ("h100.json", "slow.json"):
        profile = read_profile(folder / name)
        machine = machine_of_profile(profile)
        times.append(
            search(replace(job, stack=stack_of_profile(profile, machine, OURS)), machine, most=1)
            .best[0]
            .step.seconds
        )
    assert 1.3 * times[0] < times[1] < 2.2 * times[0]


def test_operations_are_measured_on_two_ranks(answers: dict[str, Result], folder: Path) -> None:
    answer = answers["profile"]
    assert answer.code == 0 and answer.left == [], answer.output
    content = json.loads((folder / "profile.json").read_text())
    assert (content["device"], content["ranks"], content["precision"]) == (
        "cpu",
        2,
        "fp32",
    ) and content["versions"]["torch"]
    kinds = {one["kind"] for one in content["operations"]}
    assert kinds == {
        "matmul",
        "attention",
        "copy",
        "elementwise",
        "optimizer",
        "norm",
        "model",
        "backward",
        "host",
        "collective",
    }
    widths = {
        (one.get("tp"), one["config"]["intermediate_size"])
        for one in content["operations"]
        if one["kind"] == "model"
    }
    assert widths == {(None, 64), (2, 32)}, "blocks, whole and as narrow as those of two ranks"
    products = {
        (one["outputs"], one["inputs"]) for one in content["operations"] if one["kind"] == "matmul"
    }
    assert {(128, 32), (64, 32), (32, 64), (32, 32)} <= products, "an MLP's, whole and cut in two"
    sent = {
        (one["name"], one["placement"])
        for one in content["operations"]
        if one["kind"] == "collective"
    }
    assert sent == {
        (name, "node")
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
    }
    kept = {
        one["config"]["num_hidden_layers"]: one["kept"]
        for one in content["operations"]
        if one["kind"] == "model" and "tp" not in one
    }
    assert kept[2] > kept[1] > 0, "as many blocks as there are, at most"


def test_the_best_are_run_and_compared(answers: dict[str, Result]) -> None:
    answer = answers["plan"]
    assert answer.code == 0, answer.output
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in answer.output.splitlines()
        if line.startswith("| ")
    ]
    assert rows[0][:3] == ["layout", "s/step predicted", "measured"] and len(rows) == 2
    for row in rows[1:]:
        assert float(row[1]) > 0 and float(row[2]) > 0
        assert float(row[3]) == pytest.approx(float(row[1]) / float(row[2]), rel=0.05, abs=0.01)
        assert re.fullmatch(r"[0-9.]+ [KMG]iB", row[5])


def test_training_asks_a_planner_that_has_read_the_profile(answers: dict[str, Result]) -> None:
    assert (
        answers["auto"].code == 0
        and ": 2 ranks on CPU" in answers["auto"].output
        and not answers["auto"].left
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another machine", "(cpu), but the cluster has NVIDIA H100 SXM"),
        ("another GPU", "measured on NVIDIA H100 80GB HBM3, but the cluster has NVIDIA A100"),
        ("another precision", "was measured in bf16, but the run uses fp32"),
        ("no profile", "none.json cannot be read: No such file"),
        ("no format", "other.json is not a profile"),
        ("no GPUs", "has GPUs, so 2 ranks need 2 GPUs on this machine, which has 0"),
        ("no ranks", "--ranks must be a whole number of at least 1; got 0."),
        ("no folder", "there is no folder /nowhere/at"),
        ("no such option", 'lightning-3d profile has no option --rank. Did you mean "--ranks"?'),
        (
            "larger than the machine",
            (
                "--validate runs layouts on this machine, which has no GPU, but the plan is for 8"
                " GPUs (h100_1x8)"
            ),
        ),
        (
            "larger than a machine",
            (
                "The plan is for 32 nodes, and --validate starts ranks on several nodes with srun,"
                " in a SLURM job."
            ),
        ),
        ("no number", "--validate must be a whole number of at least 1; got some."),
    ],
)
def test_refusals(answers: dict[str, Result], name: str, said: str) -> None:
    answer = answers[name]
    assert answer.code == 2 and said in answer.output and "Traceback" not in answer.output, (
        answer.output
    )
    assert answer.left == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cut", "cut.json cannot be read: it is not JSON"),
        ("negative", "negative.json is damaged: ValueError: -"),
        ("few", "few.json is damaged: ValueError: it has no measurements of copy"),
    ],
)
def test_damaged_files_are_refused(name: str, said: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        machine_of(ClusterConfig(name="unknown", accelerator="gpu"), str(folder / f"{name}.json"))


def test_a_machine_without_a_network_is_no_cluster(folder: Path) -> None:
    with pytest.raises(ConfigError, match="was measured on one node"):
        machine_of(
            ClusterConfig(name="unknown", nodes=2, accelerator="gpu"), str(folder / "h100.json")
        )
