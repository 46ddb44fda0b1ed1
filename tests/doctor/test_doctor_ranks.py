"""The checks on ranks: one of them is changed, slow, blind, stopped or never there."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctored import setup_of, with_measure
from ranks import run_ranks

from lightning_3d.app.doctor import collectives, compute, environment, file_system, host, versions
from lightning_3d.app.doctor.board import DoctorBoard, Unreachable
from lightning_3d.app.doctor.check import Check, Facts, Room, Setup
from lightning_3d.app.doctor.examination import Report, dismiss, examine
from lightning_3d.app.doctor.findings import OK, UNKNOWN, WARNING, WRONG
from lightning_3d.app.doctor.record import as_data
from lightning_3d.app.doctor.table import show
from lightning_3d.ranks.environment import outside_rank

Found = dict[str, Any]


def examined(setup: Setup, checks: list[Check], wake: bool = False) -> Found | int:
    """On each rank: the report of rank 0 as data, with its text; elsewhere the exit code."""
    me = outside_rank()
    assert me is not None
    board = DoctorBoard(me.rank, setup.limit)
    report = examine(setup, checks, me, board)
    if not isinstance(report, Report):
        return report
    for rank in report.silent if wake else ():
        os.kill(report.places.by_rank[rank].process, signal.SIGCONT)
    dismiss(board, report)
    return as_data(report) | {"text": show(report)}


def of_ranks(
    setup: Setup, *checks: Check, wake: bool = False
) -> tuple[Found, Callable[[str, str], Found]]:
    """Examine; return the report, and a function that finds a finding by check and name."""
    found = run_ranks(
        examined,
        setup.layout.world_size,
        setup,
        list(checks),
        wake,
        process_group=False,
        timeout=60,
    )
    report = found[0]

    def named(check: str, name: str) -> Found:
        return next(one for one in report["findings"][check] if one["name"] == name)

    assert set(found[1:]) <= {report["exit_code"]}, "all ranks have one exit code"
    return report, named


def other_version(room: Room) -> Facts:
    return versions.measure(room) | ({"torch": "2.12.1"} if room.rank == 1 else {})


def with_variable(room: Room) -> Facts:
    if room.rank == 1:
        os.environ["NCCL_P2P_DISABLE"] = "1"  # the pool puts the environment back
    return environment.measure(room)


def with_fewer_files(room: Room) -> Facts:
    facts = host.measure(room)
    return facts | ({"limits": {**facts["limits"], "files": 256}} if room.rank == 1 else {})


def elsewhere(room: Room) -> Facts:
    if room.rank == 1:
        room.setup = replace(room.setup, folder="/nowhere", limit=3.0)
    return file_system.measure(room)


def multiplies_slowly(room: Room) -> Facts:
    """By a clock that only counts the products: real ones take their time on a busy machine."""
    import torch

    passed, product, clock = [0.0], torch.mm, compute.time

    def multiply(*tensors: Any, **more: Any) -> Any:
        passed[0] += 0.05 if room.rank == 1 else 0.01
        return product(*tensors, **more)

    torch.mm, compute.time = multiply, SimpleNamespace(perf_counter=lambda: passed[0])  # type: ignore[assignment]
    try:
        return compute.measure(room)
    finally:
        torch.mm, compute.time = product, clock


def sends_slowly(room: Room) -> Facts:
    import torch.distributed as dist

    if room.rank == 2:
        send = dist.batch_isend_irecv
        dist.batch_isend_irecv = lambda operations: (time.sleep(0.05), send(operations))[1]
        try:
            return collectives.measure(room)
        finally:
            dist.batch_isend_irecv = send
    return collectives.measure(room)


def stops(room: Room) -> Facts:
    if room.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return {}


def hangs(room: Room) -> Facts:
    if room.rank == 1:
        room.now = "waiting for Godot"
        time.sleep(6)
    return {}


def fails(room: Room) -> Facts:
    if room.rank == 1:
        raise RuntimeError("no such thing")
    return {}


def nothing(gathered: Any) -> list[Any]:
    return []


def test_a_version_a_variable_and_a_limit_of_one_rank_are_found() -> None:
    checks = (
        with_measure(versions.CHECK, other_version),
        with_measure(environment.CHECK, with_variable),
        with_measure(host.CHECK, with_fewer_files),
    )
    report, named = of_ranks(setup_of("dp2", "cpu"), *checks)
    here = os.uname().nodename
    assert (named("versions", "torch")["verdict"], named("versions", "torch")["ranks"]) == (
        WRONG,
        (1,),
    )
    assert f"2.12.1 on rank 1 ({here})" in named("versions", "torch")["measured"]
    assert named("versions", "lightning")["verdict"] == OK
    assert named("environment", "NCCL_P2P_DISABLE")["ranks"] == (1,)
    assert named("host", "open files")["verdict"] == WRONG and named("host", "ports")
    assert report["exit_code"] == 1 and "2.12.1" in report["text"]


def test_the_file_system_is_measured(tmp_path: Path) -> None:
    report, named = of_ranks(setup_of("dp2", "cpu", str(tmp_path)), file_system.CHECK)
    verdicts = {
        name: named("file system", name)["verdict"]
        for name in ("shared folder", "locks", "renames")
    }
    assert verdicts == dict.fromkeys(verdicts, OK)
    assert report["facts"]["file system"]["0"]["write"] > 0 and list(tmp_path.iterdir()) == [], (
        "nothing is left behind"
    )


def test_a_folder_that_a_rank_cannot_see_is_wrong(tmp_path: Path) -> None:
    report, named = of_ranks(
        setup_of("dp2", "cpu", str(tmp_path)), with_measure(file_system.CHECK, elsewhere)
    )
    finding = named("file system", "shared folder")
    assert (finding["verdict"], finding["ranks"]) == (WRONG, (1,)) and report["exit_code"] == 1


def test_a_rank_that_computes_slowly_is_named() -> None:
    report, named = of_ranks(setup_of("dp2", "cpu"), with_measure(compute.CHECK, multiplies_slowly))
    assert (named("compute", "slow rank")["verdict"], named("compute", "slow rank")["ranks"]) == (
        WARNING,
        (1,),
    )
    assert report["exit_code"] == 0, "on CPU ranks only a warning"


@pytest.mark.slow
def test_a_rank_that_sends_slowly_is_named() -> None:
    report, named = of_ranks(setup_of("dp4", "cpu"), with_measure(collectives.CHECK, sends_slowly))
    finding = named("collectives", "pairs within a host")
    assert (finding["verdict"], finding["ranks"]) == (WARNING, (2,)), finding
    assert {one["name"] for one in report["operations"]} == {"reduce_scatter", "all_gather"}


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("tp2_pp2", {("tp", "all_reduce"), ("pp", "send")}),
        (
            "cp2_dp2_ep2",
            {("cp", "send"), ("dp", "reduce_scatter"), ("dp", "all_gather"), ("ep", "all_to_all")},
        ),
    ],
)
def test_collectives_of_every_axis_are_measured(layout: str, names: set[tuple[str, str]]) -> None:
    report, named = of_ranks(setup_of(layout, "cpu"), collectives.CHECK)
    assert {(one["axis"], one["name"]) for one in report["operations"]} == names
    assert all(one["seconds"] > 0 and one["placement"] == "node" for one in report["operations"])
    assert all(named("collectives", f"{axis} {name.replace('_', '-')}") for axis, name in names)


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_nothing_waits_for_it() -> None:
    checks = (Check("first", stops, nothing), versions.CHECK, collectives.CHECK)
    report, named = of_ranks(setup_of("dp2", "cpu", limit=2.0), *checks, wake=True)
    answers = named("ranks", "answers")
    assert (answers["verdict"], answers["ranks"]) == (WRONG, (1,)) and report["exit_code"] == 1
    assert (
        f"rank 1 ({os.uname().nodename}) stopped answering in the check of first"
        in answers["measured"]
    )
    assert named("versions", "torch")["verdict"] == OK, "the other ranks are still checked"
    assert named("collectives", "collectives")["verdict"] == UNKNOWN


@pytest.mark.slow
def test_a_check_that_hangs_or_fails_on_a_rank_is_named() -> None:
    checks = (Check("first", fails, nothing), Check("second", hangs, nothing), collectives.CHECK)
    report, named = of_ranks(setup_of("dp2", "cpu", limit=2.0), *checks)
    assert (named("first", "first")["verdict"], named("first", "first")["ranks"]) == (WRONG, (1,))
    assert "failed: RuntimeError: no such thing" in named("first", "first")["measured"]
    assert "has not ended after 2 s: waiting for Godot" in named("second", "second")["measured"]
    assert (
        "did not answer before" in named("collectives", "collectives")["measured"]
        and report["exit_code"] == 1
    )


def with_a_missing_rank(limit: float) -> Any:
    """Rank 2 of 3 never begins."""
    if os.environ["RANK"] == "2":
        return None
    return examined(setup_of("dp3", "cpu", limit=limit), [versions.CHECK])


@pytest.mark.slow
def test_a_rank_that_never_begins_is_named() -> None:
    report, code, _ = run_ranks(with_a_missing_rank, 3, 2.0, process_group=False, timeout=60)
    answers = report["findings"]["ranks"][0]
    assert "rank 2" in answers["measured"] and "never answered within 2 s" in answers["measured"]
    assert report["exit_code"] == code == 1


def without_rank_0(limit: float) -> str:
    """Rank 0 begins, and then does not lead."""
    me = outside_rank()
    assert me is not None
    if me.rank == 0:
        DoctorBoard(0, limit).post("here/0", {"host": "node7"})
        return ""
    with pytest.raises(Unreachable) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_3d.app.doctor.examination._LEAD_SECONDS", 0.5)
        examine(setup_of("dp2", "cpu", limit=limit), [], me, DoctorBoard(me.rank, limit))
    return str(caught.value)


@pytest.mark.slow
def test_ranks_do_not_wait_for_ever_for_rank_0() -> None:
    _, message = run_ranks(without_rank_0, 2, 0.5, process_group=False, timeout=60)
    assert "Rank 0 on node7 did not answer within" in message


def without_a_store() -> str:
    os.environ["MASTER_PORT"] = "1"
    with pytest.raises(Unreachable) as caught:
        DoctorBoard(1, 1.0, serve=False)
    return str(caught.value)


@pytest.mark.slow
def test_a_store_that_is_not_there_is_explained() -> None:
    (message,) = run_ranks(without_a_store, 1, process_group=False)
    assert (
        "cannot reach the store at 127.0.0.1:1 (MASTER_ADDR and MASTER_PORT) within 1 s" in message
    )
