"""`data=huggingface` with `data.packing=best_fit`: whole documents in padded samples."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run_commands
from data_modules import trainer_of
from quick_runs import QUICK, losses

from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.padded import split_documents
from lightning_3d.errors import ConfigError, DataError

LENGTH, END, WORDS = 32, 0, 50
IGNORED = -100


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: index
        for index, word in enumerate(
            ["[end]", "[unknown]", *(f"w{index}" for index in range(WORDS))]
        )
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[unknown]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="[end]", unk_token="[unknown]"
    ).save_pretrained(folder)
    return str(folder)


def documents(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Documents of random ids, each different from the others, with the id that ends each."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, longest + 1, count)
    return [[*generator.integers(2, 2 + WORDS, size).tolist(), END] for size in sizes]


def write(folder: Path, found: list[list[int]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [" ".join(f"w{token - 2}" for token in document[:-1]) for document in found]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return folder / "texts.jsonl"


def module(path: Path, tokenizer: str, replicas: int = 1, rank: int = 0, **more: Any) -> Any:
    given = {
        "name": "huggingface",
        "path": str(path),
        "tokenizer": tokenizer,
        "sequence_length": LENGTH,
        "global_batch_size": 4,
        "seed": 3,
    }
    data = make_data_module(
        {
            **given,
            "val_fraction": 0.0,
            "cache_dir": str(path.parent / "cache"),
            "packing": "best_fit",
            **more,
        }
    )
    data.trainer = trainer_of(replicas, rank)
    data.prepare_data()
    data.setup()
    return data


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


def read_sample(sample: dict[str, torch.Tensor]) -> tuple[list[list[int]], int]:
    """Return the documents of a sample, by its position ids, and the number of tokens that are
    padding."""
    ids, positions, labels = (
        sample[key].tolist() for key in ("input_ids", "position_ids", "labels")
    )
    begins = [place for place in range(LENGTH) if positions[place] == 0]
    found, padding = [], 0
    for start, stop in zip(begins, [*begins[1:], LENGTH], strict=True):
        assert positions[start:stop] == list(range(stop - start))
        if ids[start] == END:
            assert stop == LENGTH and set(ids[start:]) == {END} and set(labels[start:]) == {IGNORED}
            padding = stop - start
        else:
            found.append(ids[start:stop])
            assert labels[start + 1 : stop] == ids[start + 1 : stop], (
                "all tokens but the first one are targets"
            )
            assert start == 0 or labels[start] == IGNORED
    return found, padding


def best_fit_decreasing(sizes: list[int]) -> list[list[int]]:
    """The sizes in each sample, by the definition: the longest first, into the fullest sample that
    has room."""
    samples: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fitting = [sample for sample in samples if sum(sample) + size <= LENGTH]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            samples.append([size])
    return samples


def test_each_document_is_whole_and_in_one_sample(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = documents(200, LENGTH - 1)
    data = module(write(tmp_path, wanted), tokenizer, document_mask=True)
    printed = capsys.readouterr().err
    samples = [read_sample(sample) for sample in data.train_set]
    assert sorted(document for found, _ in samples for document in found) == sorted(wanted)
    expected = best_fit_decreasing([len(document) for document in wanted])
    assert Counter(tuple(sorted(map(len, found))) for found, _ in samples) == Counter(
        tuple(sorted(sample)) for sample in expected
    )
    padding = sum(padding for _, padding in samples)
    assert padding == LENGTH * len(expected) - sum(map(len, wanted)) > 0
    share = data.padding_share()
    assert share == padding / (LENGTH * len(samples))
    assert f"lightning_3d: {100 * share:.2f} % of the tokens of samples are padding" in printed


def test_longer_documents_fill_samples_and_their_rest_is_packed(
    tokenizer: str, tmp_path: Path
) -> None:
    # a rest of one token would be the end of its document alone, which looks like padding
    wanted = [document for document in documents(60, 3 * LENGTH) if len(document) % LENGTH != 1]
    assert max(map(len, wanted)) > 2 * LENGTH
    data = module(write(tmp_path, wanted), tokenizer, document_mask=True)
    pieces = [
        document[start : start + LENGTH]
        for document in wanted
        for start in range(0, len(document), LENGTH)
    ]
    samples = [read_sample(sample) for sample in data.train_set]
    assert sorted(piece for found, _ in samples for piece in found) == sorted(pieces)
    assert len(samples) == len(best_fit_decreasing([len(piece) for piece in pieces]))


def test_labels_without_a_mask(tokenizer: str, tmp_path: Path) -> None:
    path = write(tmp_path, documents(50, LENGTH - 1))
    masked = module(path, tokenizer, document_mask=True)
    across, apart = (
        module(path, tokenizer, predict_across_documents=value) for value in (True, False)
    )
    for sample, all_tokens, inside in zip(
        masked.train_set, across.train_set, apart.train_set, strict=True
    ):
        assert all_tokens.keys() == inside.keys() == {"input_ids", "labels"}
        assert sample["input_ids"].equal(all_tokens["input_ids"]) and sample["labels"].equal(
            inside["labels"]
        )
        _, padding = read_sample(sample)
        kept = LENGTH - padding
        assert all_tokens["labels"][:kept].equal(all_tokens["input_ids"][:kept]), (
            "the first token of a document is a target too"
        )
        assert set(all_tokens["labels"][kept:].tolist()) <= {IGNORED}


def test_rows_are_the_same_on_any_dp_and_after_a_resume(tokenizer: str, tmp_path: Path) -> None:
    path = write(tmp_path, documents(200, LENGTH - 1))

    def rows(data: Any) -> list[list[list[int]]]:
        return [batch["input_ids"].tolist() for batch in data.train_dataloader()]

    one = module(path, tokenizer)
    whole = rows(one)
    assert len(whole) == len(one.train_set) // 4 > 5
    halves = []
    for rank in range(2):
        half = module(path, tokenizer, 2, rank)
        half.resume_from({**one.position_state(), "epoch": 0, "samples": 12})
        halves.append(rows(half))
    assert [sorted(a + b) for a, b in zip(*halves, strict=True)] == [
        sorted(batch) for batch in whole[3:]
    ]


def test_a_run_resumes_with_its_own_packing(tokenizer: str, tmp_path: Path) -> None:
    path = write(tmp_path, documents(200, LENGTH - 1))
    packed, plain = module(path, tokenizer), module(path, tokenizer, packing=None)
    assert plain.padding_share() is None
    for data, other in ((plain, packed), (packed, plain)):
        with pytest.raises(
            DataError, match=f"packing was {other.packing} and is now {data.packing}"
        ):
            data.resume_from({**other.position_state(), "train_samples": len(data.train_set)})
    with pytest.raises(
        ConfigError,
        match=(
            "data.packing must be best_fit, or null for samples of consecutive tokens; got"
            " 'bestfit'"
        ),
    ):
        module(path, tokenizer, packing="bestfit")


def test_nothing_changes_without_a_packing(tokenizer: str, tmp_path: Path) -> None:
    wanted = documents(100, 3 * LENGTH)
    data = module(write(tmp_path, wanted), tokenizer, packing=None)
    tokens = [token for document in wanted for token in document]
    found = [token for sample in data.train_set for token in sample["input_ids"].tolist()]
    assert found == tokens[: len(tokens) // LENGTH * LENGTH]
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1


def test_the_token_file_is_shared_and_samples_are_packed_once(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, documents(100, LENGTH))
    first = module(path, tokenizer)
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 3
    monkeypatch.setattr(type(first), "_tokenize", lambda *_: pytest.fail("tokenized again"))
    module(path, tokenizer, packing=None)
    module(path, tokenizer, sequence_length=2 * LENGTH)
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 5
    monkeypatch.setattr(
        "lightning_3d.app.training.data.huggingface.pack", lambda *_: pytest.fail("packed again")
    )
    again = module(path, tokenizer)
    assert all(
        a["input_ids"].equal(b["input_ids"])
        for a, b in zip(first.train_set, again.train_set, strict=True)
    )


def test_the_held_out_samples_and_their_entropy(tokenizer: str, tmp_path: Path) -> None:
    wanted = documents(200, LENGTH - 1)
    data = module(write(tmp_path, wanted), tokenizer, val_fraction=0.25, document_mask=True)
    parts = [
        [read_sample(sample) for sample in samples] for samples in (data.train_set, data.val_set)
    ]
    assert sorted(document for part in parts for found, _ in part for document in found) == sorted(
        wanted
    )
    assert len(parts[1]) == round(0.25 * (len(parts[0]) + len(parts[1])))
    held = [document for found, _ in parts[1] for document in found]
    assert np.mean([len(document) for document in held]) > 0.7 * np.mean(
        [len(document) for document in wanted]
    )
    counts = np.array(list(Counter(token for document in held for token in document).values()))
    shares = counts / counts.sum()
    assert data.entropy().unigram == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)


def test_tokens_are_split_at_each_separator() -> None:
    tokens = np.array([1, 2, 0, 0, 3, 4, 5, 6, 7, 0, 8])
    found = [document.tolist() for document in split_documents(tokens, 0, 3)]
    assert found == [[1, 2, 0], [0], [3, 4, 5], [6, 7, 0], [8]]
    assert split_documents(tokens[:0], 0, 3) == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_runs_of_several_layouts_and_a_resume(tokenizer: str, tmp_path: Path) -> None:
    path = write(tmp_path, documents(300, 2 * LENGTH))
    model = [line for line in QUICK if line.startswith("model.")] + ["model.config.vocab_size=64"]
    words = [
        "train",
        "data=huggingface",
        f"data.path={path}",
        f"data.tokenizer={tokenizer}",
        f"data.cache_dir={tmp_path}/cache",
        *model,
    ]
    words += [
        "data.packing=best_fit",
        "data.document_mask=true",
        f"data.sequence_length={LENGTH}",
        "data.global_batch_size=4",
    ]
    words += [
        "parallelism.micro_batch_size=1",
        "trainer.max_steps=4",
        "trainer.val_check_interval=2",
        "data.val_sequences=4",
    ]
    words += ["trainer.checkpoint_every_n_steps=2"]
    runs = {"one": "dp1", "two": "dp2", "resumed": "pp2"}
    lines = [
        [*words, f"parallelism={layout}", f"hydra.run.dir={tmp_path}/{name}"]
        for name, layout in runs.items()
    ]
    lines[2].append(f"trainer.resume={tmp_path}/two/checkpoints/step_2.ckpt")
    lines.append([*lines[2], "data.packing=null", f"hydra.run.dir={tmp_path}/other"])
    one, two, resumed, other = run_commands(lines, timeout=550, warm=True)
    assert (one.code, two.code, resumed.code) == (0, 0, 0), one.output + two.output + resumed.output
    assert one.output.count("% of the tokens of samples are padding") == 1
    assert "% of the tokens of training samples" in one.output
    expected = [float(loss) for loss in losses(tmp_path / "one")]
    assert [float(loss) for loss in losses(tmp_path / "two")] == pytest.approx(expected, rel=1e-5)
    assert [float(loss) for loss in losses(tmp_path / "resumed")] == pytest.approx(
        expected[2:], rel=1e-5
    )
    assert (
        other.code == 2
        and "packing was best_fit and is now None" in other.output
        and "Traceback" not in other.output
    ), other.output
