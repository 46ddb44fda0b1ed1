"""Messages in a traced step: each is there with its bytes and ranks, in the right order next to the
computation."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from counting import Call
from ranks import run_ranks
from torch import Tensor, nn
from traced_messages import traced_messages
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP

from lightning_3d.layout import Layout
from lightning_3d.parallel import gloo_exchange
from lightning_3d.tracing import messages
from lightning_3d.tracing.chrome import MESSAGE, WAIT, as_chrome, read_timeline, write_timeline
from lightning_3d.tracing.marks import Marks
from lightning_3d.tracing.overlap import (
    computing_spans,
    hidden_by_kind,
    length_within,
    summary,
    union,
    without,
)
from lightning_3d.tracing.trace import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    Event,
    Memory,
    RankTrace,
    StepTrace,
    Transfer,
    group_name,
)

AGREEMENT = 1024
"""Bytes up to which a message may be an agreement of the ranks, which is not recorded."""


def first_rank(
    parts: list[tuple[StepTrace | None, list[Call]]],
) -> tuple[list[Event], list[Transfer], list[Call]]:
    """Events and messages of rank 0, and what it sent meanwhile, counted by other means."""
    trace, calls = parts[0]
    assert trace is not None
    events, transfers = list(trace.ranks[0].events or ()), list(trace.ranks[0].transfers or ())
    assert all(each.events and each.transfers for each in trace.ranks), "rank 0 has those of all"
    assert not any(each.transfers for each in parts[1][0].ranks), "and no other rank"  # type: ignore[union-attr]
    assert transfers == sorted(transfers, key=lambda one: one.start)
    begin, end = events[0].start, events[-1].end
    for one in transfers:
        assert one.start <= one.launched <= one.end and (
            one.wait is None or one.start <= one.wait[0] <= one.wait[1]
        )
        assert one.wait is None or one.end <= one.wait[1], (
            "nothing arrives after it has been waited for"
        )
    return events, transfers, [call for call in calls if begin <= call.at <= end]


def check_all_are_seen(
    events: list[Event], transfers: list[Transfer], calls: list[Call], *, most_left: int = 0
) -> None:
    """Each message is one that was counted, and what is missing are agreements."""
    seen = Counter((one.ranks, one.size) for one in transfers if one.start >= events[0].start)
    sent = Counter((call.ranks, call.bytes) for call in calls)
    assert not seen - sent
    assert sum((sent - seen).values()) <= most_left and all(
        size <= AGREEMENT for _, size in sent - seen
    )


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shared memory"])
def test_buckets_are_reduced_while_the_last_backward_runs(
    shared_memory: bool, tmp_path: Path
) -> None:
    parts = run_ranks(traced_messages, 2, str(tmp_path), "dp2", shared_memory=shared_memory)
    events, transfers, calls = first_rank(parts)
    check_all_are_seen(events, transfers, calls)
    last = [event for event in events if event.kind == BACKWARD][-1]
    buckets = [one for one in transfers if one.operation == "all-reduce" and one.size > AGREEMENT]
    early = [one for one in buckets if last.start < one.start < last.end]
    assert len(early) >= 2 and all(one.start > last.start for one in buckets)
    assert {(one.group, one.ranks, one.exact) for one in buckets} == {
        ("dp", (0, 1), not shared_memory)
    }
    assert all(one.wait is not None and one.wait[0] > last.end for one in early), (
        "nothing in the backward waits for them"
    )
    found = read_timeline(tmp_path / "timeline.json")
    assert found is not None and [one[:4] for one in found.ranks[0].transfers or ()] == [
        one[:4] for one in transfers
    ]
    share = hidden_by_kind(found.ranks)["all-reduce over dp"]
    assert 0 < share.share < 1 and json.loads((tmp_path / "timeline.json").read_text())[
        "lightning_3d"
    ]["hidden"].keys() == {"all-reduce over dp"}
    assert "all-reduce over dp: " in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_parameters_are_gathered_while_blocks_run(tmp_path: Path) -> None:
    events, transfers, calls = first_rank(
        run_ranks(traced_messages, 4, str(tmp_path), "dp4", zero_stage=3)
    )
    check_all_are_seen(events, transfers, calls, most_left=4)
    gathers = [one for one in transfers if one.operation == "all-gather"]
    assert {one.group for one in gathers} == {"dp"} and all(one.exact for one in gathers)
    for event in events:
        if event.kind in (FORWARD, BACKWARD):
            inside = [one for one in gathers if event.start < one.start < event.end]
            assert len(inside) >= 2
            ahead = [
                one
                for one, other in zip(inside, inside[1:], strict=False)
                if one.wait and one.wait[0] > other.start
            ]
            assert ahead or len(inside) > 2, (
                "a gather starts before the one before it is waited for"
            )


@pytest.mark.slow
def test_shards_are_reduced_inside_and_across(tmp_path: Path) -> None:
    options = {"zero_stage": 1, "zero_reduce_scatter": True, "zero_shard_size": 2}
    events, transfers, _ = first_rank(
        run_ranks(traced_messages, 4, str(tmp_path), "dp4", **options)
    )
    last = [event for event in events if event.kind == BACKWARD][-1]
    by_group = {
        group: [
            one
            for one in transfers
            if one.group == group
            and one.operation in ("reduce", "all-reduce")
            and one.size > AGREEMENT
        ]
        for group in ("shard", "replicas")
    }
    assert {one.ranks for one in by_group["shard"]} == {(0, 1)} and {
        one.ranks for one in by_group["replicas"]
    } == {(0, 2)}
    assert any(last.start < one.start < last.end for one in by_group["shard"])
    inner, outer = (sum(one.size for one in by_group[group]) for group in ("shard", "replicas"))
    assert outer == pytest.approx(inner / 2, rel=0.02), (
        "a rank's half of the shard group's gradients crosses"
    )
    assert by_group["shard"][0].start < by_group["replicas"][0].start


def mixture(folder: str) -> tuple[StepTrace | None, list[Call], list[tuple[float, float]]]:
    """A traced step of a mixture, and when its shared experts ran forward."""
    ran: list[tuple[float, float]] = []
    forward = Qwen2MoeMLP.forward

    def timed(module: nn.Module, x: Tensor) -> Tensor:
        start = time.perf_counter()
        result = forward(module, x)
        ran.append((start, time.perf_counter()))
        return result

    with patch.object(Qwen2MoeMLP, "forward", timed):
        trace, calls = traced_messages(folder, "dp2_ep2", model="qwen2_moe", shared_memory=True)
    return trace, calls, ran


@pytest.mark.slow
def test_tokens_travel_while_the_shared_expert_runs(tmp_path: Path) -> None:
    parts = run_ranks(mixture, 2, str(tmp_path))
    events, transfers, calls = first_rank([(trace, calls) for trace, calls, _ in parts])
    check_all_are_seen(events, transfers, calls)
    exchanges = [one for one in transfers if one.operation == "all-to-all" and one.size > AGREEMENT]
    shared = [
        (start, end) for start, end in parts[0][2] if events[0].start < start < events[-1].end
    ]
    assert shared
    for start, end in shared:
        assert sum(one.start < start and end < one.end for one in exchanges) == 1


@pytest.mark.slow
def test_messages_between_stages_are_seen(tmp_path: Path) -> None:
    parts = run_ranks(traced_messages, 2, str(tmp_path), "pp2")
    events, transfers, calls = first_rank(parts)
    check_all_are_seen(events, transfers, calls)
    for operation in ("send", "receive"):
        found = [one for one in transfers if one.operation == operation]
        assert len(found) == 2 and len({one.size for one in found}) == 1, "two micro-batches"
        assert {(one.group, one.ranks, one.exact) for one in found} == {("pp", (0, 1), False)}
    waits = [one.wait for one in transfers if one.operation == "receive"]
    inside = [event for event in events if event.kind == RECEIVE]
    for event, wait in zip(inside, waits, strict=True):
        assert wait is not None and event.start <= wait[0] <= wait[1] <= event.end


# One message


def one_message(follows: bool) -> tuple[list[Transfer], bool]:
    """A sum over all ranks, with and without someone who follows."""
    log = messages.MessageLog(Marks(torch.device("cpu")))
    messages.follow(log if follows else None)
    x = torch.ones(1000)
    work = gloo_exchange.start_all_reduce(x, dist.group.WORLD)
    messages.follow(None)
    work.wait()
    assert x.tolist() == [dist.get_world_size()] * 1000
    while follows and log._notes[0].arrived is None:
        time.sleep(0.001)
    return log.take(), isinstance(work, dist.Work)


def test_nothing_is_recorded_where_nobody_follows() -> None:
    for found, is_torchs_own in run_ranks(one_message, 2, False):
        assert found == [] and is_torchs_own
    for found, is_torchs_own in run_ranks(one_message, 2, True):
        assert (
            [one[:4] for one in found] == [("all-reduce", "world", (0, 1), 4000)]
            and found[0].exact
            and not is_torchs_own
        )


class FakeEvent:
    """A CUDA event that remembers its stream; each is a second after the one before."""

    recorded: list[Any] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        FakeEvent.recorded.append(stream)
        self.moment = float(len(FakeEvent.recorded))

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1000 * (other.moment - self.moment)


class FakeCuda:
    """Streams, of which one is current."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.current, self.waits = "main", 0
        patched.setattr(torch.cuda, "Event", FakeEvent)
        patched.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patched.setattr(torch.cuda, "Stream", lambda device=None: "apart")
        patched.setattr(torch.cuda, "stream", lambda stream: self._use(stream))
        patched.setattr(
            torch.cuda, "synchronize", lambda device=None: setattr(self, "waits", self.waits + 1)
        )

    def _use(self, stream: str) -> Any:
        class Used:
            def __enter__(_) -> None:
                self.before, self.current = self.current, stream

            def __exit__(_, *error: Any) -> None:
                self.current = self.before

        return Used()


