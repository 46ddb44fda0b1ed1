"""Prompts and answers for supervised fine-tuning: only the tokens of answers count in the loss."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_3d.app.training.data.entropy import Entropy
from lightning_3d.app.training.data.huggingface import is_local, load_split, state_of
from lightning_3d.app.training.data.packing import Tokens, smallest_dtype
from lightning_3d.app.training.data.padded import (
    BEGINS,
    PADDING,
    TARGET,
    Document,
    PaddedDataModule,
    pack,
)
from lightning_3d.app.training.data.token_file import index_path, open_tokens, write_tokens
from lightning_3d.errors import ConfigError, DataError, listed, plural
from lightning_3d.storage.user_cache import default_cache

_TOKENIZER = (".json", ".jinja", ".model", ".txt")
"""Suffixes of a tokenizer's files."""

Example = tuple[list[int], list[bool]]
"""Tokens of a conversation, and True for those that are targets."""


class Instructions(PaddedDataModule):
    """Conversations, packed whole into padded samples of `sequence_length`; attention crosses their
    borders without a document mask.

    The sample that holds a conversation depends only on the data; the order of samples on the seed
    and the global batch. Tokenization keeps all conversations of a split in memory, on one process
    per node. Later, ranks map the samples into memory.

    Args:
        path, dataset, split, val_split, val_fraction, cache_dir: see `HuggingFaceText`.
        tokenizer: folder of a tokenizer, or name on the hub; needs a chat template for rows with
            `messages`.
        max_examples: number of examples to use, the first ones of each split; None for all.
        **kwargs: see `PackedDataModule`.
    """

    tokenizer: str
    packing = "best_fit"

    def __init__(
        self,
        *,
        path: str,
        tokenizer: str,
        dataset: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        val_fraction: float = 0.01,
        max_examples: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= val_fraction < 1:
            raise ConfigError(
                f"data.val_fraction must be at least 0 and less than 1; got {val_fraction}."
            )
        for what, name in (("data set", path), ("tokenizer", tokenizer)):
            if is_local(name) and not Path(name).exists():
                raise DataError(
                    f"The {what} {name} does not exist. Give a folder, or a name on the hub."
                )
        self.path, self.tokenizer, self.dataset = path, tokenizer, dataset
        self.split, self.val_split, self.val_fraction = split, val_split, val_fraction
        self.max_examples = max_examples
        self.cache_dir = Path(cache_dir) if cache_dir is not None else default_cache()

    @override
    def prepare_data(self) -> None:
        """Tokenize what is not in the cache yet. Lightning calls this on one rank per node while
        the others wait."""
        for split in dict.fromkeys([self.split, self.val_split or self.split]):
            tokens, targets = self.paths(split)
            if not (index_path(tokens).is_file() and index_path(targets).is_file()):
                ids, which, vocab_size = self._tokenize(split)
                write_tokens(targets, which, vocab_size=2 * PADDING)
                write_tokens(tokens, ids, vocab_size=vocab_size)

    @override
    def load_tokens(self) -> tuple[Tokens, Tokens | None]:
        train = self._map(self.split)
        if self.val_split is not None:
            return train, self._map(self.val_split)
        return train.hold_out(self.val_fraction, self.sequence_length)

    def paths(self, split: str) -> tuple[Path, Path]:
        """Files with the tokens of a split and with their target marks, named by a hash of
        everything they depend on."""
        sources = [
            self.path,
            self.dataset,
            split,
            self.max_examples,
            self.sequence_length,
            state_of(self.path),
        ]
        # The tokenizer may be in the folder of the weights, among many other files.
        sources += ["best_fit", "marks"]
        sources += [
            self.tokenizer,
            [
                state_of(str(file))
                for file in sorted(Path(self.tokenizer).glob("*.*"))
                if file.suffix in _TOKENIZER
            ],
        ]
        name = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:32]
        return self.cache_dir / f"{name}.bin", self.cache_dir / f"{name}_targets.bin"

    def _map(self, split: str) -> Tokens:
        tokens, targets = (open_tokens(path)[0] for path in self.paths(split))
        name = f"split '{split}' of {self.path}"
        self._marks[name] = targets
        return Tokens(tokens, name)

    @override
    def entropy(self) -> Entropy | None:
        """Return None: token frequencies say nothing about the loss of answers given their
        prompts."""
        return None

    def _tokenize(self, split: str) -> tuple[np.ndarray, np.ndarray, int]:
        """Return (tokens, target marks, vocabulary size) of a split, packed into samples."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"The tokenizer {self.tokenizer} has no end-of-sequence token to mark the end of an"
                " answer. Set its eos_token."
            )
        length, kept, truncated, count = self.sequence_length, [], 0, 0
        for row in self._rows(split):
            ids, targets = encode(row, tokenizer, f"Row {count} of {self.path}")
            count += 1
            truncated += len(ids) > length
            if any(targets[1:length]):  # the first token has no context to be predicted from
                kept.append((ids[:length], targets[:length]))
        if truncated or len(kept) < count:
            warnings.warn(
                f"{self.path}: {truncated} of {plural(count, 'conversation')} are longer than"
                f" data.sequence_length={length} tokens and were truncated. {count - len(kept)}"
                f" were left out, because no answer begins within the first {length} tokens. To"
                " keep more, raise data.sequence_length.",
                stacklevel=2,
            )
        if not kept:
            raise DataError(
                f"{self.path} has {plural(count, 'conversation')}, but none with an answer in its"
                f" first {length} tokens. Raise data.sequence_length."
            )
        padding = (
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )
        packed = pack([marked(*example) for example in kept], length, padding)
        vocab_size = max(len(tokenizer), int(packed[0].max()) + 1)
        return packed[0].astype(smallest_dtype(vocab_size - 1)), packed[1], vocab_size

    def _rows(self, split: str) -> Iterator[Mapping[str, Any]]:
        rows = load_split(self.path, self.dataset, split)
        for index in range(
            len(rows) if self.max_examples is None else min(self.max_examples, len(rows))
        ):
            yield rows[index]


def encode(row: Mapping[str, Any], tokenizer: Any, where: str) -> Example:
    """Tokenize a row and mark its targets: the tokens of answers and the token that ends each.

    Args:
        row: `messages`, or `prompt` and `response`; with a chat template the latter are a
            conversation of two turns.
        where: name of the row, for messages.

    Raises:
        DataError: the columns are missing, there is no chat template, or it changes earlier turns
            when later ones follow.
    """
    messages, prompt, response = row.get("messages"), row.get("prompt"), row.get("response")
    if not messages and not (isinstance(prompt, str) and isinstance(response, str)):
        raise DataError(
            f"{where} has neither messages nor prompt and response; it has {listed(sorted(row))}."
            " Rename the columns of the data set."
        )
    if not messages and not tokenizer.chat_template:
        before = list(tokenizer(prompt)["input_ids"])
        answer = [
            *tokenizer(response, add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        return before + answer, [False] * len(before) + [True] * len(answer)
    if not tokenizer.chat_template:
        raise DataError(
            f"{where} has messages, but the tokenizer has no chat template. Set data.tokenizer to"
            " that of a chat model."
        )
    turns = messages or [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": response},
    ]
    ids = _apply_template(turns, tokenizer)
    targets = [False] * len(ids)
    for index in (index for index, turn in enumerate(turns) if turn["role"] == "assistant"):
        before, after = (
            _apply_template(turns[:index], tokenizer, answer=True),
            _apply_template(turns[: index + 1], tokenizer),
        )
        if ids[: len(after)] != after or after[: len(before)] != before:
            raise DataError(
                f"The tokenizer's chat template changes earlier turns of {where} when later turns"
                " follow, so it is unknown which tokens are answers. Use rows with one answer, or"
                " another tokenizer."
            )
        targets[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, targets


def marked(ids: list[int], targets: list[bool]) -> Document:
    """Mark the tokens of a conversation. Its first token is no target: its context would be the
    previous conversation."""
    marks = np.where(targets, TARGET, 0)
    marks[0] = BEGINS
    return np.asarray(ids), marks


def _apply_template(turns: Any, tokenizer: Any, *, answer: bool = False) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            turns, add_generation_prompt=answer, tokenize=True, return_dict=True
        )["input_ids"]
    )
