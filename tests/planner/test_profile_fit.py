"""What the planner fits to a profile of CPU cores: blocks that are whole and blocks as narrow as
tensor parallelism makes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import REPOSITORY
from made_profile import made

from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.block_costs import work_of
from lightning_3d.app.planner.constants import OURS, compiled
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.profile_file import (
    Profile,
    machine_of_profile,
    read_profile,
    stack_of_profile,
)
from lightning_3d.app.planner.stack import Host, Stack, Traffic
from lightning_3d.app.planner.stages import stages_of
from lightning_3d.app.planner.step_time import stage_seconds, step_of
from lightning_3d.app.profiling.operations import sharded_config
from lightning_3d.layout import Layout

CONFIG = yaml.safe_load((REPOSITORY / "conf/model/llama3_1_8b.yaml").read_text())["config"]
TRUE = Traffic(elementwise=3.0, logit=20.0, between=2.0, sharded=((2, 1.5),))
HOST = 2e-3
HALVES = 1.12


def job_of(config: dict[str, Any], tokens: int, stack: Stack) -> Job:
    return Job(Architecture.from_config(config), Layout(), tokens, 1, 1, stack=stack)


def cpu_profile(tmp_path: Path) -> Profile:
    """A profile of cores on which operations take what the planner predicts with `TRUE`, and a
    block `HOST` more."""
    content = made(device="cpu", name="CPU")
    (tmp_path / "first.json").write_text(json.dumps(content))
    machine = machine_of_profile(read_profile(tmp_path / "first.json"))
    operations = [one for one in content["operations"] if one["kind"] not in ("model", "host")]
    for tokens in (1024, 4096):
        seconds = 15 * 2 * tokens * CONFIG["hidden_size"] * 2.0 / machine.memory_rate
        operations.append(
            {"kind": "norm", "tokens": tokens, "hidden": CONFIG["hidden_size"], "seconds": seconds}
        )
    for tp in (1, 2):
        for layers in (1, 3):
            config = sharded_config({**CONFIG, "num_hidden_layers": layers}, tp)
            assert config is not None
            for tokens in (16, 1024, 4096):
                job = job_of(
                    config,
                    tokens,
                    replace(OURS, traffic=replace(TRUE, elementwise=TRUE.inside(tp))),
                )
                work = work_of(job, machine)
                seconds = (
                    sum((work.of(job.model.counts) + work.embedding + work.head).seconds()[:2])
                    + HOST * layers
                )
                entry = {
                    "config": config,
                    "tokens": tokens,
                    "seq": tokens,
                    "seconds": seconds,
                    "kept": 1e9 + 1e9 * layers,
                }
                if tokens > 16:
                    operations.append({"kind": "model", **entry, **({"tp": tp} if tp > 1 else {})})
                elif tp == 1:
                    operations.append({"kind": "host", **entry})
    job = job_of({**CONFIG, "num_hidden_layers": 3}, 4096, replace(OURS, traffic=TRUE))
    work = work_of(job, machine)
    for split in (False, True):
        seconds = 0.5 + split * (HALVES - 1) * (work.of(job.model.counts) + work.head).backward
        entry = {
            "config": {**CONFIG, "num_hidden_layers": 3},
            "tokens": 4096,
            "seq": 4096,
            "split": split,
            "seconds": seconds,
        }
        operations.append({"kind": "backward", **entry})
    (tmp_path / "profile.json").write_text(json.dumps({**content, "operations": operations}))
    return read_profile(tmp_path / "profile.json")


def test_traffic_of_whole_and_narrow_blocks_is_given_back(tmp_path: Path) -> None:
    profile = cpu_profile(tmp_path)
    stack = stack_of_profile(profile, machine_of_profile(profile), OURS)
    found = stack.traffic
    assert (found.elementwise, found.logit, found.between) == pytest.approx(
        (3.0, 20.0, 2.0), rel=0.01
    )
    assert (found.inside(1), found.inside(2), found.inside(4)) == pytest.approx(
        (3.0, 1.5, 3.0), rel=0.01
    )
    assert stack.host.computes and stack.host.block == pytest.approx(HOST, rel=0.05)


def test_compiled_blocks_have_no_traffic_of_measured_eager_ones(tmp_path: Path) -> None:
    profile = cpu_profile(tmp_path)
    measured, published = (
        compiled(stack).traffic
        for stack in (stack_of_profile(profile, machine_of_profile(profile), OURS), OURS)
    )
    assert (measured.elementwise, measured.of_norms, measured.inside(2)) == (
        published.elementwise,
        published.of_norms,
        published.inside(2),
    )


def test_the_time_in_which_cores_start_operations_is_added_to_their_work(tmp_path: Path) -> None:
    profile = cpu_profile(tmp_path)
    machine = machine_of_profile(profile)
    job = replace(job_of(CONFIG, 4096, stack_of_profile(profile, machine, OURS)), zero=0)
    without = replace(job, stack=replace(job.stack, host=Host(0.0, computes=True)))
    more = step_of(job, machine).seconds - step_of(without, machine).seconds
    assert more == pytest.approx(
        job.stack.host.step + CONFIG["num_hidden_layers"] * job.stack.host.block
    )


def test_a_split_backward_takes_as_much_longer_as_was_measured(tmp_path: Path) -> None:
    """But that of the first stage, which is not split."""
    profile = cpu_profile(tmp_path)
    machine = machine_of_profile(profile)
    stack = stack_of_profile(profile, machine, OURS)
    assert stack.halves == pytest.approx(HALVES, rel=0.01)
    split = replace(
        job_of(CONFIG, 4096, stack),
        layout=Layout(pp=2, vp=2),
        schedule="ZBVZeroBubble",
        global_batch=8,
    )
    for job, times in ((split, stack.halves), (replace(split, schedule="Interleaved1F1B"), 1.0)):
        plain = replace(job, stack=replace(stack, halves=1.0))
        longer = stage_seconds(job, machine, work_of(job, machine))
        seconds = stage_seconds(plain, machine, work_of(plain, machine))
        assert longer[0] == seconds[0]
        for stage, more, one in zip(stages_of(job)[1:], longer[1:], seconds[1:], strict=True):
            started = stack.host.block * stage.blocks * 2 / 3
            assert more.backward - one.backward == pytest.approx(
                (times - 1) * (one.backward - started)
            )


@pytest.mark.parametrize(
    ("changes", "tp", "width"),
    [
        ({}, 2, 7168),
        ({}, 8, 1792),
        ({}, 16, None),
        ({"model_type": "gpt2"}, 2, None),
        ({"model_type": "mixtral", "num_local_experts": 8}, 2, None),
    ],
    ids=str,
)
def test_blocks_as_narrow_as_those_of_a_rank(
    changes: dict[str, Any], tp: int, width: int | None
) -> None:
    """Heads and inner width are divided; not where ranks would share a head, nor in families whose
    fields have other names."""
    found = sharded_config({**CONFIG, **changes}, tp)
    assert (found and found["intermediate_size"]) == width
    if found is not None:
        whole, part = (Architecture.from_config(config) for config in (CONFIG, found))
        assert (part.hidden, tp * part.query_width, tp * part.key_width) == (
            whole.hidden,
            whole.query_width,
            whole.key_width,
        )
