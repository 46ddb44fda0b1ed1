"""Writing safetensors files tensor by tensor: the library's own functions want all tensors of a
file in memory at once.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a JSON header,
the header, the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


class SafetensorsStream:
    """A file whose tensors are written in the order in which they were announced. A context
    manager.

    Args:
        path: path of a new file.
        tensors: shape and dtype of each tensor, by name.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            start, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": TYPES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._expected = iter(tensors.items())
        self._file: BinaryIO = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, on the CPU.

        Raises:
            ValueError: it is not the one that was announced.
        """
        announced = next(self._expected, None)
        if announced != (name, (tuple(tensor.shape), tensor.dtype)):
            raise ValueError(
                f"The next tensor in the header is {announced}, but {name} {tuple(tensor.shape)}"
                f" {tensor.dtype} was written."
            )
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsStream:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises ValueError if tensors that were announced are missing."""
        self._file.close()
        missing = next(self._expected, None)
        if error is None and missing is not None:
            raise ValueError(f"{missing[0]} was announced but never written.")
