"""Write tokens into shards. A shard counts once its files are whole and the manifest lists it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lightning_3d.app.training.data.indexed_file import pack_index
from lightning_3d.app.training.data.shard_manifest import (
    Manifest,
    Shard,
    ShardPlace,
    commit,
    replace_file,
)
from lightning_3d.app.training.data.tokenization.encoding import Encoded


class ShardWriter:
    """Appends shards to a folder.

    A shard ends before the document with which it would have more than `limit` tokens. A document
    is never split, so a longer one is a shard of its own.

    Args:
        folder: folder of the shards.
        manifest: what the folder has so far.
        limit: largest number of tokens of a shard.

    Attributes:
        manifest: what the folder has now.
    """

    def __init__(self, folder: Path, manifest: Manifest, limit: int) -> None:
        self.manifest = manifest
        self._folder, self._limit, self._dtype = folder, limit, np.dtype(manifest.dtype)
        self._file: BinaryIO | None = None
        self._begin()

    def _begin(self) -> None:
        self._name = f"shard-{len(self.manifest.shards):05d}"
        self._hash = hashlib.sha256()
        self._lengths: list[np.ndarray] = []
        self._tokens = self._largest = 0

    @property
    def _draft(self) -> Path:
        return self._folder / f".{self._name}.bin.partial"

    def add(self, place: ShardPlace, encoded: Encoded) -> None:
        """Write the documents of a batch, except the first `place.skip`, which earlier shards
        have."""
        lengths = encoded.lengths
        ends = np.cumsum(lengths)
        done = place.skip
        while done < len(lengths):
            start = int(ends[done - 1]) if done else 0
            until = int(np.searchsorted(ends, start + self._limit - self._tokens, side="right"))
            if until <= done and self._tokens:
                self._end_shard(ShardPlace(place.source, place.offset, place.record, done))
                continue
            until = max(until, done + 1)
            self._write(encoded.tokens[start : int(ends[until - 1])], lengths[done:until])
            done = until

    def _write(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        data = tokens.astype(self._dtype.newbyteorder("<"), copy=False).tobytes()
        if self._file is None:
            self._file = self._draft.open("wb")
        self._file.write(data)
        self._hash.update(data)
        self._lengths.append(lengths)
        self._tokens += len(tokens)
        self._largest = max(self._largest, int(tokens.max()))

    def _end_shard(self, following: ShardPlace | None) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        lengths = np.concatenate(self._lengths)
        index = pack_index(lengths, self._dtype)
        commit(self._draft, self._folder / f"{self._name}.bin")
        replace_file(self._folder / f"{self._name}.idx", lambda path: path.write_bytes(index))
        hashes = self._hash.hexdigest(), hashlib.sha256(index).hexdigest()
        self.manifest = self.manifest.with_shard(
            Shard(self._name, self._tokens, len(lengths), self._largest, *hashes), following
        )
        self.manifest.write(self._folder)
        self._begin()

    def finish(self) -> None:
        """Write the last shard."""
        if self._tokens:
            self._end_shard(None)

    def abandon(self) -> None:
        """Remove what is written of a shard that is not whole."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._draft.unlink(missing_ok=True)
