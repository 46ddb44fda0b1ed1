"""Files of `numpy.save` that hold one array of token ids. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np

from lightning_3d.errors import DataError, listed, plural
from lightning_3d.storage.remote_path import Place, size_of

_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
"""Types of ids. NumPy has no integer that holds both int64 and uint64."""
_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True)
class ArrayHeader:
    """What the head of a `.npy` says.

    Attributes:
        dtype: name of NumPy's type of ids.
        tokens: number of ids.
        offset: bytes before the first id.
    """

    dtype: str
    tokens: int
    offset: int


def read_array_header(path: Place) -> ArrayHeader:
    """Read the head of the `.npy` at `path`, and compare it with the size of the file.

    Raises:
        DataError: the file is missing or truncated, or is not an array of one dimension of
            little-endian integers.
    """
    try:
        with path.open("rb") as file:
            shape, dtype, offset = _read_head(cast(BinaryIO, file))
        found = size_of(path)
    except FileNotFoundError:
        raise DataError(f"There is no token file {path}.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise DataError(f"{path} is not a file of numpy.save: {error}.") from None
    if dtype.name not in _DTYPES or not dtype.isnative or len(shape) != 1:
        raise DataError(
            f"{path} has an array of type {dtype.str} with {plural(len(shape), 'dimension')}. Save"
            f" one of 1 dimension and of a little-endian type: {listed(_DTYPES, last='or')}."
            " numpy.save(path, array.reshape(-1).astype('int32')) does that."
        )
    wanted = offset + shape[0] * dtype.itemsize
    if found != wanted:
        raise DataError(
            f"{path} has {plural(found, 'byte')}, but its head says {plural(shape[0], 'token')} of"
            f" {dtype.name}, which take {wanted} bytes. It is truncated or damaged: copy it again."
        )
    return ArrayHeader(dtype.name, shape[0], offset)


def _read_head(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return (shape, type, bytes of the head)."""
    version = np.lib.format.read_magic(file)
    if version not in _READERS:
        raise ValueError(
            f"it has version {version[0]}.{version[1]} of the format, and integers have 1.0 or 2.0"
        )
    shape, _, dtype = _READERS[version](file)
    return shape, dtype, file.tell()
