"""`lightning-3d plan` for the CPU cores of a machine speaks of CPU ranks, and nowhere of GPUs."""

import json
from pathlib import Path

import pytest
from made_profile import made

from lightning_3d.app.cli import plan
from lightning_3d.app.cli.plan_words import training_words
from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys
from lightning_3d.app.config.run_config import complete_run
from lightning_3d.app.planner.advice import job_of
from lightning_3d.layout import Layout

TINY = ["cluster=local_cpu", "data.global_batch_size=16", "data.sequence_length=64"]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.json"
    path.write_text(
        json.dumps(
            made(
                device="cpu",
                name="a processor",
                precision="fp32",
                ranks=4,
                ranks_per_node=4,
                memory=4e9,
            )
        )
    )
    return path


def test_text_tables_and_page_name_cpu_ranks(
    profile: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        plan.run(
            [
                "--out",
                str(tmp_path),
                "--scaling",
                "8",
                *TINY,
                "+cluster.inter_node.bandwidth=1e9",
                f"profile={profile}",
            ]
        )
        == 0
    )
    said, page = capfd.readouterr(), (tmp_path / "plan.html").read_text()
    for text in (said.out, said.err, page):
        assert "GPU" not in text
    assert "of CPU rank" in said.out and "| CPU ranks |" in said.out
    assert "global batch in proportion to the CPU ranks" in said.out
    assert all(
        words in page
        for words in (
            '<th class="number">of CPU rank</th>',
            "all of a CPU rank: 3.7 GiB",
            ">CPU ranks</text>",
        )
    )


def test_what_does_not_fit_names_cpu_ranks(
    profile: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert plan.run([*TINY, "model=llama3_1_8b", f"profile={profile}"]) == 2
    said = capfd.readouterr().err
    assert (
        "fits on 4 CPU ranks with" in said
        and "Use more CPU ranks, shorter sequences" in said
        and "GPU" not in said
    )


@pytest.mark.parametrize("split", [True, False])
def test_the_command_splits_sequences_as_the_plan_does(split: bool, profile: Path) -> None:
    """On CPU ranks the default is not to split them, and a proposal says it where it does."""
    words = [*TINY, f"profile={profile}", "parallelism=auto"]
    run = complete_run(check_keys(compose([*words, "trainer.dry=true"])))
    layout = Layout.parse("tp2_dp2")
    job = job_of(run, "fp32", layout).but(sequence_parallel=split, micro_batch=4)
    found = training_words(words, job).words
    assert f"parallelism.sequence_parallel={str(split).lower()}" in found
    named = complete_run(check_keys(compose([*found, "trainer.dry=true"])))
    assert job_of(named, "fp32", layout).sequence_parallel is split
    assert job_of(run, "fp32", layout).sequence_parallel is False, (
        "what a run does that does not say"
    )


def test_cores_that_nobody_measured(capfd: pytest.CaptureFixture[str]) -> None:
    assert plan.run(TINY) == 2
    said = capfd.readouterr().err
    assert (
        "because the rates of its CPU cores are unknown. Measure them with lightning-3d profile"
        in said
        and "GPU" not in said
    )
