"""Lightning's own state (loops, callbacks, schedulers, hyperparameters) as JSON and a few tensors:
data, never code.

Values that JSON does not support are written as an object with one key that starts with "$":
{"$tuple": [1, 2]}, {"$tensor": "0"}.
"""

from __future__ import annotations

import argparse
import base64
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from datetime import timedelta
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from torch import Tensor


class Unstorable(Exception):
    """A value that is not plain data."""


class Packer:
    """Converts values to what `json.dump` accepts.

    Attributes:
        tensors: tensors that were found, by the key that replaces them.
        left_out: places and types of entries that are not plain data.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.left_out: list[str] = []

    def pack_entries(self, values: Mapping[Any, Any], where: str = "") -> dict[str, Any]:
        """Pack a mapping. Entries that are not plain data are left out and remembered."""
        packed = []
        for key, value in values.items():
            place = f"{where}.{key}" if where else str(key)
            try:
                packed.append([self._pack(key, place), self._pack(value, place)])
            except Unstorable as error:
                self.left_out.append(f"{place} ({error})")
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in packed):
            return dict(packed)
        return {"$items": packed}

    def _pack(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Enum):
            return (
                self._pack(value.value, where)
                if isinstance(value, (str, int))
                else self._refuse(value)
            )
        if isinstance(value, (str, int)):
            return str(value) if isinstance(value, str) else int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, (Tensor, numpy.ndarray, numpy.generic)):
            return self._pack_array(value, where)
        return (
            self._pack_container(value, where)
            if isinstance(value, (Mapping, Sequence, Set))
            else self._pack_object(value, where)
        )

    def _pack_container(self, value: Any, where: str) -> Any:
        if _is_config(value):
            return self._pack(_without_config_classes(value), where)
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, Counter):
            return {"$counter": self.pack_entries(value, where)}
        if isinstance(value, Mapping):
            return self.pack_entries(value, where)
        items = [self._pack(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, Set):
            return {"$set": items}
        return {"$tuple": items} if isinstance(value, tuple) else items

    def _pack_object(self, value: Any, where: str) -> Any:
        if isinstance(value, PurePath):
            return {"$path": str(value)}
        if isinstance(value, timedelta):
            return {"$seconds": value.total_seconds()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, argparse.Namespace):
            return {"$namespace": self.pack_entries(vars(value), where)}
        return self._refuse(value)

    def _pack_array(self, value: Any, where: str) -> Any:
        if isinstance(value, numpy.generic):
            return (
                self._pack(value.item(), where)
                if value.dtype.kind in "biuf"
                else self._refuse(value)
            )
        if isinstance(value, numpy.ndarray):
            return (
                {"$array": self._keep(torch.from_numpy(value.copy()))}
                if value.dtype.kind in "biuf"
                else self._refuse(value)
            )
        if (
            value.layout != torch.strided
            or value.is_complex()
            or value.is_quantized
            or value.is_meta
        ):
            return self._refuse(value)
        return {"$tensor": self._keep(value)}

    def _keep(self, tensor: Tensor) -> str:
        key = str(len(self.tensors))
        self.tensors[key] = tensor.detach().cpu().contiguous().clone()
        return key

    @staticmethod
    def _refuse(value: Any) -> Any:
        raise Unstorable(type(value).__name__)


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Convert packed values back: the inverse of `Packer`.

    Raises:
        ValueError: a "$" key is unknown in this version.
    """
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) != 1 or not next(iter(packed)).startswith("$"):
        return {key: unpack(value, tensors) for key, value in packed.items()}
    [(word, value)] = packed.items()
    match word:
        case "$items":
            return {unpack(key, tensors): unpack(item, tensors) for key, item in value}
        case "$tensor":
            return tensors[value]
        case "$array":
            return tensors[value].numpy()
        case "$float":
            return float(value)
        case "$bytes":
            return base64.b64decode(value)
        case "$path":
            return Path(value)
        case "$seconds":
            return timedelta(seconds=value)
        case "$dtype" if isinstance(dtype := getattr(torch, value, None), torch.dtype):
            return dtype
    kinds: dict[str, Any] = {
        "$tuple": tuple,
        "$set": set,
        "$counter": Counter,
        "$namespace": lambda entries: argparse.Namespace(**entries),
    }
    if word not in kinds:
        raise ValueError(f"unknown type marker {word!r}")
    return kinds[word](unpack(value, tensors))


def _is_config(value: Any) -> bool:
    """Return whether this is an OmegaConf container. OmegaConf need not be installed."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and omegaconf.OmegaConf.is_config(value)


def _without_config_classes(config: Any) -> Any:
    """Convert an OmegaConf container to a dict or list, with interpolations resolved where
    possible."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        return OmegaConf.to_container(config, resolve=False)
