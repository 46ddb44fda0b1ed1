"""Check: limits of each host, shared memory, ports, connections between hosts, and their clocks."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from contextlib import closing, suppress
from typing import Any

from lightning_3d.app.doctor.check import Check, Facts, GatheredAnswers, Room
from lightning_3d.app.doctor.findings import OK, UNKNOWN, WARNING, WRONG, DoctorFinding
from lightning_3d.app.doctor.time_limit import TimeLimit
from lightning_3d.errors import listed
from lightning_3d.storage.numbers import show_memory

_PORTS = (29400, 29500, 29501)
"""Ports at which ranks meet: torchrun's defaults for --rdzv-backend=c10d and for MASTER_PORT, and
the next one for a second run."""
_FILES, _FEW_FILES = 4096, 1024
"""Open files: data loaders pass each tensor as a file."""
_STACK = 8 << 20
_SHM, _LITTLE_SHM = 1 << 30, 128 << 20
"""Bytes of /dev/shm: data loaders and NCCL put their buffers there. Docker gives 64 MiB without
--shm-size or --ipc=host."""
_ROUNDS, _PONG_SECONDS = 5, 5.0
_OFFSET, _LARGE_OFFSET = 1.0, 60.0
"""Seconds between clocks that confuse times of files and logs, and that break certificates."""
_REACH_SECONDS = 3.0


def measure(room: Room) -> Facts:
    """Return limits of this rank, and on the lowest rank of each host what concerns the host."""
    facts: Facts = {"limits": limits(), "shm": shared_memory(), "clock": _clock(room)}
    if room.is_leader:
        facts |= {
            "ports": {str(port): can_bind(port) for port in _PORTS if port != _own_port()},
            "reached": _reach(room),
        }
    return facts


def limits() -> dict[str, int | None]:
    """Return the soft limits of this process; None for no limit."""
    names = {
        "files": resource.RLIMIT_NOFILE,
        "locked": resource.RLIMIT_MEMLOCK,
        "stack": resource.RLIMIT_STACK,
    }
    soft = {name: resource.getrlimit(number)[0] for name, number in names.items()}
    return {
        name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()
    }


def shared_memory(folder: str = "/dev/shm") -> dict[str, int] | None:
    """Return total and free bytes of /dev/shm; None where it does not exist."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def _own_port() -> int:
    return int(os.environ.get("MASTER_PORT", "0"))


def can_bind(port: int) -> bool:
    """Check whether a program could listen on a port now."""
    with closing(socket.socket()) as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return True
    return False


def _clock(room: Room) -> dict[str, float] | None:
    """Measure the offset of this host's clock from rank 0's: half of the shortest way there and
    back is its error (Cristian, "Probabilistic clock synchronization", 1989). Rank 0 answers the
    lowest rank of each host in turn."""
    if room.rank == 0:
        for leader in room.leaders[1:]:
            for turn in range(_ROUNDS):
                with suppress(TimeLimit):
                    room.board.wait(f"ping/{leader}/{turn}", _PONG_SECONDS)
                    room.board.post(f"pong/{leader}/{turn}", time.time())
        return None
    if not room.is_leader:
        return None
    best: dict[str, float] | None = None
    for turn in range(_ROUNDS):
        sent = time.time()
        room.board.post(f"ping/{room.rank}/{turn}", True)
        with suppress(TimeLimit):
            there = float(
                room.board.wait(f"pong/{room.rank}/{turn}", _PONG_SECONDS * len(room.leaders))
            )
            back = time.time()
            if best is None or (back - sent) / 2 < best["error"]:
                best = {"offset": (sent + back) / 2 - there, "error": (back - sent) / 2}
    return best


def _reach(room: Room) -> dict[str, str]:
    """Connect to a port of each other host; return what failed by rank.

    The listener stays open until all hosts have tried; the kernel accepts connections for it.
    """
    with closing(socket.socket()) as listener:
        listener.bind(("", 0))
        listener.listen(len(room.leaders))
        room.board.post(f"listens/{room.rank}", [_own_address(), listener.getsockname()[1]])
        keys = {f"listens/{rank}": rank for rank in room.leaders if rank != room.rank}
        addresses = room.board.wait_for_all(keys, _REACH_SECONDS)
        failed = {
            str(keys[key]): why for key, address in addresses.items() if (why := _connect(address))
        }
        failed |= {
            str(rank): "it does not answer" for key, rank in keys.items() if key not in addresses
        }
        room.board.post(f"reached/{room.rank}", True)
        room.board.wait_for_all(
            [f"reached/{rank}" for rank in room.leaders], _REACH_SECONDS * len(room.leaders)
        )
    return failed


def _own_address() -> str:
    """Return the address of this host on the way to rank 0. A datagram socket that connects sends
    nothing."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe, suppress(OSError):
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _connect(address: Any) -> str:
    """Connect, and return why that failed; empty if it worked."""
    try:
        socket.create_connection((address[0], int(address[1])), timeout=_REACH_SECONDS).close()
    except OSError as error:
        return f"{address[0]}:{address[1]}: {error.strerror or error}"
    return ""


def judge(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Judge limits, shared memory, ports, connections and clocks."""
    return [
        *_limits(gathered),
        _shared_memory(gathered),
        _ports(gathered),
        *_connections(gathered),
        *_clocks(gathered),
    ]


