"""`data=blend`: exact shares, an order that depends on the seed and the row only, resuming,
validation sets, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from command_line import run_commands
from data_modules import trainer_of
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_3d.app.config.blend_sources import LONGEST_CYCLE, read_sources, whole_shares
from lightning_3d.app.runs.check import check_shapes
from lightning_3d.app.runs.metrics_file import read_rows
from lightning_3d.app.training.callbacks import MetricsCSV
from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.blend_sources import ENDLESS, BlendPlan, Interleaving
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.data.indexed_file import pack_index
from lightning_3d.app.training.data.token_file import write_tokens
from lightning_3d.app.training.module import CausalLM
from lightning_3d.errors import ConfigError, DataError
from lightning_3d.layout.batch_ramp import BatchRamp

LENGTH = 4
SAMPLES = {"web": 50, "code": 21, "math": 13}
SIZES = {"web": 50 * LENGTH + 3, "code": 21 * LENGTH, "math": 13 * LENGTH + 1}


# Shares


@pytest.mark.parametrize(
    "weights",
    [
        "1",
        "7 2 1",
        "0.7 0.2 0.1",
        "1 1 1 1 1 1 1",
        "0.34 0.33 0.329 0.001",
        "0 3 0 5",
        "97 1 1 1",
        "0.12345 0.54321 0.33334",
        "random",
    ],
)
def test_shares_are_exact_to_less_than_a_row_over_every_prefix(weights: str) -> None:
    for seed in range(5 if weights == "random" else 1):
        drawn = np.random.default_rng(seed).integers(0, 300, 40).tolist()
        given = [
            Fraction(word) for word in (map(str, drawn) if weights == "random" else weights.split())
        ]
        order = Interleaving.of(given)
        assert [Fraction(share, order.cycle) for share in order.shares] == [
            weight / sum(given) for weight in given
        ]
        rows = np.arange(1, order.cycle + 1)
        for number, share in enumerate(order.shares):
            counts = np.cumsum(order.source == number)
            assert np.abs(counts * order.cycle - rows * share).max() < order.cycle
            assert counts[-1] == share


def test_a_row_is_found_without_those_before_it() -> None:
    order = Interleaving.of([Fraction(7), Fraction(2), Fraction(4)])
    counts = [0, 0, 0]
    for row in range(100):
        number, before = order.at(row)
        assert before == counts[number]
        assert order.rows_before(number, before) == row
        counts[number] += 1
    number, before = order.at(13 * 10**15 + 5)
    assert before == order.shares[number] * 10**15 + order.at(5)[1]


def test_weights_without_a_short_cycle_are_rounded() -> None:
    weights = [Fraction("0.3333333333"), Fraction("0.1"), Fraction("0.5666666667")]
    shares = whole_shares(weights)
    assert sum(shares) == LONGEST_CYCLE
    for share, weight in zip(shares, weights, strict=True):
        assert abs(Fraction(share, LONGEST_CYCLE) - weight) < Fraction(1, LONGEST_CYCLE)


# Rows


def write_sources(folder: Path) -> dict[str, dict[str, Any]]:
    """Three token files: the first token of a sample tells which sample of which source it is."""
    for number, (name, size) in enumerate(SIZES.items()):
        write_tokens(
            folder / f"{name}.bin",
            np.arange(size, dtype=np.uint16) + 1000 * number,
            vocab_size=3000,
            document_separator=2999,
        )
    return {name: {"train_path": str(folder / f"{name}.bin"), "val_fraction": 0} for name in SIZES}


def blend_of(
    sources: dict[str, Any], replicas: int = 1, rank: int = 0, steps: int = 1, **more: Any
) -> Any:
    config = {"name": "blend", "sources": sources, "sequence_length": LENGTH, **more}
    data: Any = make_data_module(
        config, **{"global_batch_size": 12, "seed": 3, "vocab_size": 3000} | more
    )
    data.trainer = trainer_of(replicas, rank)
    data.trainer.max_steps = steps
    data.setup("fit")
    return data


def weighted(folder: Path, **changes: Any) -> dict[str, Any]:
    sources = write_sources(folder)
    for name, weight in (("web", 0.6), ("code", 0.3), ("math", 0.1)):
        sources[name] |= {"weight": weight, "epochs": 3, **changes.get(name, {})}
    return sources


def rows_of(data: Any) -> list[int]:
    """The first token of each row that a rank reads."""
    return [int(token) for batch in data.train_dataloader() for token in batch["input_ids"][:, 0]]


def sample(token: int) -> tuple[str, int]:
    """Which sample of which source begins with a token."""
    number, place = divmod(token, 1000)
    assert place % LENGTH == 0
    return list(SIZES)[number], place // LENGTH


def test_a_source_gives_each_sample_once_an_epoch(tmp_path: Path) -> None:
    found = list(map(sample, rows_of(blend_of(weighted(tmp_path)))))
    ends = {"web": 150 * 10 // 6, "code": 63 * 10 // 3, "math": 390}
    assert abs(len(found) - min(ends.values())) <= 12, (
        "the blend ends, at a whole global batch, where code has been read three times"
    )
    for name, count in SAMPLES.items():
        mine = [place for source, place in found if source == name]
        epochs = [mine[start : start + count] for start in range(0, len(mine), count)]
        assert all(
            len(set(epoch)) == len(epoch) and set(epoch) <= set(range(count)) for epoch in epochs
        )
        whole = [tuple(epoch) for epoch in epochs if len(epoch) == count]
        assert len(set(whole)) == len(whole) and tuple(range(count)) not in whole, (
            "each epoch has an order of its own"
        )
        share = {"web": 0.6, "code": 0.3, "math": 0.1}[name]
        for rows in range(1, len(found) + 1):
            assert abs(sum(source == name for source, _ in found[:rows]) - share * rows) < 1
    assert len({source for source, _ in found}) == 3


def test_the_order_depends_on_the_seed_and_not_on_the_epochs_allowed(tmp_path: Path) -> None:
    first = rows_of(blend_of(weighted(tmp_path)))
    assert first == rows_of(blend_of(weighted(tmp_path)))
    assert first != rows_of(blend_of(weighted(tmp_path), seed=4))
    longer = blend_of(weighted(tmp_path, code={"epochs": None}, web={"epochs": 10}))
    assert rows_of(longer)[: len(first)] == first


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_run_that_resumes_on_another_dp_reads_the_same_rows(
    tmp_path: Path, replicas: int
) -> None:
    sources = weighted(tmp_path)
    one = rows_of(blend_of(sources))
    saved = blend_of(sources, 4, 1)
    loader = saved.train_dataloader()
    next(iter(loader))
    saved.trainer.fit_loop.epoch_loop.batch_progress.total.processed = 5
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["samples"] == 60
    ranks = []
    for rank in range(replicas):
        data = blend_of(sources, replicas, rank)
        loader = data.train_dataloader()
        loader.load_state_dict(state)
        ranks.append([int(token) for batch in loader for token in batch["input_ids"][:, 0]])
    together = [token for tokens in zip(*ranks, strict=True) for token in tokens]
    assert together == one[60:]


@pytest.mark.parametrize(
    "change", [{"web": {"weight": 0.7}}, {"math": {"val_fraction": 0.5}}, "seed", "source"]
)
def test_a_position_in_another_blend_is_refused(tmp_path: Path, change: Any) -> None:
    state = blend_of(weighted(tmp_path)).position_state()
    sources = weighted(tmp_path, **change) if isinstance(change, dict) else weighted(tmp_path)
    if change == "source":
        del sources["math"]
    other = blend_of(sources, **({"seed": 9} if change == "seed" else {}))
    message = (
        "seed was 3 and is now 9"
        if change == "seed"
        else "sources was web: 6 of 10 rows, 50 samples; code"
    )
    with pytest.raises(DataError, match=message):
        other.resume_from(state)
    blend_of(weighted(tmp_path, web={"epochs": 9})).resume_from(state)


def test_a_blend_ends_after_its_last_row(tmp_path: Path) -> None:
    data = blend_of(weighted(tmp_path))
    loader = data.train_dataloader()
    next(iter(loader))
    loader.sampler.set_epoch(1)
    data.trainer.fit_loop.epoch_loop.batch_progress.total.processed = 17
    with pytest.raises(
        DataError,
        match=r"read to its end: 204 of its 212 rows .* a step takes 12. Let the sources repeat",
    ):
        next(iter(loader))


class RowsRead(LightningModule):
    """A model that notes the first token of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.rows += batch["input_ids"][:, 0].tolist()
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": -1,
    "limit_val_batches": 0,
    "use_distributed_sampler": False,
}


