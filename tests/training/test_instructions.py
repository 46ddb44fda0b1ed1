"""Conversations: only answers are targets, whole conversations in a sample, wherever they lie."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversations import TEMPLATE, WORDS, a_tokenizer, write

from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.instructions import Instructions, encode, marked
from lightning_3d.app.training.data.padded import TARGET, pack
from lightning_3d.errors import DataError

# As some that leave out the reasoning of earlier turns.
REWRITING = (
    "{% for m in messages %}{{ m.role + ' : ' + (m.content if loop.last else 'w0') + ' [end] ' }}{%"
    " endfor %}"
)


def read(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_tokenizer(tmp_path_factory.mktemp("plain"), None)


def said(ids: Any) -> str:
    return " ".join(WORDS[index] for index in ids)


def answers(ids: Any, targets: Any) -> str:
    return said(index for index, target in zip(ids, targets, strict=True) if target)


def turns(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(contents)
    ]


def test_answers_are_targets(tokenizer: Path, plain: Path) -> None:
    ids, targets = encode({"messages": turns("w1 w2", "w3", "w4", "w5 w6")}, read(tokenizer), "")
    assert (
        said(ids)
        == "[begin] user : w1 w2 [end] assistant : w3 [end] user : w4 [end] assistant : w5 w6 [end]"
    )
    assert answers(ids, targets) == "w3 [end] w5 w6 [end]"
    pair = {"prompt": "w1 w2", "response": "w3"}
    assert (
        said(encode(pair, read(tokenizer), "")[0])
        == "[begin] user : w1 w2 [end] assistant : w3 [end]"
    )
    ids, targets = encode(pair, read(plain), "")
    assert (said(ids), answers(ids, targets)) == ("w1 w2 w3 [end]", "w3 [end]")


def test_what_cannot_be_encoded(tokenizer: Path, plain: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="Row 3 .*neither messages nor prompt and response; it has text"
    ):
        encode({"text": "w1"}, read(tokenizer), "Row 3 of x")
    with pytest.raises(DataError, match="no chat template"):
        encode({"messages": turns("w1", "w2")}, read(plain), "Row 3 of x")
    with pytest.raises(DataError, match="changes earlier turns"):
        encode(
            {"messages": turns("w1", "w2", "w3", "w4")},
            read(a_tokenizer(tmp_path, REWRITING)),
            "Row 3 of x",
        )


def test_packing_keeps_conversations_whole() -> None:
    generator = np.random.default_rng(0)
    examples = [
        ([place + 1] * size, [False] + [True] * (size - 1))
        for place, size in enumerate(generator.integers(1, 17, 200))
    ]
    tokens, targets = (
        values.reshape(-1, 16) for values in pack([marked(*example) for example in examples], 16, 0)
    )
    for place, (ids, which) in enumerate(examples):
        rows, columns = np.nonzero(tokens == place + 1)
        assert (
            len(rows) == len(ids)
            and len(set(rows)) == 1
            and list(columns) == list(range(columns[0], columns[0] + len(ids)))
        )
        assert list(targets[rows, columns] & TARGET == TARGET) == which
    assert not (targets[tokens == 0] & TARGET).any()
    assert len(tokens) < 1.1 * sum(len(ids) for ids, _ in examples) / 16, (
        "few samples have much padding"
    )


def module(
    folder: Path, rows: list[dict[str, Any]], tokenizer: Path, **options: Any
) -> Instructions:
    given = {
        "sequence_length": 16,
        "global_batch_size": 2,
        "num_workers": 0,
        "cache_dir": str(folder / "cache"),
        **options,
    }
    made = make_data_module(
        {"name": "instructions", "path": write(folder, rows), "tokenizer": str(tokenizer), **given}
    )
    assert isinstance(made, Instructions)
    return made


def test_a_data_set(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"messages": turns(f"w{index}", f"w{index + 1} w{index + 2}")} for index in range(24)]
    data = module(tmp_path, rows, tokenizer, val_fraction=0.25, vocab_size=len(WORDS))
    data.prepare_data()
    data.setup()
    assert data.train_set is not None and data.val_set is not None and data.entropy() is None
    # A conversation has 10 tokens, so each fills a sample.
    assert (len(data.train_set), len(data.val_set)) == (18, 6)
    seen = []
    for batch in data.train_dataloader():
        assert batch["input_ids"].shape == batch["labels"].shape == (2, 16)
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            first = int(ids[3]) - WORDS.index("w0")
            assert (
                said(ids[:10])
                == f"[begin] user : w{first} [end] assistant : w{first + 1} w{first + 2} [end]"
            )
            assert said(labels[labels != -100]) == f"w{first + 1} w{first + 2} [end]"
            assert torch.equal(labels[labels != -100], ids[labels != -100])
            seen.append(first)
    assert seen != sorted(seen), "shuffled"
    held_out = [int(sample["input_ids"][3]) - WORDS.index("w0") for sample in data.val_set]
    assert sorted(seen + held_out) == list(range(24)), "all, once"


def test_it_is_tokenized_once(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "w1", "response": "w2"}] * 8
    module(tmp_path, rows, tokenizer).prepare_data()
    path = str(tmp_path / "rows.jsonl")
    options: dict[str, Any] = {
        "sequence_length": 16,
        "global_batch_size": 2,
        "cache_dir": tmp_path / "cache",
    }
    again = Instructions(path=path, tokenizer=str(tokenizer), **options)
    monkeypatch.setattr(again, "_tokenize", lambda split: pytest.fail("tokenized again"))
    again.prepare_data()
    assert again.paths("train") != Instructions(
        path=path, tokenizer=str(tokenizer), **options | {"sequence_length": 8}
    ).paths("train")


def test_what_is_too_long(tokenizer: Path, tmp_path: Path) -> None:
    long_prompt, long_answer = (
        turns(" ".join(["w1"] * 20), "w2"),
        turns("w1", " ".join(["w2"] * 20)),
    )
    rows = [
        {"messages": talk}
        for talk in (long_prompt, long_answer, turns("w1", "w2"), turns("w3", "w4"))
    ]
    data = module(tmp_path, rows, tokenizer, val_fraction=0.0)
    with pytest.warns(
        UserWarning,
        match=(
            "2 of 4 conversations are longer than data.sequence_length=16 tokens.*1 were left out"
        ),
    ):
        data.prepare_data()
    data.setup()
    assert data.train_set is not None
    samples = [said(sample["labels"][sample["labels"] != -100]) for sample in data.train_set]
    assert sorted(samples) == ["w2 [end]", " ".join(["w2"] * 9), "w4 [end]"]
    with (
        pytest.raises(DataError, match="has 1 conversation, but none with an answer"),
        pytest.warns(UserWarning),
    ):
        module(tmp_path, rows[:1], tokenizer).prepare_data()
