"""Files of tokens: a `.bin` of uint16 or uint32 in little-endian order, with a JSON file of the
same name next to it.

`corpus.bin` goes with `corpus.json`:

    {"dtype": "uint16", "tokens": 1200000, "vocab_size": 50257, "document_separator": 50256}

`document_separator` may be null or missing. This module needs NumPy only.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_3d.errors import DataError, listed, plural
from lightning_3d.storage.json_file import parse_json, read_text
from lightning_3d.storage.remote_path import AnyPlace, Place, size_of

DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class TokenIndex:
    """Contents of the JSON of a token file.

    Attributes:
        dtype: "uint16" or "uint32".
        tokens: number of tokens in the file.
        vocab_size: upper limit of token ids, exclusive.
        document_separator: id after each document; None if documents are not marked.
    """

    dtype: str
    tokens: int
    vocab_size: int
    document_separator: int | None = None


def index_path(path: AnyPlace) -> AnyPlace:
    return path.with_suffix(".json")


def open_tokens(path: str | os.PathLike[str]) -> tuple[np.ndarray, TokenIndex]:
    """Map a token file into memory, read-only.

    Raises:
        DataError: the file or its JSON is missing or unreadable, or they do not match.
    """
    path = Path(path)
    index = require_size(path)
    if index.tokens == 0:
        return np.empty(0, dtype=index.dtype), index
    return np.memmap(path, dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r"), index


def require_size(path: Place) -> TokenIndex:
    """Compare the size of a token file with its JSON, which is returned.

    Raises:
        DataError: the file or its JSON is missing or unreadable, or they do not match.
    """
    if not path.is_file():
        raise DataError(
            f"There is no token file {path}.{_candidates(path) if isinstance(path, Path) else ''}"
        )
    index = read_index(path)
    width = np.dtype(index.dtype).itemsize
    size = size_of(path)
    if size == index.tokens * width:
        return index
    held = f"{size // width} tokens of {index.dtype}" + (
        f" and {plural(size % width, 'byte')}" if size % width else ""
    )
    other = next((name for name in DTYPES if size == index.tokens * np.dtype(name).itemsize), None)
    reason = (
        f"Its size fits {other}: correct dtype in the JSON"
        if other
        else "It is truncated or belongs to another version: copy it again"
    )
    raise DataError(
        f"{path} has {size} bytes, which is {held}, but {index_path(path).name} says"
        f" {index.tokens} tokens ({index.tokens * width} bytes). {reason}."
    )


def read_index(path: Place) -> TokenIndex:
    """Read and check the JSON of the token file `path`.

    Raises:
        DataError: it is missing, is not a JSON object, or has a wrong or unknown entry.
    """
    sidecar = index_path(path)
    try:
        entries = parse_json(read_text(sidecar))
    except FileNotFoundError:
        raise DataError(
            f'{path} has no {sidecar.name} next to it. Write one such as {{"dtype": "uint16",'
            ' "tokens": 1200000, "vocab_size": 50257, "document_separator": 50256}, or copy the'
            " .idx of a data set of Megatron."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{sidecar} cannot be read as JSON: {error}.") from None
    return _check_entries(sidecar, entries)


def _check_entries(sidecar: Place, entries: Any) -> TokenIndex:
    if not isinstance(entries, dict):
        raise DataError(
            f"{sidecar} must hold a JSON object with dtype, tokens and vocab_size; got a"
            f" {type(entries).__name__}."
        )
    required, known = {"dtype", "tokens", "vocab_size"}, set(TokenIndex.__dataclass_fields__)
    for wrong, names in (
        ("lacks", required - entries.keys()),
        ("has the unknown entry", entries.keys() - known),
    ):
        if names:
            raise DataError(
                f"{sidecar} {wrong} {', '.join(sorted(names))}. It must have"
                f" {listed(sorted(required))}, and may have {listed(sorted(known - required))}."
            )
    if entries["dtype"] not in DTYPES:
        raise DataError(
            f"dtype in {sidecar} must be {' or '.join(DTYPES)}; got {entries['dtype']!r}."
        )
    for name, least in (("tokens", 0), ("vocab_size", 1), ("document_separator", 0)):
        value = entries.get(name)
        optional = value is None and name not in required
        if not optional and (
            isinstance(value, bool) or not isinstance(value, int) or value < least
        ):
            raise DataError(
                f"{name} in {sidecar} must be an integer of at least {least}; got {value!r}."
            )
    separator = entries.get("document_separator")
    if separator is not None and separator >= entries["vocab_size"]:
        raise DataError(
            f"document_separator in {sidecar} must be less than its vocab_size of"
            f" {entries['vocab_size']}; got {separator}."
        )
    return TokenIndex(**entries)


def write_tokens(
    path: str | os.PathLike[str],
    tokens: np.ndarray,
    *,
    vocab_size: int,
    document_separator: int | None = None,
) -> None:
    """Write a token file and its JSON. A reader sees the old or the new files, never an incomplete
    one.

    Args:
        path: path of the `.bin`.
        tokens: (tokens,) of uint16 or uint32.
    """
    path = Path(path)
    index = TokenIndex(str(tokens.dtype), len(tokens), vocab_size, document_separator)
    if index.dtype not in DTYPES:
        raise DataError(
            f"Tokens of type {index.dtype} cannot be written to {path}. Convert them to"
            f" {' or '.join(DTYPES)}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may write the same cache file: each has its own temporary file, and the JSON
    # comes last.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tofile(temporary)
        os.replace(temporary, path)
        temporary.write_text(json.dumps(asdict(index)))
        os.replace(temporary, index_path(path))
    finally:
        temporary.unlink(missing_ok=True)


def _candidates(path: Path) -> str:
    if not path.parent.is_dir():
        return f" The folder {path.parent} does not exist either."
    names = sorted(found.name for found in path.parent.glob("*.bin"))[:5]
    return (
        f" {path.parent} has {', '.join(names)}." if names else f" {path.parent} has no .bin file."
    )
