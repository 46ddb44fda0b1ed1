"""Memory that operators of a forward read and write, and the traces of code that does so without an
operator.

Triton kernels, compiled functions and C++ extensions read and write memory that the dispatcher does
not see. Two traces tell that such code runs: somebody reads memory that no operator has written
since its allocation, or a result of the forward that no operator made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

_BLANK = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
)


class SeenMemory:
    """Memory of one forward.

    Args:
        given: inputs of the forward.

    Attributes:
        unseen: code ran that the dispatcher did not see.
    """

    def __init__(self, given: Any) -> None:
        self.unseen = False
        # these references keep the addresses from being used for other memory
        self._known: dict[int, StorageWeakRef] = {}
        self._blank: set[int] = set()
        self._read: set[int] = set()
        self._know(given)

    def step(self, operator: Any, arguments: Any, result: Any) -> None:
        """Note an operator, its arguments and what it returned."""
        made = storages(result)
        if isinstance(operator, OpOverload) and (
            operator.is_view or _only_waits(operator, arguments, made)
        ):
            return
        if _is_blank(operator):
            self._blank |= made
        else:
            written = made | _written(operator, arguments, result)
            for x in tensors(arguments):
                if address(x) not in written or address(x) not in self._blank:
                    self.read(x)
            self._blank -= written
        self._know(result)

    def read(self, tree: Any) -> None:
        """Note tensors that an operator reads, autograd saves, or the forward returns."""
        for x in tensors(tree):
            place = address(x)
            self._read.add(place)
            self.unseen = (
                self.unseen or place in self._blank or (place not in self._known and _is_made(x))
            )

    def was_read(self, memory: frozenset[int]) -> bool:
        """Return whether somebody was seen to read some of this memory, of this forward."""
        return not self._read.isdisjoint(memory)

    def _know(self, tree: Any) -> None:
        for x in tensors(tree):
            if address(x) not in self._known:
                self._known[address(x)] = StorageWeakRef(x.untyped_storage())


def acts(operator: Any, arguments: Any, result: Any) -> bool:
    """Return whether an operator may do more than to return tensors to other operators, such as
    writing into an argument, drawing random numbers, sending messages, or returning what Python
    reads unseen: numbers, other tensors than of floating point, copies for the host."""
    if not isinstance(operator, OpOverload) or operator.namespace not in ("aten", "prims"):
        return True
    if operator._schema.is_mutable or torch.Tag.nondeterministic_seeded in operator.tags:
        return True
    made = list(tensors(result))
    numeric = made and all(x.is_floating_point() or x.is_complex() for x in made)
    return (
        not numeric or any(x.is_cpu for x in made) and not all(x.is_cpu for x in tensors(arguments))
    )


def overwritten(operator: Any, arguments: Any, result: Any) -> frozenset[int]:
    """Return the memory of arguments into which an operator may write. Schemas of `c10d` do not say
    it, and its tensors get no versions."""
    if isinstance(operator, OpOverload) and operator.namespace == "c10d":
        return storages(arguments)
    return _written(operator, arguments, result)


def _is_blank(operator: Any) -> bool:
    """Return whether an operator returns memory without values."""
    return (
        isinstance(operator, OpOverload)
        and operator.namespace == "aten"
        and operator._opname in _BLANK
    )


def _is_made(x: Tensor) -> bool:
    """Return whether `x` is neither a parameter or constant, nor a part of one."""
    origin = x._base if x._base is not None else x
    return origin.requires_grad and not origin.is_leaf


def _only_waits(operator: OpOverload, arguments: Any, made: frozenset[int]) -> bool:
    """Return whether an operator returns its argument, as `wait_tensor` does, except for tensors
    without values."""
    return operator is torch.ops._c10d_functional.wait_tensor.default and made == storages(
        arguments
    )


def _written(operator: Any, arguments: Any, result: Any) -> frozenset[int]:
    """Return the memory of arguments into which an operator writes. One without a schema that
    returns nothing may write into all."""
    if not isinstance(operator, OpOverload):
        return storages(arguments) if not storages(result) else frozenset()
    args, kwargs = arguments
    schema = operator._schema.arguments
    written = {
        argument.name
        for argument in schema
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    named = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    return storages([value for name, value in named.items() if name in written])


def tensors(tree: Any) -> Iterator[Tensor]:
    """Return the tensors in a tree."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def address(x: Tensor) -> int:
    """Return what tells the memory of `x` from all other memory that exists."""
    return x.untyped_storage()._cdata


def storages(tree: Any) -> frozenset[int]:
    """Return the addresses of the tensors in a tree."""
    return frozenset(address(x) for x in tensors(tree))
