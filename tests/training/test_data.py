"""The data modules: what a sample is, the order of samples, and what is refused."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from data_modules import trainer_of

from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.training.data import DATA_MODULES, _parameters, make_data_module
from lightning_3d.app.training.data.base import ORDER, PackedDataModule
from lightning_3d.app.training.data.byte_tokens import SEPARATOR, VOCAB_SIZE
from lightning_3d.app.training.data.documents import IGNORE_INDEX
from lightning_3d.app.training.data.entropy import entropy
from lightning_3d.app.training.data.huggingface import HuggingFaceText
from lightning_3d.app.training.data.packing import PackedDataset, Tokens, join_documents, spread
from lightning_3d.app.training.data.python_stdlib import PythonStdlib, is_held_out, source_files
from lightning_3d.app.training.data.token_file import open_tokens, write_tokens
from lightning_3d.app.training.data.tokens import TokenFiles
from lightning_3d.errors import ConfigError, DataError


class Counting(PackedDataModule):
    """Tokens 0, 1, 2, ...: a sample's first token tells which sample it is."""

    def __init__(self, train_tokens: int = 800, **kwargs: Any) -> None:
        super().__init__(
            **{
                "sequence_length": 8,
                "global_batch_size": 8,
                "val_sequences": 3,
                "seed": 1,
                **kwargs,
            }
        )
        self.train_tokens = train_tokens

    def load_tokens(self) -> tuple[Tokens, Tokens]:
        return numbered(self.train_tokens), numbered(80)


def numbered(count: int) -> Tokens:
    return Tokens(np.arange(count, dtype=np.uint16), "numbers")


def as_rank(data: PackedDataModule, replicas: int, rank: int) -> Any:
    data.trainer = trainer_of(replicas, rank)
    data.setup("fit")
    return data


