"""Check: bandwidth and latency of the collectives that each axis of a layout uses, in the groups of
`parallel/mesh.py`.

Bandwidths are bytes a second that leave a rank, so that groups of all sizes compare with the link's
datasheet, as in nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md,
"bus bandwidth").
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_3d.app.doctor import links_rate, nvidia_smi
from lightning_3d.app.doctor.check import Check, Facts, GatheredAnswers, Room
from lightning_3d.app.doctor.findings import DoctorFinding

_SMALL = 4096
_LARGE = {"cpu": 1 << 20, "cuda": 1 << 27, "simulated": 1 << 16}
"""Bytes of messages: a small one costs the latency, a large one the bandwidth."""
_REPEATS = {"small": 20, "large": 5}
_MEDIANS = 3


@dataclass(frozen=True)
class _Case:
    """A collective of an axis.

    Attributes:
        axis: axis of the layout.
        name: kind of the collective, as in `planner.profile_file`.
        group: process group.
        ranks: global ranks of the group, in the order of their index.
        make: function from bytes to the action that this rank repeats.
    """

    axis: str
    name: str
    group: Any
    ranks: tuple[int, ...]
    make: Callable[[int], Callable[[], Any]]


def measure(room: Room) -> Facts:
    """Measure each case with a small and a large message, then neighbors of each group, one pair
    after the other."""
    mesh, device = room.mesh, room.device()
    large = _LARGE[
        "simulated" if device.type == "cuda" and nvidia_smi.are_simulated() else device.type
    ]
    entries, pairs = [], []
    seen: set[tuple[int, ...]] = set()
    for case in _cases(mesh, device):
        for size, repeats in ((_SMALL, _REPEATS["small"]), (large, _REPEATS["large"])):
            room.now = (
                f"{case.name} of {case.axis}, {size} bytes, with the ranks"
                f" {', '.join(map(str, case.ranks))}"
            )
            entries.append(_entry(case, size, _seconds(room, case.group, case.make(size), repeats)))
        if case.ranks not in seen:
            seen.add(case.ranks)
            pairs += _pairs(room, case, device, large)
    return {"collectives": entries, "pairs": pairs}


def _cases(mesh: Any, device: Any) -> Iterator[_Case]:
    """The collectives of the layout's axes; in the same order on all ranks."""
    layout = mesh.layout
    for axis, names in (
        ("tp", ["all_reduce"]),
        ("dp", ["reduce_scatter", "all_gather"]),
        ("cp", ["send"]),
    ):
        if layout.size(axis) > 1:
            group, ranks = mesh.group(axis), mesh.ranks(axis)
            for name in names:
                yield _Case(
                    axis,
                    name,
                    group,
                    ranks,
                    partial(_action, name, group, ranks, mesh.rank, device),
                )
    if layout.pp > 1:
        group, ranks = mesh.pipeline_up, mesh.ranks("pp")
        yield _Case(
            "pp", "send", group, ranks, partial(_action, "stages", group, ranks, mesh.rank, device)
        )
    if layout.ep > 1:
        group = mesh.expert_group
        ranks = next(ranks for ranks in layout.expert_groups() if mesh.rank in ranks)
        yield _Case(
            "ep",
            "all_to_all",
            group,
            ranks,
            partial(_action, "all_to_all", group, ranks, mesh.rank, device),
        )


def _action(
    name: str, group: Any, ranks: Sequence[int], rank: int, device: Any, size: int
) -> Callable[[], Any]:
    """Return a collective on `size` bytes in total; `send` passes them to the next rank of a ring,
    `stages` to the next stage."""
    import torch
    import torch.distributed as dist

    from lightning_3d.parallel.collectives import (
        all_gather_flat,
        all_reduce_flat,
        reduce_scatter_flat,
    )

    count, index = len(ranks), ranks.index(rank)
    part = max(1, size // 4 // count)
    whole, own = torch.ones(part * count, device=device), torch.ones(part, device=device)
    other = torch.empty_like(whole)
    if name in ("send", "stages"):
        ring = name == "send"
        target = ranks[(index + 1) % count] if ring or index + 1 < count else None
        source = ranks[index - 1] if ring or index > 0 else None
        return partial(_pass_on, whole, target, other, source, group)
    actions: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: all_reduce_flat(whole, group, dist.ReduceOp.MAX),
        "reduce_scatter": lambda: reduce_scatter_flat(own, whole, group).wait(),
        "all_gather": lambda: all_gather_flat(whole, own, group).wait(),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return actions[name]


def _pass_on(tensor: Any, target: int | None, other: Any, source: int | None, group: Any) -> None:
    """Send to one rank and receive from another, in one batch: on NCCL it needs no communicator of
    its own for the two ranks."""
    import torch.distributed as dist

    operations = [dist.P2POp(dist.isend, tensor, target, group)] if target is not None else []
    operations += [dist.P2POp(dist.irecv, other, source, group)] if source is not None else []
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _seconds(room: Room, group: Any, action: Callable[[], Any], repeats: int) -> float:
    """Time an action that all ranks of a group run: the median of some rounds, after a round to
    warm up."""
    import torch
    import torch.distributed as dist

    times = []
    for turn in range(_MEDIANS + 1):
        # the ranks start together; an all-reduce uses the communicator that is there
        if group is not None:
            dist.all_reduce(torch.ones(1, device=room.device()), group=group)
        room.wait()
        started = time.perf_counter()
        for _ in range(repeats if turn else 1):
            action()
        room.wait()
        times.append((time.perf_counter() - started) / (repeats if turn else 1))
    return statistics.median(times[1:])


def _pairs(room: Room, case: _Case, device: Any, size: int) -> list[Facts]:
    """Measure neighbors in a group while its other ranks wait; the first rank of each pair reports
    it."""
    import torch

    found, count = [], len(case.ranks)
    tensor, other = torch.ones(size // 4, device=device), torch.empty(size // 4, device=device)
    for index in range(count if count > 2 else 1):
        pair = case.ranks[index], case.ranks[(index + 1) % count]
        if room.rank in pair:
            room.now = f"messages of {case.axis} between the ranks {pair[0]} and {pair[1]}"
            peer = pair[1] if room.rank == pair[0] else pair[0]
            action = partial(_pass_on, tensor, peer, other, peer, case.group)
            seconds = _seconds(room, None, action, _REPEATS["large"])
            if room.rank == pair[0]:
                found.append(
                    {"axis": case.axis, "ranks": list(pair), "bytes": size, "seconds": seconds}
                )
    return found


def _entry(case: _Case, size: int, seconds: float) -> Facts:
    return {
        "axis": case.axis,
        "name": case.name,
        "group": list(case.ranks),
        "bytes": size,
        "seconds": seconds,
    }


def judge(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Judge each collective against the other groups and the datasheet, then the pairs."""
    return links_rate.judge(gathered)


CHECK = Check("collectives", measure, judge, together=True)
