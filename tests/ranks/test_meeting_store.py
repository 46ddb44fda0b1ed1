"""Ranks that do not join are named, by the ranks that have; ports of an earlier attempt are waited
for."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading

import pytest
from ranks import run_ranks

from lightning_3d.errors import ConfigError, RendezvousError
from lightning_3d.ranks import meeting_store


def join(port: int, missing: int) -> tuple[str, str]:
    """(error, what was printed) of this rank, if three ranks join except for one."""
    rank = int(os.environ["RANK"])
    if rank == missing:
        return "", ""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            meeting_store.connect_store(rank, 3, 3.0)
        except RendezvousError as error:
            return str(error), printed.getvalue()
    return "joined", printed.getvalue()


def free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


@pytest.mark.slow
def test_f50_rank_that_never_joins_is_named() -> None:
    (said, printed), (_, silent), _ = run_ranks(join, 3, free_port(), 2, process_group=False)
    assert said.startswith(
        "Rank 2 of 3 has not joined the run within 3 s. Look at the logs of the ranks that are"
        " missing"
    ), said
    assert printed == silent == "", "the command line prints the error, on rank 0"
    assert RendezvousError.exit_code == 1


@pytest.mark.slow
def test_f50_rank_0_that_never_joins_is_named_by_one_other() -> None:
    _, (said, printed), (_, silent) = run_ranks(join, 3, free_port(), 0, process_group=False)
    assert "Rank 0 of 3 could not be reached at 127.0.0.1:" in said and "within 3 s" in said, said
    assert printed == f"lightning_3d: {said}\n" and silent == ""


def serve_on_a_taken_port(leaves: bool) -> tuple[str, str]:
    """(outcome, what was printed) of rank 0 whose port another process has, which leaves it soon or
    never."""
    with (
        socket.socket(socket.AF_INET6) as holder,
        contextlib.redirect_stderr(io.StringIO()) as printed,
    ):
        holder.bind(("::", 0))
        holder.listen()
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(holder.getsockname()[1]))
        patience, meeting_store.PORT_SECONDS = meeting_store.PORT_SECONDS, 10.0 if leaves else 0.5
        timer = threading.Timer(0.7, holder.close)
        if leaves:
            timer.start()
        try:
            meeting_store.connect_store(0, 1, 3.0)
        except ConfigError as error:
            return str(error), printed.getvalue()
        finally:
            timer.cancel()
            meeting_store.PORT_SECONDS = patience
    return "connected", printed.getvalue()


@pytest.mark.parametrize(
    ("leaves", "outcome"), [(True, "connected"), (False, "Rank 0 must listen on port")]
)
def test_f54_port_of_the_earlier_attempt_is_waited_for(leaves: bool, outcome: str) -> None:
    [(said, printed)] = run_ranks(serve_on_a_taken_port, 1, leaves, process_group=False)
    assert said.startswith(outcome), said
    assert printed.count(" s for 127.0.0.1:") == 1, printed
