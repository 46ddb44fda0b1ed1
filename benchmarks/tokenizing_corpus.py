"""Documents and a tokenizer for `tokenizing.py`, made of the sources of Python's standard
library."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

SEPARATOR = "<|endoftext|>"
VOCABULARY = 32_000
_TRAINED_ON = 16_000_000  # characters


@dataclass(frozen=True)
class Corpus:
    """The same documents twice.

    Attributes:
        file: JSON lines.
        parts: folder with the same lines in one file for each process, in order, for a program that
            shares out whole files.
    """

    file: Path
    parts: Path
    documents: int

    @property
    def bytes(self) -> int:
        return self.file.stat().st_size


def write_corpus(folder: Path, size: int, processes: int) -> Corpus:
    """Write documents until they have `size` bytes. No two are the same: files that come again
    begin with another line."""
    parts = folder / "parts"
    parts.mkdir()
    written = documents = 0
    files = [(parts / f"{part:03d}.jsonl").open("w", encoding="utf-8") for part in range(processes)]
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as whole:
        for text in _documents():
            line = json.dumps({"text": text}) + "\n"
            whole.write(line)
            files[min(processes - 1, written * processes // size)].write(line)
            written += len(line)  # ASCII
            documents += 1
            if written >= size:
                break
    for file in files:
        file.close()
    return Corpus(folder / "corpus.jsonl", parts, documents)


def _documents() -> Iterator[str]:
    """All modules of the standard library with text in them, again and again."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    for copy in count():
        for path in paths:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a test of another encoding
            if text:
                yield f"# copy {copy}\n{text}" if copy else text


def train_tokenizer(folder: Path) -> Path:
    """Train a byte-level BPE as GPT-2's on a part of the documents, and save it for
    Transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some_documents(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SEPARATOR).save_pretrained(folder)
    return folder


def _some_documents() -> Iterator[str]:
    """Every third document, at most `_TRAINED_ON` characters."""
    taken = 0
    for text in islice(_documents(), 0, None, 3):
        yield text
        taken += len(text)
        if taken >= _TRAINED_ON:
            return
