"""Counts the bytes that operators read and write, as if each of them were a kernel that finds
nothing in a cache."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MovedBytes(TorchDispatchMode):
    """Adds up what operators read (the tensors that they are given) and write (those that they make
    or change), without views and messages.

    Args:
        least: tensors of fewer bytes do not count: norms, step counts, what is one number for each
            token.

    Attributes:
        moved: bytes by name of the operator.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self._least = least
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = list({id(tensor): tensor for tensor in _tensors((args, kwargs))}.values())
        before = [tensor.clone() for tensor in given]
        result = func(*args, **(kwargs or {}))
        changed = [
            tensor
            for tensor, old in zip(given, before, strict=True)
            if not torch.equal(tensor, old)
        ]
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        made = [
            tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in storages
        ]
        if (made or changed) and func.namespace == "aten" and "empty" not in func._opname:
            read = [
                tensor
                for tensor in given
                if not (tensor is args[0] and func._opname in ("copy_", "fill_", "zero_"))
            ]
            self.moved[func._opname] += sum(
                tensor.nbytes for tensor in [*read, *made, *changed] if tensor.nbytes >= self._least
            )
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
