"""Best-fit packing: whole documents, few samples, and the share of padding."""

from pathlib import Path

import numpy as np
import pytest
from conversations import TEMPLATE, a_tokenizer, write

from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.padded import best_fit

LENGTH = 64


def pieces(samples: int, seed: int) -> list[int]:
    """Lengths of documents that fill so many samples without padding, in a random order."""
    generator = np.random.default_rng(seed)
    found: list[int] = []
    for _ in range(samples):
        ends = sorted(
            {0, LENGTH, *generator.integers(1, LENGTH, generator.integers(1, 7)).tolist()}
        )
        found += np.diff(ends).tolist()
    generator.shuffle(found)
    return found


def by_search(lengths: list[int]) -> list[list[int]]:
    """Best-fit decreasing by its definition."""
    samples: list[list[int]] = []
    for document in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        room = [LENGTH - sum(lengths[one] for one in sample) for sample in samples]
        fitting = [index for index in range(len(samples)) if room[index] >= lengths[document]]
        if not fitting:
            samples.append([])
        samples[min(fitting, key=lambda index: room[index]) if fitting else -1].append(document)
    return [sorted(sample) for sample in samples]


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_is_within_its_bound(seed: int) -> None:
    least = 200
    lengths = pieces(least, seed)
    samples = best_fit(lengths, LENGTH)
    assert sorted(document for sample in samples for document in sample) == list(
        range(len(lengths))
    )
    assert all(sum(lengths[document] for document in sample) <= LENGTH for sample in samples)
    assert samples == by_search(lengths)
    assert len(samples) <= 11 / 9 * least + 4
    padding = 1 - sum(lengths) / (LENGTH * len(samples))
    assert padding <= 1 - 1 / (11 / 9 + 4 / least)


def test_documents_that_fill_a_sample_and_none_at_all() -> None:
    assert best_fit([LENGTH, LENGTH, 1, LENGTH - 1], LENGTH) == [[0], [1], [2, 3]]
    assert best_fit([], LENGTH) == []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def conversations(folder: Path, tokenizer: Path, **more: object) -> object:
    """Conversations of 9 to 28 tokens."""
    answers = [" ".join(["w1"] * size) for size in np.random.default_rng(0).integers(1, 21, 60)]
    rows = [
        {"prompt": f"w{index % 40}", "response": answer} for index, answer in enumerate(answers)
    ]
    config = {
        "name": "instructions",
        "path": write(folder, rows),
        "tokenizer": str(tokenizer),
        "cache_dir": str(folder / "cache"),
    }
    config |= {"sequence_length": LENGTH, "num_workers": 0, "val_fraction": 0.0}
    data = make_data_module(config | more, global_batch_size=2, seed=0)
    data.prepare_data()
    data.setup()
    return data


def test_conversations_keep_to_themselves_and_the_share_of_padding_is_printed(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = conversations(tmp_path, tokenizer, document_mask=True)
    printed = capsys.readouterr().err
    padding, tokens, seen = 0, 0, []
    for sample in data.train_set:
        ids, positions, labels = (
            sample[key].tolist() for key in ("input_ids", "position_ids", "labels")
        )
        tokens += LENGTH
        padding += ids.count(0)
        begins = [place for place in range(LENGTH) if positions[place] == 0]
        for start, stop in zip(begins, [*begins[1:], LENGTH], strict=True):
            assert positions[start:stop] == list(range(stop - start))
            if ids[start] == 0:
                assert set(ids[start:]) == {0} and set(labels[start:]) == {-100}, (
                    "padding is a document of its own"
                )
                break
            assert (ids[start], ids[stop - 1]) == (2, 1), "a whole conversation"
            seen.append(ids[start + 3])
            assert labels[start] == -100
    assert len(seen) == 60
    assert data.padding_share() == padding / tokens
    assert f"{100 * padding / tokens:.2f} % of the tokens of samples are padding" in printed
