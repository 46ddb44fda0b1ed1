"""Check: the folder of runs is on a file system that all ranks share, with the semantics and the
speed that runs and checkpoints need."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from lightning_3d.app.doctor.check import Check, Facts, GatheredAnswers, Room
from lightning_3d.app.doctor.findings import OK, UNKNOWN, WARNING, WRONG, DoctorFinding
from lightning_3d.storage.lock import FileLock, is_held
from lightning_3d.storage.numbers import show_bytes

_SEEN_SECONDS = 10.0
"""Time for a new file to appear on other hosts: NFS caches folders for up to 60 s, but looks again
for a name that is missing."""
_RENAMES, _RENAME_BYTES = 50, 1 << 16
_SPEED_BYTES = {"cpu": 1 << 24, "gpu": 1 << 28}
_SLOW_BYTES = 50e6
"""Bytes a second and host below which a checkpoint takes more than half an hour."""
_FREE_BYTES = {"cpu": 10e9, "gpu": 150e9}
"""Space for a checkpoint: an 8B model with its optimizer state has 112 GB."""
_LATE_SECONDS = 2.0


def measure(room: Room) -> Facts:
    """Let rank 0 write, lock and replace files while the other ranks look; then write and read on
    each host.

    The ranks share the folder that rank 0 names; whatever is missing there is a fact.
    """
    if room.rank == 0:
        folder = Path(room.setup.folder) / f".lightning_3d_doctor_{os.getpid()}_{time.time_ns()}"
        facts = _lead(room, folder)
    else:
        name = str(room.board.wait("folder", room.setup.limit / 4))
        folder = Path(room.setup.folder) / Path(name).name
        facts = _look(room, folder)
    if room.is_leader and facts.get("seen", True):
        room.now = f"writing to {folder}"
        facts |= _speed(room, folder)
    room.board.post(f"file system done/{room.rank}", True)
    if room.rank == 0:
        room.board.wait_for_all(
            [f"file system done/{rank}" for rank in room.present], room.setup.limit / 4
        )
        shutil.rmtree(folder, ignore_errors=True)
    return facts


def _lead(room: Room, folder: Path) -> Facts:
    """Write a file, hold a lock, and replace a file again and again until all others have
    looked."""
    room.now = f"writing to {folder}"
    try:
        folder.mkdir(parents=True)
        (folder / "hello").write_text("hello", "utf-8")
        _replace(folder, 0)
    except OSError as error:
        room.board.post("folder", folder.name)
        return {"error": f"{error.strerror}: {folder}", "seen": False}
    lock = FileLock(folder / "lock")
    locked = lock.acquire()
    room.board.post("folder", folder.name)
    others = [f"file system looked/{rank}" for rank in room.present if rank > 0]
    turn, deadline = 0, time.monotonic() + min(_SEEN_SECONDS + 5, room.setup.limit / 4)
    while turn < _RENAMES or (
        len(room.board.wait_for_all(others, 0.0)) < len(others) and time.monotonic() < deadline
    ):
        turn += 1
        _replace(folder, turn)
        time.sleep(0.01)
    lock.release()
    return {"locked": locked, "renames": turn}


def _replace(folder: Path, turn: int) -> None:
    """Replace a file at once, as checkpoints and status files are."""
    draft = folder / "renamed.part"
    draft.write_bytes(bytes([turn % 256]) * _RENAME_BYTES)
    draft.replace(folder / "renamed")


def _look(room: Room, folder: Path) -> Facts:
    """Wait for the file of rank 0, ask for its lock, and read the file that it replaces."""
    room.now = f"looking for {folder}"
    started = time.monotonic()
    while not (seen := _is_there(folder / "hello")) and time.monotonic() - started < min(
        _SEEN_SECONDS, room.setup.limit / 4
    ):
        time.sleep(0.05)
    facts: Facts = {
        "seen": seen,
        "seconds": time.monotonic() - started,
        "folder": str(folder.parent),
    }
    if seen:
        facts |= {"held": is_held(folder / "lock"), "torn": _torn(folder / "renamed")}
    room.board.post(f"file system looked/{room.rank}", True)
    return facts


def _is_there(path: Path) -> bool:
    with suppress(OSError):
        return path.read_text("utf-8") == "hello"
    return False


def _torn(path: Path) -> str:
    """Read a file while rank 0 replaces it; return what was ever wrong with its content, empty if
    nothing was."""
    for _ in range(20):
        try:
            content = path.read_bytes()
        except OSError as error:
            return f"{error.strerror}"
        if len(content) != _RENAME_BYTES or content != content[:1] * _RENAME_BYTES:
            return f"{len(content)} of {_RENAME_BYTES} bytes, or a mixture of two versions"
        time.sleep(0.01)
    return ""


def _speed(room: Room, folder: Path) -> Facts:
    """Write and read a file on this host; each host has its own. The kernel is asked to forget what
    it has written."""
    path, size = folder / f"speed_{room.rank}", _SPEED_BYTES[room.setup.accelerator]
    block = os.urandom(1 << 20)
    started = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(size >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            wrote = time.perf_counter()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        reading = time.perf_counter()
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass
        read = time.perf_counter() - reading
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return {"write_error": f"{error.strerror}"}
    return {"write": size / (wrote - started), "read": size / read, "free": free}


def judge(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Judge what the ranks saw of rank 0's files, then the speed of each host."""
    error = (gathered.facts.get(0) or {}).get("error")
    if error:
        advice = "Name a folder in which runs may be written: --folder FOLDER."
        return [DoctorFinding("folder", WRONG, f"rank 0 cannot write: {error}", (0,), advice)]
    findings = [_seen(gathered)]
    if len(gathered.facts) > 1 and findings[0].verdict != WRONG:
        findings += [_locks(gathered), _renames(gathered)]
    return [*findings, *_speeds(gathered), _free(gathered)]


