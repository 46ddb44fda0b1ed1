"""Counts the bytes of all tensors that are alive while a block of code runs, by watching what every
operation returns."""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Watches storages from their first appearance in an operation until they are freed.

    Attributes:
        peak: the largest number of bytes that were alive at an operation, since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._freed: deque[tuple[int, weakref.ref[torch.UntypedStorage]]] = deque()
        # of the sizes when they were last seen: never too small, too large where one was shrunk
        # since
        self._total = 0
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes that are alive. A storage may have been resized."""
        self._settle()
        for key, (reference, size) in list(self._storages.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._keep(key, reference, storage.nbytes())
        return self._total

    def reset(self) -> None:
        self.peak = self.now

    def _keep(self, key: int, reference: weakref.ref[torch.UntypedStorage], size: int) -> None:
        self._total += size - self._storages.get(key, (reference, 0))[1]
        self._storages[key] = reference, size

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        known = self._storages.get(key)
        if known is None or known[0]() is not storage:  # a freed storage's id may be used again
            self._keep(key, weakref.ref(storage, functools.partial(self._forget, key)), size)
        elif known[1] != size:
            self._keep(key, known[0], size)

    def _forget(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        """Only note it: other threads free storages too, and the garbage collector does so in the
        middle of a sum."""
        self._freed.append((key, reference))

    def _settle(self) -> None:
        while self._freed:
            key, reference = self._freed.popleft()
            known = self._storages.get(key)
            if known is not None and known[0] is reference:
                self._total -= self._storages.pop(key)[1]

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._settle()
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self._see(leaf.untyped_storage())
        # counting all of them at every operation would take most of the time of a test
        if self._total > self.peak:
            self.peak = max(self.peak, self.now)
        return result
