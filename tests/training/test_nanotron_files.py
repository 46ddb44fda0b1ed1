"""Token files of nanotron as datatrove writes them (`TokenizedFile` of datatrove 0.10.1): the
fixtures are made byte by byte."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from data_modules import trainer_of

from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.corpus import find_corpus
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.errors import ConfigError, DataError

LENGTH = 16
DOCUMENTS = {
    "00000_00000_shuffled.ds": [3, 40, 1, 17, 60, 2],
    "00000_00001_shuffled.ds": [30, 5, 44, 8, 90, 12],
}


def write_file(
    path: Path,
    lengths: list[int],
    first: int = 1,
    *,
    width: int = 2,
    tokenizer: str | None = "words",
) -> None:
    """Ids that count up from `first`. No token ends a document: only the index says where they
    end."""
    path.parent.mkdir(exist_ok=True)
    count = sum(lengths)
    path.write_bytes(
        struct.pack(f"<{count}{'H' if width == 2 else 'I'}", *range(first, first + count))
    )
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    name = f"Unknown Tokenizer|{width}" if tokenizer is None else tokenizer
    Path(f"{path}.metadata").write_text(f"{name}|{width}\n{count}\n{count} T")


def write_folder(folder: Path, *, last: str = "words", **options: Any) -> Path:
    """Two files, whose ids count up from 1 through both; `last` is the tokenizer of the second
    one."""
    first, second = DOCUMENTS.items()
    write_file(folder / first[0], first[1], **options)
    write_file(folder / second[0], second[1], 1 + sum(first[1]), **{"tokenizer": last, **options})
    # the total, which DocumentTokenizerMerger adds
    (folder / "m.ds.metadata").write_text("words|2\n312\n312 T")
    return folder


def expected() -> tuple[list[list[int]], list[list[int]]]:
    """Rows of ids, and of places in their documents; a document begins anew where a row cuts it."""
    ids, places = [], []
    for length in sum(DOCUMENTS.values(), []):
        for place in range(length):
            starts = len(ids) % LENGTH == 0 or place == 0
            places.append(0 if starts else places[-1] + 1)
            ids.append(len(ids) + 1)
    whole = len(ids) // LENGTH * LENGTH
    return tuple(np.reshape(values[:whole], (-1, LENGTH)).tolist() for values in (ids, places))  # type: ignore[return-value]


def rows(path: Any, **more: Any) -> tuple[list[list[int]], list[list[int]]]:
    given = {
        "name": "tokens",
        "train_path": str(path),
        "sequence_length": LENGTH,
        "global_batch_size": 1,
        "val_fraction": 0.0,
    }
    config = {**given, "document_mask": True, **more}
    check_files(config)
    data = make_data_module(config, seed=0, vocab_size=3000)
    data.trainer = trainer_of(1, 0)
    data.prepare_data()
    data.setup()
    samples = [data.train_set[index] for index in range(len(data.train_set))]
    for sample in samples:
        begins = sample["position_ids"] == 0
        assert (sample["labels"] == -100)[1:].equal(begins[1:]), (
            "nothing predicts the first token of a document"
        )
    return tuple(
        [sample[key].tolist() for sample in samples] for key in ("input_ids", "position_ids")
    )  # type: ignore[return-value]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", ["", "*.ds", "*"])
def test_a_folder_and_a_pattern_are_read_with_their_documents(
    name: str, width: int, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "out", width=width)
    assert rows(folder / name) == expected()
    assert {part.dtype for part in find_corpus(folder).parts} == {f"uint{8 * width}"}


def test_one_file_and_a_part_that_is_held_out(tmp_path: Path) -> None:
    name, lengths = next(iter(DOCUMENTS.items()))
    file = write_folder(tmp_path / "out") / name
    whole = sum(lengths) // LENGTH
    assert rows(file) == tuple(part[:whole] for part in expected())
    data = make_data_module(
        {
            "name": "tokens",
            "train_path": str(tmp_path / "out"),
            "sequence_length": LENGTH,
            "document_mask": True,
            "val_fraction": 0.5,
        },
        global_batch_size=2,
        seed=0,
        vocab_size=3000,
    )
    data.setup()
    held = [data.val_set[index]["position_ids"].tolist() for index in range(len(data.val_set))]
    assert held == expected()[1][-len(held) :], (
        "the index is that of the file, not of its held-out part"
    )


@pytest.mark.parametrize("left_out", ["metadata", "index", "both"])
def test_datatrove_may_leave_files_out(left_out: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", tokenizer=None)
    for kind in ("index", "metadata") if left_out == "both" else (left_out,):
        for name in DOCUMENTS:
            (folder / f"{name}.{kind}").unlink()
    if left_out == "metadata":
        assert rows(folder) == expected(), (
            "the index says how many ids there are, so the width of one is known"
        )
    elif left_out == "index":
        with pytest.raises(
            ConfigError,
            match="document_mask=true needs .*out does not say it. Set data.document_separator",
        ):
            rows(folder)
        assert rows(folder, document_separator=20)[1][1] == [
            0,
            1,
            2,
            3,
            *range(12),
        ], "token 20 ends a document"
    else:
        with pytest.raises(
            DataError,
            match=(
                r"00000_shuffled\.ds has neither 00000_00000_shuffled\.ds\.metadata nor .*write a"
                r" .*\.json"
            ),
        ):
            rows(folder)


def test_an_index_may_have_empty_documents_and_a_file_none(tmp_path: Path) -> None:
    write_file(tmp_path / "out" / "a.ds", [])
    write_file(tmp_path / "out" / "b.ds", [0, 5, 0, 0, 11, 0])
    assert rows(tmp_path / "out") == ([list(range(1, 17))], [[*range(5), *range(11)]])


def test_sources_of_a_blend_and_files_at_a_url(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for file in folder.iterdir():
        memory.pipe(f"/bucket/out/{file.name}", file.read_bytes())
    cache = {"cache_dir": str(tmp_path / "cache"), "cache_bytes": 2**20}
    first = next(iter(DOCUMENTS))
    for name in ("", "/*.ds", f"/{first}"):
        assert rows(f"memory://bucket/out{name}", **cache) == rows(f"{folder}{name}")
    memory.pipe(f"/bucket/out/{first}.index", memory.cat(f"/bucket/out/{first}.index")[:-8])
    with pytest.raises(
        DataError, match=r"memory://bucket/out/00000_00000_shuffled\.ds\.index ends at token 121"
    ):
        rows("memory://bucket/out", **cache)


def test_a_blend_of_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out")
    sources = {
        name: {"train_path": str(folder / name), "weight": 1, "val_fraction": 0}
        for name in DOCUMENTS
    }
    options = {"sequence_length": LENGTH, "document_mask": True, "global_batch_size": 2}
    check_files({"name": "blend", "sources": sources, **options}, 7)
    data = make_data_module(
        {"name": "blend", "sources": sources, **options}, seed=0, vocab_size=3000
    )
    data.trainer = trainer_of(1, 0)
    data.setup()
    found = {
        tuple(sample["input_ids"].tolist()): sample["position_ids"].tolist()
        for sample in map(data.train_set.__getitem__, range(14))
    }
    own = {
        tuple(ids): places
        for name in DOCUMENTS
        for ids, places in zip(*rows(folder / name), strict=True)
    }
    assert len(found) == 14 and found.items() <= own.items(), "documents are those of each file"


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def put(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


FIRST = next(iter(DOCUMENTS))
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        cut(FIRST, 200),
        (
            r"shuffled\.ds has 200 bytes, but 00000_00000_shuffled\.ds\.metadata says 123 tokens of"
            r" 2 bytes \(246"
        ),
    ),
    "odd": (cut(FIRST, 245), "has 245 bytes, but .*246 bytes.* truncated"),
    "count": (
        put(f"{FIRST}.metadata", "words|2\n124\n124 T"),
        r"has 246 bytes, but .* says 124 tokens of 2 bytes \(248 bytes\)",
    ),
    "width": (
        put(f"{FIRST}.metadata", "words|4\n123\n123 T"),
        r"has 246 bytes, but .* says 123 tokens of 4 bytes \(492 bytes\)",
    ),
    "metadata": (
        put(f"{FIRST}.metadata", "words\n123\n"),
        r"\.metadata is not metadata of datatrove: its first line must be TOKENIZER\|2",
    ),
    "empty": (put(f"{FIRST}.metadata", ""), r"\.metadata is not metadata of datatrove"),
    "number": (
        put(f"{FIRST}.metadata", "words|2\nmany\n"),
        r"\.metadata is not metadata of datatrove: .* second line the number",
    ),
    "beyond": (
        lambda folder: (folder / f"{FIRST}.index").write_bytes(struct.pack("<3Q", 3, 43, 124)),
        r"shuffled\.ds\.index ends at token 124, but 00000_00000_shuffled\.ds has 123 tokens",
    ),
    "short": (
        cut(f"{FIRST}.index", 16),
        r"\.index ends at token 43, but 00000_00000_shuffled\.ds has 123 tokens",
    ),
    "bytes": (cut(f"{FIRST}.index", 17), r"\.index has 17 bytes, which is not a multiple of 8"),
    "tokenizers": (
        put(f"{FIRST}.metadata", "others|2\n123\n"),
        r"00000_shuffled\.ds and .*00001_\S+ are of different tokenizers: others and words",
    ),
    "without_metadata": (
        lambda folder: ((folder / f"{FIRST}.metadata").unlink(), cut(FIRST, 244)(folder)),
        (
            r"has 244 bytes, and .*\.index ends at token 123, so its tokens would have neither 2"
            r" nor 4 bytes"
        ),
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_files_that_do_not_match_are_refused_before_ranks_are_started(
    case: str, tmp_path: Path
) -> None:
    damage, message = DAMAGE[case]
    folder = write_folder(tmp_path / "out")
    config = {"name": "tokens", "train_path": str(folder), "sequence_length": LENGTH}
    check_files(config)
    damage(folder)
    with pytest.raises(DataError, match=message):
        check_files(config)


def test_an_index_that_is_damaged_inside_is_refused_where_it_is_read(tmp_path: Path) -> None:
    write_file(tmp_path / "out" / "a.ds", [8, 8, 8, 8])
    (tmp_path / "out" / "a.ds.index").write_bytes(struct.pack("<4Q", 8, 4, 24, 32))
    with pytest.raises(
        DataError,
        match=r"a\.ds\.index is damaged: the ends of its documents are not in ascending order",
    ):
        rows(tmp_path / "out")


def test_the_tokenizer_is_compared_by_its_name(tmp_path: Path) -> None:
    tokenizer = tmp_path / "words"
    tokenizer.mkdir()
    folder = write_folder(
        tmp_path / "out",
        tokenizer=f"{tokenizer}/tokenizer.json",
        last=f"{tokenizer}/tokenizer.json",
    )
    config = {"name": "tokens", "train_path": str(folder), "sequence_length": LENGTH}
    check_files({**config, "tokenizer": str(tokenizer)})
    check_files({**config, "tokenizer": f"{tmp_path}/out/../words"})
    with pytest.raises(
        DataError,
        match=(
            r"of another tokenizer than data\.tokenizer=gpt2: its metadata names"
            r" .*words/tokenizer\.json"
        ),
    ):
        check_files({**config, "tokenizer": "gpt2"})


def test_a_file_that_does_not_exist_is_named_with_those_next_to_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out")
    with pytest.raises(
        DataError,
        match=(
            r"There is no token file .*/x\.ds\. .* has 00000_00000_shuffled\.ds,"
            r" 00000_00001_shuffled\.ds\."
        ),
    ):
        check_files(
            {"name": "tokens", "train_path": str(folder / "x.ds"), "sequence_length": LENGTH}
        )


def test_a_json_of_your_own_comes_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out")
    entries = {"dtype": "uint16", "tokens": 123, "vocab_size": 3000, "document_separator": 20}
    (folder / FIRST).with_suffix(".json").write_text(json.dumps(entries))
    assert rows(folder / FIRST)[1][1] == [0, 1, 2, 3, *range(12)]
