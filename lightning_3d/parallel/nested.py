"""Walks through nested containers of tensors, such as batches and outputs of modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


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


def rows_of(value: Any, rows: slice | Tensor) -> Any:
    """Select these rows, in dimension 0, of every tensor. Returns a container of the same type; values other than tensors are unchanged."""
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, Mapping):
        items = {key: rows_of(item, rows) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rows_of(item, rows) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(rows_of(item, rows) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: rows_of(getattr(value, field.name), rows) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def joined(first: Any, second: Any) -> Any:
    """Join the rows of two containers of the same structure. Values without rows come from the first one.

    Raises:
        ValueError: their tensors do not fit.
    """
    if isinstance(first, Tensor):
        if first.shape[1:] != second.shape[1:]:
            raise ValueError(f"rows of shapes {tuple(first.shape[1:])} and {tuple(second.shape[1:])}")
        return torch.cat([first, second])
    if isinstance(first, Mapping):
        items = {key: joined(item, second[key]) for key, item in first.items()}
        return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        parts = [joined(one, other) for one, other in zip(first, second, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = {field.name: joined(getattr(first, field.name), getattr(second, field.name)) for field in dataclasses.fields(first)}
        return dataclasses.replace(first, **fields)
    return first
