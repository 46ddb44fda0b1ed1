"""`lightning-3d tokenize`: what it writes from every kind of source, again after a kill, and with
any number of processes."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_3d.app.cli.main import main
from lightning_3d.app.training.data.shard_manifest import read_manifest
from lightning_3d.app.training.data.tokenization import job, shard_writer, sources

TEXTS = [
    f"def f{number}(x):\n    return {'x + ' * (number % 7)}{number}  # é\n" * (1 + number % 5)
    for number in range(300)
] + ["", "end"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small byte-level BPE."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS, vocab_size=400, special_tokens=["<end>"], show_progress=False)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>").save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture(scope="module")
def expected(tokenizer: str) -> list[list[int]]:
    """Ids of each document with its separator, by Transformers alone."""
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(tokenizer)
    return [
        [*plain(text, add_special_tokens=False)["input_ids"], plain.eos_token_id]
        for text in TEXTS
        if text
    ]


def lines() -> bytes:
    return b"".join(
        json.dumps({"id": number, "text": text}).encode() + b"\n"
        for number, text in enumerate(TEXTS)
    )


def write_source(kind: str, folder: Path) -> tuple[list[str], list[str]]:
    """Write `TEXTS` as a source of a kind. Returns (words of the source, further options)."""
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(lines() + b"\n")
    elif kind == "gz":
        (folder / "a.jsonl.gz").write_bytes(
            gzip.compress(lines()[:9000]) + gzip.compress(lines()[9000:])
        )
    elif kind == "zst":
        pyarrow = pytest.importorskip("pyarrow")
        compressed = [
            pyarrow.Codec("zstd").compress(part, asbytes=True)
            for part in (lines()[:9000], lines()[9000:])
        ]
        (folder / "a.jsonl.zst").write_bytes(b"".join(compressed))
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(
            pyarrow.table({"n": range(len(TEXTS)), "content": TEXTS}),
            folder / "a.parquet",
            row_group_size=70,
        )
        return [str(folder)], ["--text-column", "content"]
    elif kind == "text":
        for number, text in enumerate(TEXTS):
            (folder / f"{number:03d}.py").write_text(text)
        return [f"{folder}/*.py"], []
    elif kind == "hf":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "saved")
        return [f"hf://{folder}/saved"], []
    return [str(folder)], []


def tokenize(words: list[str], tokenizer: str, out: Path, *options: str) -> int:
    return main(
        [
            "tokenize",
            *words,
            "--tokenizer",
            tokenizer,
            "--out",
            str(out),
            "--processes",
            "1",
            *options,
        ]
    )


def documents(folder: Path) -> Iterator[list[int]]:
    """Read the shards by the description of the format alone."""
    for index in sorted(folder.glob("*.idx")):
        data = index.read_bytes()
        assert data[:9] == b"MMIDIDX\x00\x00"
        version, code, sequences, indices = struct.unpack_from("<QBQQ", data, 9)
        assert (version, code, indices) == (1, 8, sequences + 1)
        sizes, place = np.frombuffer(data, "<i4", sequences, 34), 34 + 4 * sequences
        offsets, place = np.frombuffer(data, "<i8", sequences, place), place + 8 * sequences
        assert (
            np.frombuffer(data, "<i8", indices, place).tolist() == list(range(sequences + 1))
            and len(data) == place + 8 * indices
        )
        tokens = index.with_suffix(".bin").read_bytes()
        for size, offset in zip(sizes, offsets, strict=True):
            yield np.frombuffer(tokens, "<u2", size, offset).tolist()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "parquet", "text", "hf"])
def test_every_source_gives_the_ids_of_transformers(
    kind: str, tmp_path: Path, tokenizer: str, expected: list[list[int]]
) -> None:
    (tmp_path / "in").mkdir()
    words, options = write_source(kind, tmp_path / "in")
    assert tokenize(words, tokenizer, tmp_path / "out", "--shard-tokens", "3000", *options) == 0
    assert list(documents(tmp_path / "out")) == expected
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["complete"] and manifest["dtype"] == "uint16" and len(manifest["shards"]) > 3
    assert (manifest["documents"], manifest["tokens"]) == (len(expected), sum(map(len, expected)))
    for shard in manifest["shards"]:
        data = (tmp_path / "out" / f"{shard['name']}.bin").read_bytes()
        index = (tmp_path / "out" / f"{shard['name']}.idx").read_bytes()
        assert (shard["bin_sha256"], shard["idx_sha256"]) == (
            sha256(data).hexdigest(),
            sha256(index).hexdigest(),
        )
        assert (
            shard["tokens"] == len(data) // 2 <= 3000
            and shard["largest"] == np.frombuffer(data, "<u2").max()
        )
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()).count(".partial") == 0


def test_several_processes_write_the_same_bytes(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_BATCH_BYTES", 2000)
    (tmp_path / "a.jsonl").write_bytes(lines())
    (tmp_path / "b.txt").write_text("one more document")
    words = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    assert tokenize(words, tokenizer, tmp_path / "one", "--shard-tokens", "5000") == 0
    assert (
        tokenize(words, tokenizer, tmp_path / "three", "--shard-tokens", "5000", "--processes", "3")
        == 0
    )
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "parquet", "text", "hf"])
def test_it_continues_after_the_last_whole_shard(
    kind: str,
    tmp_path: Path,
    tokenizer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sources, "_BATCH_BYTES", 3000)
    monkeypatch.setattr(sources, "_BATCH_ROWS", 16)
    (tmp_path / "in").mkdir()
    words, options = write_source(kind, tmp_path / "in")
    options += ["--shard-tokens", "2000"]
    assert tokenize(words, tokenizer, tmp_path / "whole", *options) == 0
    real, count = shard_writer.commit, 0

    def fail(draft: Path, path: Path) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise OSError("the disk went away")
        real(draft, path)

    monkeypatch.setattr(shard_writer, "commit", fail)
    for _ in range(50):
        if tokenize(words, tokenizer, tmp_path / "out", *options) == 0:
            break
        assert not read_manifest(tmp_path / "out").complete
    assert count > 5 and contents(tmp_path / "out") == contents(tmp_path / "whole")
    monkeypatch.setattr(job, "_write_all", None)
    assert tokenize(words, tokenizer, tmp_path / "out", *options) == 0
    assert "it was complete already" in capsys.readouterr().out


@pytest.mark.full
def test_a_killed_command_leaves_no_process_and_continues(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines() * 400)
    words = [
        "tokenize",
        str(tmp_path / "a.jsonl"),
        "--tokenizer",
        tokenizer,
        "--shard-tokens",
        "20000",
        "--processes",
        "2",
        "--out",
    ]
    started = subprocess.Popen(
        [sys.executable, "-m", "lightning_3d", *words, str(tmp_path / "out")],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 200
    while not (tmp_path / "out/manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    manifest = read_manifest(tmp_path / "out")
    assert not manifest.complete and manifest.shards
    while time.monotonic() < deadline and members(started.pid):
        time.sleep(0.05)
    assert members(started.pid) == []
    assert (
        main([*words, str(tmp_path / "out")]) == 0 and main([*words, str(tmp_path / "whole")]) == 0
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def members(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        found += [int(stat.parent.name)] if int(sid) == session and state != "Z" else []
    return found


def test_a_document_longer_than_a_shard_is_a_shard_of_its_own(
    tmp_path: Path, tokenizer: str
) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("ab", "ab " * 400, "cd", "ef"))
    )
    assert (
        tokenize([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "out", "--shard-tokens", "50")
        == 0
    )
    assert [shard.documents for shard in read_manifest(tmp_path / "out").shards] == [1, 1, 2]


def test_a_tokenizer_that_needs_transformers_gives_the_same_shards(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_3d.app.training.data.tokenization import encoding

    (tmp_path / "a.jsonl").write_bytes(lines())
    assert encoding.load_tokenizer(tokenizer)._rules is not None
    assert tokenize([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "direct") == 0
    real = encoding.Encoder._ids
    monkeypatch.setattr(
        encoding.Encoder,
        "_ids",
        lambda self, texts: [[]] if self._tokenizer and self._rules else real(self, texts),
    )
    assert encoding.load_tokenizer(tokenizer)._rules is None
    assert tokenize([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "slow") == 0
    assert contents(tmp_path / "direct") == contents(tmp_path / "slow")


BAD: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no_source": ({}, ["{}/none.jsonl"], "There is no file or folder"),
    "empty_folder": ({"sub/a.md": b"text"}, ["{}/sub"], "has no file of the types"),
    "not_json": (
        {"a.jsonl": b'{"text": "x"}\n{"text": \n'},
        ["{}/a.jsonl"],
        r"Line 2 of .*a\.jsonl is not JSON",
    ),
    "no_key": (
        {"a.jsonl": b'\n{"content": "x"}\n'},
        ["{}/a.jsonl"],
        "Line 2 of .* has the keys content",
    ),
    "not_an_object": ({"a.jsonl": b"[1]\n"}, ["{}/a.jsonl"], "Line 1 of .* is a list"),
    "not_utf8": (
        {"a.txt": b"ok", "b.txt": b"ab\xff"},
        ["{}"],
        r"b\.txt is not text in UTF-8: byte 2",
    ),
    "cut_gz": (
        {"a.jsonl.gz": gzip.compress(lines())[:-100]},
        ["{}/a.jsonl.gz"],
        r"a\.jsonl\.gz cannot be read",
    ),
    "not_zst": (
        {"a.jsonl.zst": b"no frame at all"},
        ["{}/a.jsonl.zst"],
        r"a\.jsonl\.zst cannot be read",
    ),
    "not_parquet": ({"a.parquet": b"PAR"}, ["{}/a.parquet"], r"a\.parquet cannot be read"),
    "empty": ({"a.jsonl": b"\n"}, ["{}/a.jsonl"], "The 1 source has no text"),
    "no_words": ({}, [], "SOURCE... must be given"),
    "shard_tokens": (
        {"a.jsonl": b""},
        ["{}/a.jsonl", "--shard-tokens", "3000000000"],
        "at most 2147483647",
    ),
    "out_url": ({"a.jsonl": b""}, ["{}/a.jsonl", "--out", "s3://bucket/x"], "on the local disk"),
    "tokenizer": (
        {"a.jsonl": lines()},
        ["{}/a.jsonl", "--tokenizer", "{}/nothing"],
        "tokenizer .*nothing does not exist",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_leaves_nothing(
    case: str, tmp_path: Path, tokenizer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    files, words, message = BAD[case]
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    given = ["--tokenizer", tokenizer, "--out", str(tmp_path / "out"), "--processes", "1"]
    assert main(["tokenize", *given, *[word.format(tmp_path) for word in words]]) == 2
    error = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("lightning_3d: ")
    ]
    assert len(error) == 1
    assert re.search(message, error[0]), error
    assert not (tmp_path / "out").exists()


def test_other_arguments_for_the_same_folder_are_refused(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines())
    word = [str(tmp_path / "a.jsonl")]
    assert tokenize(word, tokenizer, tmp_path / "out") == 0
    before = contents(tmp_path / "out")
    assert tokenize(word, tokenizer, tmp_path / "out", "--shard-tokens", "100") == 2
    assert "of another size of shards, 268435456 tokens" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_bytes(lines()[:500])
    assert tokenize([*word, str(tmp_path / "b.jsonl")], tokenizer, tmp_path / "out") == 2
    assert "of other sources" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes").touch()
    assert tokenize(word, tokenizer, tmp_path / "other") == 2
    assert "holds other files, for example notes" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before
    os.truncate(tmp_path / "out/shard-00000.bin", 100)
    assert tokenize(word, tokenizer, tmp_path / "out") == 2
    assert "do not match" in capsys.readouterr().err
