"""Megatron's indexed data sets: a `.bin` of token ids and an `.idx` of the same name, both
little-endian. NumPy only.

The `.idx`, in this order: `MMIDIDX` and two zero bytes; version 1 (uint64); the code of the type of
ids (uint8); the number n of sequences (uint64); the number d of document indices (uint64); n
lengths in tokens (int32); n offsets in the `.bin` in bytes (int64); d indices of the first sequence
of each document, ending with n (int64). A multimodal data set has n modes (int8) after them.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from lightning_3d.errors import DataError, listed, plural
from lightning_3d.storage.remote_path import AnyPlace, Place, size_of

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_CODES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
_CODE_OF = {name: code for code, name in _CODES.items()}
_LARGEST_UINT16_VOCABULARY = 65_500
"""Megatron's limit: vocabularies from this size on are stored as int32."""


@dataclass(frozen=True)
class IndexHeader:
    """What the head and the end of an `.idx` say, without reading its lists.

    Attributes:
        dtype: name of NumPy's type of ids.
        sequences: number of sequences.
        documents: number of documents.
        tokens: number of tokens in the `.bin`.
    """

    dtype: str
    sequences: int
    documents: int
    tokens: int


def index_of(path: AnyPlace) -> AnyPlace:
    """Return the `.idx` of a `.bin`."""
    return path.with_suffix(".idx")


def dtype_for(vocab_size: int) -> np.dtype:
    """Choose the type of ids that Megatron chooses for a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < _LARGEST_UINT16_VOCABULARY else np.int32)


def read_header(path: Place) -> IndexHeader:
    """Read the `.idx` of the `.bin` at `path` and compare both with each other, in time that does
    not depend on their sizes.

    Raises:
        DataError: a file is missing or truncated, is of another format, or the two do not match.
    """
    index = index_of(path)
    if not path.is_file():
        raise DataError(f"{index} has no {path.name} next to it. Copy both files.")
    try:
        with index.open("rb") as file:
            return _compare(path, index, file)
    except FileNotFoundError:
        raise DataError(f"{path} has no {index.name} next to it. Copy both files.") from None
    except OSError as error:
        raise DataError(f"{index} cannot be read: {error.strerror or error}.") from None


def _compare(path: Place, index: Place, file: BinaryIO) -> IndexHeader:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise DataError(
            f"{index} is not the index of a Megatron data set: it does not begin with"
            f" {_MAGIC[:7].decode()}."
        )
    _, version, code, sequences, indices = _HEAD.unpack(head)
    dtype = _CODES.get(code, "")
    if version != 1 or np.dtype(dtype or "float").kind not in "iu":
        what = (
            f"version {version}"
            if version != 1
            else f"ids of {f'type {dtype}' if dtype else f'the unknown type {code}'}"
        )
        types = listed([name for name in _CODE_OF if np.dtype(name).kind in "iu"], last="or")
        raise DataError(f"{index} has {what}. It must have version 1 and ids of type {types}.")
    size, lists = file.seek(0, os.SEEK_END), _HEAD.size + 12 * sequences + 8 * indices
    if size not in (lists, lists + sequences) or not indices:
        raise DataError(
            f"{index} has {plural(size, 'byte')}, but its header says"
            f" {plural(sequences, 'sequence')} and {plural(indices, 'document index')[:-1]}es,"
            f" which take {lists} bytes. It is truncated or damaged: copy it again."
        )
    tokens = _tokens(file, sequences, np.dtype(dtype).itemsize)
    file.seek(lists - 8)
    last = int.from_bytes(file.read(8), "little")
    found = size_of(path)
    if found != tokens * np.dtype(dtype).itemsize or last != sequences:
        raise DataError(
            f"{path} and {index.name} do not match: the .bin has {found} bytes, and the .idx"
            f" describes {plural(tokens, 'token')} of {dtype} ({tokens * np.dtype(dtype).itemsize}"
            f" bytes) in {plural(sequences, 'sequence')}. A file is truncated or belongs to another"
            " data set: copy both again."
        )
    return IndexHeader(dtype, sequences, indices - 1, tokens)


def _tokens(file: BinaryIO, sequences: int, width: int) -> int:
    """Compute the number of tokens from the length and the offset of the last sequence."""
    if not sequences:
        return 0
    file.seek(_HEAD.size + 4 * (sequences - 1))
    length = int.from_bytes(file.read(4), "little", signed=True)
    file.seek(_HEAD.size + 4 * sequences + 8 * (sequences - 1))
    return int.from_bytes(file.read(8), "little", signed=True) // width + length


def pack_index(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """Make the contents of an `.idx` in which every document is one sequence.

    Args:
        lengths: (documents,) of tokens of each document.
        dtype: type of the ids in the `.bin`.
    """
    count = len(lengths)
    offsets = np.zeros(count, dtype="<i8")
    np.cumsum(lengths[:-1], out=offsets[1:], dtype=np.int64)
    head = _HEAD.pack(_MAGIC, 1, _CODE_OF[dtype.name], count, count + 1)
    lists = lengths.astype("<i4"), offsets * dtype.itemsize, np.arange(count + 1, dtype="<i8")
    return b"".join([head, *(values.tobytes() for values in lists)])