def fit_blend(
    sources: dict[str, Any], steps: int, start: Path | None, save: Path | None = None, **more: Any
) -> list[int]:
    """Rows that a run reads. It saves a checkpoint at the end, if none of its callbacks does."""
    data = make_data_module(
        {"name": "blend", "sources": sources, "sequence_length": LENGTH},
        global_batch_size=12,
        seed=3,
        vocab_size=3000,
    )
    module, trainer = RowsRead(), Trainer(max_steps=steps, **QUIET, **more)
    trainer.fit(module, datamodule=data, ckpt_path=start)
    if save is not None and not more:
        trainer.save_checkpoint(save)
    return module.rows


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "in_batch", [True, False], ids=["saved after the batch", "saved after the run"]
)
def test_a_blend_that_was_read_to_its_end_continues_with_more_epochs(
    tmp_path: Path, in_batch: bool
) -> None:
    sources = weighted(tmp_path)
    longer, longest = (
        weighted(tmp_path, **{name: {"epochs": epochs} for name in SIZES}) for epochs in (5, 9)
    )
    whole = fit_blend(longest, 40, None)
    files = [tmp_path / f"{step}.ckpt" for step in (17, 23, 29)]

    def more(step: int, file: Path) -> dict[str, Any]:
        return {"callbacks": [SaveAt(step, file)]} if in_batch else {}

    assert fit_blend(sources, 17, None, files[0], **more(17, files[0])) == whole[: 17 * 12]
    assert fit_blend(sources, 17, files[0]) == [], "a finished run that resumes reads nothing"
    assert (
        fit_blend(longer, 23, files[0], files[1], **more(23, files[1])) == whole[17 * 12 : 23 * 12]
    )
    assert (
        fit_blend(longer, 29, files[1], files[2], **more(29, files[2])) == whole[23 * 12 : 29 * 12]
    ), "in Lightning's epoch 1"
    assert fit_blend(longest, 40, files[2]) == whole[29 * 12 :]
    if in_batch:  # without max_steps, Lightning restores the position only within an epoch
        with pytest.raises(
            DataError, match="The blend has been read to its end: 204 of its 212 rows"
        ):
            fit_blend(sources, -1, files[0])