def first_tokens(data: PackedDataModule, epoch: int = 0) -> list[list[int]]:
    """The first token of each sample, by step."""
    loader: Any = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small folder that looks like a standard library."""
    root = tmp_path / "lib"
    for index in range(40):
        path = root / ("pkg" if index % 2 else ".") / f"module{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# module {index}\n" * (index + 1))
    for left_out in (
        "site-packages/a.py",
        "test/b.py",
        "pkg/tests/c.py",
        "idlelib/idle_test/d.py",
        "pkg/data.txt",
    ):
        path = root / left_out
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left out")
    (root / "empty.py").write_text("")
    return root


def stdlib_of(root: Path | None, **kwargs: Any) -> PythonStdlib:
    return PythonStdlib(
        **{
            "root": root,
            "sequence_length": 16,
            "global_batch_size": 4,
            "val_fraction": 0.2,
            **kwargs,
        }
    )


def documents_of(tokens: Tokens) -> list[bytes]:
    """The documents of byte-level tokens, by their separators."""
    ends = np.flatnonzero(tokens.values == SEPARATOR)
    starts = [0, *(ends[:-1] + 1)]
    return [
        tokens.values[a:b].astype(np.uint8).tobytes() for a, b in zip(starts, ends, strict=True)
    ]


# Samples


def test_a_sample_is_inputs_and_equal_labels() -> None:
    dataset = PackedDataset(numbered(20), 8)
    assert len(dataset) == 2
    sample = dataset[1]
    assert sample["input_ids"].tolist() == list(range(8, 16))
    assert sample["labels"].tolist() == list(range(8, 16))
    assert sample["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(("across", "masked"), [(True, []), (False, [3, 6])])
def test_the_first_token_of_a_document_counts_unless_told_otherwise(
    across: bool, masked: list[int]
) -> None:
    tokens = Tokens(np.array([5, 6, 9, 5, 6, 9, 7, 7], dtype=np.uint16), "text", separator=9)
    labels = PackedDataset(tokens, 8, predict_across_documents=across)[0]["labels"]
    assert [place for place in range(8) if labels[place] == IGNORE_INDEX] == masked


@pytest.mark.parametrize(("separator", "dtype"), [(9, np.uint16), (70_000, np.uint32)])
def test_documents_are_joined_with_separators(separator: int, dtype: type) -> None:
    joined = join_documents(
        [np.array([1, 2]), np.array([], dtype=np.int64), np.array([3])], separator
    )
    assert joined.tolist() == [1, 2, separator, 3, separator]
    assert joined.dtype == dtype


def test_validation_samples_are_spread_evenly() -> None:
    assert list(spread(10, 4)) == [0, 2, 5, 7]
    assert list(spread(3, 5)) == [0, 1, 2]
    assert list(spread(3, None)) == [0, 1, 2]


# The standard library


def test_every_source_file_without_tests_and_packages(sources: Path) -> None:
    found = set(source_files(sources))
    assert len(found) == 41
    assert found >= {"module0.py", "pkg/module1.py", "empty.py"}


def test_document_boundaries_are_kept(sources: Path) -> None:
    train, held_out = stdlib_of(sources).load_tokens()
    files = {path: (sources / path).read_bytes() for path in source_files(sources)}
    for tokens, of_held_out in ((train, False), (held_out, True)):
        expected = [
            text for path, text in files.items() if text and is_held_out(path, 0.2) == of_held_out
        ]
        assert sorted(documents_of(tokens)) == sorted(expected)
        assert len(expected) > 1


def test_the_split_depends_on_the_path_and_the_order_on_the_seed(sources: Path) -> None:
    train, held_out = stdlib_of(sources, seed=1).load_tokens()
    other, other_held_out = stdlib_of(sources, seed=2).load_tokens()
    again, _ = stdlib_of(sources, seed=1).load_tokens()
    assert sorted(documents_of(train)) == sorted(documents_of(other))
    assert sorted(documents_of(held_out)) == sorted(documents_of(other_held_out))
    assert documents_of(train) != documents_of(other)
    assert documents_of(train) == documents_of(again)


def test_the_real_standard_library() -> None:
    data = PythonStdlib(
        sequence_length=128, global_batch_size=16, val_sequences=64, vocab_size=VOCAB_SIZE
    )
    data.setup("fit")
    assert data.root == Path(sysconfig.get_paths()["stdlib"])
    assert data.train_set is not None and data.val_set is not None
    assert len(data.train_set.tokens) > 5_000_000
    assert data.train_set.tokens.values.dtype == np.uint16
    assert 0.01 < len(data.val_set.tokens) / len(data.train_set.tokens) < 0.2
    assert len(data.val_set) == 64
    measured = data.entropy()
    assert measured is not None
    assert 2.9 < measured.unigram < 3.6
    assert 2.2 < measured.bigram < 2.7


# Entropy


def test_entropy_of_known_texts() -> None:
    flat = entropy(np.tile(np.arange(16, dtype=np.uint16), 100))
    assert flat.unigram == pytest.approx(np.log(16))
    assert flat.bigram == pytest.approx(0.0, abs=1e-12)
    constant = entropy(np.zeros(10, dtype=np.uint16))
    assert (constant.unigram, constant.bigram) == (0.0, 0.0)


@pytest.mark.parametrize("largest", [5, 60_000])
def test_bigram_entropy_is_the_conditional_one(largest: int) -> None:
    tokens = (np.random.default_rng(0).integers(0, 6, 5000) * (largest // 5)).astype(np.uint16)
    counts: dict[tuple[int, int], int] = {}
    of_first: dict[int, int] = {}
    for a, b in zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True):
        counts[a, b] = counts.get((a, b), 0) + 1
        of_first[a] = of_first.get(a, 0) + 1
    expected = -sum(n * np.log(n / of_first[a]) for (a, _), n in counts.items()) / (len(tokens) - 1)
    assert entropy(tokens).bigram == pytest.approx(expected)


def test_entropy_does_not_depend_on_how_the_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 5000).astype(np.uint16)
    whole = entropy(tokens)
    monkeypatch.setattr("lightning_3d.app.training.data.entropy._CHUNK", 17)
    assert entropy(tokens) == whole


# Order


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_step_sees_the_same_global_batch_whatever_the_number_of_ranks(replicas: int) -> None:
    alone = first_tokens(as_rank(Counting(), 1, 0))
    together = [first_tokens(as_rank(Counting(), replicas, rank)) for rank in range(replicas)]
    assert len(alone) == 100 // 8
    for step, samples in enumerate(alone):
        dealt = [of_rank[step] for of_rank in together]
        assert {len(samples) for samples in dealt} == {8 // replicas}
        assert sorted(sum(dealt, [])) == sorted(samples)


def test_the_order_depends_on_the_seed_and_the_epoch() -> None:
    data = as_rank(Counting(), 1, 0)
    assert first_tokens(data) == first_tokens(as_rank(Counting(), 1, 0))
    assert first_tokens(data) != first_tokens(data, epoch=1)
    assert first_tokens(data) != first_tokens(as_rank(Counting(seed=2), 1, 0))
    assert len(set(sum(first_tokens(data), []))) == 96


def test_validation_does_not_shuffle() -> None:
    loader: Any = as_rank(Counting(global_batch_size=2), 1, 0).val_dataloader()
    assert [batch["input_ids"][:, 0].tolist() for batch in loader] == [[0, 24], [48]]


def test_a_global_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="8 cannot be split evenly over 3 data-parallel ranks. Use 6 or 9"
    ):
        as_rank(Counting(), 3, 0).train_dataloader()


# The position in the data


def resumed(replicas: int, rank: int, **state: Any) -> Any:
    data = as_rank(Counting(), replicas, rank)
    state = {
        "epoch": 0,
        "samples": 0,
        "global_batch_size": 8,
        "seed": 1,
        "sequence_length": 8,
        "order": ORDER,
        **state,
    }
    data.resume_from({"train_samples": 100, **state})
    return data


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_resumed_epoch_goes_on_where_it_was(replicas: int) -> None:
    for rank in range(replicas):
        whole = first_tokens(as_rank(Counting(), replicas, rank))
        assert first_tokens(resumed(replicas, rank, samples=24)) == whole[3:]


def test_the_epochs_after_the_resumed_one_are_whole() -> None:
    data = resumed(1, 0, samples=24)
    first_tokens(data)
    assert first_tokens(data, epoch=1) == first_tokens(as_rank(Counting(), 1, 0), epoch=1)


def test_a_position_in_an_unknown_kind_of_order_is_refused() -> None:
    with pytest.raises(DataError, match="order of samples is of kind 9"):
        resumed(1, 0, order=9)


def test_new_positions_say_which_order_they_are_in() -> None:
    assert resumed(1, 0, samples=24).position_state()["order"] == ORDER


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"sequence_length": 4}, {"train_samples": 99}, {"global_batch_size": 4}]
)
def test_a_position_in_another_order_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(
        DataError, match=f"{next(iter(change))} was {next(iter(change.values()))} and is now"
    ):
        resumed(1, 0, **change)


def test_f26_a_resumed_run_without_a_position_is_refused() -> None:
    data = as_rank(Counting(), 1, 0)
    data.trainer.global_step, data.trainer.ckpt_path = 5, "run/step5.ckpt"
    with pytest.raises(
        DataError,
        match=r"run/step5\.ckpt is at step 5 but does not contain the position in the data",
    ):
        first_tokens(data)


# Refusals


def test_f23_a_data_set_shorter_than_one_global_batch_is_refused() -> None:
    data = Counting(train_tokens=56)
    with pytest.raises(
        DataError,
        match=(
            "56 tokens .* 7 samples of 8 tokens, fewer than data.global_batch_size=8. Use"
            " data.global_batch_size=7 or less, or a shorter"
        ),
    ):
        data.setup("fit")


def test_f23_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.py file under"):
        stdlib_of(tmp_path).setup("fit")
    write_tokens(tmp_path / "empty.bin", np.empty(0, dtype=np.uint16), vocab_size=4)
    with pytest.raises(
        DataError,
        match="0 samples of 16 tokens, fewer than data.global_batch_size=4. Use more data",
    ):
        TokenFiles(
            train_path=tmp_path / "empty.bin", sequence_length=16, global_batch_size=4
        ).setup("fit")


def test_f24_a_token_outside_the_vocabulary_is_refused_with_its_position() -> None:
    with pytest.raises(
        DataError,
        match=(
            "Token 500 at position 500 of numbers .* vocabulary of 500 .ids 0 to 499.* at least 800"
        ),
    ):
        Counting(vocab_size=500).setup("fit")


def test_f24_the_position_is_that_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(100, dtype=np.uint32) % 7
    values[95] = 80_000
    write_tokens(tmp_path / "corpus.bin", values, vocab_size=90_000)
    monkeypatch.setattr("lightning_3d.app.training.data.packing._CHUNK", 10)
    data = TokenFiles(
        train_path=tmp_path / "corpus.bin",
        sequence_length=8,
        global_batch_size=2,
        val_fraction=0.2,
        vocab_size=7,
    )
    with pytest.raises(DataError, match=r"Token 80000 at position 95 of .*corpus\.bin"):
        data.setup("fit")


def test_f24_a_sample_of_a_large_file_is_checked_before_the_model_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_3d.app.training.data.base.FULL_SCAN", 0)
    data = Counting(vocab_size=500)
    data.setup("fit")
    assert data.train_set is not None
    assert data.train_set[0]["input_ids"].tolist() == list(range(8))
    with pytest.raises(DataError, match="Token 504 at position 504"):
        data.train_set[63]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            {"bytes": -1},
            "199 bytes, which is 99 tokens of uint16 and 1 byte, but corpus.json says 100 tokens",
        ),
        (
            {"bytes": -20},
            "90 tokens of uint16, but corpus.json says 100 tokens .200 bytes.. It is truncated",
        ),
        ({"tokens": 90}, "corpus.json says 90 tokens"),
        ({"dtype": "uint32"}, "Its size fits uint16: correct dtype"),
        ({"dtype": "int64"}, "dtype in .* must be uint16 or uint32; got 'int64'"),
        ({"tokens": "many"}, "tokens in .*; got 'many'"),
        ({"tokens": -1}, "tokens in .*; got -1"),
        ({"vocab_size": None}, "vocab_size in .*; got None"),
        (
            {"document_separator": 50},
            "document_separator in .* must be less than its vocab_size of 50; got 50",
        ),
        ({"tokens": ...}, "lacks tokens"),
        ({"token": 3}, "has the unknown entry token"),
        ({"text": "{"}, "cannot be read as JSON"),
        ({"text": "[1]"}, "must hold a JSON object .*; got a list"),
        ({"text": None}, r"has no corpus\.json next to it"),
    ],
    ids=str,
)
def test_f25_a_damaged_token_file_is_refused(
    tmp_path: Path, damage: dict[str, Any], message: str
) -> None:
    path = tmp_path / "corpus.bin"
    write_tokens(path, np.arange(100, dtype=np.uint16) % 50, vocab_size=50)
    index = tmp_path / "corpus.json"
    if "bytes" in damage:
        path.write_bytes(path.read_bytes()[: damage["bytes"]])
    elif "text" in damage:
        index.unlink() if damage["text"] is None else index.write_text(damage["text"])
    else:
        entries = {**json.loads(index.read_text()), **damage}
        index.write_text(
            json.dumps({key: value for key, value in entries.items() if value is not ...})
        )
    with pytest.raises(DataError, match=message):
        open_tokens(path)


def test_f25_a_missing_token_file_is_refused_and_names_its_neighbors(tmp_path: Path) -> None:
    write_tokens(tmp_path / "corpus.bin", np.zeros(4, dtype=np.uint16), vocab_size=1)
    with pytest.raises(DataError, match=r"no token file .*corpsu\.bin\. .* has corpus\.bin"):
        open_tokens(tmp_path / "corpsu.bin")
    with pytest.raises(DataError, match="does not exist either"):
        open_tokens(tmp_path / "nowhere" / "corpus.bin")


def test_a_held_out_split_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", np.zeros(100, dtype=np.uint16), vocab_size=1)
    write_tokens(tmp_path / "val.bin", np.zeros(5, dtype=np.uint16), vocab_size=1)
    data = TokenFiles(
        train_path=tmp_path / "train.bin",
        val_path=tmp_path / "val.bin",
        sequence_length=8,
        global_batch_size=2,
    )
    with pytest.raises(
        DataError,
        match=(
            "has 5 tokens, fewer than one sample of 8 tokens. Use a data.sequence_length of at"
            " most 5"
        ),
    ):
        data.setup("fit")


# Token files


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_token_files_keep_what_was_written(tmp_path: Path, dtype: type) -> None:
    values = np.arange(1000, dtype=dtype)
    write_tokens(tmp_path / "corpus.bin", values, vocab_size=1000, document_separator=999)
    read, index = open_tokens(tmp_path / "corpus.bin")
    assert isinstance(read, np.memmap)
    assert np.array_equal(read, values)
    assert (index.tokens, index.vocab_size, index.document_separator) == (1000, 1000, 999)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.json"]


def test_the_end_of_the_file_is_held_out(tmp_path: Path) -> None:
    write_tokens(tmp_path / "corpus.bin", np.arange(165, dtype=np.uint16), vocab_size=165)
    data = TokenFiles(
        train_path=tmp_path / "corpus.bin", val_fraction=0.1, sequence_length=8, global_batch_size=2
    )
    data.setup("fit")
    assert data.train_set is not None and data.val_set is not None
    assert (len(data.train_set), len(data.val_set)) == (18, 2)
    assert data.val_set[0]["input_ids"].tolist() == list(range(144, 152))


def test_a_file_without_held_out_part_validates_nothing(tmp_path: Path) -> None:
    write_tokens(tmp_path / "corpus.bin", np.zeros(100, dtype=np.uint16), vocab_size=1)
    data = TokenFiles(
        train_path=tmp_path / "corpus.bin", val_fraction=0, sequence_length=8, global_batch_size=2
    )
    data.setup("fit")
    assert (data.val_set, data.val_dataloader(), data.entropy()) == (None, [], None)


# The datasets library


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: index
        for index, word in enumerate(["[end]", "[unknown]", *(f"w{i}" for i in range(20))])
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[unknown]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="[end]", unk_token="[unknown]"
    ).save_pretrained(folder)
    return str(folder)


TEXTS = [" ".join(f"w{(document + i) % 20}" for i in range(document + 1)) for document in range(12)]
EXPECTED = [
    id_
    for document in range(12)
    for id_ in [*((document + i) % 20 + 2 for i in range(document + 1)), 0]
]


def hugging_face(path: Path, tokenizer: str, tmp_path: Path, **kwargs: Any) -> HuggingFaceText:
    arguments = {
        "sequence_length": 8,
        "global_batch_size": 2,
        "val_fraction": 0,
        "cache_dir": tmp_path / "cache",
    }
    return HuggingFaceText(path=str(path), tokenizer=tokenizer, **{**arguments, **kwargs})


def write_data_set(kind: str, folder: Path) -> Path:
    import datasets

    table = datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(12))})
    place = folder / "data"
    place.mkdir()
    if kind == "text":
        (place / "a.txt").write_text("\n".join(TEXTS[:5]))
        (place / "b.txt").write_text("\n".join(TEXTS[5:]))
    elif kind == "jsonl":
        (place / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
        return place / "a.jsonl"
    elif kind == "parquet":
        table.to_parquet(place / "a.parquet")
    elif kind == "disk":
        table.save_to_disk(place)
    else:
        datasets.DatasetDict({"train": table, "held": table.select(range(6))}).save_to_disk(place)
    return place


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "disk", "dict"])
def test_local_data_sets_become_tokens(
    kind: str, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    data = hugging_face(write_data_set(kind, tmp_path), tokenizer, tmp_path)
    data.prepare_data()
    train, held_out = data.load_tokens()
    assert train.values.tolist() == EXPECTED
    assert (train.separator, held_out) == (0, None)


def test_a_held_out_split_of_a_data_set(tmp_path: Path, tokenizer: str) -> None:
    data = hugging_face(
        write_data_set("dict", tmp_path), tokenizer, tmp_path, val_split="held", vocab_size=22
    )
    data.prepare_data()
    data.setup("fit")
    assert data.val_set is not None
    assert data.val_set.tokens.values.tolist() == EXPECTED[:27]


def test_a_data_set_is_tokenized_once(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_data_set("disk", tmp_path)
    first = hugging_face(place, tokenizer, tmp_path)
    first.prepare_data()
    monkeypatch.setattr(HuggingFaceText, "_tokenize", lambda *_: pytest.fail("tokenized again"))
    hugging_face(place, tokenizer, tmp_path).prepare_data()
    other = hugging_face(place, tokenizer, tmp_path, max_documents=3)
    assert other.token_path("train") != first.token_path("train")


def test_only_the_first_documents(tmp_path: Path, tokenizer: str) -> None:
    data = hugging_face(write_data_set("disk", tmp_path), tokenizer, tmp_path, max_documents=3)
    data.prepare_data()
    assert data.load_tokens()[0].values.tolist() == EXPECTED[:9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_column": "txet"},
            "no column 'txet'; it has text and number. Did you mean \"text\"",
        ),
        ({"split": "validation"}, "no split 'validation'. Use one of its splits: train, held"),
        ({"path": "./nowhere"}, r"The data set \./nowhere does not exist"),
        ({"tokenizer": "./nowhere"}, r"The tokenizer \./nowhere does not exist"),
        ({"vocab_size": 10}, "Token 10 at position 18 of split 'train'"),
    ],
    ids=str,
)
def test_what_a_data_set_lacks_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, tokenizer: str
) -> None:
    place = write_data_set("dict", tmp_path)
    with pytest.raises(DataError, match=message):
        data = (
            hugging_face(place, **{"tokenizer": tokenizer, "tmp_path": tmp_path, **changes})
            if ("path" not in changes)
            else hugging_face(changes["path"], tokenizer, tmp_path)
        )
        data.prepare_data()
        data.setup("fit")


# By name


def test_every_data_file_of_the_configuration_fits_its_module() -> None:
    files = sorted((conf_folder() / "data").glob("*.yaml"))
    assert {path.stem for path in files} == set(DATA_MODULES)
    for path in files:
        config = yaml.safe_load(path.read_text())
        module_name, class_name = DATA_MODULES[config.pop("name")].split(":")
        known = _parameters(getattr(__import__(module_name, fromlist=[class_name]), class_name))
        given = {"global_batch_size", "batch_ramp", "seed", "vocab_size"}
        assert set(config) == set(known) - given
        for key, value in config.items():
            default = known[key].default
            assert (
                value == default
                or default is known[key].empty
                or key in ("sequence_length", "val_sequences", "num_workers")
            )


def test_a_data_module_by_name(sources: Path) -> None:
    config = {"name": "python_stdlib", "root": str(sources), "sequence_length": 16, "seed": None}
    data = make_data_module(config, global_batch_size=4, vocab_size=257, seed=3)
    assert isinstance(data, PythonStdlib)
    assert (data.global_batch_size, data.vocab_size, data.seed) == (4, 257, 3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"name": "token"},
            (
                "data.name must be python_stdlib, .*, huggingface or instructions; got 'token'. Did"
                ' you mean "tokens"'
            ),
        ),
        (
            {"name": "tokens", "train_path": "???", "sequence_length": 8},
            "data=tokens needs data.train_path",
        ),
        (
            {"name": "tokens", "sequence_lenght": 8},
            "no option 'sequence_lenght'.* Did you mean \"sequence_length\"",
        ),
        (
            {"name": "python_stdlib", "sequence_length": 8, "global_batch_size": 8},
            "data.global_batch_size=8 contradicts",
        ),
        (
            {"name": "python_stdlib", "sequence_length": 1},
            "data.sequence_length must be at least 2.*got 1",
        ),
        (
            {"name": "python_stdlib", "sequence_length": 8, "val_fraction": 1.5},
            "data.val_fraction must be .*; got 1.5",
        ),
        (
            {"name": "python_stdlib", "sequence_length": 8, "val_sequences": 0},
            "data.val_sequences must be .*; got 0",
        ),
        ({"name": {}}, "data.name must be .*; got {}"),
        (
            {"name": "python_stdlib", "sequence_length": 8, "root": ["/x"]},
            r"data.root must be a string; got \['/x'\]",
        ),
        (
            {"name": "python_stdlib", "sequence_length": 8, "root": True},
            "data.root must be a string; got True",
        ),
        (
            {"name": "python_stdlib", "sequence_length": 8, "val_sequences": 1.5},
            "data.val_sequences must be a whole number; got 1.5",
        ),
    ],
    ids=str,
)
def test_data_options_that_do_not_fit_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_data_module(config, global_batch_size=4)
