"""GPU memory that an earlier attempt of the run still holds: it is waited for, and its process is
named."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import torch

HELD_SHARE = 0.1
"""Share of a GPU's memory that others may hold without a word: driver and CUDA contexts need
some."""

_POLL_SECONDS = 1.0
_QUERY_SECONDS = 20.0


def wait_for_memory(device: torch.device, seconds: float) -> None:
    """Wait until no other process holds a large part of a GPU's memory, and warn if one still does
    after a while.

    A process that is killed leaves its memory to the driver, which takes seconds to free it. A run
    that began meanwhile would run out of memory. To be called before this process allocates. Does
    nothing on a CPU.

    Args:
        seconds: time for the processes of an earlier attempt to leave the GPU. 0: the GPU is shared
            on purpose, so nothing is printed.
    """
    if device.type != "cuda" or not seconds:
        return
    deadline, announced = time.monotonic() + seconds, False
    while (held := held_by_others(device)) and time.monotonic() < deadline:
        if not announced:
            _say(
                f"waiting up to {seconds:g} s for {held / 2**30:.1f} GiB of {device}, still held by"
                f" {_holders(device)}. If the GPU is shared on purpose, set"
                " trainer.held_memory_timeout=0."
            )
        announced = True
        time.sleep(_POLL_SECONDS)
    if held:
        _say(
            f"{held / 2**30:.1f} GiB of {device} are still held by {_holders(device)}. The run"
            " starts with the remaining memory. If an earlier attempt holds it, kill that process."
            " If the GPU is shared on purpose, set trainer.held_memory_timeout=0."
        )


def held_by_others(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that other processes hold; 0 if it is a small part."""
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device)
    return held if held > HELD_SHARE * total else 0


def _holders(device: torch.device, query: Callable[[str], str] | None = None) -> str:
    """Name the processes on a GPU, as far as nvidia-smi sees them: in a container it may see
    none."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    lines = (query or _query)(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").splitlines()
    found = [
        f"process {pid} ({name})"
        for pid, _, name in (line.partition(", ") for line in lines)
        if pid.strip().isdigit()
    ]
    return " and ".join(found[:4]) or "other processes"


def _query(uuid: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [
        tool,
        "--query-compute-apps=pid,process_name",
        "--format=csv,noheader",
        f"--id={uuid}",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _say(text: str) -> None:
    print(f"lightning_3d: {text}", file=sys.stderr, flush=True)
