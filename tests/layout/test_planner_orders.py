"""The orders of actions are the ones that torch's schedules run, and played they take as long as
the published formulas say."""

from fractions import Fraction
from itertools import product

import pytest
from torch_orders import torch_pipeline_order

from lightning_3d.app.planner.moments import moments_of
from lightning_3d.app.planner.timeline import StageSeconds, play
from lightning_3d.layout.pipeline_orders import training_order
from lightning_3d.layout.schedules import SCHEDULES, ScheduleInfo, stages_of_rank
from lightning_3d.parallel.pipeline import schedule as engine


def chunks(info: ScheduleInfo) -> tuple[int, ...]:
    return (2,) if info.v_shaped else (2, 3) if info.looped else (1,)


CASES = [
    (info.name, pp, vp, m)
    for info in SCHEDULES.values()
    for pp in (2, 3, 4, 8)
    for vp in chunks(info)
    for m in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
    if info.accepts(pp, vp, m)
]


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("GPipe", "1F1B")])
def test_orders_are_those_that_torch_computes(schedule: str) -> None:
    cases = [case for case in CASES if case[0] == schedule]
    assert len(cases) > 10
    for name, pp, vp, micro_batches in cases:
        stages = stages_of_rank(0, pp, vp, SCHEDULES[name].v_shaped)
        theirs = torch_pipeline_order(name, stages, pp * vp, pp, micro_batches)
        assert training_order(name, pp, vp, micro_batches) == theirs, (name, pp, vp, micro_batches)


def test_orders_that_torch_only_runs_as_loops() -> None:
    """torch's GPipe and 1F1B have no list of actions, and the one it displays for 1F1B (2.13) is
    off by one micro-batch."""
    gpipe, one_ahead = training_order("GPipe", 2, 1, 3), training_order("1F1B", 2, 1, 3)
    assert [f"{kind}{i}" for _, kind, i in gpipe[0]] == ["F0", "F1", "F2", "B0", "B1", "B2"]
    assert [f"{kind}{i}" for _, kind, i in one_ahead[0]] == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert [f"{kind}{i}" for _, kind, i in one_ahead[1]] == ["F0", "B0", "F1", "B1", "F2", "B2"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_engine_runs_the_orders_that_the_planner_predicts(schedule: str) -> None:
    for case in [case for case in CASES if case[0] == schedule and case[1] <= 4]:
        run = engine.training_order(*case)
        assert tuple(
            tuple((one.stage, one.kind.value, one.micro_batch) for one in rank) for rank in run
        ) == training_order(*case), case


def bubble(schedule: str, pp: int, vp: int, m: int) -> Fraction:
    """Idle share with equal stages whose forward takes 1 and whose backward takes 2, half of it for
    weights."""
    timeline = play(training_order(schedule, pp, vp, m), [StageSeconds(1.0, 2.0, 1.0)] * (pp * vp))
    return Fraction(timeline.bubble).limit_denominator(10_000)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 4), (4, 16), (8, 32)])
def test_bubbles_are_the_published_ones(pp: int, m: int) -> None:
    # GPipe (arXiv:1811.06965, section 2.3) and 1F1B (arXiv:2104.04473, section 2.2.1): (p - 1) / (m
    # + p - 1)
    assert bubble("GPipe", pp, 1, m) == bubble("1F1B", pp, 1, m) == Fraction(pp - 1, m + pp - 1)
    # Interleaved (arXiv:2104.04473, section 2.2.2) and breadth-first (arXiv:2211.05953): 1 / v of
    # it
    for vp in (2, 4):
        assert (
            bubble("Interleaved1F1B", pp, vp, m)
            == bubble("LoopedBFS", pp, vp, m)
            == Fraction(pp - 1, vp * m + pp - 1)
        )
    # ZB-H1 (arXiv:2401.10241, table 2): (p - 1)(F + B - W) idle, a third of 1F1B's with F = B = W
    assert bubble("InterleavedZeroBubble", pp, 2, m) == Fraction(pp - 1, 6 * m + pp - 1)
    assert bubble("ZBVZeroBubble", pp, 2, 2 * m) == Fraction(pp - 1, 12 * m + pp - 1), (
        "near none: it shrinks with m"
    )
    assert bubble("DualPipeV", pp, 2, 2 * m) < bubble("Interleaved1F1B", pp, 2, 2 * m)


def test_a_slow_stage_sets_the_pace() -> None:
    slow_end = [StageSeconds(1, 2)] * 3 + [StageSeconds(2, 4)]
    timeline = play(training_order("1F1B", 4, 1, 16), slow_end)
    assert timeline.seconds == 3 * 1 + 16 * 6 + 3 * 2, (
        "the last stage is never idle between the first input and the last gradient"
    )


def test_messages_take_time() -> None:
    quiet = play(training_order("1F1B", 2, 1, 1), [StageSeconds(1, 2)] * 2)
    busy = play(training_order("1F1B", 2, 1, 1), [StageSeconds(1, 2)] * 2, message=0.25)
    assert (quiet.seconds, busy.seconds) == (6, 6.5), "one there and one back"


def test_an_order_that_waits_for_itself_is_found() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        play((((0, "B", 0), (0, "F", 0)), ((1, "F", 0), (1, "B", 0))), [StageSeconds(1, 1)] * 2)


def test_activations_in_flight() -> None:
    # 1F1B keeps p - rank micro-batches (arXiv:1806.03377), GPipe all of them; a V keeps as much on
    # every rank (arXiv:2401.10241, section 6)
    def most(schedule: str, vp: int) -> list[int]:
        return [
            max(sum(moment.live) for moment in rank.moments)
            for rank in moments_of(schedule, 4, vp, 16)
        ]

    assert most("1F1B", 1) == [4, 3, 2, 1]
    assert most("GPipe", 1) == [16] * 4
    assert most("ZBVZeroBubble", 2) == [8] * 4


def test_gradients_are_there_from_the_first_backward_pass_on() -> None:
    """GPipe has none when all micro-batches are in flight; with 1F1B, the next forward makes as
    many alive as before."""
    [first] = [
        moment for moment in moments_of("GPipe", 2, 1, 4)[0].moments if sum(moment.live) == 4
    ]
    assert first.graded == (False,)
    assert all(moment.graded == (True,) for moment in moments_of("1F1B", 2, 1, 4)[0].moments)


@pytest.mark.parametrize(
    "schedule", [name for name in SCHEDULES if name not in ("GPipe", "LoopedBFS")]
)
def test_three_rounds_have_all_moments_of_more(schedule: str) -> None:
    """What the planner's memory takes for any number of whole rounds."""
    info = SCHEDULES[schedule]
    for pp, vp in product((2, 3, 4, 8), chunks(info)):
        assert moments_of(info.name, pp, vp, 3 * pp) == moments_of(info.name, pp, vp, 6 * pp)