def test_budgets_of_tokens(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    for name, samples in (("web", 40), ("code", 20), ("math", 10)):
        sources[name] |= {"tokens": samples * LENGTH}
    data = blend_of(sources, global_batch_size=10)
    names = [sample(token)[0] for token in rows_of(data)]
    assert {name: names.count(name) for name in SIZES} == {"web": 40, "code": 20, "math": 10}


def test_sources_that_repeat_without_end(tmp_path: Path) -> None:
    data = blend_of(
        weighted(tmp_path, web={"epochs": None}, code={"epochs": None}, math={"epochs": None}),
        steps=10**9,
    )
    assert len(data.train_set) == ENDLESS
    assert data.train_set[ENDLESS - 1]["input_ids"].shape == (LENGTH,)


def test_the_first_batch_of_a_huge_blend(tmp_path: Path) -> None:
    """Files of 5 * 10^12 tokens each, as in `test_corpus.py`."""
    sources = {}
    for name in ("a", "b"):
        (tmp_path / f"{name}.bin").touch()
        tmp_path.joinpath(f"{name}.bin").open("r+b").truncate(10**13)
        head = pack_index(np.array([1]), np.dtype(np.uint16))
        size = (10**13 - 2).to_bytes(8, "little")
        (tmp_path / f"{name}.idx").write_bytes(
            head[:34] + (1).to_bytes(4, "little") + size + head[46:]
        )
        sources[name] = {"train_path": str(tmp_path / f"{name}.bin"), "weight": 1}
    data = blend_of(sources, sequence_length=4096, vocab_size=None)
    loader = data.train_dataloader()
    loader.load_state_dict(data.position_state() | {"samples": 12 * 10**7})
    assert next(iter(loader))["input_ids"].shape == (12, 4096) and len(data.train_set) > 2 * 10**9


# Refusals


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "negative": (
        lambda s: s["web"].update(weight=-1),
        r"data\.sources\.web\.weight must be at least 0; got -1",
    ),
    "nan": (
        lambda s: s["web"].update(weight=float("nan")),
        r"sources\.web\.weight must be at least 0; got nan",
    ),
    "text": (
        lambda s: s["web"].update(weight="much"),
        r"sources\.web\.weight must be at least 0; got 'much'",
    ),
    "sum": (
        lambda s: [s[name].update(weight=0) for name in s],
        r"The weights of data\.sources sum to 0",
    ),
    "mixed": (
        lambda s: s["web"].update(weight=None, tokens=40),
        "has tokens for web and a weight for the others",
    ),
    "both": (
        lambda s: s["web"].update(tokens=40),
        r"sources\.web must have either weight or tokens",
    ),
    "neither": (
        lambda s: s["web"].update(weight=None),
        r"sources\.web must have either weight or tokens",
    ),
    "length": (
        lambda s: s["code"].update(sequence_length=8),
        r"code\.sequence_length=8 differs from data\.sequence_length=4",
    ),
    "option": (
        lambda s: s["code"].update(wieght=8),
        "has no option 'wieght'.*Did you mean \"weight\"",
    ),
    "path": (lambda s: s["code"].pop("train_path"), r"sources\.code\.train_path must be given"),
    "file": (
        lambda s: s["code"].update(train_path="/nowhere/x.bin"),
        r"There is no token file /nowhere/x\.bin",
    ),
    "epochs": (lambda s: s["code"].update(epochs=0), r"code\.epochs must be more than 0; got 0"),
    "fraction": (
        lambda s: s["code"].update(val_fraction=1),
        r"code\.val_fraction must be at least 0 and less than 1; got 1",
    ),
    "group": (lambda s: s.update(code=3), r"data\.sources\.code must be a group of keys"),
    "name": (lambda s: s.update({"a/b": s.pop("code")}), "must have a name without slashes"),
    "share": (
        lambda s: s["math"].update(weight=1e-9),
        r"share of data\.sources\.math is less than one row",
    ),
    "empty": (lambda s: s["math"].update(val_fraction=0.99), r"math\) has no sample of 4 tokens"),
    "separator": (
        lambda s: s["math"].update(document_separator=7),
        r"data\.document_separator=7 contradicts",
    ),
    "only_validated": (
        lambda s: [
            entry.update(val_path=entry.pop("train_path"), weight=0) for entry in s.values()
        ],
        (
            r"No source of data\.sources has a train_path, so there is nothing to train on\. .*"
            r" data\.sources\.web\.train_path="
        ),
    ),
    "validated_with_a_weight": (
        lambda s: s["code"].update(val_path=s["code"].pop("train_path")),
        (
            r"sources\.code\.train_path must be given: .* Without it, a source is only validated,"
            r" and its weight must be 0\."
        ),
    ),
    "validated_with_a_typo": (
        lambda s: s.update(held={"val_pth": "x"}),
        "sources\\.held has no option 'val_pth'.*Did you mean \"val_path\"",
    ),
    "validated_without_files": (
        lambda s: s.update(held={"val_path": s["web"]["train_path"] + "x"}),
        "There is no token file .*binx",
    ),
    "weights_beside_a_validated_one": (
        lambda s: [
            *(entry.update(weight=0) for entry in s.values()),
            s.update(held={"val_path": s["web"]["train_path"]}),
        ],
        r"The weights of data\.sources sum to 0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_blend_is_refused_before_ranks_are_started(tmp_path: Path, case: str) -> None:
    sources = weighted(tmp_path)
    config = {
        "name": "blend",
        "sources": sources,
        "sequence_length": LENGTH,
        "global_batch_size": 12,
    }
    check_files(config, steps=17)
    damage, message = BAD[case]
    damage(sources)
    with pytest.raises((ConfigError, DataError), match=message):
        check_files(config, steps=17)


DRY: dict[str, tuple[str, str]] = {
    "text": (
        "{web:{train_path:x,weight:'0.5'}}",
        r"sources\.web\.weight must be at least 0; got '0\.5'",
    ),
    "share": (
        "{web:{train_path:x,weight:1},math:{train_path:y,weight:1e-9}}",
        r"share of data\.sources\.math is less than one row",
    ),
    "fraction": (
        "{web:{train_path:x,weight:1,val_fraction:null}}",
        r"web\.val_fraction must be at least 0 and less than 1; got None",
    ),
    "path": ("{web:{weight:1}}", r"sources\.web\.train_path must be given"),
    "few": (
        "{web:{train_path:x,tokens:10}}",
        r"sum to 10, but the run takes 2048 \(4 steps of 512\)\. Give all sources more tokens\.",
    ),
    "fewer": (
        "{a:{train_path:x,tokens:1000},b:{train_path:x,tokens:1000}}",
        r"sum to 2000, .* or use trainer\.max_steps=3\.",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DRY)
def test_a_dry_run_checks_the_options_of_sources(case: str) -> None:
    job = [
        "data=blend",
        "data.sequence_length=64",
        "data.global_batch_size=8",
        "trainer.max_steps=4",
        "trainer.val_check_interval=4",
    ]
    job += ["parallelism=dp1"]
    sources, message = DRY[case]
    with pytest.raises(ConfigError, match=message):
        check_shapes([*job, f"data.sources={sources}"])
    if case == "few":
        check_shapes(job)
        check_shapes([*job, "data.sources={web:{train_path:x,tokens:2048}}"])


def test_a_blend_shorter_than_the_run_is_refused(tmp_path: Path) -> None:
    sources = weighted(tmp_path)
    config = {
        "name": "blend",
        "sources": sources,
        "sequence_length": LENGTH,
        "global_batch_size": 12,
    }
    message = (
        r"The blend has 212 rows of 4 tokens, and the run takes 216 \(18 steps of 12\). Its source"
        r" code ends first: 21 samples, 3 epochs."
        r" Use trainer.max_steps=17, or data.sources.code.epochs=3.15, or a smaller"
        r" data.sources.code.weight."
    )
    with pytest.raises(DataError, match=message):
        check_files(config, steps=18)
    with pytest.raises(DataError, match=message):
        blend_of(sources, steps=18)
    sources["code"]["epochs"] = 3.15
    check_files(config, steps=18)
    with pytest.raises(DataError, match="trainer.max_steps=18"):
        check_files(config, steps=30)


def proposed(message: str) -> dict[str, float]:
    """The numbers of epochs that a message proposes, by source."""
    return {
        name: float(epochs)
        for name, epochs in re.findall(r"data\.sources\.(\w+)\.epochs=(\d+(?:\.\d+)?)", message)
    }


def test_the_proposed_epochs_are_enough_for_all_sources(tmp_path: Path) -> None:
    sources = weighted(tmp_path)
    config = {
        "name": "blend",
        "sources": sources,
        "sequence_length": LENGTH,
        "global_batch_size": 12,
    }
    with pytest.raises(
        DataError, match=r"epochs=\d\S+, data\.sources\.code.* and data\.sources\.math\S+\.$"
    ) as refused:
        check_files(config, steps=50)
    for name, epochs in proposed(str(refused.value)).items():
        sources[name]["epochs"] = epochs
    check_files(config, steps=50)


def test_a_large_number_of_epochs_is_rounded_up() -> None:
    source = {"train_path": "x", "weight": 1}
    for samples, steps in ((7, 8642100), (3, 10**9), (13, 12345678)):
        with pytest.raises(DataError, match=r"or data\.sources\.web\.epochs=\S+\.$") as refused:
            BlendPlan.of(read_sources({"web": source}, LENGTH), [samples], LENGTH).require_steps(
                steps, BatchRamp.none(1)
            )
        enough = source | {"epochs": proposed(str(refused.value))["web"]}
        BlendPlan.of(read_sources({"web": enough}, LENGTH), [samples], LENGTH).require_steps(
            steps, BatchRamp.none(1)
        )


def test_a_budget_above_what_a_source_has_is_refused(tmp_path: Path) -> None:
    sources = {"code": write_sources(tmp_path)["code"] | {"tokens": 100}}
    config = {
        "name": "blend",
        "sources": sources,
        "sequence_length": LENGTH,
        "global_batch_size": 1,
    }
    with pytest.raises(
        DataError,
        match=(
            "tokens=100, but the source has 84 tokens to train on in 1 epoch. Use at most"
            " 84.*epochs=1.2"
        ),
    ):
        check_files(config)
    sources["code"]["epochs"] = 1.2
    check_files(config, steps=25)
    with pytest.raises(
        DataError,
        match=r"has 25 rows .* takes 26 .*Use trainer.max_steps=25, or more tokens for all sources",
    ):
        check_files(config, steps=26)


def test_sources_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    sources = weighted(tmp_path)
    write_tokens(
        tmp_path / "math.bin", np.arange(50, dtype=np.uint16), vocab_size=3000, document_separator=7
    )
    config = {
        "name": "blend",
        "sources": sources,
        "sequence_length": LENGTH,
        "global_batch_size": 12,
    }
    with pytest.raises(
        DataError, match="do not end documents alike: one has token 2999, one has token 7"
    ):
        check_files(config)
    assert read_sources(sources, LENGTH)[2].epochs == 3


def test_a_plan_describes_what_the_order_depends_on(tmp_path: Path) -> None:
    plan = BlendPlan.of(read_sources(weighted(tmp_path), LENGTH), [50, 21, 13], LENGTH)
    assert (
        plan.describe()
        == "web: 6 of 10 rows, 50 samples; code: 3 of 10 rows, 21 samples; math: 1 of 10 rows, 13"
        " samples"
    )


# Validation


MODEL = {
    "config": {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 3000,
    }
}


def test_each_source_has_a_validation_set(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "web": {"val_fraction": 0.2},
        "code": {"val_path": str(tmp_path / "code.bin")},
    }
    data = make_data_module(
        {"name": "blend", "sources": weighted(tmp_path, **changes), "sequence_length": LENGTH},
        global_batch_size=4,
        seed=0,
        vocab_size=3000,
    )
    module = CausalLM(MODEL, {"name": "sgd", "lr": 0.1})
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("step,val_loss/gone\n0,1.5\n")  # of a source that the run no longer has
    trainer = Trainer(
        accelerator="cpu",
        max_steps=3,
        val_check_interval=3,
        num_sanity_val_steps=0,
        callbacks=MetricsCSV(metrics),
        **quiet,
    )
    trainer.fit(module, datamodule=data)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert data.val_names == ("web", "code")
    for name, count in (("web", 10), ("code", 21)):
        samples = data.val_sets[name]
        assert len(samples) == count
        losses = [
            module.model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.item()
            for row in samples
        ]
        assert found[f"val_loss/{name}"] == pytest.approx(sum(losses) / count, rel=1e-4)
    assert found["val_loss"] == pytest.approx(
        (2 * found["val_loss/web"] + found["val_loss/code"]) / 3
    )
    earlier, *_, last = read_rows(metrics)
    assert (
        earlier["val_loss/gone"] == "1.5" and earlier["val_loss/web"] == last["val_loss/gone"] == ""
    )
    assert {
        name: float(last[name]) for name in found if name.startswith("val_loss")
    } == pytest.approx(
        {name: value for name, value in found.items() if name.startswith("val_loss")}
    )


@pytest.mark.parametrize("share", [{}, {"weight": 0}, {"weight": None}, {"tokens": 0}], ids=str)
def test_a_source_without_files_to_train_on_is_only_validated(
    share: dict[str, Any], tmp_path: Path
) -> None:
    sources = weighted(
        tmp_path, web={"val_fraction": 0.2}, code={"val_path": str(tmp_path / "code.bin")}
    )
    alone = blend_of(sources)
    held = {"held": {"val_path": str(tmp_path / "math.bin"), **share}}
    for given in (sources | held, held | sources):
        check_files(
            {"name": "blend", "sources": given, "sequence_length": LENGTH, "global_batch_size": 12},
            steps=3,
        )
        data = blend_of(given)
        assert rows_of(data) == rows_of(alone), "it takes no part in the mixture"
        assert data.position_state() == alone.position_state(), (
            "so a run may resume with it or without it"
        )
        assert [row["input_ids"][0].item() for row in data.val_sets["held"]] == list(
            range(2000, 2000 + 13 * LENGTH, LENGTH)
        )
        assert data.validation_weights() == pytest.approx({"web": 2 / 3, "code": 1 / 3, "held": 0})
        assert len(data.val_dataloader()) == 3


def test_a_budget_of_tokens_goes_with_a_source_that_is_only_validated(tmp_path: Path) -> None:
    code = write_sources(tmp_path)["code"]
    sources = {"held": {"val_path": code["train_path"]}, "code": code | {"tokens": 80}}
    assert len(blend_of(sources, steps=1, global_batch_size=4).train_set) == 20


# The command


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_blend_resumes_in_another_layout(tmp_path: Path) -> None:
    sources = weighted(tmp_path, web={"val_fraction": 0.2})
    given = yaml.safe_dump(sources, default_flow_style=True, width=10**6).strip().replace(": ", ":")
    job = [
        "data=blend",
        f"data.sources={given}",
        f"data.sequence_length={LENGTH}",
        "data.global_batch_size=8",
        "data.num_workers=0",
    ]
    job += [
        "model.config.vocab_size=3000",
        "trainer.max_steps=4",
        "trainer.val_check_interval=2",
        "trainer.checkpoint_every_n_steps=2",
    ]
    resume = f"trainer.resume={tmp_path}/a/checkpoints/step_2.ckpt"
    lines = [
        ["train", *job, "parallelism=dp2", f"hydra.run.dir={tmp_path}/a"],
        ["train", *job, "parallelism=pp2", resume, f"hydra.run.dir={tmp_path}/b"],
        [
            "train",
            *job,
            "parallelism=dp2",
            "trainer.max_steps=1000",
            "trainer.val_check_interval=1000",
            f"hydra.run.dir={tmp_path}/c",
        ],
    ]
    first, second, refused = run_commands(lines, timeout=850, warm=True)
    assert (first.code, second.code, refused.code) == (0, 0, 2), (
        first.output + second.output + refused.output
    )
    assert "Its source web ends first" in refused.output and not (tmp_path / "c").exists()
    tables = [(tmp_path / name / "metrics.csv").read_text().splitlines()[1:] for name in "ab"]
    numbers = [
        {line.split(",")[0]: [float(cell or 0) for cell in line.split(",")[1:3]] for line in table}
        for table in tables
    ]
    assert list(numbers[1]) == ["3", "4"]
    for step in ("3", "4"):
        assert numbers[1][step] == pytest.approx(numbers[0][step], rel=1e-5)
