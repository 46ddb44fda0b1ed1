"""Walks through nested containers of tensors, such as batches and outputs of modules."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import DataError, listed


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors of a nested container, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def strided(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors that hold the values of others, which may be sparse or jagged, without
    gradients."""
    for tensor in tensors:
        plain = tensor.detach()
        if plain.is_nested:
            yield from plain.unbind()
        elif plain.layout == torch.strided:
            yield plain
        else:
            entries = plain.to_sparse_coo().coalesce()
            yield from (entries.indices(), entries.values())


def lists_of_rows(value: Any, count: int, *, top: bool = True) -> Iterator[Sequence[Any]]:
    """All lists and tuples in a batch that have one entry for each of its `count` rows."""
    if (
        not top
        and isinstance(value, (list, tuple))
        and len(value) == count
        and not _all_have_rows(value, count)
    ):
        yield value
        return
    for item in _items(value):
        yield from lists_of_rows(item, count, top=False)


def same_tensors(value: Any) -> Any:
    """Copy the containers of a nested container, which then has the same tensors and other
    values."""
    if isinstance(value, Mapping):
        items = {key: same_tensors(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(same_tensors(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(same_tensors(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value,
            **{
                field.name: same_tensors(getattr(value, field.name))
                for field in dataclasses.fields(value)
            },
        )
    return value


def rows_of(value: Any, rows: slice | Tensor, count: int | None = None) -> Any:
    """Select these rows, in dimension 0, of every tensor that has dimensions. Returns a container
    of the same type.

    Args:
        count: rows of the batch. Lists, tuples and arrays with as many entries are rows, too,
            unless they contain tensors that have the rows. None: values other than tensors are
            unchanged.

    Raises:
        DataError: a value may be rows or not.
    """
    return _rows_of(value, rows, count if count != 1 else None, "")


def _rows_of(value: Any, rows: slice | Tensor, count: int | None, place: str) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else "sparse"
            raise DataError(
                f"batch{place} is a {kind} tensor, which cannot be split into micro-batches."
                f" {_SPLIT_BATCH}"
            )
        return value[rows] if value.ndim > 0 else value
    if isinstance(value, Mapping):
        items = {
            key: _rows_of(item, rows, count, f"{place}[{key!r}]") for key, item in value.items()
        }
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return type(value)(
            *(_rows_of(item, rows, count, f"{place}.{name}") for name, item in named)
        )
    if isinstance(value, (list, tuple)):
        if count is not None and place and _are_rows(value, count, place):
            return type(value)(_entries(value, rows))
        return type(value)(
            _rows_of(item, rows, count, f"{place}[{index}]") for index, item in enumerate(value)
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            name: _rows_of(item, rows, count, f"{place}.{name}") for name, item in _fields(value)
        }
        return dataclasses.replace(value, **fields)
    return value if count is None else _other_rows(value, rows, count, place)


def _other_rows(value: Any, rows: slice | Tensor, count: int, place: str) -> Any:
    """Select rows of a value that is not a container of tensors; one that has no rows is
    unchanged."""
    if isinstance(value, (str, bytes)) or not (_length(value) == count or _has_rows(value, count)):
        return value
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # an array
        return value[rows.tolist() if isinstance(rows, Tensor) else rows]
    if isinstance(value, range):
        return _entries(value, rows)
    raise DataError(
        f"The batch has {count} rows, and so does its {type(value).__name__} at batch{place}, which"
        f" cannot be split into micro-batches. {_SPLIT_BATCH}"
    )


def joined(batches: Sequence[Any]) -> Any:
    """Join batches of one row each.

    Raises:
        DataError: a value may be rows or not.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches)) if first.ndim and first.shape[0] == 1 else first
    if isinstance(first, Mapping):
        items = {key: joined([batch[key] for batch in batches]) for key in first}
        return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(joined, zip(*batches, strict=True)))
    if isinstance(first, (list, tuple)) and list(tensors_of(first)):
        return type(first)(map(joined, zip(*batches, strict=True)))
    if isinstance(first, (bool, int, float, type(None))) and all(
        batch == first for batch in batches
    ):
        return first
    raise DataError(f"rows of type {type(first).__name__} cannot be joined")


def count_rows(batch: Any) -> int:
    """Count the rows of a batch: dimension 0 of its tensors, and the entries of lists with one
    entry for each row. Tensors without dimensions have no rows.

    Raises:
        DataError: it has none, or values disagree about their number.
    """
    sizes = sorted({tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim > 0})
    if not sizes:
        raise DataError(
            "The batch contains no tensor with a batch dimension, so it cannot be split into"
            f" micro-batches. {_SPLIT_BATCH}"
        )
    fitting = [size for size in sizes if _fits(batch, size, top=True)]
    fitting = fitting or [
        size for size in sorted(set(_lengths(batch, top=True))) if _fits(batch, size, top=True)
    ]
    if len(fitting) == 1:
        return fitting[0]
    counts = Counter(tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim > 0)
    rows = max(counts, key=lambda size: counts[size])  # of equally many, those of the first entry
    raise DataError(
        "The tensors of the batch have different numbers of rows in dimension 0:"
        f" {named_tensors(batch)}. {_SPLIT_BATCH}{_split_line(batch, rows)}"
    )


_SPLIT_BATCH = "Pass split_batch= to the strategy, a function (batch, n) -> n micro-batches."
_MOST_NAMED = 6


def named_tensors(batch: Any) -> str:
    """List the entries of a batch that are tensors with dimensions, and their shapes."""
    found = [
        f"batch{place} {tuple(tensor.shape)}"
        for place, tensor in _places(batch, "")
        if tensor.ndim > 0
    ]
    return listed([*found[:_MOST_NAMED], *["others"] * (len(found) > _MOST_NAMED)])


def _places(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested container with their places."""
    if isinstance(value, Tensor):
        yield place, value
        return
    keys = (
        [f"[{key!r}]" for key in value]
        if isinstance(value, Mapping)
        else [f"[{index}]" for index in range(len(_items(value)))]
    )
    if dataclasses.is_dataclass(value):
        keys = [f".{name}" for name, _ in _fields(value)]
    for key, item in zip(keys, _items(value), strict=True):
        yield from _places(item, place + key)


def _split_line(batch: Any, rows: int) -> str:
    """Write the line that splits the entries of a flat batch that have `rows` rows and copies the
    others; else ""."""
    entries = _items(batch)
    if type(batch) not in (dict, list, tuple) or not all(
        isinstance(entry, Tensor) for entry in entries
    ):
        return ""
    keys = list(batch) if isinstance(batch, dict) else range(len(entries))
    parts = [
        (
            f"batch[{key!r}].chunk(n)"
            if entry.ndim > 0 and len(entry) == rows
            else f"[batch[{key!r}]] * n"
        )
        for key, entry in zip(keys, entries, strict=True)
    ]
    line = f"zip({', '.join(parts)})"
    line = (
        f"[dict(zip(batch, parts)) for parts in {line}]"
        if isinstance(batch, dict)
        else f"list({line})"
    )
    return (
        f" If the rows are {rows} and the others belong to all of them: split_batch=lambda batch,"
        f" n: {line}"
    )


def require_rows_first(batch: Any, rows: int, samples: int) -> None:
    """Refuse to split a batch along dimension 0 if dimension 1 of all its tensors is the number of
    samples.

    Args:
        rows: size of dimension 0.
        samples: number of samples in the batch, as its data loader knows it.

    Raises:
        DataError: with the line that splits along dimension 1.
    """
    tensors = [tensor for tensor in tensors_of(batch) if tensor.ndim > 0]
    if samples in (rows, 1) or not all(
        tensor.ndim > 1 and tensor.shape[1] == samples for tensor in tensors
    ):
        return
    line = "..."
    if isinstance(batch, Tensor):
        line = "batch.chunk(n, dim=1)"
    elif type(batch) is dict:
        line = (
            "[dict(zip(batch, parts)) for parts in zip(*(entry.chunk(n, dim=1) for entry in"
            " batch.values()))]"
        )
    elif type(batch) in (list, tuple):
        line = "list(zip(*(entry.chunk(n, dim=1) for entry in batch)))"
    raise DataError(
        f"The DataLoader gives {samples} samples per batch, but the batch has {rows} in dimension 0"
        f" and {samples} in dimension 1: {named_tensors(batch)}. Micro-batches are rows in"
        " dimension 0. If the samples are in dimension 1, pass to the strategy: split_batch=lambda"
        f" batch, n: {line}"
    )


def _fits(value: Any, count: int, *, top: bool = False) -> bool:
    """Return whether everything in a value that has rows has `count` of them."""
    if isinstance(value, Tensor):
        return value.ndim == 0 or value.shape[0] == count
    if (
        not top
        and type(value) in (list, tuple)
        and len(value) == count
        and not _all_have_rows(value, count)
    ):
        return True
    return all(_fits(item, count) for item in _items(value))


def _lengths(value: Any, *, top: bool = False) -> Iterator[int]:
    if not top and type(value) in (list, tuple):
        yield len(value)
    for item in _items(value):
        yield from _lengths(item)


def _items(value: Any) -> list[Any]:
    """Values in a container."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [item for _, item in _fields(value)]
    return []


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]


def _all_have_rows(value: Any, count: int) -> bool:
    """Return whether a container has tensors, all of which have `count` rows."""
    tensors = list(tensors_of(value))
    return bool(tensors) and all(tensor.ndim > 0 and tensor.shape[0] == count for tensor in tensors)


def _are_rows(value: Any, count: int, place: str) -> bool:
    """Return whether the entries of a list or tuple are rows.

    Raises:
        DataError: entries are tensors with `count` rows, as many as there are entries, and alike,
            so that both may be the rows.
    """
    if len(value) != count:
        return False
    if not _all_have_rows(value, count):
        return True
    if (
        len(
            {
                (type(item), *((tensor.shape, tensor.dtype) for tensor in tensors_of(item)))
                for item in value
            }
        )
        > 1
    ):
        return False
    raise DataError(
        f"batch{place} has {count} entries of {count} rows each, so its entries may be the {count}"
        f" rows of the batch, or parts that have them. {_SPLIT_BATCH}"
    )


def _entries(value: Any, rows: slice | Tensor) -> Any:
    return [value[row] for row in rows.tolist()] if isinstance(rows, Tensor) else value[rows]


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, Sized) else None


def _has_rows(value: Any, count: int) -> bool:
    """Return whether an object of any class has an attribute that is a tensor of `count` rows."""
    attributes = getattr(value, "__dict__", {})
    return any(
        isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] == count
        for item in attributes.values()
    )
