"""What is said of a hang, from what the ranks say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d.health.hang_verdict import judge
from lightning_3d.health.rank_report import GroupState, LastCollective, RankStatus
from lightning_3d.health.time_limits import seconds_allowed
from lightning_3d.ranks.heartbeat import BETWEEN, SAVING, STARTING, STEP, Heartbeat


def calls(*kinds: str, pending: bool = True) -> tuple[LastCollective, ...]:
    """Collectives from number 5 on; the last one is pending."""
    last = len(kinds) - 1
    return tuple(
        LastCollective(5 + place, kind, "(4) float", pending and place == last)
        for place, kind in enumerate(kinds)
    )


def report(
    rank: int, *, blocked: bool = True, overdue: bool = True, waits_for: Any = None, **groups: Any
) -> RankStatus:
    """Groups are `name=(ranks, calls)`."""
    states = {name: GroupState(name, ranks, last) for name, (ranks, last) in groups.items()}
    return RankStatus(
        rank,
        f"node{rank}",
        "training step 7: reduce",
        61.0,
        f"mine.py:{rank} in f",
        blocked,
        overdue,
        waits_for,
        states,
    )


def text(*reports: RankStatus, silent: dict[int, str] | None = None) -> str:
    found = judge(
        {each.rank: RankStatus.from_json(each.to_json()) for each in reports}, silent or {}
    )
    assert found.certain
    return found.text


BOTH = (0, 1)


def test_a_silent_rank_is_the_cause() -> None:
    waiting = report(0, dp=(BOTH, calls("all_reduce")))
    assert (
        text(waiting, silent={1: "process 9 on node1 is stopped"})
        == "rank 1 does not answer: process 9 on node1 is stopped. Rank 0 has waited for it for 61"
        " s, in collective 5 (all_reduce of (4) float) of group dp (ranks 0 1)."
    )


def test_the_rank_that_computes_holds_up_the_others() -> None:
    """Although a collective of its own, which others have not called, runs beside its
    computation."""
    waiting = report(0, dp=(BOTH, calls("all_reduce", "all_gather")))
    computing = report(
        1,
        blocked=False,
        dp=(BOTH, calls("all_reduce", pending=False)),
        tp=((1, 2), calls("all_reduce")),
    )
    third = report(2, waits_for=(0, "the activation of micro-batch 1 at stage 3"), tp=((1, 2), ()))
    assert (
        text(waiting, computing, third)
        == "rank 0 has waited for rank 1 for 61 s, in collective 6 (all_gather of (4) float) of"
        " group dp (ranks 0 1). Rank 1 (node1) is in training step 7: reduce, for 61 s, at"
        " mine.py:1 in f."
    )


def test_a_rank_that_may_still_compute_is_waited_for() -> None:
    waiting = report(0, dp=(BOTH, calls("all_reduce")))
    slow = report(1, blocked=False, overdue=False, dp=(BOTH, ()))
    assert not judge({0: waiting, 1: slow}, {}).certain


@pytest.mark.parametrize("other", ["broadcast", "all_gather"])
def test_other_collectives_in_one_place_are_named(other: str) -> None:
    found = text(report(0, dp=(BOTH, calls("all_reduce"))), report(1, dp=(BOTH, calls(other))))
    assert (
        "do not call the same collective as its number 5: rank 0 calls all_reduce of (4) float and"
        " rank 1 calls" in found
    )
    assert (
        f"{other} of (4) float" in found
        and "at mine.py:0 in f" in found
        and "at mine.py:1 in f" in found
    )


def test_parts_of_an_all_to_all_may_differ() -> None:
    unequal = tuple(
        LastCollective(5, "all_to_all", size, True) for size in ("(4) float", "(6) float")
    )
    found = text(*(report(rank, ep=(BOTH, (unequal[rank],))) for rank in BOTH))
    assert (
        "all ranks of group ep (ranks 0 1) have called collective 5" in found
        and "does not end" in found
    )


def test_ranks_that_wait_for_each_other_have_another_order() -> None:
    first = report(0, one=(BOTH, calls("all_reduce")), two=(BOTH, ()))
    second = report(1, one=(BOTH, ()), two=(BOTH, calls("all_reduce")))
    assert (
        text(first, second)
        == "ranks wait for each other: rank 0 waits for rank 1 in collective 5 (all_reduce of (4)"
        " float) of group one (ranks 0 1) and rank 1 waits for rank 0 in collective 5"
        " (all_reduce of (4) float) of group two (ranks 0 1). They have called collectives in"
        " another order."
    )


def test_a_message_of_the_pipeline_is_waited_for() -> None:
    found = text(
        report(0, waits_for=(1, "the gradient of micro-batch 3 at stage 0")),
        report(1, blocked=False),
    )
    assert found.startswith(
        "rank 0 has waited for rank 1 for 61 s, for the gradient of micro-batch 3 at stage 0. Rank"
        " 1 (node1) is in"
    )


def test_time_limits() -> None:
    """Ten times the median step, at least a minute; more outside of steps, and before three steps
    are known."""
    heart = Heartbeat()
    assert (heart.phase, seconds_allowed(heart, "auto", 0.0)) == (STARTING, 3600)
    heart.enter(STEP, 1)
    assert seconds_allowed(heart, "auto", 0.0) == 600
    heart._seconds.extend([20.0, 1.0, 30.0])
    assert seconds_allowed(heart, "auto", 0.0) == 200 and seconds_allowed(heart, 30, 0.0) == 30
    heart.enter(BETWEEN)
    assert seconds_allowed(heart, "auto", 0.0) == 2000
    heart.enter(SAVING)
    assert seconds_allowed(heart, 30, 1800.0) == 1800


def test_what_a_heartbeat_says() -> None:
    heart = Heartbeat()
    heart.enter(STEP, 7)
    heart.act("forward", 2, 5)
    assert heart.describe() == "training step 7: forward, stage 2, micro-batch 5"
    with heart.during(SAVING):
        assert heart.describe() == SAVING
    heart.end_step()
    assert heart.describe() == BETWEEN and heart.step_seconds() is None