class OnGpu:
    """The part of a tensor on a GPU that is looked at."""

    device = torch.device("cuda", 0)

    def numel(self) -> int:
        return 3

    def element_size(self) -> int:
        return 2


class NcclWork:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.waited_in = cuda, []

    def wait(self) -> None:
        self.waited_in.append(self._cuda.current)


def test_on_a_gpu_the_arrival_is_that_of_a_stream_that_only_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, FakeEvent.recorded = FakeCuda(monkeypatch), []
    group: Any = type("Group", (), {"group_desc": "dp"})()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr("time.perf_counter", lambda: 100.0)
    marks = Marks(torch.device("cuda", 0))
    marks.begin()
    log, inner, x = messages.MessageLog(marks), NcclWork(cuda), OnGpu()
    work = log.started("all-reduce", x, group, lambda: inner)  # type: ignore[arg-type]
    work.wait()
    work.wait()
    assert inner.waited_in == ["apart", "main", "main"]
    assert FakeEvent.recorded == [
        "main",
        "main",
        "apart",
        "main",
        "main",
        "main",
    ], "origin, start, arrival, a wait; the second counts not"
    assert cuda.waits == 1, "nothing waits for the GPU after the origin"
    assert log.take() == [
        Transfer("all-reduce", "dp", (0, 1), 6, 101.0, 101.0, 102.0, (103.0, 104.0), True)
    ]


