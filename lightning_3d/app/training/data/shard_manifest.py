"""The manifest of a folder of shards that `lightning-3d tokenize` writes: what the shards hold, and
of which tokenizer. NumPy only.

The folder has `manifest.json`, and `shard-00000.bin` with `shard-00000.idx` (`indexed_file`),
`shard-00001.bin`, ...
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from lightning_3d.app.training.data.indexed_file import index_of, read_header
from lightning_3d.errors import DataError, plural
from lightning_3d.storage.json_file import parse_json, read_text
from lightning_3d.storage.remote_path import Place as Where

NAME = "manifest.json"
_VERSION = 1


@dataclass(frozen=True)
class TokenizerIdentity:
    """What makes two tokenizers the same.

    Attributes:
        name: the tokenizer as it was named; two names may be one tokenizer.
        vocab_size: number of ids.
        document_separator: id after each document.
        vocabulary_sha256: hash of all tokens with their ids.
        rules_sha256: hash of everything that decides how text is split.
    """

    name: str
    vocab_size: int
    document_separator: int
    vocabulary_sha256: str
    rules_sha256: str

    def same_ids(self, other: TokenizerIdentity) -> bool:
        """Check whether each id means the same text in both."""
        return (self.vocabulary_sha256, self.document_separator) == (
            other.vocabulary_sha256,
            other.document_separator,
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.vocab_size} ids, vocabulary {self.vocabulary_sha256[:12]}...)"


@dataclass(frozen=True)
class ShardPlace:
    """A place in the sources.

    Attributes:
        source: index of the file or data set.
        offset: where a batch of documents begins in it, in the units of its format.
        record: number of records of the source before that batch.
        skip: documents of the batch that were read already.
    """

    source: int = 0
    offset: int = 0
    record: int = 0
    skip: int = 0


@dataclass(frozen=True)
class Shard:
    """One shard: `NAME.bin` and `NAME.idx`.

    Attributes:
        name: name of the files without their suffixes.
        tokens: number of tokens, separators included.
        documents: number of documents.
        largest: largest id.
        bin_sha256: hash of the `.bin`.
        idx_sha256: hash of the `.idx`.
    """

    name: str
    tokens: int
    documents: int
    largest: int
    bin_sha256: str
    idx_sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`.

    Attributes:
        complete: whether all sources are in the shards.
        dtype: type of the ids.
        tokens: number of tokens of all shards.
        documents: number of documents of all shards.
        tokenizer: the tokenizer.
        settings: everything else that the shards depend on: sources and options.
        shards: the shards, in order.
        next: where the next shard begins in the sources; None if complete.
    """

    complete: bool
    dtype: str
    tokenizer: TokenizerIdentity
    settings: dict[str, Any]
    tokens: int = 0
    documents: int = 0
    shards: tuple[Shard, ...] = field(default=())
    next: ShardPlace | None = None

    def with_shard(self, shard: Shard, following: ShardPlace | None) -> Manifest:
        tokens, documents = self.tokens + shard.tokens, self.documents + shard.documents
        return replace(
            self, tokens=tokens, documents=documents, shards=(*self.shards, shard), next=following
        )

    def write(self, folder: Path) -> None:
        """Replace the manifest of a folder: a reader sees the old or the new one."""
        text = json.dumps({"version": _VERSION, **asdict(self)}, indent=1)
        replace_file(folder / NAME, lambda path: path.write_text(text + "\n", "utf-8"))


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name, wait until it is on disk, and rename it."""
    draft = path.with_name(f".{path.name}.partial")
    write(draft)
    commit(draft, path)


def commit(draft: Path, path: Path) -> None:
    """Wait until `draft` is on disk and rename it to `path`."""
    _flush(draft)
    os.replace(draft, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Where) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        DataError: there is none, or it is not a manifest of this version.
    """
    path = folder / NAME
    try:
        entries = parse_json(read_text(path))
        if entries.pop("version") != _VERSION:
            raise ValueError("it has another version")
        entries["tokenizer"] = TokenizerIdentity(**entries["tokenizer"])
        entries["shards"] = tuple(_checked_shard(entry) for entry in entries["shards"])
        entries["next"] = ShardPlace(**entries["next"]) if entries["next"] else None
        return Manifest(**entries)
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {NAME}. Make the folder with lightning-3d tokenize, or name its"
            f' files, for example "{folder}/*.bin".'
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a manifest of lightning-3d tokenize: {error}. Write the folder again."
        ) from None


def _checked_shard(entry: dict[str, Any]) -> Shard:
    shard = Shard(**entry)
    for part in fields(shard):
        value = getattr(shard, part.name)
        if type(value).__name__ != part.type:
            raise ValueError(f"{part.name} of a shard is {value!r}")
    if "/" in shard.name:
        raise ValueError(f"the shard {shard.name!r} is outside the folder")
    return shard


def check_shards(
    folder: Where, manifest: Manifest, shards: Sequence[Shard], *, hashes: bool = False
) -> None:
    """Compare shards of a folder with its manifest: sizes and headers, and with `hashes` every
    byte.

    Raises:
        DataError: the manifest is not complete, or a shard is missing, truncated or damaged.
    """
    if not manifest.complete:
        raise DataError(
            f"{folder} is not complete: it has {plural(len(manifest.shards), 'shard')} so far."
            " Repeat the command lightning-3d tokenize, which continues after the last one."
        )
    check = partial(_check_shard, folder, manifest, hashes)
    if isinstance(folder, Path):
        list(map(check, shards))
        return
    with ThreadPoolExecutor(_REQUESTS) as pool:
        list(pool.map(check, shards))


def _check_shard(folder: Where, manifest: Manifest, hashes: bool, shard: Shard) -> None:
    path = folder / f"{shard.name}.bin"
    missing = [file.name for file in (path, index_of(path)) if not file.is_file()]
    if missing:
        raise DataError(f"{folder} lacks {missing[0]}, which its {NAME} lists. {_REPAIR}")
    header = read_header(path)
    if (header.dtype, header.tokens, header.documents) != (
        manifest.dtype,
        shard.tokens,
        shard.documents,
    ):
        raise DataError(
            f"{path} has {header.tokens} tokens of {header.dtype} in"
            f" {plural(header.documents, 'document')}, but {NAME} says {shard.tokens} tokens of"
            f" {manifest.dtype} in {plural(shard.documents, 'document')}. {_REPAIR}"
        )
    if hashes:
        _compare_hashes(path, shard)


_REQUESTS = 16
"""Shards of a URL that are checked at the same time."""
_READ_BYTES = 32 * 2**20
"""Bytes that are read at a time for a hash."""
_REPAIR = "Copy the folder again, or repeat lightning-3d tokenize into a new one."


def _compare_hashes(path: Where, shard: Shard) -> None:
    for file, expected in ((path, shard.bin_sha256), (index_of(path), shard.idx_sha256)):
        with cast(BufferedReader, file.open("rb", buffering=_READ_BYTES)) as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != expected:
            raise DataError(
                f"{file} has changed since it was written: its SHA-256 is {found[:12]}..., and"
                f" {NAME} says {expected[:12]}.... {_REPAIR}"
            )
