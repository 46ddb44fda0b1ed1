"""Traced steps: what is recorded equals the schedule, and the numbers made of it are right."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import LiveBytes
from parity import Cell, check
from ranks import run_ranks
from sweeps import by_default
from tiny_pipelines import NO_DROPOUT, VOCABULARY, CountedStep, Owner, tiny
from torch import nn
from traced import fit

from lightning_3d.app.runs.metrics_file import read_rows
from lightning_3d.engine.step.tracer import StepTracer
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.layout.schedules import SCHEDULES
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import PipelineEngine, PipelineState, assign_stages, keep_owned
from lightning_3d.parallel.pipeline.schedule import Kind, training_order
from lightning_3d.tracing.chrome import MESSAGE, WAIT, as_chrome, read_timeline, write_timeline
from lightning_3d.tracing.clocks import clock_offsets
from lightning_3d.tracing.memory import SavedTensors
from lightning_3d.tracing.recorder import Recorder
from lightning_3d.tracing.trace import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    OPTIMIZER,
    RECEIVE,
    REDUCE,
    SEND,
    WEIGHT_GRADIENT,
    Event,
    Memory,
    RankTrace,
    StepTrace,
    Work,
    chosen_ranks,
    measured_bubble,
    work_of,
)

OF_KIND = {
    Kind.FORWARD: FORWARD,
    Kind.BACKWARD: BACKWARD,
    Kind.BACKWARD_INPUT: INPUT_GRADIENT,
    Kind.BACKWARD_WEIGHT: WEIGHT_GRADIENT,
}
MICRO_BATCHES = 4


def record_schedule(schedule: str, vp: int) -> list[Event]:
    """The events of this rank, in the second of two runs; the first has none, as nothing was to be
    recorded."""
    layout = Layout(pp=torch.distributed.get_world_size(), vp=vp)
    mesh = Mesh(layout)
    mesh.warm_up()
    user = Owner(tiny("llama", layout.pp * vp))
    plan = read_plan(user.model)
    assignment = assign_stages(user.model, plan, layout, schedule)
    state = PipelineState(NO_DROPOUT)
    chunks = keep_owned(user, "model", plan, assignment, mesh.index("pp"), state)
    recorder = Recorder(torch.device("cpu"))
    engine = PipelineEngine(
        mesh,
        assignment,
        {chunk.stage: list(user.parameters()) for chunk in chunks},
        schedule=schedule,
        vp=vp,
        state=state,
        device=torch.device("cpu"),
        after_backward=lambda parameters, stage, last: None,
        recorder=recorder,
    )
    step = CountedStep(user, torch.randint(VOCABULARY, (MICRO_BATCHES, 2, 6)))
    engine.train(MICRO_BATCHES, 2, step)
    assert recorder.take() == []
    recorder.begin()
    recorder.recording(True)
    engine.train(MICRO_BATCHES, 2, step)
    recorder.recording(False)
    engine.train(MICRO_BATCHES, 2, step)
    return recorder.take()


@pytest.mark.parametrize("schedule", by_default(list(SCHEDULES), 1, 2, 4, 5))
def test_events_are_the_actions_and_messages_of_the_schedule(schedule: str) -> None:
    pp, vp = 2, SCHEDULES[schedule].default_vp
    order = training_order(schedule, pp, vp, MICRO_BATCHES)
    owner = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    recorded = run_ranks(record_schedule, pp, schedule, vp)
    for rank, events in enumerate(recorded):
        did = [
            (event.kind, event.stage, event.micro_batch)
            for event in events
            if event.kind in OF_KIND.values()
        ]
        assert did == [
            (OF_KIND[action.kind], action.stage, action.micro_batch) for action in order[rank]
        ]
        expected = []
        for action in order[rank]:
            if action.kind is Kind.BACKWARD_WEIGHT:
                continue
            forward = action.kind is Kind.FORWARD
            before, behind = (
                (action.stage - 1, action.stage + 1)
                if forward
                else (action.stage + 1, action.stage - 1)
            )
            expected += (
                [(RECEIVE, action.stage, action.micro_batch)]
                if owner.get(before, rank) != rank
                else []
            )
            expected += (
                [(SEND, action.stage, action.micro_batch)]
                if owner.get(behind, rank) != rank
                else []
            )
        assert [
            (event.kind, event.stage, event.micro_batch)
            for event in events
            if event.kind in (SEND, RECEIVE)
        ] == expected
        assert all(event.start <= event.end for event in events)
        assert all(
            one.end <= next_.start for one, next_ in zip(events, events[1:], strict=False)
        ), "one after the other"
    sent = {
        (event.stage, event.micro_batch): event
        for event in recorded[0]
        if event.kind == SEND and event.stage == 0
    }
    for event in recorded[1]:
        if (
            event.kind == RECEIVE
            and event.stage == 1
            and owner[0] == 0
            and (0, event.micro_batch) in sent
        ):
            kind = next(e.kind for e in recorded[1] if e.start >= event.end)
            if kind == FORWARD:
                assert event.end >= sent[0, event.micro_batch].start, (
                    "nothing arrives before it is sent, by one clock"
                )


def idle_share(events: dict[int, list[Event]], layout: Layout) -> float:
    """The bubble by its definition, from moments at equal distances instead of sums of lengths."""
    idle = moments = 0
    distance = max(event.end for each in events.values() for event in each) / 1e5
    for pipeline in layout.groups("pp"):
        actions = {
            rank: [
                e
                for e in events[rank]
                if e.kind not in (SEND, RECEIVE, OPTIMIZER) and e.stage is not None
            ]
            for rank in pipeline
        }
        start = min(event.start for each in actions.values() for event in each)
        end = max(event.end for each in actions.values() for event in each)
        count = round((end - start) / distance)
        for rank in pipeline:
            mine, place = actions[rank], 0
            for index in range(count):
                moment = start + (index + 0.5) * distance
                while place < len(mine) and mine[place].end < moment:
                    place += 1
                idle += not (place < len(mine) and mine[place].start <= moment)
            moments += count
    return idle / moments


def test_a_step_is_traced_when_its_number_says_so_and_when_it_is_asked_for(traced: Any) -> None:
    folder, parts = traced
    for traces, _, _ in parts:
        assert [trace.step if trace else None for trace in traces] == [None, None, 3, 4]
    bubbles = {trace.bubble for traces, _, _ in parts for trace in traces[3:] if trace}
    assert len(bubbles) == 1, "the same number on every rank"
    trace = parts[0][0][3]
    assert trace is not None and all(each.events for each in trace.ranks)
    assert not any(each.events for each in parts[1][0][3].ranks), "events are on rank 0"
    layout = Layout.parse("tp2_pp2_dp2")
    order = training_order("1F1B", 2, 1, 4)
    for each in trace.ranks:
        assert each.events is not None
        did = [
            (event.kind, event.micro_batch)
            for event in each.events
            if event.kind in (FORWARD, BACKWARD)
        ]
        assert did == [
            (OF_KIND[action.kind], action.micro_batch)
            for action in order[layout.coordinates(each.rank)["pp"]]
        ]
        kinds = [event.kind for event in each.events]
        assert set(kinds) <= set(KINDS)
        assert kinds[-1] == OPTIMIZER and REDUCE in kinds
    origin = min(event.start for each in trace.ranks for event in each.events or ())
    found = idle_share(
        {each.rank: list(each.shifted(-origin).events or ()) for each in trace.ranks}, layout
    )
    assert trace.bubble == pytest.approx(found, abs=1e-3)
    assert 0.1 < trace.bubble < 0.9, (
        "two stages and four micro-batches: a fifth of the time at the least"
    )


def test_the_same_numbers_are_in_the_files_and_in_the_loggers(traced: Any) -> None:
    folder, parts = traced
    rows = read_rows(folder / "metrics.csv", last_step=9)
    assert [row["bubble"] == "" for row in rows] == [True, True, False, False]
    trace = read_timeline(folder / "timeline.json")
    assert trace is not None and trace.step == 4
    assert f"{trace.bubble:.6f}" == rows[3]["bubble"]
    assert (
        trace.peak_memory
        == int(rows[3]["memory"])
        == max(each.memory.total for each in trace.ranks)
    )
    told = parts[0][2]
    assert sorted(told) == [2, 3, 4], "every second step, and those that were traced"
    for row in rows[1:]:
        expected = {
            f"step/{name}": float(value) for name, value in row.items() if name != "step" and value
        }
        numbers = told[int(row["step"])]
        assert {name: numbers[name] for name in expected} == expected
    assert [told[4][f"memory/rank_{each.rank}"] for each in trace.ranks] == [
        each.memory.total for each in trace.ranks
    ]
    assert not any(told for _, _, told in parts[1:])


def test_memory_is_counted_by_category(traced: Any) -> None:
    _, parts = traced
    trace = parts[0][0][3]
    for each, (_, parameters, _) in zip(trace.ranks, parts, strict=True):
        memory = each.memory
        assert parameters <= memory.parameters < parameters + 4096, "and some buffers"
        assert parameters <= memory.gradients <= 2 * parameters + 4096, (
            "gradients, and the flat copy that is reduced"
        )
        # ZeRO-1: two moments and a copy of the weights, dealt to two ranks
        assert memory.optimizer == pytest.approx(3 * parameters / 2, rel=0.05)
        assert memory.activations is not None and memory.activations > 0
    first, second = trace.ranks[0].memory.activations, trace.ranks[2].memory.activations
    assert first > 1.5 * second - parts[0][1], (
        "1F1B: the first of two stages keeps two micro-batches"
    )


@pytest.mark.slow
def test_batches_of_an_accumulated_step_are_told_apart(tmp_path: Path) -> None:
    parts = run_ranks(
        fit, 2, str(tmp_path), "pp2", 2, accumulate=2, schedule="ZBVZeroBubble", process_group=False
    )
    trace = parts[0][0][1]
    assert trace is not None and trace.step == 2
    order = training_order("ZBVZeroBubble", 2, 2, 4)
    for each in trace.ranks:
        assert each.events is not None and len(each.work) == 2
        for batch in (0, 1):
            mine = [
                event
                for event in each.events
                if event.batch == batch and event.kind in OF_KIND.values()
            ]
            expected = [
                (OF_KIND[action.kind], action.stage, action.micro_batch)
                for action in order[each.rank]
            ]
            assert [(event.kind, event.stage, event.micro_batch) for event in mine] == expected


def test_one_rank_is_traced_too(tmp_path: Path) -> None:
    [(traces, parameters, _)] = run_ranks(fit, 1, str(tmp_path), "tp1", 2, process_group=False)
    assert [trace.step if trace else None for trace in traces] == [None, 2, 3, 4]
    trace = traces[3]
    assert trace is not None and 0 <= trace.bubble < 0.2, "nothing to wait for"
    assert trace.ranks[0].memory.optimizer == pytest.approx(2 * parameters, rel=0.05), "two moments"


CELLS = [
    Cell(tp=2, pp=2, schedule="ZBVZeroBubble", zero=1),
    Cell(dp=2, zero=3),
    Cell(pp=2, dp=2, zero=3),
    Cell(pp=2, options=(("recompute", "full"),)),
    Cell(pp=2, options=(("recompute", "selective"),)),
    Cell(dp=2, zero=2, options=(("offload_activations", True),)),
]


@pytest.mark.parametrize("cell", by_default(CELLS, 0, 1, 3), ids=lambda cell: cell.name)
def test_steps_that_are_traced_are_exact(cell: Cell) -> None:
    check(cell, trace_every_n_steps=1)


# Arithmetic


def test_bubble_of_two_stages_by_hand() -> None:
    # Rank 0 works in [0, 2] and [6, 8], rank 1 in [2, 6] of 8 seconds; a second pipeline never
    # waits.
    layout = Layout(pp=2, dp=2)
    work = {0: [Work(0, 8, 4)], 1: [Work(2, 6, 4)], 2: [Work(1, 5, 4)], 3: [Work(1, 5, 4)]}
    assert measured_bubble(work, layout) == pytest.approx((4 + 4) / (16 + 8))
    assert measured_bubble({0: [Work(0, 4, 3), Work(4, 6, 2)]}, Layout()) == pytest.approx(1 / 6)
    assert measured_bubble({0: []}, Layout()) == 0.0


def test_waiting_and_reduction_of_the_whole_are_no_actions() -> None:
    events = [
        Event(RECEIVE, 1, 0, 0, 0.0, 1.0),
        Event(FORWARD, 1, 0, 0, 1.0, 2.0),
        Event(SEND, 1, 0, 0, 2.0, 2.5),
        Event(BACKWARD, 1, 0, 0, 3.0, 5.0),
        Event(REDUCE, 1, 0, 0, 5.0, 5.5),
        Event(REDUCE, None, None, 0, 6.0, 9.0),
        Event(OPTIMIZER, None, None, 0, 9.0, 10.0),
    ]
    assert work_of(events) == (Work(1.0, 5.5, 3.5),)


def test_events_of_a_large_layout_are_those_of_whole_pipelines() -> None:
    layout = Layout.parse("tp8_pp16_dp8")
    kept = chosen_ranks(layout)
    assert len(kept) == 64
    places = [layout.coordinates(rank) for rank in kept]
    assert {place["tp"] for place in places} == {0} and {place["dp"] for place in places} == {
        0,
        1,
        2,
        3,
    }
    assert chosen_ranks(Layout.parse("tp2_pp2_dp2")) == frozenset(range(8))
    assert len(chosen_ranks(Layout(pp=128))) == 128, "one pipeline at the least"


def test_clocks_of_three_machines() -> None:
    generator = torch.Generator().manual_seed(0)
    clocks = ["a", "a", "b", "b", "c"]
    true = {"a": 0.0, "b": -3.5, "c": 1200.25}
    rounds: list[list[tuple[float, float]]] = [[] for _ in clocks]
    for moment in range(8):
        entered = [moment + 1e-3 * torch.rand((), generator=generator).item() for _ in clocks]
        left = [
            max(entered) + 2e-4 * (1 + torch.rand((), generator=generator).item()) for _ in clocks
        ]
        for rank, clock in enumerate(clocks):
            rounds[rank].append((entered[rank] + true[clock], left[rank] + true[clock]))
    for clock, (offset, error) in zip(clocks, clock_offsets(clocks, rounds), strict=True):
        assert abs(offset - true[clock]) <= error + 1e-9 and error < 1e-3
    assert clock_offsets(["a", "a"], [[], []]) == [(0.0, 0.0)] * 2


class FakeEvent:
    """A CUDA event: from one that is recorded to the next a second goes by, by the GPU's clock."""

    done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        assert stream == "the stream that computes"
        self.moment, FakeEvent.done = FakeEvent.done, FakeEvent.done + 1.0

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1000 * (other.moment - self.moment)


