"""Text from the `datasets` library, tokenized by Transformers. Both are imported on first use."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_3d.app.training.data.base import FULL_SCAN
from lightning_3d.app.training.data.entropy import Entropy, entropy
from lightning_3d.app.training.data.packing import Tokens, join_documents, smallest_dtype
from lightning_3d.app.training.data.padded import (
    PADDING,
    PaddedDataModule,
    PaddedDataset,
    mark_targets,
    pack,
    split_documents,
)
from lightning_3d.app.training.data.token_file import index_path, open_tokens, write_tokens
from lightning_3d.errors import ConfigError, DataError, did_you_mean, listed
from lightning_3d.storage.user_cache import default_cache

_READERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
_BATCH = 1000


class HuggingFaceText(PaddedDataModule):
    """Documents of a data set, tokenized once per node into a cached token file that all ranks map
    into memory.

    Each document ends with the tokenizer's end-of-sequence token. Documents keep the order of the
    data set; samples are shuffled. With a packing, samples hold whole documents and padding, and
    are made in memory on one process per node.

    Args:
        path: name on the hub, a folder written by `save_to_disk`, a folder of json, jsonl, parquet,
            csv, txt or arrow files, or one such file.
        tokenizer: name on the hub or folder of a tokenizer.
        dataset: configuration of the data set, for those on the hub that have several.
        split: training split.
        val_split: held-out split; None holds out the end of the training split.
        val_fraction: fraction of the training split's samples that is held out if there is no
            `val_split`; 0: no validation.
        text_column: column that holds the text.
        max_documents: number of documents to use, the first ones of each split; None for all.
        packing: `best_fit` for samples of whole documents and padding; a document longer than a
            sample is cut, and its rest packed like a document. None: consecutive tokens.
        cache_dir: folder of the token files; None is `lightning_3d` in the user's cache folder
            (XDG_CACHE_HOME).
        **kwargs: see `PackedDataModule`.
    """

    tokenizer: str

    def __init__(
        self,
        *,
        path: str,
        tokenizer: str,
        dataset: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        val_fraction: float = 0.01,
        text_column: str = "text",
        max_documents: int | None = None,
        packing: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if packing not in (None, "best_fit"):
            raise ConfigError(
                "data.packing must be best_fit, or null for samples of consecutive tokens; got"
                f" {packing!r}."
            )
        super().__init__(**kwargs)
        self.packing = packing
        if not 0 <= val_fraction < 1:
            raise ConfigError(
                f"data.val_fraction must be at least 0 and less than 1; got {val_fraction}."
            )
        if is_local(path) and not Path(path).exists():
            raise DataError(
                f"The data set {path} does not exist. Give a folder, a file, or a name on the hub."
            )
        if is_local(tokenizer) and not Path(tokenizer).exists():
            raise DataError(
                f"The tokenizer {tokenizer} does not exist. Give a folder with a tokenizer, or a"
                " name on the hub."
            )
        self.path, self.tokenizer, self.dataset = path, tokenizer, dataset
        self.split, self.val_split, self.val_fraction = split, val_split, val_fraction
        self.text_column, self.max_documents = text_column, max_documents
        self.cache_dir = Path(cache_dir) if cache_dir is not None else default_cache()

    @override
    def prepare_data(self) -> None:
        """Tokenize what is not in the cache yet. Lightning calls this on one rank per node while
        the others wait."""
        for split in self._splits():
            path = self.token_path(split)
            if not (index_path(path).is_file() and path.is_file()):
                tokens, vocab_size, separator = self._tokenize(split)
                write_tokens(path, tokens, vocab_size=vocab_size, document_separator=separator)
            if self.packing is not None:
                self._write_samples(split)

    @override
    def load_tokens(self) -> tuple[Tokens, Tokens | None]:
        train = self._map(self.split)
        if self.val_split is not None:
            return train, self._map(self.val_split)
        return train.hold_out(self.val_fraction, self.sequence_length)

    def _splits(self) -> list[str]:
        return [self.split] if self.val_split is None else [self.split, self.val_split]

    def _map(self, split: str) -> Tokens:
        name = f"split '{split}' of {self.path}"
        if self.packing is None:
            values, index = open_tokens(self.token_path(split))
            return Tokens(values, name, index.document_separator)
        tokens, marks = (open_tokens(path)[0] for path in self.sample_paths(split))
        self._marks[name] = marks
        return Tokens(tokens, name)

    def token_path(self, split: str) -> Path:
        """Token file of a split. Its name is a hash of everything its content depends on, including
        sizes and times of local files."""
        sources = {
            "data": [
                self.path,
                self.dataset,
                split,
                self.text_column,
                self.max_documents,
                state_of(self.path),
            ],
            "tokenizer": [self.tokenizer, state_of(self.tokenizer)],
        }
        return (
            self.cache_dir / f"{hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:32]}.bin"
        )

    def sample_paths(self, split: str) -> tuple[Path, Path]:
        """Files with the samples of a packed split, and with the marks of their tokens."""
        path = self.token_path(split)
        name = f"{path.stem}_{self.packing}_{self.sequence_length}"
        return path.with_name(f"{name}.bin"), path.with_name(f"{name}_marks.bin")

    def _write_samples(self, split: str) -> None:
        """Pack the documents of the token file of a split, if they are not packed yet."""
        paths = self.sample_paths(split)
        if all(path.is_file() and index_path(path).is_file() for path in paths):
            return
        values, index = open_tokens(self.token_path(split))
        assert index.document_separator is not None, "each document ends with it"
        documents = split_documents(
            np.asarray(values), index.document_separator, self.sequence_length
        )
        ids, marks = pack(
            mark_targets(documents), self.sequence_length, index.document_separator, values.dtype
        )
        write_tokens(paths[1], marks, vocab_size=2 * PADDING)
        write_tokens(paths[0], ids, vocab_size=index.vocab_size)

    @override
    def entropy(self) -> Entropy | None:
        """Return the entropy of the held-out split as usual, but without its padding."""
        if self._entropy is None and isinstance(self.val_set, PaddedDataset):
            self._entropy = entropy(
                self.val_set.without_padding(FULL_SCAN // self.val_set.tokens.values.dtype.itemsize)
            )
        return super().entropy()

    def _tokenize(self, split: str) -> tuple[np.ndarray, int, int]:
        """Return (tokens, vocabulary size, separator) of a split."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        separator = tokenizer.eos_token_id
        if separator is None:
            raise DataError(
                f"The tokenizer {self.tokenizer} has no end-of-sequence token to mark the end of a"
                " document. Set its eos_token."
            )
        dtype = smallest_dtype(len(tokenizer) - 1)
        documents = (
            np.asarray(ids, dtype=dtype)
            for texts in self._texts(split)
            for ids in tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )["input_ids"]
        )
        return join_documents(documents, separator), len(tokenizer), separator

    def _texts(self, split: str) -> Iterator[list[str]]:
        """Yield the documents of a split, `_BATCH` at a time."""
        dataset = load_split(self.path, self.dataset, split)
        if self.text_column not in dataset.column_names:
            columns = listed(dataset.column_names)
            near = did_you_mean(self.text_column, dataset.column_names)
            raise DataError(
                f"{self.path} has no column '{self.text_column}'; it has {columns}.{near} Set"
                " data.text_column."
            )
        count = (
            len(dataset) if self.max_documents is None else min(self.max_documents, len(dataset))
        )
        for start in range(0, count, _BATCH):
            yield dataset[start : min(start + _BATCH, count)][self.text_column]


