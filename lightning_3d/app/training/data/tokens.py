"""Prepared tokens: token files, folders of shards, and data sets of Megatron (see `corpus`), mapped
into memory or at URLs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, overload

from typing_extensions import override

from lightning_3d.app.config.data_urls import check_data_urls, has_url
from lightning_3d.app.training.data.base import PackedDataModule
from lightning_3d.app.training.data.concatenation import Concatenation
from lightning_3d.app.training.data.corpus import Corpus, find_corpora, require_separator
from lightning_3d.app.training.data.packing import Tokens
from lightning_3d.app.training.data.remote_corpora import Finder
from lightning_3d.app.training.data.token_file import index_path, open_tokens
from lightning_3d.errors import ConfigError


class TokenFiles(PackedDataModule):
    """Samples from token files, one after the other. The operating system keeps one copy in memory
    for all ranks of a node.

    Args:
        train_path: files to train on: a `.bin` or `.npy`, a folder of `lightning-3d tokenize`, or a
            glob (see `find_corpus`), or a list of these, which are read one after the other.
        val_path: held-out files; None holds out the end of `train_path`.
        val_fraction: fraction of `train_path` that is held out if there is no `val_path`; 0 for no
            validation.
        tokenizer: tokenizer that made the files, a folder or a name on the hub, to compare with
            their manifest; None: no comparison.
        document_separator: id after each document, for files that do not say it.
        check_hashes: compare the SHA-256 of every shard with its manifest, which reads all of them.
        cache_dir, cache_bytes: folder and bytes of the cache for paths that are URLs; see
            `data_cache`.
        **kwargs: see `PackedDataModule`.
    """

    def __init__(
        self,
        *,
        train_path: str | os.PathLike[str] | list[str],
        val_path: str | os.PathLike[str] | list[str] | None = None,
        val_fraction: float = 0.01,
        tokenizer: str | None = None,
        document_separator: int | None = None,
        check_hashes: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= val_fraction < 1:
            raise ConfigError(
                f"data.val_fraction must be at least 0 and less than 1; got {val_fraction}."
            )
        self.train_path, self.val_path = train_path, val_path
        self.val_fraction = val_fraction
        self.tokenizer, self.document_separator, self.check_hashes = (
            tokenizer,
            document_separator,
            check_hashes,
        )
        self.cache_dir, self.cache_bytes = cache_dir, cache_bytes
        check_data_urls({**vars(self), "name": "tokens"})

    @override
    def prepare_data(self) -> None:
        """Make the checks that take time, and look at URLs. Lightning calls this on one rank per
        node while the others wait."""
        if (
            self.tokenizer is not None
            or self.check_hashes
            or has_url(self.train_path, self.val_path)
        ):
            find = Finder(vars(self), fresh=True)
            find_corpora(
                self.train_path,
                self.val_path,
                self.tokenizer,
                self.document_separator,
                self.check_hashes,
                find,
            )

    @override
    def load_tokens(self) -> tuple[Tokens, Tokens | None]:
        find = Finder(vars(self), fresh=self.trainer is None)  # a trainer has called prepare_data
        train, val = find_corpora(
            self.train_path, self.val_path, document_separator=self.document_separator, find=find
        )
        require_separator(train, vars(self))
        return map_corpora(train, val, self.val_fraction, self.sequence_length)


@overload
def map_corpora(
    train: Corpus, val: Corpus | None, val_fraction: float, sequence_length: int
) -> tuple[Tokens, Tokens | None]: ...


@overload
def map_corpora(
    train: Corpus | None, val: Corpus | None, val_fraction: float, sequence_length: int
) -> tuple[Tokens | None, Tokens | None]: ...


def map_corpora(
    train: Corpus | None, val: Corpus | None, val_fraction: float, sequence_length: int
) -> tuple[Tokens | None, Tokens | None]:
    """Map files to train on and held-out files into memory. Without the latter, the end of the
    former is held out."""
    if train is not None and val is None:
        return _map(train).hold_out(val_fraction, sequence_length)
    return _map(train) if train is not None else None, _map(val) if val is not None else None


def _map(corpus: Corpus) -> Tokens:
    """Map the files of a corpus into memory: one at once, several when they are read. Those of URLs
    are read through a cache."""
    first = corpus.parts[0].path
    alone = (
        len(corpus.parts) == 1
        and isinstance(first, Path)
        and first.suffix != ".npy"
        and index_path(first).is_file()
    )
    values = open_tokens(str(first))[0] if alone else Concatenation(corpus.parts)
    return Tokens(values, corpus.name, corpus.separator, largest=corpus.largest)
