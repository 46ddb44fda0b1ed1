"""Walks through nested containers of tensors, such as batches and outputs of modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch import Tensor

from lightning_3d.errors import DataError


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


def same_tensors(value: Any) -> Any:
    """Copy the containers of a nested container, which then has the same tensors and other values."""
    if isinstance(value, Mapping):
        items = {key: same_tensors(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(same_tensors(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(same_tensors(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{field.name: same_tensors(getattr(value, field.name)) for field in dataclasses.fields(value)})
    return value


def rows_of(value: Any, rows: slice | Tensor, count: int | None = None) -> Any:
    """Select these rows, in dimension 0, of every tensor. Returns a container of the same type.

    Args:
        count: rows of the batch. Lists, tuples and arrays with as many entries are rows, too, unless they contain tensors that have the
            rows. None: values other than tensors are unchanged.

    Raises:
        DataError: a value may be rows or not.
    """
    return _rows_of(value, rows, count if count != 1 else None, "")


def _rows_of(value: Any, rows: slice | Tensor, count: int | None, place: str) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, Mapping):
        items = {key: _rows_of(item, rows, count, f"{place}[{key!r}]") for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return type(value)(*(_rows_of(item, rows, count, f"{place}.{name}") for name, item in named))
    if isinstance(value, (list, tuple)):
        if count is not None and place and _are_rows(value, count, place):
            return type(value)(_entries(value, rows))
        return type(value)(_rows_of(item, rows, count, f"{place}[{index}]") for index, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: _rows_of(item, rows, count, f"{place}.{name}") for name, item in _fields(value)}
        return dataclasses.replace(value, **fields)
    return value if count is None else _other_rows(value, rows, count, place)


def _other_rows(value: Any, rows: slice | Tensor, count: int, place: str) -> Any:
    """Select rows of a value that is not a container of tensors; one that has no rows is unchanged."""
    if isinstance(value, (str, bytes)) or not (_length(value) == count or _has_rows(value, count)):
        return value
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # an array
        return value[rows.tolist() if isinstance(rows, Tensor) else rows]
    if isinstance(value, range):
        return _entries(value, rows)
    raise DataError(
        f"The batch has {count} rows, and so does its {type(value).__name__} at batch{place}, which cannot be split into"
        f" micro-batches. {_SPLIT_BATCH}"
    )


def count_rows(batch: Any) -> int:
    """Count the rows of a batch: dimension 0 of its tensors, and the entries of lists with one entry for each row.

    Raises:
        DataError: it has none, or values disagree about their number.
    """
    sizes = sorted({tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim > 0})
    if not sizes:
        raise DataError(
            f"The batch contains no tensor with a batch dimension, so it cannot be split into micro-batches. {_SPLIT_BATCH}"
        )
    fitting = [size for size in sizes if _fits(batch, size, top=True)]
    fitting = fitting or [size for size in sorted(set(_lengths(batch, top=True))) if _fits(batch, size, top=True)]
    if len(fitting) == 1:
        return fitting[0]
    scalars = any(tensor.ndim == 0 for tensor in tensors_of(batch))
    found = [*map(str, sizes), *["no dimension at all"] * scalars]
    raise DataError(f"The tensors of the batch have different numbers of rows in dimension 0: {', '.join(found)}. {_SPLIT_BATCH}")


_SPLIT_BATCH = "Pass split_batch= to the strategy, a function (batch, n) -> n micro-batches."


def _fits(value: Any, count: int, *, top: bool = False) -> bool:
    """Return whether everything in a value that has rows has `count` of them."""
    if isinstance(value, Tensor):
        return value.ndim > 0 and value.shape[0] == count
    if not top and type(value) in (list, tuple) and len(value) == count and not _all_have_rows(value, count):
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
        DataError: entries are tensors with `count` rows, as many as there are entries, and alike, so that both may be the rows.
    """
    if len(value) != count:
        return False
    if not _all_have_rows(value, count):
        return True
    if len({(type(item), *((tensor.shape, tensor.dtype) for tensor in tensors_of(item))) for item in value}) > 1:
        return False
    raise DataError(
        f"batch{place} has {count} entries of {count} rows each, so its entries may be the {count} rows of the batch, or parts that have"
        " them."
        f" {_SPLIT_BATCH}"
    )


def _entries(value: Any, rows: slice | Tensor) -> Any:
    return [value[row] for row in rows.tolist()] if isinstance(rows, Tensor) else value[rows]


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, Sized) else None


def _has_rows(value: Any, count: int) -> bool:
    """Return whether an object of any class has an attribute that is a tensor of `count` rows."""
    attributes = getattr(value, "__dict__", {})
    return any(isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] == count for item in attributes.values())