def load_split(path: str, name: str | None, split: str) -> Any:
    """Load one split as a `datasets.Dataset`, from disk or from the hub.

    Raises:
        DataError: the split does not exist, no file has a known type, or the library cannot read
            it.
    """
    import datasets

    place = Path(path)
    try:
        if (place / "dataset_dict.json").is_file() or (place / "dataset_info.json").is_file():
            saved = datasets.load_from_disk(path)
            return saved if isinstance(saved, datasets.Dataset) else saved[split]
        if place.exists():
            reader, files = local_files(place)
            return datasets.load_dataset(reader, data_files={split: files}, split=split)
        return datasets.load_dataset(path, name, split=split)
    except DataError:
        raise
    except KeyError:
        raise DataError(
            f"{path} has no split '{split}'. Use one of its splits: {', '.join(saved)}."
        ) from None
    except Exception as error:
        raise DataError(f"The data set {path} cannot be read: {error}") from error


def local_files(place: Path) -> tuple[str, list[str]]:
    """Return (reader of `datasets`, files) of a folder or file; of a folder, the files of its most
    frequent known type."""
    found = (
        [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    )
    known = [path for path in found if path.suffix in _READERS]
    if not known:
        types = ", ".join(_READERS)
        raise DataError(
            f"{place} has no file of a known type. Set data.path to a file or folder with one of"
            f" these types: {types}."
        )
    readers = [_READERS[path.suffix] for path in known]
    reader = max(sorted(set(readers)), key=readers.count)
    return reader, [str(path) for path in known if _READERS[path.suffix] == reader]


def is_local(name: str) -> bool:
    """Return whether the user means a path on disk: names on the hub are `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix in _READERS


def state_of(name: str) -> list[Any]:
    """List relative path, size and modification time of each local file; empty for a name on the
    hub."""
    place = Path(name)
    files = (
        [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    )
    return [
        [path.relative_to(place).as_posix(), path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
    ]
