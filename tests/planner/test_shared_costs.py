"""Costs that candidates of a search share are those that are computed for each of them, and a
search computes few of them in full."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from math import inf
from typing import Any

import pytest
import yaml
from command_line import REPOSITORY
from planner_ways import fits

from benchmarks.planner_accuracy import software
from lightning_3d.app.planner import block_costs, rank_memory, search, shared_costs, step_time
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.block_costs import work_of
from lightning_3d.app.planner.block_memory import block_bytes
from lightning_3d.app.planner.choices import Fixed, degrees, fitting, schedules, shapes, ways
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.memory import least_bytes, least_memory, memory_of, memory_within
from lightning_3d.app.planner.shared_costs import SharedCosts
from lightning_3d.app.planner.stages import Stage, parameters_of
from lightning_3d.app.planner.step_time import least_seconds, least_span, step_of
from lightning_3d.layout import Layout
from lightning_3d.models.families import read_spec
from lightning_3d.options.blocks import RECOMPUTE

CASES: dict[str, tuple[str, int, dict[str, Any], float, Fixed]] = {
    "dense": ("llama3_1_8b", 32, {}, 0.07, Fixed()),
    "experts": ("mixtral_8x7b", 64, {}, 0.3, Fixed(micro_batch=1)),
    "latent attention and modules ahead": (
        "deepseek_v2_lite",
        32,
        {"ahead": 1},
        0.25,
        Fixed(micro_batch=1),
    ),
    "other stages": ("llama2_13b", 16, {}, 0.2, Fixed(fit_stages=True, micro_batch=1)),
}
"""By name (model, GPUs, changes of its sizes, share of a GPU with which some shapes do not fit,
what is fixed)."""


MIXED = {"autocast": True, "weight_bytes": 4.0, "state_bytes": 8.0, "master_bytes": 4.0}


def job_of(name: str, **changes: Any) -> Job:
    """Return a job of a model, with changes to the model or, if it is `MIXED`, to the job."""
    of_job, of_model = (changes, {}) if changes == MIXED else ({}, changes)
    spec = read_spec(yaml.safe_load((REPOSITORY / f"conf/model/{name}.yaml").read_text())["config"])
    return Job(
        replace(Architecture.from_spec(spec), **of_model),
        Layout(),
        4096,
        256,
        1,
        stack=OURS,
        loss_chunks="auto",
        **of_job,
    )


def machine(gpus: int) -> Machine:
    found = software.published_machine("H100-80GB", gpus)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_shared_costs_are_those_of_each_job(case: str) -> None:
    name, gpus, changes, share, fixed = CASES[case]
    job, where = job_of(name, **changes), machine(gpus)
    room = share * where.memory
    costs, refused, recomputed, cannot_run = SharedCosts(where, fixed, room), 0, 0, 0
    considered = list(shapes(job, where, fixed))
    for shape in considered:
        assert costs.work(shape) == work_of(shape, where)
        assert costs.least_seconds(shape) == least_seconds(shape, where)
        bounds = list(least_memory(shape, costs.levels, balanced=not fixed.fit_stages))
        level = next((level for level, least in bounds if least <= room), None)
        assert costs.least_recomputation(shape) == level
        assert least_bytes(shape).held <= min(least for _, least in bounds) * (1 + 1e-9)
        assert costs.may_fit(shape) or level is None
        refused += not costs.may_fit(shape)
        recomputed += level not in (None, "none")
        if level is None or sum(degrees(shape)) % 5:  # both orders of ranks, or neither
            continue
        for scheduled in schedules(shape.but(recompute=level), fixed):
            for way in ways(scheduled, fixed):
                assert costs.fitting(way) == fitting(way, room, fixed)
                assert costs.may_run(way) or costs.fitting(way) is None
                cannot_run += not costs.may_run(way)
            for way, bytes_of_way in fits(scheduled, room, fixed):
                assert bytes_of_way == memory_of(way)
                step = step_of(way, where, pipeline="bound", work=costs.work(way))
                assert step == step_of(way, where, pipeline="bound")
                assert max(
                    costs.least_seconds(way), least_span(way, where, costs.work(way))
                ) <= step.seconds * (1 + 1e-9)
    assert bool(cannot_run) != fixed.fit_stages
    assert refused and recomputed and len({shape.layout.order for shape in considered}) == 2


@pytest.mark.parametrize(
    ("name", "gpus", "changes"),
    [
        *(
            ("llama3_1_8b", 8, {}),
            ("mixtral_8x7b", 64, {}),
            ("qwen3_30b_a3b", 16, {}),
            ("deepseek_v2_lite", 32, {"ahead": 1}),
        ),
        ("llama3_1_8b", 8, MIXED),
    ],
)
def test_no_way_to_run_a_shape_needs_less_than_its_bounds(
    name: str, gpus: int, changes: dict[str, Any]
) -> None:
    """Also not where experts are on more or fewer data-parallel ranks than the rest: a search never
    looks at what a bound refuses."""
    job, where = job_of(name, **changes), machine(gpus)
    every_zero = [Fixed(zero=stage, recompute=level) for stage in (1, 2, 3) for level in RECOMPUTE]
    seen = 0
    for shape in list(shapes(job, where, Fixed()))[::23]:
        held, least = least_bytes(shape).held, dict(least_memory(shape, RECOMPUTE))
        for scheduled in schedules(shape, Fixed()):
            for way, needed in (way for fixed in every_zero for way in fits(scheduled, inf, fixed)):
                assert needed.total * (1 + 1e-9) >= max(held, least[way.recompute]), way
                seen += 1
    assert seen > 100


def test_the_bound_of_full_recomputation_has_no_copies_of_weights() -> None:
    """With autocast, a micro-batch keeps 16-bit copies of the weights of its blocks unless they are
    recomputed."""
    job = replace(job_of("llama3_1_8b", **MIXED), layout=Layout(dp=8), schedule="1F1B")
    copies = 2 * sum(parameters_of(job, Stage(job.model.counts, False, False)))
    for one, expected in ((job, copies), (replace(job, autocast=False), 0.0)):
        least, kept = (
            dict(least_memory(one, ["none", "full"])),
            [block_bytes(one.but(recompute=level))[0] for level in ("none", "full")],
        )
        of_blocks = job.model.layers * (kept[0][0] - kept[1][0]) - kept[1][1]
        assert (least["none"] - least["full"] - 1.05 * of_blocks) / copies == pytest.approx(
            expected / copies, abs=0.06
        )


def test_the_memory_of_a_job_that_does_not_fit_is_not_asked_for() -> None:
    job = replace(job_of("llama3_1_8b"), layout=Layout(pp=4, dp=8), schedule="1F1B")
    needed = memory_of(job)
    assert memory_within(job, needed.total) == memory_within(job, inf) == needed
    assert memory_within(job, 0.999 * needed.total) is None


def test_a_job_with_other_values_is_the_one_of_dataclasses() -> None:
    job = job_of("llama3_1_8b")
    computed = {
        name: getattr(job, name)
        for name, value in vars(Job).items()
        if isinstance(value, cached_property)
    }
    assert computed, "they are in the job, and must not be in the next one"
    changes: dict[str, Any] = {"global_batch": 64, "layout": Layout(tp=2, cp=8)}
    other, expected = job.but(**changes), replace(job, **changes)
    assert other == expected and set(vars(other)) == {each.name for each in fields(Job)}
    assert all(
        getattr(other, name) == getattr(expected, name) != value for name, value in computed.items()
    )


class Calls:
    """Counts the calls of functions of the planner."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.counts: dict[str, int] = {}

    def count(self, name: str, *modules: Any) -> None:
        """Count the calls of the function that these modules know by this name."""
        function = getattr(modules[0], name)
        self.counts[name] = 0

        def counted(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += 1
            return function(*arguments, **options)

        for module in modules:
            self._patch.setattr(module, name, counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("llama3_70b", {"work_of": 0.2, "least_memory": 0.4, "memory": 0.1, "step_of": 0.3}),
        (
            "qwen3_235b_a22b",
            {"work_of": 0.2, "least_memory": 0.195, "memory": 0.01, "step_of": 0.015},
        ),
    ],
)
def test_few_shapes_are_priced_in_full(
    name: str, most: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 1,024 GPUs, each function is called at most so often for each shape: the work of a rank,
    bounds of the memory with each recomputation, the memory of a rank, and the time of a step."""
    calls = Calls(monkeypatch)
    calls.count("work_of", shared_costs, step_time, block_costs)
    calls.count("least_memory", shared_costs)
    calls.count("memory", rank_memory.RankBytes)
    calls.count("step_of", search)
    job = replace(job_of(name), seq=8192, global_batch=2048)
    found = search.search(job, machine(1024), room=0.85 * machine(1024).memory)
    assert found.best and found.shapes > 2000
    assert all(
        0 < count < most[function] * found.shapes for function, count in calls.counts.items()
    ), (calls.counts, found.shapes)
