"""What `data=tokens` reads: folders of shards, globs, data sets of Megatron; and what it refuses
before ranks are started."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_modules import trainer_of

from lightning_3d.app.training.data import corpus as corpora
from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.concatenation import Concatenation, TokenPart
from lightning_3d.app.training.data.corpus import find_corpus
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.data.indexed_file import pack_index
from lightning_3d.app.training.data.shard_manifest import Manifest, TokenizerIdentity
from lightning_3d.app.training.data.token_file import write_tokens
from lightning_3d.app.training.data.tokenization.encoding import Encoded
from lightning_3d.app.training.data.tokenization.shard_writer import ShardPlace, ShardWriter
from lightning_3d.app.training.data.tokens import TokenFiles
from lightning_3d.errors import ConfigError, DataError

END = 0
WORDS = TokenizerIdentity("words", 3000, END, "a" * 64, "b" * 64)
LENGTHS = [3, 40, 1, 17, 60, 2, 30, 5, 44, 8, 90, 12]


def values(lengths: list[int] = LENGTHS) -> np.ndarray:
    """Documents of ids that count up from 1, each with `END`."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    tokens[np.cumsum(lengths) - 1] = END
    return tokens


def write_shards(
    folder: Path, *, identity: TokenizerIdentity = WORDS, complete: bool = True
) -> Path:
    folder.mkdir()
    writer = ShardWriter(folder, Manifest(False, "uint16", identity, {}), 100)
    writer.add(ShardPlace(), Encoded(values(), np.array(LENGTHS)))
    writer.finish()
    manifest = writer.manifest
    assert len(manifest.shards) > 3
    Manifest(**{**manifest.__dict__, "complete": complete}).write(folder)
    return folder


def write_megatron(path: Path, tokens: np.ndarray, lengths: list[int]) -> None:
    path.with_suffix(".bin").write_bytes(tokens.tobytes())
    path.with_suffix(".idx").write_bytes(pack_index(np.array(lengths), tokens.dtype))


def rows(train_path: Any, **arguments: Any) -> list[list[int]]:
    data = TokenFiles(
        train_path=train_path, sequence_length=16, global_batch_size=2, val_fraction=0, **arguments
    )
    data.setup()
    assert data.train_set is not None
    return [data.train_set[index]["input_ids"].tolist() for index in range(len(data.train_set))]


