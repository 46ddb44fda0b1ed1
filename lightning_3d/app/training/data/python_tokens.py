"""The source code of Python's standard library as shards of tokens: what `lightning-3d tokenize`
writes, made when a run needs it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_3d.app.training.data.corpus import find_corpora
from lightning_3d.app.training.data.packing import Tokens
from lightning_3d.app.training.data.python_stdlib import PARTS, PythonStdlib
from lightning_3d.app.training.data.shard_manifest import NAME, read_manifest
from lightning_3d.app.training.data.tokenization.encoding import ByteEncoder
from lightning_3d.app.training.data.tokenization.job import tokenize
from lightning_3d.app.training.data.tokenization.sources import TextFiles
from lightning_3d.app.training.data.tokens import map_corpora
from lightning_3d.errors import DataError
from lightning_3d.storage.user_cache import default_cache

_FOLDERS = ("train", "validation")
_PATIENCE_SECONDS = 600.0
"""Time to wait for another process that writes the same shards, which takes it seconds."""


class PythonTokens(PythonStdlib):
    """The files of `PythonStdlib`, tokenized once per node into two folders of shards, which all
    ranks map into memory.

    The folders are `python_tokens-HASH/train` and `python_tokens-HASH/validation` in `cache_dir`.
    The hash is one of everything that the shards depend on: seed, paths, sizes and times of the
    files. Ranks read them as `TokenFiles` does. The tokens and their order are those of
    `PythonStdlib`.

    Args:
        cache_dir: folder of the shards; None is `lightning_3d` in the user's cache folder
            (XDG_CACHE_HOME).
        document_mask: see `PackedDataset`.
        **kwargs: see `PythonStdlib`.
    """

    def __init__(
        self,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        document_mask: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(document_mask=document_mask, **kwargs)
        self.cache_dir = Path(cache_dir) if cache_dir is not None else default_cache()

    @override
    def prepare_data(self) -> None:
        """Tokenize what is not in the cache yet. Lightning calls this on one rank per node while
        the others wait.

        Raises:
            DataError: there is no file to train on or none held out, or the cache cannot be
                written.
        """
        parts = self.split_files()
        for folder, paths, what in zip(self._folders(parts), parts, PARTS, strict=True):
            if not paths:
                raise DataError(
                    f"{self.root} has no {what} with data.val_fraction={self.val_fraction}. Change"
                    " data.val_fraction."
                )
            if (folder / NAME).is_file() and read_manifest(folder).complete:
                continue
            try:
                tokenize(
                    [TextFiles([self.root / path for path in paths])],
                    ByteEncoder(),
                    folder,
                    patience_seconds=_PATIENCE_SECONDS,
                )
            except OSError as error:
                raise DataError(
                    f"Cannot write the tokens of {self.root} to {folder}:"
                    f" {error.strerror or error}. Set data.cache_dir to a folder that can be"
                    " written."
                ) from error

    @override
    def load_tokens(self) -> tuple[Tokens, Tokens]:
        folders = self._folders(self.split_files())
        train, held_out = map_corpora(
            *find_corpora(folders[0], folders[1]), 0.0, self.sequence_length
        )
        assert held_out is not None, "it has a folder of its own"
        return replace(train, name=f"the {PARTS[0]} of {self.root}"), replace(
            held_out, name=f"the {PARTS[1]} of {self.root}"
        )

    def _folders(self, parts: Sequence[Sequence[str]]) -> list[Path]:
        """Return the folders of the training files and of the held-out files."""
        states = [[[path, *_state_of(self.root / path)] for path in paths] for paths in parts]
        name = hashlib.sha256(
            json.dumps([str(self.root), states]).encode("utf-8", "surrogateescape")
        ).hexdigest()[:32]
        return [self.cache_dir / f"python_tokens-{name}" / folder for folder in _FOLDERS]


def _state_of(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
