"""Answers of `nvidia-smi` about the GPUs of a host. Imports no torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

Row = dict[str, str | None]
"""Values of one GPU by our names; None where the driver does not tell."""

FIELDS: dict[str, tuple[str, ...]] = {
    "index": ("index",),
    "uuid": ("uuid",),
    "name": ("name",),
    "driver": ("driver_version",),
    "memory": ("memory.total",),
    "used": ("memory.used",),
    "temperature": ("temperature.gpu",),
    "clock": ("clocks.sm",),
    "max_clock": ("clocks.max.sm",),
    "reasons": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
    "ecc": ("ecc.errors.uncorrected.volatile.total",),
    "mig": ("mig.mode.current",),
}
"""Our names, and those of nvidia-smi, the newest first: driver 535 renamed the throttle reasons to
event reasons (https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html). Sizes
are in MiB, clocks in MHz, temperatures in degrees C."""

_SECONDS = 20.0
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_NOTHING = re.compile(
    r"\[?(N/A|Not Supported|Unknown Error|Insufficient Permissions|GPU requires reset)\]?",
    re.IGNORECASE,
)


def gpus(names: Sequence[str] = tuple(FIELDS)) -> list[Row] | None:
    """Return one row for each GPU of this host; None if there is no nvidia-smi, or it fails."""
    chosen = {name: list(FIELDS[name]) for name in names}
    while chosen:
        asked = {name: fields[0] for name, fields in chosen.items()}
        done = _run(f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits")
        if done is None:
            return None
        if done.returncode == 0:
            return [
                _row(line, list(chosen), names) for line in done.stdout.splitlines() if line.strip()
            ]
        refused = _UNKNOWN_FIELD.search(done.stdout + done.stderr)
        known = refused and next(
            (name for name, field in asked.items() if field == refused[1]), None
        )
        if not known:
            return None
        chosen[known].pop(0)
        if not chosen[known]:
            del chosen[known]
    return None


def _row(line: str, asked: Sequence[str], names: Sequence[str]) -> Row:
    values = dict(zip(asked, (value.strip() for value in line.split(",")), strict=False))
    return {
        name: None if _NOTHING.fullmatch(values.get(name, "N/A")) else values[name]
        for name in names
    }


def topology() -> dict[str, dict[str, str]] | None:
    """Return the links between the devices of this host, such as NV18 or PIX, by the names of both
    devices; None if they are unknown."""
    done = _run("topo", "-m")
    return parse_topology(done.stdout) if done is not None and done.returncode == 0 else None


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """Parse the matrix of `nvidia-smi topo -m`. Its columns are separated by tabs, and headings may
    be underlined by escape sequences."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    heading = next(
        (line for line in lines if re.match(r"\s*GPU0\b", line) and "X" not in line.split()), ""
    )
    devices = [word for word in heading.split() if re.fullmatch(r"(GPU|NIC)\d+|mlx\w+", word)]
    rows = {}
    for line in lines:
        first, *cells = line.split()[: len(devices) + 1] or [""]
        if first in devices and len(cells) == len(devices):
            rows[first] = dict(zip(devices, cells, strict=True))
    return rows


def own_row(
    rows: Sequence[Row], local_rank: int, uuid: str | None, environment: Mapping[str, str]
) -> Row | None:
    """Find the GPU of a rank: by its UUID; else by CUDA_VISIBLE_DEVICES, which may contain UUIDs or
    numbers.

    Args:
        rows: the GPUs of the host.
        local_rank: number of the rank on its host.
        uuid: UUID that CUDA reports; None if it is not known.
        environment: environment variables of the rank.
    """
    words = [
        word.strip()
        for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if word.strip()
    ]
    word = words[local_rank] if local_rank < len(words) else str(local_rank)
    by_uuid = [
        row
        for row in rows
        if uuid and row["uuid"] and row["uuid"].removeprefix("GPU-") == uuid.removeprefix("GPU-")
    ]
    by_word = [
        row
        for row in rows
        if row["index"] == word
        or (word.startswith("GPU-") and (row["uuid"] or "").startswith(word))
    ]
    return next(iter([*by_uuid, *by_word]), None)


def names_simulated(rows: Sequence[Row]) -> bool:
    """Check whether one of these GPUs calls itself simulated."""
    return any("simulated" in (row["name"] or "").lower() for row in rows)


def are_simulated() -> bool:
    """Check whether the GPUs of this host are simulated, on which large operations would take
    minutes."""
    return names_simulated(gpus(("name",)) or ())


def _run(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        return subprocess.run(
            [tool, *arguments], capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