# Arithmetic and the file


def message(
    start: float, end: float, wait: tuple[float, float] | None = None, operation: str = "all-reduce"
) -> Transfer:
    return Transfer(operation, "dp", (0, 1), 1 << 20, start, start, end, wait, True)


def test_hidden_share_by_hand() -> None:
    events = (
        Event(FORWARD, 0, 0, 0, 0.0, 4.0),
        Event(BACKWARD, 0, 0, 0, 4.0, 10.0),
        Event(RECEIVE, 0, 0, 0, 11.0, 12.0),
    )
    # The first is hidden from 2 to 5, then waited for; the second has 1 of 2 s outside of the
    # backward; the third is never hidden.
    sent = (
        message(2.0, 6.0, (5.0, 6.0)),
        message(9.0, 11.0),
        message(11.0, 12.0, (11.0, 12.0), "receive"),
    )
    rank = RankTrace(0, "a", Memory(0, 0, 0, None), (), events, sent)
    assert computing_spans(events, sent) == [(0.0, 5.0), (6.0, 10.0)]
    assert computing_spans(events, [sent[0]._replace(launched=3.0)]) == [
        (0.0, 2.0),
        (3.0, 5.0),
        (6.0, 10.0),
    ]
    found = hidden_by_kind([rank])
    assert found["all-reduce over dp"] == (2, 2 << 20, 6.0, 4.0, 1.0)
    assert found["receive over dp"].share == 0.0
    assert summary([rank])[0] == "all-reduce over dp: 2 messages, 2.00 MiB, hidden 67%"
    assert summary([RankTrace(1, "a", Memory(0, 0, 0, None), ())]) == []


