"""`self.log` inside a pipelined step: collected per micro-batch on the last stage, logged once with
the true value everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_3d.compat.lightning import hush_sync_dist_advice, logged_entry
from lightning_3d.compat.torchmetrics import forward_value, mark_updated, set_forward_value
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.collectives import all_reduce_flat
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import Unknown

_NOT_REPLAYED = {"sync_dist", "sync_dist_group", "enable_graph", "batch_size", "reduce_fx"}
"""Arguments of `LightningModule.log` that have no meaning once the value is the same on every rank,
or that `LogKey` has."""


@dataclass(frozen=True)
class LogKey:
    """One call of `self.log`, without its value: the same on all ranks."""

    name: str
    combine: str  # "mean", "sum", "max" or "min", over micro-batches and data-parallel ranks
    metric: str | None  # dotted name of the torchmetrics object that was logged, None for a number
    arguments: tuple[tuple[str, Any], ...]


@dataclass
class _Collected:
    """Values of one key over the micro-batches of a step, with their weights."""

    values: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


class StepLog:
    """Collects the log calls of one step and replays them on every rank.

    Values are reduced over all ranks with this rank's tensor-parallel index: one small all-reduce a
    step (and a second one where something is logged with reduce_fx max or min), and one broadcast
    of the keys whenever they change.

    Args:
        module: the user's module.
        mesh: process groups.
        last_rank: pipeline rank that runs the last stage, the only one whose steps reach their log
            calls.
        device: device of this rank.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, last_rank: int, device: torch.device) -> None:
        self._module: Any = module
        self._mesh = mesh
        self._last_rank = last_rank
        self._device = device
        self._keys: dict[int, tuple[LogKey, ...]] = {}
        self._own: dict[int, tuple[LogKey, ...]] = {}
        self._collected: dict[LogKey, _Collected] = {}
        self._pending: list[tuple[LogKey, Tensor, float | None]] = []
        self._unknown: list[Unknown] = []

    def empty(self) -> StepLog:
        """Make another log of the same step, which has collected nothing."""
        return StepLog(self._module, self._mesh, self._last_rank, self._device)

    def begin(self) -> None:
        """Forget the previous batch."""
        self._collected = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take the place of `module.log` while the user's step runs on one micro-batch."""
        self._pending, self._unknown = [], []
        self._module.log = self._record
        try:
            yield
        finally:
            del self._module.log

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        if isinstance(value, Unknown):
            self._unknown.append(value)
            return
        kwargs.update(zip(names, args, strict=False))
        metric = self._metric_name(name, value) if isinstance(value, Metric) else None
        number = forward_value(value) if isinstance(value, Metric) else value
        number = 0.0 if number is None or isinstance(number, Unknown) else number
        # filled on the device: as_tensor would copy from the host and wait
        if isinstance(number, int | float):
            tensor = torch.full((), float(number), dtype=torch.float64, device=self._device)
        else:
            tensor = torch.as_tensor(number, dtype=torch.float64, device=self._device).detach()
        if tensor.numel() != 1:
            raise ConfigError(
                f"self.log('{name}', ...) needs a single number; got a tensor of shape"
                f" {tuple(tensor.shape)}."
            )
        kept = tuple(sorted((k, v) for k, v in kwargs.items() if k not in _NOT_REPLAYED))
        key = LogKey(name, _combination(kwargs.get("reduce_fx", "mean")), metric, kept)
        self._pending.append((key, tensor.reshape(()), kwargs.get("batch_size")))

    def _metric_name(self, name: str, value: Metric) -> str:
        for path, child in self._module.named_modules():
            if child is value:
                return path
        raise ConfigError(
            f"self.log('{name}', metric): the metric is not an attribute of the LightningModule."
            " Assign it in __init__, so that Lightning can find it."
        )

    def weigh(self, weight: Tensor) -> None:
        """Set the weight of what the last micro-batch logged: the weight of its loss, or the
        `batch_size` that the user passed."""
        for unknown in self._unknown:
            unknown.pass_over()
        for key, value, batch_size in self._pending:
            entry = self._collected.setdefault(key, _Collected())
            entry.values.append(value)
            named = (
                weight
                if batch_size is None
                else torch.where(weight > 0, torch.full_like(weight, float(batch_size)), weight)
            )
            entry.weights.append(named)
        self._pending = []

    def values_of(self, index: int, count: int) -> dict[str, tuple[str, Tensor, Tensor]]:
        """The numbers that one of `count` micro-batches has logged, as (how they are combined,
        value, weight), by name."""
        return {
            key.name: (key.combine, entry.values[index], entry.weights[index])
            for key, entry in self._collected.items()
            if key.metric is None and len(entry.values) == count
        }

    def checksum(self) -> float:
        """Checksum (16 bits) of this step's set of keys, different from those of earlier sets; 0
        for no keys."""
        keys = tuple(self._collected)
        if not keys:
            return 0.0
        checksum = 1 + zlib.crc32(repr(keys).encode()) % (1 << 16)
        while self._own.setdefault(checksum, keys) != keys:
            checksum += 1
        return float(checksum)

    def replay(self, checksum: int, *, waits: bool = True) -> None:
        """Reduce the values and log them for real, on every rank.

        Args:
            checksum: checksum of the keys that all last stages collected (see `BatchTotals`); 0
                when nothing was logged.
            waits: whether to wait for the device, which knows whether a value counts. Without,
                Lightning gets weights on the device.
        """
        if checksum == 0:
            return
        keys = self._agree(checksum)
        values, weights = self._reduce(keys)
        if not waits:
            for key, value, weight in zip(keys, values, weights, strict=True):
                self._log_unread(key, value, weight)
            return
        # one read for all keys
        for key, value, known in zip(keys, values, weights.tolist(), strict=True):
            if known > 0:
                self._log(key, value, max(1, round(known)))

    def _log_unread(self, key: LogKey, value: Tensor, weight: Tensor) -> None:
        """Log a value whose weight only the device knows. Where that is 0, nothing that Lightning
        adds up or shows changes."""
        counts = weight > 0
        entry = logged_entry(self._module, key.name)
        earlier = None if entry is None else forward_value(entry)
        earlier = torch.nan if earlier is None else earlier
        nothing = (
            {"mean": 0.0, "sum": 0.0, "max": -torch.inf, "min": torch.inf}[key.combine]
            if key.metric is None
            else earlier
        )
        rows = torch.where(counts, weight.round().clamp(min=1), 0.0).to(torch.int64)
        self._log(key, torch.where(counts, value, nothing), rows)
        entry = logged_entry(self._module, key.name)
        if entry is not None and forward_value(entry) is not None:  # logged with on_step
            set_forward_value(entry, torch.where(counts, forward_value(entry), earlier))

    def _log(self, key: LogKey, value: Tensor, batch_size: int | Tensor) -> None:
        """Log a number, or the torchmetrics object that was logged, with this value for the
        step."""
        logged: Any = value.to(torch.get_default_dtype())
        if key.metric is not None:
            logged = self._module.get_submodule(key.metric)
            set_forward_value(logged, value.to(torch.get_default_dtype()))
            mark_updated(logged)
        log: Callable[..., None] = self._module.log
        log(key.name, logged, batch_size=batch_size, reduce_fx=key.combine, **dict(key.arguments))

    def _agree(self, checksum: int) -> tuple[LogKey, ...]:
        """Look up the keys behind a checksum; the first time, the last stage broadcasts them over
        the pipeline."""
        if checksum not in self._keys:
            keys: list[Any] = [self._own.get(checksum)]
            if self._mesh.size("pp") > 1:
                source = self._mesh.ranks("pp")[self._last_rank]
                dist.broadcast_object_list(keys, source, group=self._mesh.control)
            self._keys[checksum] = keys[0]
            for key in keys[0]:
                hush_sync_dist_advice(key.name)
        return self._keys[checksum]

    def _reduce(self, keys: tuple[LogKey, ...]) -> tuple[list[Tensor], Tensor]:
        """Reduce values and weights of all keys over all micro-batches and data-parallel ranks.
        Does not wait for the device."""
        sums = torch.zeros(len(keys), 2, dtype=torch.float64, device=self._device)
        peaks = torch.full((len(keys),), -torch.inf, dtype=torch.float64, device=self._device)
        for i, key in enumerate(keys):
            entry = self._collected.get(key)
            # context-parallel ranks log the same values
            if entry is None or self._mesh.index("cp") > 0:
                continue
            values, weights = (
                torch.stack(entry.values),
                torch.stack(entry.weights).to(torch.float64),
            )
            counted = values if key.combine == "sum" else values * weights
            sums[i, 0] = torch.where(weights > 0, counted, torch.zeros_like(counted)).sum()
            sums[i, 1] = weights.sum()
            peaks[i] = torch.where(
                weights > 0, -values if key.combine == "min" else values, -torch.inf
            ).max()
        group = self._mesh.group("cp", "pp", "dp")
        all_reduce_flat(sums, group)
        if any(key.combine in ("max", "min") for key in keys):
            all_reduce_flat(peaks, group, dist.ReduceOp.MAX)
        reduced: list[Tensor] = []
        for key, (total, weight), peak in zip(keys, sums, peaks, strict=True):
            signed = -peak if key.combine == "min" else peak
            reduced.append({"mean": total / weight, "sum": total}.get(key.combine, signed))
        return reduced, sums[:, 1]


def _combination(reduce_fx: Any) -> str:
    """Name of the reduction that the user passed to `self.log`, as a string or as torch's
    function."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = {"avg": "mean", "amax": "max", "amin": "min"}.get(name, name)
    if name not in ("mean", "sum", "max", "min"):
        raise ConfigError(
            f"reduce_fx of self.log must be mean, sum, max or min in a step; got {reduce_fx!r}."
        )
    return name
