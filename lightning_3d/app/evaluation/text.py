"""Text to token ids and back: a tokenizer of Transformers, or bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_3d.app.config.tokenizer import BYTES
from lightning_3d.app.evaluation.subject import HUGGING_FACE_CONFIG, Subject
from lightning_3d.app.training.data.byte_tokens import SEPARATOR
from lightning_3d.errors import ConfigError, listed

_END_OF_FILE = SEPARATOR
_GENERATION_CONFIG = "generation_config.json"


class Text(Protocol):
    """A tokenizer, as this package uses it."""

    stop: frozenset[int]
    """Tokens that end a text."""

    end: int
    """Token that ends a document."""

    prefix: int
    """Token before the first one of a document."""

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Return token ids, with or without special tokens; None: as the tokenizer does by
        default."""

    def written(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""


class Bytes:
    """Bytes as token ids."""

    stop, end, prefix = frozenset({_END_OF_FILE}), _END_OF_FILE, _END_OF_FILE

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def written(self, tokens: Sequence[int]) -> str:
        # no text has that
        parts = b"".join(
            b"\0<end of file>" if token == _END_OF_FILE else bytes([token]) for token in tokens
        )
        return parts.decode("utf-8", "replace")

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < _END_OF_FILE).decode("utf-8", "replace")


class Tokenizer:
    """A tokenizer of Transformers.

    Args:
        folder: folder or name of the tokenizer.
        stop: tokens that end a text, in addition to the tokenizer's.
    """

    def __init__(self, folder: str, stop: Sequence[int] = ()) -> None:
        from transformers import AutoTokenizer

        self.inner: Any = AutoTokenizer.from_pretrained(folder)
        own, first = self.inner.eos_token_id, self.inner.bos_token_id
        self.stop = frozenset([*stop, *([] if own is None else [own])])
        self.end = own if own is not None else min(self.stop, default=0)
        self.prefix = first if first is not None else self.end

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        return list(
            self.inner.encode(text, **({} if special is None else {"add_special_tokens": special}))
        )

    def written(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens)))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(tokens, skip_special_tokens=True))


def open_text(name: str, subject_stop: Sequence[int]) -> Text:
    """Open a tokenizer that `find_tokenizer` has found."""
    return Bytes() if name == BYTES else Tokenizer(name, subject_stop)


def find_tokenizer(subject: Subject, given: str | None) -> str:
    """Find the tokenizer of a model, and check that it is there.

    Args:
        given: folder or name that the user gave.

    Raises:
        ConfigError: there is none.
    """
    name = given or subject.tokenizer
    if name is None:
        raise ConfigError(
            f"The run of {subject.path} names no tokenizer. Give one with --tokenizer FOLDER."
        )
    if name == BYTES:
        return name
    path = Path(name).expanduser()
    if (
        path.is_dir()
        and not any(path.glob("tokenizer*"))
        and not any(path.glob("*.model"))
        and not (path / "vocab.json").is_file()
    ):
        raise ConfigError(
            f"{path} has no tokenizer. Give the folder of one with --tokenizer FOLDER."
        )
    if not path.is_dir() and (path.is_absolute() or name.count("/") > 1 or name.startswith(".")):
        raise ConfigError(
            f"There is no tokenizer {name}. Give a folder, or a name on the Hugging Face hub, with"
            " --tokenizer."
        )
    return str(path) if path.is_dir() else name


def refuse_bytes(name: str) -> None:
    """Refuse bytes where a chat template is needed. Raises ConfigError."""
    if name == BYTES:
        raise ConfigError(
            "Bytes have no chat template. Evaluate without --apply-chat-template, or with another"
            " --tokenizer FOLDER."
        )


def require_chat_template(text: Text, name: str) -> None:
    """Refuse a tokenizer without a chat template, or with several of which none is the default.

    Raises:
        ConfigError: with what works.
    """
    refuse_bytes(name)
    assert isinstance(text, Tokenizer)
    found = text.inner.chat_template
    if not found or isinstance(found, dict) and "default" not in found:
        what = (
            f"has several chat templates ({listed(sorted(found))}), and none is called default"
            if found
            else "has no chat template"
        )
        raise ConfigError(
            f"The tokenizer {name} {what}. Evaluate without --apply-chat-template, or with another"
            " --tokenizer FOLDER."
        )


def stop_tokens(subject: Subject) -> tuple[int, ...]:
    """Read the tokens that end a text from a model folder of Transformers; none for a run, whose
    tokenizer says them."""
    if subject.run is not None:
        return ()
    for file in (_GENERATION_CONFIG, HUGGING_FACE_CONFIG):
        path = Path(str(subject.path)) / file
        found = json.loads(path.read_text("utf-8")).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()
