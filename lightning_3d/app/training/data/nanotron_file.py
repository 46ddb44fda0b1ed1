"""Token files of nanotron, as datatrove writes them: `NAME.ds` with the ids, of 2 bytes (uint16) or
4 bytes (uint32). NumPy only.

Next to it are, unless datatrove was told to leave one out:

- `NAME.ds.metadata`, three lines of text: the tokenizer and the bytes of an id with `|` between
  them, the number of ids, and the same number in short form;
- `NAME.ds.index`, the end of each document, counted in ids from the start of the file (uint64).

All numbers are little-endian. Source: `TokenizedFile` of datatrove 0.10.1
(`pipeline/tokens/tokenizer.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.errors import DataError, plural
from lightning_3d.storage.json_file import read_text
from lightning_3d.storage.remote_path import AnyPlace, Place, size_of

SUFFIX = ".ds"
_TYPES = {2: "uint16", 4: "uint32"}
_UNKNOWN = "Unknown Tokenizer"
"""What datatrove writes in place of a tokenizer that it was not given; `|` and the bytes of an id
follow, twice."""
_END_BYTES = 8


@dataclass(frozen=True)
class NanotronFile:
    """What the files next to the ids say.

    Attributes:
        dtype: name of NumPy's type of ids.
        tokens: number of ids.
        tokenizer: tokenizer as datatrove was given it, a name on the hub or a file; None if it is
            not known.
        documents: number of documents; None without an index.
    """

    dtype: str
    tokens: int
    tokenizer: str | None = None
    documents: int | None = None


@dataclass(frozen=True)
class _Metadata:
    """The lines of `NAME.ds.metadata`; `width` is the bytes of an id."""

    tokenizer: str | None
    width: int
    tokens: int


def metadata_of(path: AnyPlace) -> AnyPlace:
    """Return the metadata of a `.ds`."""
    return path.with_suffix(f"{SUFFIX}.metadata")


def ends_of(path: AnyPlace) -> AnyPlace:
    """Return the index of a `.ds`."""
    return path.with_suffix(f"{SUFFIX}.index")


def read_nanotron_file(path: Place) -> NanotronFile:
    """Read what the files next to a `.ds` say, and compare all of them, in time that does not
    depend on their sizes.

    Raises:
        DataError: a file is missing, truncated or damaged, or they do not match.
    """
    if not path.is_file():
        raise DataError(
            f"There is no token file {path}.{_candidates(path) if isinstance(path, Path) else ''}"
        )
    try:
        size, metadata, ends = size_of(path), _read_metadata(path), _read_ends(path)
    except OSError as error:
        raise DataError(
            f"The files next to {path} cannot be read: {error.strerror or error}."
        ) from None
    if metadata is None and ends is None:
        raise DataError(
            f"{path} has neither {metadata_of(path).name} nor {ends_of(path).name} next to it. Copy"
            " what datatrove has written, or write a"
            f' {path.stem}.json such as {{"dtype": "uint16", "tokens": 1200000, "vocab_size":'
            " 50257}."
        )
    if metadata is None:
        metadata = _Metadata(
            None, _width(path, size, ends[1] if ends else 0), ends[1] if ends else 0
        )
    if size != metadata.tokens * metadata.width:
        raise DataError(
            f"{path} has {plural(size, 'byte')}, but {metadata_of(path).name} says"
            f" {plural(metadata.tokens, 'token')} of {metadata.width} bytes"
            f" ({metadata.tokens * metadata.width} bytes). A file is truncated or belongs to"
            " another version: copy both again."
        )
    if ends is not None and ends[1] != metadata.tokens:
        raise DataError(
            f"{ends_of(path)} ends at token {ends[1]}, but {path.name} has"
            f" {plural(metadata.tokens, 'token')}. It belongs to another file, or is truncated:"
            " copy both again."
        )
    return NanotronFile(
        _TYPES[metadata.width],
        metadata.tokens,
        metadata.tokenizer,
        None if ends is None else ends[0],
    )


def same_name(one: str, other: str) -> bool:
    """Check whether two names are of one tokenizer. A folder is that of the `tokenizer.json` in it,
    which datatrove is given."""
    return _plain(one) == _plain(other)


def _plain(name: str) -> str:
    folder = name.removesuffix("/tokenizer.json")
    return os.path.realpath(folder) if os.path.isdir(folder) else folder


def _read_metadata(path: Place) -> _Metadata | None:
    file = metadata_of(path)
    if not file.is_file():
        return None
    try:
        first, second, *_ = read_text(file).splitlines()
        name, _, width = first.rpartition("|")
        metadata = _Metadata(None if name.startswith(_UNKNOWN) else name, int(width), int(second))
    except ValueError:
        metadata = _Metadata(None, 0, 0)
    if metadata.width not in _TYPES or metadata.tokens < 0:
        raise DataError(
            f"{file} is not metadata of datatrove: its first line must be TOKENIZER|2 or"
            " TOKENIZER|4, the bytes of a token, and its second line the number of tokens."
        )
    return metadata


def _read_ends(path: Place) -> tuple[int, int] | None:
    """Return the number of documents of the index, and the end of the last one; None without an
    index."""
    file = ends_of(path)
    if not file.is_file():
        return None
    size = size_of(file)
    if size % _END_BYTES:
        raise DataError(
            f"{file} has {plural(size, 'byte')}, which is not a multiple of {_END_BYTES}, the bytes"
            " of the end of a document. It is truncated: copy it again."
        )
    if size == 0:
        return 0, 0
    with file.open("rb") as opened:
        opened.seek(size - _END_BYTES)
        return size // _END_BYTES, int.from_bytes(opened.read(_END_BYTES), "little")


def _width(path: Place, size: int, tokens: int) -> int:
    """Return the bytes of an id where only the index says how many ids there are."""
    for width in _TYPES:
        if size == tokens * width:
            return width
    raise DataError(
        f"{path} has {plural(size, 'byte')}, and {ends_of(path).name} ends at token {tokens}, so"
        " its tokens would have neither 2 nor 4 bytes. A file is truncated or belongs to another"
        " version: copy both again."
    )


def _candidates(path: Path) -> str:
    names = sorted(found.name for found in path.parent.glob(f"*{SUFFIX}"))[:5]
    return f" {path.parent} has {', '.join(names)}." if names else ""