EXPECTED = values()[: sum(LENGTHS) // 16 * 16].reshape(-1, 16).tolist()


def test_rows_of_a_folder_are_those_of_one_file(tmp_path: Path) -> None:
    write_shards(tmp_path / "out")
    write_tokens(tmp_path / "all.bin", values(), vocab_size=3000)
    assert (
        rows(tmp_path / "out")
        == rows(tmp_path / "all.bin")
        == rows(f"{tmp_path}/out/shard-*.bin")
        == EXPECTED
    )


def test_several_folders_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_shards(tmp_path / "b1")
    write_shards(tmp_path / "b0")
    twice = np.concatenate([values(), values()])
    assert rows(f"{tmp_path}/b?") == twice[: len(twice) // 16 * 16].reshape(-1, 16).tolist()


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@pytest.mark.parametrize("name", ["x.bin", "x", "*.bin"])
def test_megatron_files_are_read_as_they_are(dtype: str, name: str, tmp_path: Path) -> None:
    write_megatron(tmp_path / "x.bin", values().astype(dtype), LENGTHS)
    assert rows(tmp_path / name, vocab_size=3000) == EXPECTED


def test_a_multimodal_index_is_accepted(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x.bin", values(), LENGTHS)
    with (tmp_path / "x.idx").open("ab") as file:
        file.write(bytes(len(LENGTHS)))
    assert rows(tmp_path / "x.bin") == EXPECTED


def test_the_end_of_the_last_shard_is_held_out(tmp_path: Path) -> None:
    data = TokenFiles(
        train_path=write_shards(tmp_path / "out"),
        sequence_length=16,
        global_batch_size=2,
        val_fraction=0.2,
    )
    data.setup()
    assert data.train_set is not None and data.val_set is not None
    got = [
        part[index]["input_ids"].tolist()
        for part in (data.train_set, data.val_set)
        for index in range(len(part))
    ]
    assert got == EXPECTED and len(data.val_set) == round(0.2 * len(EXPECTED))
    entropy = data.entropy()
    assert entropy is not None and entropy.unigram > 3


def test_the_separator_of_the_manifest_masks_the_first_token_of_documents(tmp_path: Path) -> None:
    arguments = {"sequence_length": 16, "global_batch_size": 2, "predict_across_documents": False}
    data = TokenFiles(train_path=write_shards(tmp_path / "out"), **arguments)
    data.setup()
    assert data.train_set is not None
    row = data.train_set[0]
    assert (row["labels"] == -100).nonzero().flatten().tolist() == [3] and row["input_ids"][
        2
    ] == END
    write_megatron(tmp_path / "x.bin", values(), LENGTHS)
    with pytest.raises(
        ConfigError,
        match=(
            "predict_across_documents=false needs the token that ends a"
            " document.*document_separator"
        ),
    ):
        TokenFiles(train_path=tmp_path / "x.bin", **arguments).setup()
    data = TokenFiles(train_path=tmp_path / "x.bin", document_separator=END, **arguments)
    data.setup()
    assert (
        data.train_set is not None
        and data.train_set[0]["labels"].tolist() == row["labels"].tolist()
    )


def write_huge(folder: Path, shards: int, tokens: int) -> None:
    """A folder of sparse files, which take no place on the disk."""
    write_shards(folder)
    entries = json.loads((folder / "manifest.json").read_text())
    for number in range(shards):
        name = f"huge-{number:04}"
        (folder / f"{name}.bin").touch()
        os.truncate(folder / f"{name}.bin", 2 * tokens)
        head = pack_index(np.array([1]), np.dtype(np.uint16))
        (folder / f"{name}.idx").write_bytes(
            head[:34]
            + (1).to_bytes(4, "little")
            + (2 * (tokens - 1)).to_bytes(8, "little")
            + head[46:]
        )
        entries["shards"].append(
            {
                "name": name,
                "tokens": tokens,
                "documents": 1,
                "largest": 1,
                "bin_sha256": "",
                "idx_sha256": "",
            }
        )
    (folder / "manifest.json").write_text(json.dumps(entries))


class Start:
    """Processor time and memory from the check before ranks are started to the first batch. The
    data themselves are mapped, not counted."""

    def __init__(self, config: dict[str, Any], position: dict[str, Any] | None = None) -> None:
        tracemalloc.start()
        began = time.process_time()
        check_files(config, steps=1000)
        self.data: Any = make_data_module(config, vocab_size=3000, seed=1, global_batch_size=64)
        self.data.trainer = trainer_of(4, 1)
        self.data.setup()
        loader = self.data.train_dataloader()
        if position is not None:
            loader.load_state_dict(self.data.position_state() | position)
        self.batch = next(iter(loader))
        self.seconds, self.peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


@pytest.mark.slow
def test_the_first_batch_of_ten_trillion_tokens(tmp_path: Path) -> None:
    """1000 shards of 10^10 tokens: 5 s and 200 MB at most, also where a run resumes in the middle
    of an epoch."""
    write_huge(tmp_path / "out", 1000, 10**10)
    config = {"name": "tokens", "train_path": str(tmp_path / "out"), "sequence_length": 4096}
    for position in (None, {"samples": 64 * 10**7}):
        start = Start(config, position)
        assert start.batch["input_ids"].shape == (16, 4096) and start.batch["input_ids"].sum() == 0
        assert (
            len(start.data.train_set) > 2 * 10**9 and start.data.val_set[-1]["input_ids"].sum() == 0
        )
        assert start.seconds < 5 and start.peak < 200e6, (start.seconds, start.peak)


def test_token_files_of_nanotron_are_found_by_a_pattern(tmp_path: Path) -> None:
    """datatrove writes `.ds` files of ids, and other files next to them."""
    for number in (0, 1):
        values()[number::2].astype(np.uint16).tofile(tmp_path / f"0000{number}_tokens.ds")
        index = {
            "dtype": "uint16",
            "tokens": len(values()[number::2]),
            "vocab_size": 3000,
            "document_separator": END,
        }
        (tmp_path / f"0000{number}_tokens.json").write_text(json.dumps(index))
        (tmp_path / f"0000{number}_tokens.ds.index").write_bytes(b"")
        (tmp_path / f"0000{number}_tokens.ds.metadata").write_text("")
    expected = [*values()[::2], *values()[1::2]]
    for wanted in ("*.ds", "*"):
        found = find_corpus(tmp_path / wanted)
        assert (
            np.asarray(Concatenation(found.parts)[:]).tolist() == expected
            and found.separator == END
        )


def test_a_concatenation_is_the_joined_array(tmp_path: Path) -> None:
    parts, whole = [], []
    for number, size in enumerate([5, 0, 1, 7, 3]):
        tokens = np.arange(size, dtype=np.uint16 if number % 2 else np.int32) + 100 * number
        tokens.tofile(tmp_path / str(number))
        parts.append(TokenPart(tmp_path / str(number), tokens.dtype.name, size))
        whole += tokens.tolist()
    joined = Concatenation(parts)
    assert (len(joined), joined.dtype, joined.nbytes) == (16, np.int32, 64)
    for start in range(18):
        for stop in range(18):
            assert np.asarray(joined[start:stop]).tolist() == whole[start:stop]
            assert np.asarray(joined[2:14][start:stop]).tolist() == whole[2:14][start:stop]


def cut(path: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / path, size)


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        entries = json.loads((folder / "manifest.json").read_text())
        change(entries)
        (folder / "manifest.json").write_text(json.dumps(entries))

    return write


def flip(folder: Path) -> None:
    data = bytearray((folder / "shard-00001.bin").read_bytes())
    data[10] ^= 1
    (folder / "shard-00001.bin").write_bytes(data)


def swap(folder: Path) -> None:
    shutil.copy(folder / "shard-00000.idx", folder / "shard-00001.idx")


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no_bin": (lambda folder: (folder / "shard-00002.bin").unlink(), r"lacks shard-00002\.bin"),
    "no_idx": (lambda folder: (folder / "shard-00001.idx").unlink(), r"lacks shard-00001\.idx"),
    "cut_bin": (cut("shard-00001.bin", 20), "do not match: the .bin has 20 bytes"),
    "cut_idx": (cut("shard-00001.idx", 60), r"shard-00001\.idx has 60 bytes, but its header says"),
    "no_header": (cut("shard-00001.idx", 5), "is not the index of a Megatron data set"),
    "other_idx": (swap, r"shard-00001\.bin and shard-00001\.idx do not match"),
    "changed": (flip, r"shard-00001\.bin has changed since it was written: its SHA-256"),
    "incomplete": (
        edit(lambda entries: entries.update(complete=False)),
        "is not complete: it has 5 shards so far. Repeat the command",
    ),
    "tokens": (
        edit(lambda entries: entries["shards"][0].update(tokens=7)),
        "but manifest.json says 7 tokens",
    ),
    "version": (
        edit(lambda entries: entries.update(version=9)),
        "is not a manifest .*another version",
    ),
    "outside": (
        edit(lambda entries: entries["shards"][0].update(name="../x")),
        "is outside the folder",
    ),
    "not_json": (
        lambda folder: (folder / "manifest.json").write_text("{"),
        "is not a manifest of lightning-3d tokenize",
    ),
    "no_manifest": (lambda folder: (folder / "manifest.json").unlink(), r"has no manifest\.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_refused_before_ranks_are_started(case: str, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "out")
    config = {"name": "tokens", "train_path": str(folder), "check_hashes": True}
    check_files(config)
    damage, message = BAD[case]
    damage(folder)
    with pytest.raises(DataError, match=message):
        check_files(config)


def test_an_index_of_another_format_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x.bin", values(), LENGTHS)
    data = bytearray((tmp_path / "x.idx").read_bytes())
    for place, value, message in (
        (9, 2, "has version 2"),
        (17, 6, "has ids of type float64"),
        (17, 77, "has ids of the unknown type 77"),
    ):
        (tmp_path / "x.idx").write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
        with pytest.raises(DataError, match=message):
            find_corpus(tmp_path / "x.bin")


def test_files_of_different_tokenizers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_shards(tmp_path / "a")
    other = write_shards(
        tmp_path / "b", identity=TokenizerIdentity("bytes", 300, END, "c" * 64, "d" * 64)
    )
    with pytest.raises(
        DataError,
        match=r"a and .*b are of different tokenizers: words \(3000 ids.* and bytes \(300 ids",
    ):
        check_files({"name": "tokens", "train_path": f"{tmp_path}/?"})
    with pytest.raises(DataError, match="are of different tokenizers"):
        check_files({"name": "tokens", "train_path": str(first), "val_path": str(other)})
    write_megatron(tmp_path / "x.bin", values(), LENGTHS)
    with pytest.raises(
        DataError, match="do not end documents alike: one has token 0, one does not say"
    ):
        check_files(
            {"name": "tokens", "train_path": str(first), "val_path": str(tmp_path / "x.bin")}
        )
    check_files(
        {
            "name": "tokens",
            "train_path": str(first),
            "val_path": str(tmp_path / "x.bin"),
            "document_separator": END,
        }
    )
    with pytest.raises(DataError, match="document_separator=5 contradicts"):
        check_files({"name": "tokens", "train_path": str(first), "document_separator": 5})

    class Loaded:
        identity = WORDS

    monkeypatch.setattr(
        "lightning_3d.app.training.data.tokenization.encoding.load_tokenizer", lambda name: Loaded
    )
    check_files({"name": "tokens", "train_path": str(first), "tokenizer": "words"})
    with pytest.raises(DataError, match="is of another tokenizer than data.tokenizer: bytes"):
        check_files({"name": "tokens", "train_path": str(other), "tokenizer": "words"})
    with pytest.raises(
        DataError, match=r"has no manifest\.json, so its tokenizer cannot be compared"
    ):
        corpora.require_tokenizer([find_corpus(tmp_path / "x.bin")], "words")


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=f"Token {sum(LENGTHS) - 1} of .*out is outside .* at least {sum(LENGTHS)}"
    ):
        rows(write_shards(tmp_path / "out"), vocab_size=100)
    negative = values().astype(np.int32)
    negative[20] = -1
    write_megatron(tmp_path / "x.bin", negative, LENGTHS)
    with pytest.raises(DataError, match="Token -1 at position 20"):
        rows(tmp_path / "x.bin", vocab_size=3000)
