"""Clocks of several machines: which ranks share one, and by how much the others differ."""

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
"""Collectives by which clocks are compared: the ones in which all ranks met soonest count."""

Round = tuple[float, float]
"""When a rank entered a collective and when it left it."""


def clock_name() -> str:
    """The same for processes whose `perf_counter` counts from the same moment: those of one machine since it was started, in
    containers too."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/time"))
    return " ".join(parts) or socket.gethostname()


def meet(device: torch.device) -> list[Round]:
    """Collective over the world: some sums of one number, and when this rank entered and left each."""
    rounds = []
    number = torch.zeros(1, device=device)
    for _ in range(ROUNDS):
        entered = time.perf_counter()
        dist.all_reduce(number)
        number.item()  # the sum is there
        rounds.append((entered, time.perf_counter()))
    return rounds


def clock_offsets(clocks: Sequence[str], rounds: Sequence[Sequence[Round]]) -> list[tuple[float, float]]:
    """By rank: seconds to take from its times to have those of rank 0, and by how much that may be wrong.

    No rank leaves a sum before every rank has entered it. With `o` the offset of a clock, every pair of ranks and every round gives
    `entered - left of the other <= o <= left - entered of the other`; the middle of what all of them allow is taken. The bounds are as
    far apart as two messages take.

    Args:
        clocks: by rank, as `clock_name` gives them. rounds: by rank, as `meet` gives them; empty where there is one clock.
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