def test_on_a_gpu_times_are_those_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream that computes")
    monkeypatch.setattr("time.perf_counter", lambda: 100.0)
    recorder = Recorder(torch.device("cuda", 0))
    recorder.begin()
    recorder.recording(True)
    with recorder.span(FORWARD, 0, 3):
        pass
    with recorder.span(SEND, 0, 3):
        pass
    assert len(waits) == 1, "nothing waits for the GPU while the step runs"
    assert recorder.take() == [
        Event(FORWARD, 0, 3, 0, 101.0, 102.0),
        Event(SEND, 0, 3, 0, 103.0, 104.0),
    ]
    assert len(waits) == 2


def test_what_autograd_keeps_is_counted() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())
    x = torch.randn(32, 64)
    known = [parameter.untyped_storage().data_ptr() for parameter in net.parameters()]
    saved = SavedTensors(known)
    with saved:
        first = net(x)
        # inputs of both layers, the input of GELU, the output of tanh
        assert saved.peak == 4 * 32 * (64 + 256 + 256 + 64)
        first.sum().backward()
        del first
        second = net(x[:8])
        second.sum().backward()
    assert saved.peak == 4 * 32 * (64 + 256 + 256 + 64), "what is freed does not count twice"
    with LiveBytes() as live:
        live.reset()
        third = net(x)
        assert live.peak >= saved.peak, "an independent count of all that is alive"
        del third
    with saved:
        out = net(x)
        inner = net(out)
    assert saved.peak > 1.9 * 4 * 32 * (64 + 256 + 256)
    del out, inner


