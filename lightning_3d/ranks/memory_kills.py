"""Whether the kernel has killed a process because memory ran out. Imports no torch."""

from __future__ import annotations

from pathlib import Path

MEMORY_RAN_OUT = "ran out of memory"
"""Words that every message about a lack of memory has."""

CGROUP = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


def kills() -> int:
    """Count the processes that the kernel has killed for lack of memory, in this process's control
    group and on the whole machine.

    Linux counts them in `memory.events` of a control group (version 2), and in `/proc/vmstat`. 0
    where neither can be read.
    """
    own = _counts(CGROUP / _own_group() / "memory.events").get("oom_kill", 0)
    return max(
        own,
        _counts(CGROUP / "memory.events").get("oom_kill", 0),
        _counts(_VMSTAT).get("oom_kill", 0),
    )


def _own_group() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")


def _counts(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
