"""Clocks of several machines: the ranks that share one, and the differences between them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS = 8
"""Number of collectives that compare clocks; the fastest ones count."""

Round = tuple[float, float]
"""Times at which a rank entered and left a collective."""


def clock_name() -> str:
    """Name of this process's clock: the same for processes whose `perf_counter` has the same
    origin.

    These are the processes of one machine since it booted, in containers too.
    """
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/time"))
    return " ".join(parts) or socket.gethostname()


def meet(device: torch.device) -> list[Round]:
    """Run some all-reduces of one number; return when this rank entered and left each. Collective
    over the world."""
    rounds = []
    number = torch.zeros(1, device=device)
    for _ in range(ROUNDS):
        entered = time.perf_counter()
        dist.all_reduce(number)
        number.item()  # waits for the sum
        rounds.append((entered, time.perf_counter()))
    return rounds


def clock_offsets(
    clocks: Sequence[str], rounds: Sequence[Sequence[Round]]
) -> list[tuple[float, float]]:
    """Compute, by rank, the seconds to subtract from its times to get rank 0's, and the possible
    error.

    No rank leaves a sum before every rank has entered it. With `o` the offset of a clock, every
    pair of ranks and every round gives `entered - left of the other <= o <= left - entered of the
    other`; the result is the middle of the range that all of them allow. The bounds are as far
    apart as two messages take.

    Args:
        clocks: by rank, from `clock_name`.
        rounds: by rank, from `meet`; empty if there is only one clock.
    """
    offsets: dict[str, tuple[float, float]] = {clocks[0]: (0.0, 0.0)}
    first = [rounds[rank] for rank in range(len(clocks)) if clocks[rank] == clocks[0]]
    for clock in dict.fromkeys(clocks):
        if clock == clocks[0]:
            continue
        own = [rounds[rank] for rank in range(len(clocks)) if clocks[rank] == clock]
        low, high = -float("inf"), float("inf")
        for index in range(len(first[0])):
            met, here = [each[index] for each in first], [each[index] for each in own]
            low = max(low, max(entered for entered, _ in here) - min(left for _, left in met))
            high = min(high, min(left for _, left in here) - max(entered for entered, _ in met))
        offsets[clock] = ((low + high) / 2, max(0.0, (high - low) / 2))
    return [offsets[clock] for clock in clocks]