def test_a_timeline_is_read_as_it_was_written(tmp_path: Path) -> None:
    events = (Event(FORWARD, 0, 0, 0, 10.0, 10.5), Event(REDUCE, None, None, 0, 11.0, 11.25))
    memory = Memory(4, 5, 6, None)
    ranks = (
        RankTrace(0, "a", memory, work_of(events), events),
        RankTrace(1, "b", memory, work_of(events)),
    )
    trace = StepTrace(7, "dp2", ("tp", "cp", "pp", "dp"), "1F1B", ranks, 1e-6)
    write_timeline(tmp_path / "timeline.json", trace)
    read = read_timeline(tmp_path / "timeline.json")
    assert read is not None
    assert (read.step, read.layout, read.order, read.schedule, read.clock_error) == (
        7,
        "dp2",
        trace.order,
        "1F1B",
        1e-6,
    )
    assert read.ranks[0].events == (
        Event(FORWARD, 0, 0, 0, 0.0, 0.5),
        Event(REDUCE, None, None, 0, 1.0, 1.25),
    )
    assert (
        read.ranks[1].events is None
        and read.ranks[1].memory == memory
        and read.ranks[1].host == "b"
    )
    assert read.bubble == trace.bubble
    for broken in ("", "{}", '{"lightning_3d": {}, "traceEvents": []}'):
        (tmp_path / "broken.json").write_text(broken)
        assert read_timeline(tmp_path / "broken.json") is None


