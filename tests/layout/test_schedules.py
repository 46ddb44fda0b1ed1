"""The table of schedules against torch's own classes."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lightning_3d.errors import LayoutError
from lightning_3d.layout.schedules import (
    SCHEDULES,
    ScheduleInfo,
    default_schedule,
    find_schedule,
    predicted_bubble,
    rank_of_stage,
    schedules_for,
    stages_of_rank,
)
from lightning_3d.parallel.pipeline.schedule import Action, Kind, Order, training_order

PIPELINES, CHUNKS, MICRO_BATCHES = range(2, 6), range(1, 5), range(1, 21)
UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}


def torch_accepts(name: str, pp: int, vp: int, micro_batches: int) -> bool:
    """Whether torch's class can be built for rank 0's stages, which stand-ins describe."""
    v_shaped = SCHEDULES[name].v_shaped
    stages = [0, 2 * pp - 1] if v_shaped and vp == 2 else range(0, pp * vp, pp)
    stand_ins = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=pp * vp,
            group_size=pp,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == pp * vp - 1,
            has_backward=False,
            submod=None,
            stage_index_to_group_rank={stage: stage % pp for stage in range(pp * vp)},
        )
        for stage in stages
    ]
    schedule_class = get_schedule_class(name)
    if issubclass(schedule_class, PipelineScheduleSingle) and len(stand_ins) > 1:
        return False  # its argument is one stage
    argument = stand_ins[0] if issubclass(schedule_class, PipelineScheduleSingle) else stand_ins
    try:
        schedule_class(argument, micro_batches, loss_fn=lambda output, target: output)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("info", SCHEDULES.values(), ids=lambda info: info.name)
def test_f08_torch_accepts_exactly_what_the_table_accepts(info: ScheduleInfo):
    for pp in PIPELINES:
        for vp in CHUNKS:
            for m in MICRO_BATCHES:
                ours = info.allows_vp(vp) and info.accepts(pp, vp, m)
                assert torch_accepts(info.name, pp, vp, m) == ours, (pp, vp, m)


def test_the_table_is_complete():
    bases = {"PipelineScheduleSingle", "PipelineScheduleMulti"}
    named = {
        name.removeprefix("Schedule")
        for name in dir(torch_schedules)
        if name.startswith("Schedule")
    }
    assert set(SCHEDULES) == named - bases
    for name, info in SCHEDULES.items():
        assert get_schedule_class(name).__name__ == f"Schedule{info.name}"


@pytest.mark.parametrize("name", ["1f1b", "GPIPE", "dualpipev", "ZbvZeroBubble", *SCHEDULES])
def test_names_in_any_case(name: str):
    assert find_schedule(name).name.lower() == name.lower()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("1fb1", "1F1B"),
        ("zbv", "ZBVZeroBubble"),
        ("gpip", "GPipe"),
        ("interleaved", "Interleaved1F1B"),
    ],
)
def test_an_unknown_schedule_is_refused_with_the_nearest(name: str, meant: str):
    with pytest.raises(
        LayoutError, match=f'no pipeline schedule "{name}". Did you mean "{meant}"?'
    ):
        find_schedule(name)


def test_an_unknown_schedule_is_refused_with_all():
    with pytest.raises(LayoutError) as refusal:
        find_schedule("foo")
    assert all(name in str(refusal.value) for name in SCHEDULES)


def test_defaults():
    assert [default_schedule(vp).name for vp in (1, 2, 4)] == [
        "1F1B",
        "Interleaved1F1B",
        "Interleaved1F1B",
    ]
    for info in SCHEDULES.values():
        assert info.allows_vp(info.default_vp)
        assert not info.allows_vp(0)
    assert schedules_for(3) == "Interleaved1F1B, LoopedBFS or InterleavedZeroBubble"


def test_stages_of_a_v_and_of_a_loop():
    assert [stages_of_rank(rank, 4, 2, v_shaped=True) for rank in range(4)] == [
        (0, 7),
        (1, 6),
        (2, 5),
        (3, 4),
    ]
    assert [stages_of_rank(rank, 2, 3, v_shaped=False) for rank in range(2)] == [
        (0, 2, 4),
        (1, 3, 5),
    ]
    assert stages_of_rank(0, 1, 1, v_shaped=True) == (0,)


@pytest.mark.parametrize(
    ("pp", "vp", "v_shaped"),
    [(1, 1, False), (4, 1, False), (3, 2, True), (3, 2, False), (2, 5, False)],
)
def test_each_stage_has_one_rank(pp: int, vp: int, v_shaped: bool):
    owned = [stage for rank in range(pp) for stage in stages_of_rank(rank, pp, vp, v_shaped)]
    assert sorted(owned) == list(range(pp * vp))
    for stage in range(pp * vp):
        assert stage in stages_of_rank(rank_of_stage(stage, pp, vp, v_shaped), pp, vp, v_shaped)


def test_places_that_do_not_exist():
    with pytest.raises(LayoutError, match="no pipeline rank 4: the 4 ranks"):
        stages_of_rank(4, 4, 1, v_shaped=False)
    with pytest.raises(LayoutError, match="no stage 8: the 8 stages"):
        rank_of_stage(8, 4, 2, v_shaped=True)
    with pytest.raises(LayoutError, match="Use vp=2"):
        stages_of_rank(0, 4, 3, v_shaped=True)


@pytest.mark.parametrize("info", SCHEDULES.values(), ids=lambda info: info.name)
def test_nearest_numbers_of_micro_batches_work_and_are_nearest(info: ScheduleInfo):
    for pp in (1, 2, 3, 8):
        vp = info.default_vp if pp > 1 else 1
        good = [m for m in range(1, 200) if info.accepts(pp, vp, m)]
        for m in range(-1, 60):
            expected = (
                (m,)
                if m in good
                else (*[n for n in good if n < m][-1:], next(n for n in good if n > m))
            )
            assert info.nearest_micro_batches(pp, vp, m) == expected, (pp, m)


def simulated_bubble(order: Order, stages: int) -> float:
    """Idle share of all ranks when each action starts as soon as its rank and its inputs are
    ready."""
    finished: dict[Action, int] = {}
    clock, remaining = [0] * len(order), [iter(actions) for actions in order]
    waiting: list[Action | None] = [next(actions) for actions in remaining]
    while any(waiting):
        before = len(finished)
        for rank, action in enumerate(waiting):
            if action is None:
                continue
            ready = [
                finished.get(needed)
                for needed in inputs(action, stages, split=Kind.BACKWARD_INPUT in kinds(order))
            ]
            if None in ready:
                continue
            clock[rank] = (
                max(clock[rank], *(time for time in ready if time is not None), 0)
                + UNITS[action.kind]
            )
            finished[action] = clock[rank]
            finished[as_gradient(action)] = clock[rank]
            waiting[rank] = next(remaining[rank], None)
        assert len(finished) > before, "the order deadlocks"
    work = sum(UNITS[action.kind] for actions in order for action in actions)
    return 1 - work / len(order) / max(clock)


def kinds(order: Order) -> set[Kind]:
    return {action.kind for actions in order for action in actions}


def as_gradient(action: Action) -> Action:
    """Whole and split backwards both deliver the gradient of the stage's input: recorded under one
    name."""
    is_gradient = action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    return Action(Kind.BACKWARD, action.stage, action.micro_batch) if is_gradient else action


def inputs(action: Action, stages: int, split: bool) -> Iterator[Action]:
    """Actions whose results an action needs."""
    if action.kind is Kind.FORWARD:
        if action.stage > 0:
            yield Action(Kind.FORWARD, action.stage - 1, action.micro_batch)
        return
    yield Action(Kind.FORWARD, action.stage, action.micro_batch)
    if action.kind is not Kind.BACKWARD_WEIGHT and action.stage < stages - 1:
        yield Action(Kind.BACKWARD, action.stage + 1, action.micro_batch)


@pytest.mark.parametrize("info", SCHEDULES.values(), ids=lambda info: info.name)
def test_f08_predicted_bubble_is_that_of_the_order(info: ScheduleInfo):
    for pp in (2, 3, 4):
        for vp in filter(info.allows_vp, (1, 2, 3)):
            for m in filter(lambda m: info.accepts(pp, vp, m), range(1, 13)):
                simulated = simulated_bubble(training_order(info.name, pp, vp, m), pp * vp)
                assert predicted_bubble(info, pp, vp, m) == pytest.approx(simulated), (pp, vp, m)


def test_no_bubble_without_a_pipeline():
    assert predicted_bubble(SCHEDULES["1F1B"], 1, 1, 4) == 0.0
