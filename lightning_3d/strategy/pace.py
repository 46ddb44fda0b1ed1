"""Measures how fast this rank computes, and compares it with its peers."""

from __future__ import annotations

import socket
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d.compat.waits import count_waits
from lightning_3d.errors import listed
from lightning_3d.health.slow_ranks import WINDOW, SlowRank, SlowRanks
from lightning_3d.parallel.collectives import all_gather_flat
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.tracing.recorder import Recorder

_PROBE_SIZE, _PROBES = 2048, 4
_MOST_NAMED = 4


class Pace:
    """The pace of one rank, compared with that of its peers every `WINDOW` steps: one all-gather of
    a number. Collective when it is made.

    On a CPU, the time inside the actions of the schedule counts, without what it waits for others,
    and without experts that are sharded over ranks, because some have more tokens than others: the
    median of the steps of a window, so that another program that runs for a moment accuses nobody.
    On a GPU, that would need the host to wait for the device; there, a product of two matrices is
    timed on the device instead, and read a window later.

    Args:
        mesh: process groups.
        device: of this rank.
        recorder: measures the actions.
        factor, steps: see `SlowRanks`.

    Attributes:
        slowest: the slowest rank of the last window; None before the first, and without peers.
        close: function that ends the measurement.
    """

    def __init__(
        self, mesh: Mesh, device: torch.device, recorder: Recorder, factor: float, steps: int
    ) -> None:
        self._mesh, self._device, self._recorder = mesh, device, recorder
        self._factor, self._steps_slow = factor, steps
        stages: dict[int, list[int]] = {}
        for rank in range(mesh.layout.world_size):
            stages.setdefault(
                mesh.layout.coordinates(rank)["pp"] if device.type == "cpu" else 0, []
            ).append(rank)
        hosts: list[str] = [""] * mesh.layout.world_size
        dist.all_gather_object(hosts, socket.gethostname())
        self._judge = SlowRanks([tuple(ranks) for ranks in stages.values()], factor, steps, hosts)
        self._probe = _GpuProbe(device) if device.type == "cuda" else None
        self._count = 0
        self.close = count_waits()
        self._before = recorder.own_seconds
        self._seconds: list[float] = []
        self._pending: Any = None
        self.slowest: SlowRank | None = None

    def after_step(self) -> None:
        """Count a step, and compare at the end of a window. Collective then."""
        self._count += 1
        own, self._before = self._recorder.own_seconds - self._before, self._recorder.own_seconds
        if self._count > 1:  # kernels and connections are made in the first step
            self._seconds.append(own)
        if self._count % WINDOW:
            return
        seconds = self._exchange()
        if seconds is None:
            return
        self.slowest, slow = self._judge.judge(dict(enumerate(seconds)))
        if slow:
            self._warn(slow)

    def _exchange(self) -> list[float] | None:
        """Gather the paces of all ranks. On a GPU those of the window before, which need no wait
        any more."""
        if self._probe is None:
            seconds, self._seconds = self._seconds, []
            return _gather(median(seconds), self._mesh, self._device).tolist()
        earlier, last = self._pending, self._probe.read()
        self._pending = (
            None
            if last is None
            else _gather(last, self._mesh, self._device).to("cpu", non_blocking=True)
        )
        self._probe.begin()
        return earlier.tolist() if earlier is not None and bool(earlier.all()) else None

    def _warn(self, slow: list[SlowRank]) -> None:
        devices: list[str] = [""] * self._mesh.layout.world_size
        dist.all_gather_object(devices, str(self._device))
        named = [
            f"rank {one.rank} ({one.host}, {devices[one.rank]}) takes {one.factor:.2f} times as"
            " long"
            for one in slow[:_MOST_NAMED]
        ]
        peers = slow[0].peers
        rank_zero_warn(
            f"Slow: {listed(named)} to compute as"
            f" {'its peer' if len(peers) == 1 else 'the median of its peers'} with the same work"
            f" (rank{'s' * (len(peers) > 1)}"
            f" {' '.join(map(str, peers[:8]))}{' ...' if len(peers) > 8 else ''}), for"
            f" {self._steps_slow} steps. All other ranks wait for it. Look for other programs, a"
            " throttled or failing device: lightning-3d doctor."
        )


def _gather(own: float, mesh: Mesh, device: torch.device) -> torch.Tensor:
    """Gather a number of every rank, by rank. On a GPU the host does not wait."""
    part = torch.full((1,), own, dtype=torch.float64, device=device)
    whole = torch.empty(mesh.layout.world_size, dtype=torch.float64, device=device)
    all_gather_flat(whole, part, mesh.group_for(range(mesh.layout.world_size))).wait()
    return whole


class _GpuProbe:
    """Times a product of matrices on a GPU without making the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._factor = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=device, dtype=torch.bfloat16)
        self._product = torch.empty_like(self._factor)
        self._events: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Start a measurement."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(_PROBES):
            torch.mm(self._factor, self._factor, out=self._product)
        end.record()
        self._events = begin, end

    def read(self) -> float | None:
        """Return the seconds of the last measurement: 0.0 if it has not ended, None if there was
        none."""
        if self._events is None:
            return None
        begin, end = self._events
        return begin.elapsed_time(end) / 1000 if end.query() else 0.0