def test_the_file_follows_the_trace_event_format(traced: Any) -> None:
    folder, parts = traced
    content = json.loads((folder / "timeline.json").read_text())
    assert content["displayTimeUnit"] == "ms"
    complete = [
        event
        for event in content["traceEvents"]
        if event["ph"] == "X" and event["cat"] not in (MESSAGE, WAIT)
    ]
    assert len(complete) == sum(len(each.events) for each in parts[0][0][3].ranks)
    for event in complete:
        assert set(event) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}
        assert (
            event["name"] in KINDS
            and event["ts"] >= 0
            and event["dur"] >= 0
            and event["pid"] in range(8)
        )
    names = [
        event["args"]["name"]
        for event in content["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    ]
    assert [name.rpartition(" ")[0] for name in names][:3] == [
        "rank 0 tp0 pp0 dp0",
        "rank 1 tp1 pp0 dp0",
        "rank 2 tp0 pp1 dp0",
    ]
    assert (
        as_chrome(parts[0][0][3]) == content
        or json.loads(json.dumps(as_chrome(parts[0][0][3]))) == content
    )


@pytest.mark.parametrize("every", [0, -3, 1.5, True])
def test_f21_steps_between_traces_that_make_no_sense_are_refused(every: Any) -> None:
    with pytest.raises(
        ConfigError,
        match="trace_every_n_steps must be a whole number of at least 1, or None .*; got",
    ):
        StepTracer(every)
