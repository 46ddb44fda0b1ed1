"""Counts the bytes of all tensors that are alive while a block of code runs, by watching what every operation returns."""

import weakref
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
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes that are alive. A storage may have been resized."""
        alive = {key: storage for key, reference in self._storages.items() if (storage := reference()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def reset(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                known = self._storages.get(id(storage))
                if known is None or known() is not storage:  # a freed storage's id may be used again
                    self._storages[id(storage)] = weakref.ref(storage)
        self.peak = max(self.peak, self.now)
        return result
