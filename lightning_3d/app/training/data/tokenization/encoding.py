"""Tokenize one batch of documents: what each process does. Imports no torch; transformers is
imported on first use."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_3d.app.config.tokenizer import BYTES
from lightning_3d.app.training.data.byte_tokens import SEPARATOR, VOCAB_SIZE
from lightning_3d.app.training.data.indexed_file import dtype_for
from lightning_3d.app.training.data.shard_manifest import TokenizerIdentity
from lightning_3d.app.training.data.tokenization.sources import Batch
from lightning_3d.errors import DataError

_TRIAL = (
    "Ein Text, two lines:\n\tdef f(x): return x**2  # 3.14 'ok' \u00e9\u00df\u4e16\u754c"
    " \U0001f600 "
)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Encoded:
    """Tokens of a batch.

    Attributes:
        tokens: (tokens,), a separator after each document.
        lengths: (documents,) of tokens of each document with its separator; empty documents are
            left out.
    """

    tokens: np.ndarray
    lengths: np.ndarray


class Encoder:
    """Tokenizes batches. Can be sent to other processes.

    Where the tokenizer is one of the tokenizers package and gives the same ids without
    Transformers, it is called directly: that skips what Transformers makes of the ids, and
    processes need not import it.

    Args:
        tokenizer: tokenizer of Transformers.
        name: the tokenizer as the user named it.

    Raises:
        DataError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        separator = tokenizer.eos_token_id
        if separator is None:
            raise DataError(
                f"The tokenizer {name} has no end-of-sequence token to mark the end of a document."
                " Set its eos_token."
            )
        vocabulary = tokenizer.get_vocab()
        size = max([separator, *vocabulary.values()]) + 1
        fast = getattr(tokenizer, "is_fast", False)
        self._rules: str | None = _rules_of(tokenizer) if fast else None
        self._tokenizer = tokenizer
        self._direct: Any = None
        rules = self._rules or json.dumps(
            [type(tokenizer).__name__, tokenizer.init_kwargs], sort_keys=True, default=str
        )
        self.identity = TokenizerIdentity(
            name, size, separator, _hash(json.dumps(sorted(vocabulary.items()))), _hash(rules)
        )
        self.dtype = dtype_for(size)
        text = _TRIAL + tokenizer.eos_token
        if self._rules is not None and self._ids([text]) == self._plain_ids([text]):
            self._tokenizer = None
        else:
            self._rules = None

    def __call__(self, batch: Batch) -> Encoded:
        """Tokenize a batch.

        Raises:
            DataError: a record has no text.
        """
        documents = [
            ids
            for ids in self._ids([_text(batch, index) for index in range(len(batch.records))])
            if ids
        ]
        lengths = np.array([len(ids) + 1 for ids in documents], dtype=np.int64)
        tokens = np.full(int(lengths.sum()), self.identity.document_separator, dtype=self.dtype)
        end = 0
        for ids in documents:
            tokens[end : end + len(ids)] = ids
            end += len(ids) + 1
        return Encoded(tokens, lengths)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if self._rules is None:
            return self._plain_ids(texts)
        if self._direct is None:
            from tokenizers import Tokenizer

            self._direct = Tokenizer.from_str(self._rules)
        return [
            encoding.ids
            for encoding in self._direct.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def _plain_ids(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_direct": None}


class ByteEncoder:
    """Turns batches into bytes, see `byte_tokens`. Files of text are taken as they are, whatever
    their encoding."""

    identity = TokenizerIdentity(
        BYTES, VOCAB_SIZE, SEPARATOR, _hash(f"bytes, {SEPARATOR} ends a document"), _hash(BYTES)
    )
    dtype = dtype_for(VOCAB_SIZE)

    def __call__(self, batch: Batch) -> Encoded:
        """Tokenize a batch.

        Raises:
            DataError: a record has no text.
        """
        documents = [
            document
            for document in (_bytes(batch, index) for index in range(len(batch.records)))
            if document
        ]
        lengths = np.array([len(document) + 1 for document in documents], dtype=np.int64)
        tokens = np.full(int(lengths.sum()), SEPARATOR, dtype=self.dtype)
        for end, document in zip(np.cumsum(lengths).tolist(), documents, strict=True):
            tokens[end - 1 - len(document) : end - 1] = np.frombuffer(document, dtype=np.uint8)
        return Encoded(tokens, lengths)


def load_tokenizer(name: str) -> Encoder | ByteEncoder:
    """Load a tokenizer from a folder, or from the hub; "bytes" needs neither.

    Raises:
        DataError: there is none, or it has no end-of-sequence token.
    """
    if name == BYTES:
        return ByteEncoder()
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        raise DataError(
            f"The tokenizer {name} does not exist. Give a folder with a tokenizer, or a name on the"
            " hub."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"The tokenizer {name} cannot be loaded: {error}") from error
    return Encoder(tokenizer, name)


def _rules_of(tokenizer: Any) -> str:
    """Serialize a fast tokenizer without the truncation and padding that earlier calls left in
    it."""
    entries = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(entries | {"truncation": None, "padding": None})


def _bytes(batch: Batch, index: int) -> bytes:
    """Return the bytes of a record. A text from JSON may have half of a surrogate pair, which is
    written as it is."""
    record = batch.records[index]
    return (
        record
        if isinstance(record, bytes) and batch.json_key is None
        else _text(batch, index).encode("utf-8", "surrogatepass")
    )


def _text(batch: Batch, index: int) -> str:
    """Return the text of a record; empty for a blank line of a JSONL file."""
    record = batch.records[index]
    if batch.json_key is not None:
        assert isinstance(record, bytes), "a line"
        return _json_text(batch, index, record)
    if isinstance(record, str):
        return record
    if record is None:
        raise DataError(f"{_upper(batch.where(index))} has no text. Remove such rows.")
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{batch.where(index)} is not text in UTF-8: byte {error.start} is wrong. Convert it,"
            " or leave it out."
        ) from None


def _json_text(batch: Batch, index: int, line: bytes) -> str:
    if not line.strip():
        return ""
    try:
        entries = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{_upper(batch.where(index))} is not JSON: {error}.") from None
    text = entries.get(batch.json_key) if isinstance(entries, dict) else None
    if not isinstance(text, str):
        what = (
            f"has the keys {', '.join(entries)}"
            if isinstance(entries, dict)
            else f"is a {type(entries).__name__}"
        )
        raise DataError(
            f"{_upper(batch.where(index))} must be an object with a string under"
            f" '{batch.json_key}', but it {what}. Set --text-column."
        )
    return text


def _upper(words: str) -> str:
    return words[0].upper() + words[1:]