def test_spans_are_merged_removed_and_measured() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert without([(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 12)]) == [(0, 1), (2, 3), (6, 8)]
    assert without([(0, 1)], []) == [(0, 1)] and without([(1, 2)], [(0, 3)]) == []
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(40, generator=generator).sort().values.tolist()
    spans = union((start, start + 0.01) for start in starts)
    for first, last in torch.rand(50, 2, generator=generator).sort(1).values.tolist():
        expected = sum(max(0.0, min(last, end) - max(first, start)) for start, end in spans)
        assert length_within(first, last, spans) == pytest.approx(expected, abs=1e-12)


def test_a_group_is_named_by_its_axes_or_by_what_it_is_for() -> None:
    layout = Layout.parse("tp2_dp4")

    def named(*ranks: int) -> str:
        return group_name(
            layout, Transfer("all-reduce", "shard", ranks, 0, 0.0, 0.0, 0.0, None, True)
        )

    assert [named(0, 1), named(0, 2, 4, 6), named(0, 2), named(*range(8))] == [
        "tp",
        "dp",
        "shard",
        "tp+dp",
    ]


def test_messages_that_overlap_have_rows_of_their_own(tmp_path: Path) -> None:
    events = (Event(FORWARD, 0, 0, 0, 1.0, 6.0),)
    sent = (
        message(2.0, 4.0, (3.5, 4.0)),
        message(3.0, 5.0),
        message(4.5, 5.5),
        message(2.5, 3.0, None, "all-gather"),
    )
    ranks = (
        RankTrace(
            0, "a", Memory(1, 2, 3, 4), (), events, tuple(sorted(sent, key=lambda one: one.start))
        ),
    )
    trace = StepTrace(
        3,
        "dp2",
        ("tp", "cp", "pp", "dp"),
        "1F1B",
        (*ranks, RankTrace(1, "a", Memory(1, 2, 3, 4), ())),
    )
    content = as_chrome(trace)["traceEvents"]
    rows: dict[int, list[Any]] = {}
    for entry in content:
        if entry["ph"] == "X":
            rows.setdefault(entry["tid"], []).append(entry)
    for row in rows.values():
        assert all(
            one["ts"] + one["dur"] <= other["ts"] for one, other in zip(row, row[1:], strict=False)
        )
    assert [[entry["cat"] for entry in rows[row]] for row in sorted(rows)] == [
        [FORWARD],
        [WAIT],
        [MESSAGE] * 2,
        [MESSAGE],
        [MESSAGE],
    ]
    names = {
        entry["tid"]: entry["args"]["name"] for entry in content if entry["name"] == "thread_name"
    }
    over = "over dp"
    assert list(names.values()) == [
        "step",
        "waits for messages",
        f"all-reduce {over}",
        f"all-reduce {over}",
        f"all-gather {over}",
    ]
    write_timeline(tmp_path / "timeline.json", trace)
    read = read_timeline(tmp_path / "timeline.json")
    assert (
        read is not None
        and read.ranks[0] == ranks[0].shifted(-1.0)
        and read.ranks[1].transfers is None
    )