def _limits(gathered: GatheredAnswers) -> list[DoctorFinding]:
    places, findings = gathered.places, []
    gpu = gathered.setup.accelerator == "gpu"
    for key, name, least, wrong, advice in (
        (
            "files",
            "open files",
            _FILES,
            _FEW_FILES,
            "Raise it: ulimit -n 65536 (LimitNOFILE of slurmd, --ulimit of docker).",
        ),
        (
            "locked",
            "locked memory",
            None if gpu else 0,
            0,
            "Set ulimit -l unlimited, which InfiniBand needs to register memory.",
        ),
        ("stack", "stack", _STACK, 0, "Set ulimit -s 8192 or more."),
    ):
        values = {rank: one[key] for rank, one in gathered.values("limits").items()}
        finite = {rank: value for rank, value in values.items() if value is not None}
        low = tuple(rank for rank, value in finite.items() if least is None or value < least)
        lowest = min(finite.values(), default=None)
        shown = (
            "unlimited"
            if lowest is None
            else f"{lowest}"
            if key == "files"
            else show_memory(lowest)
        )
        if not low:
            findings.append(DoctorFinding(name, OK, shown))
            continue
        verdict = WRONG if lowest is not None and lowest < wrong else WARNING
        findings.append(
            DoctorFinding(name, verdict, f"{shown} on {places.describe(low)}", low, advice)
        )
    return findings


def _shared_memory(gathered: GatheredAnswers) -> DoctorFinding:
    places, values = gathered.places, gathered.values("shm")
    known = {rank: one["free"] for rank, one in values.items() if one is not None}
    if not known:
        return DoctorFinding(
            "/dev/shm", WARNING, "there is none", advice="Mount a tmpfs at /dev/shm."
        )
    low = tuple(rank for rank, free in known.items() if free < _SHM)
    least = min(known.values())
    if not low:
        return DoctorFinding("/dev/shm", OK, f"{show_memory(least)} free")
    verdict = WRONG if least < _LITTLE_SHM else WARNING
    advice = "Start the container with --ipc=host or --shm-size=16g, or remove files there."
    return DoctorFinding(
        "/dev/shm", verdict, f"{show_memory(least)} free on {places.describe(low)}", low, advice
    )


def _ports(gathered: GatheredAnswers) -> DoctorFinding:
    """Only ranks on rank 0's host listen at these ports, but any host may be the first one of the
    next run."""
    places = gathered.places
    taken = {
        rank: [port for port, free in one["ports"].items() if not free]
        for rank, one in gathered.of_hosts().items()
    }
    busy = {rank: numbers for rank, numbers in taken.items() if numbers}
    if not busy:
        return DoctorFinding("ports", OK, f"{listed(map(str, _PORTS))} can be used")
    words = listed(
        f"{listed(numbers)} in use on {places.host(rank)}" for rank, numbers in busy.items()
    )
    advice = (
        "End the program that listens there (ss -ltnp), or set MASTER_PORT (torchrun --master-port)"
        " to another port."
    )
    return DoctorFinding("ports", WARNING, words, tuple(busy), advice)


def _connections(gathered: GatheredAnswers) -> list[DoctorFinding]:
    places, hosts = gathered.places, gathered.of_hosts()
    if len(hosts) == 1:
        return []
    findings = []
    for rank, one in hosts.items():
        for other, why in one["reached"].items():
            words = f"{places.host(rank)} cannot connect to {places.host(int(other))}: {why}"
            advice = (
                "Open all ports between the hosts, and set NCCL_SOCKET_IFNAME and"
                " GLOO_SOCKET_IFNAME to their network."
            )
            findings.append(DoctorFinding("connections", WRONG, words, (rank, int(other)), advice))
    return findings or [
        DoctorFinding("connections", OK, f"all {len(hosts)} hosts reach each other")
    ]


def _clocks(gathered: GatheredAnswers) -> list[DoctorFinding]:
    places = gathered.places
    others = {
        rank: one["clock"]
        for rank, one in gathered.of_hosts().items()
        if rank != min(gathered.places.by_rank)
    }
    if not others:
        return []
    lacking = [rank for rank, clock in others.items() if clock is None]
    findings = (
        [
            DoctorFinding(
                "clocks", UNKNOWN, f"not measured on {places.describe(lacking)}", tuple(lacking)
            )
        ]
        if lacking
        else []
    )
    known = {rank: clock for rank, clock in others.items() if clock is not None}
    off = tuple(
        rank for rank, clock in known.items() if abs(clock["offset"]) - clock["error"] > _OFFSET
    )
    if not off:
        largest = max((abs(clock["offset"]) for clock in known.values()), default=0.0)
        return findings or [
            DoctorFinding("clocks", OK, f"at most {largest * 1e3:.3g} ms from that of rank 0")
        ]
    furthest = max(off, key=lambda rank: abs(known[rank]["offset"]))
    verdict = WRONG if abs(known[furthest]["offset"]) > _LARGE_OFFSET else WARNING
    words = f"{known[furthest]['offset']:+.3g} s from that of rank 0 on {places.describe(off)}"
    return [
        *findings,
        DoctorFinding("clocks", verdict, words, off, "Start a time service there (chronyd, ntpd)."),
    ]


CHECK = Check("host", measure, judge)
