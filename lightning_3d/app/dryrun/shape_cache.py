"""Cache of the results of operations on fake tensors, by shape.

A training step repeats a few hundred operations tens of thousands of times, and computing the shape
of a result with fake tensors takes much longer than a look-up. `lightning-3d dryrun
model=llama3_1_8b cluster=h100_1x8 parallelism=tp4_pp2` (two ranks, 64 micro-batches of 4096 tokens)
takes 22.5 s of CPU with the cache and 49.2 s without it (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.compat.torch_fake import as_fake, can_be_remembered, device_of_fake, is_fake


@dataclass(frozen=True)
class _Made:
    """Recipe to make a result again.

    Attributes:
        source: index of the input tensor that the result is, or is a view of; None: it has its own
            memory.
        itself: whether the result is that input tensor.
        shape: shape of the result.
        stride: strides of the result.
        offset: elements of the storage from the start of the input to the start of the result.
        dtype: type of the result.
        device: device of the result.
    """

    source: int | None
    itself: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def make(self, tensors: Sequence[Tensor], mode: Any) -> Tensor:
        if self.source is not None and self.itself:
            return tensors[self.source]
        if self.source is None:
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=self.dtype, device="meta")
            source = tensors[self.source]
            meta.set_(
                source.untyped_storage(),
                source.storage_offset() + self.offset,
                self.shape,
                self.stride,
            )
        return as_fake(meta, mode, self.device)


class ShapeCache:
    """Results of operations on fake tensors.

    Args:
        mode: mode of the fake tensors.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._known: dict[Hashable, tuple[type, list[_Made]]] = {}
        self._can: dict[Any, bool] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """Return everything that the shapes of the results depend on; None if that is not known."""
        can = self._can.get(func)
        if can is None:
            can = self._can[func] = can_be_remembered(func)
        if not can:
            return None
        key = (
            func,
            torch.get_default_dtype(),
            _described(args),
            _described(kwargs.items()) if kwargs else None,
        )
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def recall(self, key: Hashable | None, tensors: Sequence[Tensor]) -> Any:
        """Make the result of a known operation again; None if it is not known."""
        found = self._known.get(key)
        if found is None:
            return None
        kind, parts = found
        made = [part.make(tensors, self._mode) for part in parts]
        return made[0] if kind is Tensor else kind(made)

    def note(self, key: Hashable | None, tensors: Sequence[Tensor], result: Any) -> None:
        """Store a result, if it can be made again from its shape."""
        if key is None:
            return
        parts = [result] if isinstance(result, Tensor) else result
        if not isinstance(parts, (list, tuple)) or not all(
            isinstance(part, Tensor) and is_fake(part) for part in parts
        ):
            return
        made = [_made(part, tensors) for part in parts]
        own = [
            part.untyped_storage()._cdata
            for part, how in zip(parts, made, strict=True)
            if how is not None and how.source is None
        ]
        if all(how is not None for how in made) and len(own) == len(set(own)):
            self._known[key] = (
                Tensor if isinstance(result, Tensor) else type(result),
                [how for how in made if how is not None],
            )


def _made(part: Tensor, tensors: Sequence[Tensor]) -> _Made | None:
    """Describe how to make a result again; None if its shape is not enough."""
    storage = part.untyped_storage()
    places = [
        place
        for place, tensor in enumerate(tensors)
        if is_fake(tensor) and tensor.untyped_storage()._cdata == storage._cdata
    ]
    same = [place for place in places if tensors[place] is part]
    shape, about = (tuple(part.shape), part.stride()), (part.dtype, device_of_fake(part))
    if same:
        return _Made(same[0], True, *shape, 0, *about)
    if places:
        source = tensors[places[0]]
        offset = int(part.storage_offset() - source.storage_offset())
        return (
            _Made(places[0], False, *shape, offset, *about)
            if len(places) == 1 and part.dtype == source.dtype
            else None
        )
    whole = torch.empty_strided(*shape, dtype=part.dtype, device="meta").untyped_storage().nbytes()
    return (
        _Made(None, False, *shape, 0, *about)
        if storage.nbytes() == whole and not part.storage_offset()
        else None
    )


def _described(values: Iterable[Any]) -> Hashable:
    return tuple([_one(value) for value in values])


def _one(value: Any) -> Any:
    if isinstance(value, Tensor):
        return is_fake(value), value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return _described(value)
    return type(value), value


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors, also those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
