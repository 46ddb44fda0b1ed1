"""Runs multiply float32 matrices in float32, or in TF32 with `trainer.float32_matmul_precision`;
the planner counts what they do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_profile import made

from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys
from lightning_3d.app.config.run_config import CompleteRun, complete_run
from lightning_3d.app.planner.advice import job_of, machine_of_run
from lightning_3d.app.planner.block_costs import _attention
from lightning_3d.app.planner.memory import memory_of
from lightning_3d.app.planner.search import Candidate
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.app.planner.tables import share_of_peak, tokens_per_second
from lightning_3d.app.planner.utilization import full_speed
from lightning_3d.app.training.run import prepare
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout

RUN = [
    "model=llama3_1_8b",
    "cluster=h100_1x8",
    "data.global_batch_size=8",
    "data.sequence_length=4096",
    "trainer.dry=true",
]
SETTING = "trainer.float32_matmul_precision"


def run_of(*words: str) -> CompleteRun:
    return complete_run(check_keys(compose([*RUN, *words])))


def candidate(run: CompleteRun, precision: str) -> Candidate:
    machine = machine_of_run(run)
    assert machine is not None
    job = job_of(run, precision, Layout(dp=8))
    return Candidate(job, step_of(job, machine), memory_of(job))


@pytest.mark.parametrize(
    ("setting", "rate"),
    [("null", 67e12), ("highest", 67e12), ("high", 494.5e12), ("medium", 494.5e12)],
)
def test_float32_is_planned_at_the_rate_at_which_a_run_multiplies(
    setting: str, rate: float
) -> None:
    run = run_of(f"{SETTING}={setting}")
    machine = machine_of_run(run)
    assert machine is not None
    assert machine.matmul_rate("fp32") == machine.efficiency.matmul * rate
    assert machine.matmul_rate("bf16") == machine.efficiency.matmul * 989.5e12
    stack = job_of(run, "fp32").stack
    assert stack.attention_rate(machine) == machine.efficiency.attention * rate, (
        "attention has no kernel in 16 bits for float32"
    )
    assert (
        job_of(run, "bf16").stack.attention_rate(machine) == machine.efficiency.attention * 989.5e12
    )


def test_attention_without_a_fused_kernel_multiplies_at_that_rate_too() -> None:
    """Its scores move as many bytes with either rate."""
    seconds = []
    for setting in ("null", "high"):
        run = run_of("model.attn_implementation=eager", f"{SETTING}={setting}")
        job, machine = job_of(run, "fp32"), machine_of_run(run)
        assert machine is not None and not job.stack.flash
        seconds.append(_attention(job, machine, job.model.kinds[0]).forward)
    work = 4.0 * job.tokens * job.seq * job.model.query_width / machine.efficiency.matmul
    assert seconds[0] - seconds[1] == pytest.approx(work / 67e12 - work / 494.5e12)


def test_tf32_is_faster_only_where_products_are_in_float32() -> None:
    exact, rounded = (
        candidate(run_of(f"{SETTING}={setting}"), "fp32").step.seconds
        for setting in ("null", "high")
    )
    assert exact > 4 * rounded
    assert candidate(run_of(f"{SETTING}=high"), "bf16").step == candidate(run_of(), "bf16").step


@pytest.mark.parametrize(
    ("precision", "setting"),
    [("fp32", "null"), ("fp32", "high"), ("bf16", "null"), ("fp8", "null")],
)
def test_a_plan_and_a_run_divide_by_the_same_peak(precision: str, setting: str) -> None:
    """The MFU of `lightning-3d plan` and that of `metrics.csv`."""
    run = run_of(f"{SETTING}={setting}")
    one, machine = candidate(run, precision), machine_of_run(run)
    rates = {
        kind: getattr(run.cluster.peak_flops, kind) for kind in ("fp32", "tf32", "bf16", "fp8")
    }
    config: dict[str, Any] = {
        "cluster": {"accelerator": "gpu", "peak_flops": rates},
        "model": run.model,
        "precision": {"name": precision},
        "parallelism": {"layout": "dp8"},
        "trainer": {"float32_matmul_precision": run.trainer.float32_matmul_precision},
        "data": run.data,
    }
    speed = full_speed(config)
    assert machine is not None and speed is not None
    assert share_of_peak(one, 8, machine) == pytest.approx(tokens_per_second(one) / speed)


def test_a_profile_that_multiplied_in_another_way_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(made(precision="fp32", float32_matmul_precision="high")))
    assert job_of(run_of(f"profile={path}", f"{SETTING}=high"), "fp32").precision == "fp32"
    with pytest.raises(
        ConfigError, match=f"measured with {SETTING}=high, but the run uses highest"
    ):
        job_of(run_of(f"profile={path}"), "fp32")


def test_a_run_sets_what_the_planner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_names: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_names.append)
    config = {"seed": 0, "cluster": {"accelerator": "cpu"}}
    prepare(config | {"trainer": {"float32_matmul_precision": None}})
    prepare(config | {"trainer": {}})
    assert set_names == []
    prepare(config | {"trainer": {"float32_matmul_precision": "high"}})
    assert set_names == ["high"]


def test_another_word_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            f"{SETTING} must be highest, high or medium, or null; got 'hihg'. Did you mean \"high\""
        ),
    ):
        machine_of_run(run_of(f"{SETTING}=hihg"))