def _seen(gathered: GatheredAnswers) -> DoctorFinding:
    others = {rank: facts for rank, facts in gathered.facts.items() if rank > 0}
    blind = tuple(rank for rank, facts in others.items() if not facts["seen"])
    folder = gathered.setup.folder
    if blind:
        words = f"{gathered.places.describe(blind)} cannot see what rank 0 writes in {folder}"
        advice = (
            "Put runs on a shared file system, mounted at the same path on all hosts (--folder)."
        )
        return DoctorFinding("shared folder", WRONG, words, blind, advice)
    latest = max((facts["seconds"] for facts in others.values()), default=0.0)
    words = (
        f"{folder}: all ranks see a new file within {max(latest, 0.001):.2g} s"
        if others
        else f"{folder} can be written"
    )
    if latest > _LATE_SECONDS:
        late = tuple(rank for rank, facts in others.items() if facts["seconds"] > _LATE_SECONDS)
        advice = "Mount it with short caches for folders (NFS: acdirmax, lookupcache=positive)."
        return DoctorFinding(
            "shared folder", WARNING, f"{words} ({gathered.places.describe(late)})", late, advice
        )
    return DoctorFinding("shared folder", OK, words)


def _locks(gathered: GatheredAnswers) -> DoctorFinding:
    """On a file system without locks a run cannot notice that another run uses its folder."""
    held = {rank: facts.get("held") for rank, facts in gathered.facts.items() if rank > 0}
    advice = (
        "Mount it with locks for all hosts (NFS: without nolock and local_lock; Lustre: -o flock),"
        " or never share run folders."
    )
    free = tuple(rank for rank, value in held.items() if value is False)
    if free:
        words = (
            f"{gathered.places.describe(free)} cannot see that rank 0 holds a lock: locks are local"
            " to each host"
        )
        return DoctorFinding("locks", WARNING, words, free, advice)
    if any(value is None for value in held.values()) or not gathered.facts[0].get("locked"):
        ranks = tuple(rank for rank, value in held.items() if value is None)
        return DoctorFinding("locks", WARNING, "this file system has no locks", ranks, advice)
    return DoctorFinding("locks", OK, "all ranks see a lock that rank 0 holds")


def _renames(gathered: GatheredAnswers) -> DoctorFinding:
    torn = {rank: facts.get("torn") for rank, facts in gathered.facts.items() if rank > 0}
    bad = tuple(rank for rank, what in torn.items() if what)
    count = gathered.facts[0].get("renames", 0)
    if not bad:
        return DoctorFinding(
            "renames", OK, f"{count} replacements of a file while all ranks read it: always whole"
        )
    words = f"{gathered.places.describe(bad)} read a file that rank 0 replaced: {torn[bad[0]]}"
    advice = (
        "Replacing a file is not atomic here: status files may be unreadable for a moment. Use"
        " another file system."
    )
    return DoctorFinding("renames", WARNING, words, bad, advice)


def _speeds(gathered: GatheredAnswers) -> list[DoctorFinding]:
    findings = []
    hosts = gathered.of_hosts()
    failed = {rank: facts["write_error"] for rank, facts in hosts.items() if "write_error" in facts}
    for rank, why in failed.items():
        words = f"{gathered.places.host(rank)} cannot write: {why}"
        findings.append(
            DoctorFinding(
                "write",
                WRONG,
                words,
                (rank,),
                "Look at permissions, quota and mount options there.",
            )
        )
    for name in ("write", "read"):
        rates = {rank: float(facts[name]) for rank, facts in hosts.items() if name in facts}
        if rates:
            slow = tuple(rank for rank, rate in rates.items() if rate < _SLOW_BYTES)
            words = f"{show_bytes(min(rates.values()))}/s" + (
                " on the slowest host" if len(rates) > 1 else ""
            )
            words += " (may come from the cache of the kernel)" if name == "read" else ""
            advice = "Save checkpoints less often, or to a faster file system." if slow else ""
            findings.append(
                DoctorFinding(f"{name} speed", WARNING if slow else OK, words, slow, advice)
            )
    return findings


def _free(gathered: GatheredAnswers) -> DoctorFinding:
    free = {
        rank: int(facts["free"]) for rank, facts in gathered.of_hosts().items() if "free" in facts
    }
    if not free:
        return DoctorFinding("free space", UNKNOWN, "no host can tell")
    least = min(free.values())
    enough = least >= _FREE_BYTES[gathered.setup.accelerator]
    advice = (
        ""
        if enough
        else "Remove old runs: a checkpoint of an 8B model with its optimizer state has 112 GB."
    )
    return DoctorFinding("free space", OK if enough else WARNING, show_bytes(least), (), advice)


CHECK = Check("file system", measure, judge)
