"""`lightning-3d tokenize`: write text as shards of tokens for data=tokens. Transformers is imported
after all checks that need it not."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from pathlib import Path

from lightning_3d.app.cli.options import Command
from lightning_3d.errors import ConfigError, plural
from lightning_3d.ranks.progress import task
from lightning_3d.storage.numbers import show_bytes

_SHARD_TOKENS = 1 << 28
_LARGEST = (1 << 31) - 1

COMMAND = Command(
    "tokenize",
    "Tokenize text with several processes into a folder of shards, which data=tokens reads:"
    " shard-00000.bin and .idx, ... in Megatron's format, and manifest.json with their hashes. A"
    " repeated command continues after the last whole shard. The shards do not depend on the number"
    " of processes.",
    takes="SOURCE...",
    examples=[
        "corpus/*.jsonl.gz --tokenizer models/Llama-3.1-8B --out tokens",
        "hf://HuggingFaceFW/fineweb --dataset sample-10BT --tokenizer gpt2 --out tokens",
        '"src/**/*.py" --tokenizer gpt2 --out tokens',
    ],
)
COMMAND.section(
    "Arguments",
    [
        (
            "SOURCE...",
            (
                "JSON lines (.jsonl, .json), Parquet, or text in UTF-8 (one document a file), also"
                " .gz and .zst; a folder of .jsonl, .json, .parquet and .txt files; a pattern; or"
                " hf://NAME, a data set on the hub or a folder of save_to_disk"
            ),
        )
    ],
    first=True,
)
COMMAND.option(
    "--tokenizer",
    "TOKENIZER",
    "folder of a tokenizer of Transformers, a name on the hub, or bytes (each byte is a token);"
    " must be given",
    required=True,
)
COMMAND.option(
    "--out", "FOLDER", "folder to write, on the local disk; must be given", required=True
)
COMMAND.option(
    "--text-column", "COLUMN", "key or column of the text; default: text", default="text"
)
COMMAND.option("--split", "SPLIT", "split of hf:// data sets; default: train", default="train")
COMMAND.option("--dataset", "NAME", "configuration of hf:// data sets that have several")
COMMAND.count(
    "--shard-tokens",
    f"largest number of tokens of a shard; default: {_SHARD_TOKENS}",
    _SHARD_TOKENS,
)
COMMAND.count(
    "--processes", "number of processes; default: one for each processor that this process may use"
)


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    return COMMAND.run(arguments, _tokenize)


def _tokenize(options: Namespace, words: list[str]) -> int:
    if not words:
        raise ConfigError(
            "SOURCE... must be given: files, folders, patterns or hf:// data sets. See lightning-3d"
            " tokenize --help."
        )
    if "://" in options.out:
        raise ConfigError(f"--out must be a folder on the local disk; got {options.out}.")
    if options.shard_tokens > _LARGEST:
        raise ConfigError(f"--shard-tokens must be at most {_LARGEST}; got {options.shard_tokens}.")
    with task("importing Transformers"):
        from lightning_3d.app.training.data.tokenization.encoding import load_tokenizer
        from lightning_3d.app.training.data.tokenization.job import tokenize
        from lightning_3d.app.training.data.tokenization.sources import find_sources

    sources = find_sources(
        words, column=options.text_column, split=options.split, dataset=options.dataset
    )
    encoder = load_tokenizer(options.tokenizer)
    started = time.monotonic()
    done = tokenize(
        sources,
        encoder,
        Path(options.out).expanduser(),
        column=options.text_column,
        shard_tokens=options.shard_tokens,
        processes=options.processes or len(os.sched_getaffinity(0)),
    )
    seconds = time.monotonic() - started
    found = done.manifest
    size = show_bytes(found.tokens * encoder.dtype.itemsize)
    what = (
        f"{found.tokens} tokens of {found.dtype} ({size}), {plural(found.documents, 'document')},"
        f" {plural(len(found.shards), 'shard')}"
    )
    print(f"{options.out}: {what}")
    kept = (
        f"; {plural(done.earlier_shards, 'shard')} were there already"
        if done.earlier_shards
        else ""
    )
    if done.tokens:
        print(
            f"  {done.tokens} tokens in {seconds:.1f} s, {done.tokens / seconds:.0f} tokens/s{kept}"
        )
    else:
        print("  it was complete already")
    return 0
