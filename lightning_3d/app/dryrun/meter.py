"""Watch every operation of a rank: which bytes are alive and for what purpose, what is
communicated, how much is computed.

Works on real tensors and on fake ones (`shapes`), so that a dry run and a real run can be compared.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from lightning_3d.compat.torch_fake import Collective, collective_of, flops_of

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, COMMUNICATION, TEMPORARY, OTHER = "activations", "communication", "temporary", "other"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION, TEMPORARY, OTHER)
"""Purposes of memory. Parameters: with buffers, and gathered parameters of ZeRO-3. Gradients:
local, reduced, and their flat buffers. Optimizer: its state and master weights. Activations:
tensors that a forward keeps for its backward, received hidden states included. Communication:
buffers that are sent or received and freed within one action. Temporary: everything else that is
freed within one action: intermediate results of a block, logits, loss, recomputed tensors. Other:
batches, logged numbers."""

_FRESH, _FRESH_SENT = "fresh", "fresh and sent"


@dataclass(eq=False)
class _MeterEntry:
    """A storage that is alive."""

    bytes: int
    category: str
    number: int
    reference: Any = None


@dataclass
class Usage:
    """Resources that a part of a rank's work used.

    Attributes:
        peak: bytes by category at the moment when most were alive.
        collectives: number of calls of each collective.
        flops: floating-point operations of matrix products, including attention, forward and
            backward.
    """

    peak: Counter[str] = field(default_factory=Counter)
    collectives: Counter[Collective] = field(default_factory=Counter)
    flops: int = 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were alive at a time."""
        return sum(self.peak.values())


class Meter(TorchDispatchMode):
    """Tracker of storages from their first appearance in an operation until they are freed.

    Storages allocated between two calls of `settle` are fresh. `settle` gives those that are still
    alive a category; the others were temporary. `hold` gives known tensors their category.

    Attributes:
        usage: resources used since the last `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[int, _MeterEntry] = {}
        self._bytes: Counter[str] = Counter()
        self._alive = self._peak = 0
        self._number = 0
        self._fresh: dict[int, _MeterEntry] = {}
        self._snapshot = 0  # the number of the latest storage at the peak, while that is open
        self.usage = Usage()

    @property
    def now(self) -> Counter[str]:
        """Bytes that are alive now, by category."""
        return +self._bytes

    def reset(self) -> None:
        """Start measuring."""
        self.usage = Usage()
        self._take_snapshot()

    def hold(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Assign tensors to a category; unknown storages are tracked from here on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            entry = self._entries.get(storage._cdata)
            if entry is None:
                self._add(storage, category)
            elif entry.category != category:
                self._move(storage._cdata, entry, category)

    def settle(self, category: str) -> None:
        """Assign what a part of the work allocated and left alive to a category, unless `hold`
        assigned it before."""
        for key, entry in list(self._fresh.items()):
            self._move(key, entry, category)
        if self._snapshot:  # what was freed was temporary
            peak = self.usage.peak
            peak[TEMPORARY] += peak.pop(_FRESH, 0)
            peak[COMMUNICATION] += peak.pop(_FRESH_SENT, 0)
            self._snapshot = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            # the class itself computes with its inner tensors, in operations that arrive here
            return NotImplemented
        kwargs = kwargs or {}
        result = self.execute(func, types, args, kwargs)
        self.watch(func, args, kwargs, result)
        return result

    def execute(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        return func(*args, **kwargs)

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record the result of an operation, and its communication or computation."""
        sent = collective_of(func, args)
        if sent is not None:
            self.usage.collectives[sent] += 1
            self._mark_sent(args)
            return
        self.usage.flops += flops_of(func, args, kwargs, result)
        if isinstance(result, Tensor):
            self._see(result)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, Tensor):
                    self._see(part)

    def __enter__(self) -> Meter:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized(self._resize)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _resized(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `UntypedStorage.resize_`, which is not an operation that torch dispatches."""

        def call(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            entry = self._entries.get(storage._cdata)
            if entry is not None:
                self._count(entry.category, size - entry.bytes)
                entry.bytes = size
            return result

        return call

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._entries and self._is_counted(tensor):
            self._add(storage, _FRESH)

    def _is_counted(self, tensor: Tensor) -> bool:
        """Check whether a tensor has memory."""
        return not tensor.is_meta

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        key = storage._cdata
        self._number += 1
        entry = self._entries[key] = _MeterEntry(storage.nbytes(), category, self._number)
        entry.reference = weakref.ref(storage, lambda reference: self._freed(key, entry))
        if category in (_FRESH, _FRESH_SENT):
            self._fresh[key] = entry
        self._count(category, entry.bytes)

    def _freed(self, key: int, entry: _MeterEntry) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]
            self._fresh.pop(key, None)
            self._bytes[entry.category] -= entry.bytes
            self._alive -= entry.bytes

    def _count(self, category: str, amount: int) -> None:
        self._bytes[category] += amount
        self._alive += amount
        if self._alive > self._peak:
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        self.usage.peak, self._peak = +self._bytes, self._alive
        self._snapshot = self._number

    def _move(self, key: int, entry: _MeterEntry, category: str) -> None:
        """Move a storage to another category, also in the peak if it was alive there since the last
        `settle`."""
        self._bytes[entry.category] -= entry.bytes
        self._bytes[category] += entry.bytes
        if entry.category in (_FRESH, _FRESH_SENT):
            if entry.number <= self._snapshot:
                self.usage.peak[entry.category] -= entry.bytes
                self.usage.peak[category] += entry.bytes
            self._fresh.pop(key, None)
        if category in (_FRESH, _FRESH_SENT):
            self._fresh[key] = entry
        entry.category = category

    def _mark_sent(self, args: Iterable[Any]) -> None:
        for value in args:
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor):
                    self._see(tensor)
                    key = tensor.untyped_storage()._cdata
                    entry = self._entries.get(key)
                    if entry is not None and entry.category == _FRESH:
                        self._move(key, entry, _FRESH_SENT)
