"""Free memory of this machine, and of the control groups of a container or a SLURM job. Pure
Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60


def available_memory(root: Path = _ROOT) -> float | None:
    """Return the bytes that this process and its children can allocate before the kernel kills one;
    None if the kernel does not say, as on systems other than Linux.

    Args:
        root: folder that contains `proc` and `sys`.
    """
    rooms = [room for room in (_of_machine(root), *_of_groups(root)) if room is not None]
    return max(0.0, min(rooms)) if rooms else None


def _of_machine(root: Path) -> float | None:
    fields = _fields(root / "proc/meminfo")
    return fields["MemAvailable:"] * 1024 if "MemAvailable:" in fields else None


def _of_groups(root: Path) -> Iterator[float | None]:
    """Yield the free bytes of each control group of this process that has a limit. The page cache
    counts as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if number == "0" and not kinds:
            place, limit, used, cached = (
                root / "sys/fs/cgroup",
                "memory.max",
                "memory.current",
                "inactive_file",
            )
        elif "memory" in kinds.split(","):
            place, limit, used, cached = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        names = [name for name in path.split("/") if name not in ("", "..")]
        # in a container the path may be one that only the host sees
        for depth in range(len(names) + 1):
            group = place.joinpath(*names[:depth])
            most, now = _number(group / limit), _number(group / used)
            if most is not None and now is not None and most < _UNLIMITED:
                yield most - now + _fields(group / "memory.stat").get(cached, 0)


def _number(path: Path) -> int | None:
    """Read a number from a file; None if there is no such file, and for `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
