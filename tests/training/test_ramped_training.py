"""Training with `data.batch_ramp`: the same rows in the same order, exact against a plain loop, and
exact on resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from checkpoint_fits import all_tensors, assert_equal
from data_modules import trainer_of
from lightning.pytorch import Callback, LightningModule, Trainer
from parity import quiet_trainer
from ranks import run_ranks
from reference import default_dtype
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d.app.runs.check import check_shapes
from lightning_3d.app.training.data.base import PackedDataModule
from lightning_3d.app.training.data.packing import Tokens
from lightning_3d.app.training.module import CausalLM
from lightning_3d.errors import ConfigError, DataError, LayoutError
from lightning_3d.layout.micro_batch_rows import MicroBatchRows
from lightning_3d.weights.initialize import initialize

LENGTH = 8
RAMP = {"from": 4, "step": 4, "tokens": 20 * LENGTH}
SIZES = [4, 4, 4, 8, 12, 12, 12]
"""By hand: two levels of 10 rows each."""


class Numbered(PackedDataModule):
    """Tokens that tell which sample they are of: 100 samples of the same 8 tokens, counted from
    0."""

    def __init__(self, **more: Any) -> None:
        super().__init__(
            **{
                "sequence_length": LENGTH,
                "global_batch_size": 12,
                "seed": 1,
                "batch_ramp": RAMP,
                **more,
            }
        )

    def load_tokens(self) -> tuple[Tokens, None]:
        return Tokens(np.repeat(np.arange(100, dtype=np.uint16), LENGTH), "numbers"), None


def read(
    replicas: int = 1,
    rank: int = 0,
    state: dict[str, Any] | None = None,
    rows: Any = None,
    **more: Any,
) -> list[list[int]]:
    """Samples of each batch of the first epoch that a rank reads."""
    data: Any = Numbered(**more)
    data.trainer = trainer_of(replicas, rank)
    data.trainer.strategy.micro_batch_rows = rows
    data.setup("fit")
    loader = data.train_dataloader()
    if state is not None:
        loader.load_state_dict(state)
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def together(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Global batches of what all ranks read: rank r of R has rows r, r + R, ..."""
    return [
        [row for rows in zip(*step, strict=True) for row in rows]
        for step in zip(*ranks, strict=True)
    ]


def test_row_k_is_row_k_without_a_ramp_on_any_dp() -> None:
    plain = list(itertools.chain.from_iterable(read(batch_ramp=None)))
    alone = read()
    assert [len(batch) for batch in alone][: len(SIZES)] == SIZES and len(plain) == 96
    assert list(itertools.chain.from_iterable(alone)) == plain, (
        "the last batch of the epoch is shorter: no row is left out"
    )
    for replicas in (2, 4):
        assert together([read(replicas, rank) for rank in range(replicas)]) == alone


def test_an_elastic_run_reads_the_same_micro_batches_on_fewer_ranks() -> None:
    """Micro-batches of 2 rows on 2 of 4 ranks: each is read whole, as micro-batch m of the 4 ranks
    has rows m, m + 4 of its 8."""
    rows = MicroBatchRows(dp=2, whole_dp=4, micro_batch_size=2)
    ranks = [
        read(
            2,
            rank,
            rows=rows,
            global_batch_size=24,
            batch_ramp={"from": 8, "step": 8, "tokens": 20 * LENGTH},
        )
        for rank in range(2)
    ]
    order = list(itertools.chain.from_iterable(read(batch_ramp=None, global_batch_size=24)))
    start = 0
    for step in zip(*ranks, strict=True):
        size = sum(map(len, step))
        found = {tuple(mine[at : at + 2]) for mine in step for at in range(0, len(mine), 2)}
        batch = order[start : start + size]
        assert found == {
            (batch[at + m], batch[at + m + 4]) for at in range(0, size, 8) for m in range(4)
        }
        start += size
    assert start == 96 and [sum(map(len, step)) for step in zip(*ranks, strict=True)] == [
        8,
        8,
        16,
        24,
        24,
        16,
    ]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_run_resumes_in_the_middle_of_the_ramp_on_any_dp(replicas: int) -> None:
    alone = read()
    for step in range(len(SIZES)):
        data: Any = Numbered()
        data.trainer = trainer_of(1, 0)
        data.setup("fit")
        loader = data.train_dataloader()
        next(iter(loader))
        data.trainer.fit_loop.epoch_loop.batch_progress.total.processed = step
        state = loader.state_dict()
        assert state["samples"] == sum(SIZES[:step])
        assert together([read(replicas, rank, state) for rank in range(replicas)]) == alone[step:]


def test_a_run_that_resumes_with_another_ramp_is_refused() -> None:
    data: Any = Numbered()
    data.trainer = trainer_of(1, 0)
    data.setup("fit")
    state = data.position_state()
    with pytest.raises(
        DataError, match="batch_ramp was from 4 by 4 to 12 over 160 tokens and is now None"
    ):
        read(state=state, batch_ramp=None)


def test_ranks_that_cannot_share_a_batch_of_the_ramp_are_refused() -> None:
    message = (
        "has a global batch of 4, which cannot be split evenly over 3 data-parallel ranks .* Use"
        " multiples of 3"
    )
    with pytest.raises(ConfigError, match=message):
        read(3)


# Epochs


class Read(LightningModule):
    """A model that notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.batches: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.batches.append(batch["input_ids"][:, 0].tolist())
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveAt(Callback):
    def __init__(self, folder: Path, steps: tuple[int, ...]) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit_alone(
    steps: int, start: Path | None = None, callbacks: tuple[Callback, ...] = (), **more: Any
) -> list[list[int]]:
    module, options = (
        Read(),
        {"max_epochs": -1, "limit_val_batches": 0, "use_distributed_sampler": False},
    )
    trainer = quiet_trainer(max_steps=steps, callbacks=list(callbacks), **options)
    trainer.fit(module, datamodule=Numbered(**more), ckpt_path=start)
    return module.batches


LONG = {"from": 4, "step": 4, "tokens": 150 * LENGTH}
"""Two levels of 75 rows, 19 batches of 4 and 5 of 8; the last 20 rows of an epoch of 96 are in the
second."""


@pytest.mark.parametrize(
    ("ramp", "steps"), [(LONG, (3, 21, 22, 23, 30)), (None, (8, 9))], ids=["ramp", "no ramp"]
)
def test_a_run_resumes_in_later_epochs_also_with_worker_processes(
    tmp_path: Path, ramp: Any, steps: tuple[int, ...]
) -> None:
    """Lightning makes the iterator of a resumed epoch before it sets the epoch, and worker
    processes read ahead."""
    whole = fit_alone(34, callbacks=(SaveAt(tmp_path, steps),), batch_ramp=ramp)
    plain = fit_alone(34, batch_ramp=None)
    rows, same = (list(itertools.chain.from_iterable(batches)) for batches in (whole, plain))
    assert rows == same[: len(rows)], "row k of the run is row k, in every epoch"
    if ramp is not None:
        assert [len(batch) for batch in whole[18:24]] == [4, 8, 8, 4, 8, 8], "an epoch has 96 rows"
    for step in steps:
        for workers in (0, 1) if step in (23, 9) else (0,):
            assert (
                fit_alone(34, tmp_path / f"{step}.ckpt", batch_ramp=ramp, num_workers=workers)
                == whole[step:]
            ), (step, workers)


class WithValidation(Numbered):
    """Half of the samples are held out: an epoch of 48 rows."""

    def load_tokens(self) -> tuple[Tokens, Tokens]:  # type: ignore[override]
        values = super().load_tokens()[0].values
        return Tokens(values[: 48 * LENGTH], "numbers"), Tokens(values[48 * LENGTH :], "others")


class Validated(Read):
    """Notes after how many batches of the run it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[int] = []

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        if index == 0:
            self.after.append(len(self.batches))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [11, 17, 21, 25]),
        ({"check_val_every_n_epoch": 2}, [17, 25]),
        ({"val_check_interval": 0.5}, [5, 10, 14, 17, 19, 21, 23, 25]),
        ({"limit_train_batches": 5}, [5, 10, 14, 18]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 9}, [9, 18]),
    ],
    ids=str,
)
def test_validation_follows_the_epochs_of_a_ramp(
    options: dict[str, Any], expected: list[int]
) -> None:
    """By hand: batches of 4 to row 40, of 8 to row 80, then of 12. Epochs of 48 rows have 10 + 1, 4
    + 2, 4 and 4 batches."""
    module = Validated()
    trainer = quiet_trainer(
        max_epochs=4,
        use_distributed_sampler=False,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(
        module, datamodule=WithValidation(batch_ramp={"from": 4, "step": 4, "tokens": 80 * LENGTH})
    )
    assert module.after == expected


def test_validation_after_more_batches_than_a_later_epoch_has_is_refused() -> None:
    ramp = {"from": 4, "step": 4, "tokens": 80 * LENGTH}
    options = {"use_distributed_sampler": False, "limit_val_batches": 1, "val_check_interval": 6}
    message = (
        r"val_check_interval=6, but epoch 2 has 4 batches\. .* check_val_every_n_epoch=None .*"
        r" val_check_interval of at most 4"
    )
    with pytest.raises(ConfigError, match=message):
        quiet_trainer(max_epochs=4, **options).fit(
            Validated(), datamodule=WithValidation(batch_ramp=ramp)
        )
    module = Validated()
    quiet_trainer(max_epochs=2, **options).fit(module, datamodule=WithValidation(batch_ramp=ramp))
    assert module.after == [6, 17]


# Checkpoints saved anywhere


class SaveIn(Callback):
    """Saves a checkpoint in a hook, the first time that the run is at a step."""

    def __init__(self, hook: str, step: int, path: Path) -> None:
        def save(trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == step and not path.exists() and not trainer.sanity_checking:
                trainer.save_checkpoint(path)

        if hook != AFTER_FIT:
            setattr(self, hook, save)


Rows = list[list[int]]
"""Samples of each batch."""

AFTER_FIT = "after fit"
HOOKS = [
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    AFTER_FIT,
]
WITHOUT_LIMIT: dict[str, Any] = {
    "max_epochs": -1,
    "max_steps": -1,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
}


def fit_validated(
    start: Path | None, data: PackedDataModule, callbacks: tuple[Callback, ...] = (), **options: Any
) -> tuple[Any, Trainer]:
    module, trainer = (
        Validated(),
        quiet_trainer(
            callbacks=list(callbacks), limit_val_batches=1, **{**WITHOUT_LIMIT, **options}
        ),
    )
    trainer.fit(module, datamodule=data, ckpt_path=start)
    return module, trainer


def uninterrupted(ramp: Any, **options: Any) -> Rows:
    return fit_validated(None, WithValidation(batch_ramp=ramp), max_steps=40, **options)[0].batches


def resumes_with_the_same_rows(
    whole: Rows, path: Path, hook: str, step: int, stop: int, ramp: Any, **options: Any
) -> int:
    """Check the rows of a run that resumes a checkpoint of `hook` at `step` of a run that ended at
    `stop`, with `max_steps` and with `max_epochs`. Return the number of checks: 0 if the hook was
    not called there."""
    _, trainer = fit_validated(
        None,
        WithValidation(batch_ramp=ramp),
        (SaveIn(hook, step, path),),
        max_steps=stop,
        **options,
    )
    if hook == AFTER_FIT:
        trainer.save_checkpoint(path)
    if not path.exists():
        return 0
    resumed, _ = fit_validated(
        path, WithValidation(batch_ramp=ramp), max_steps=len(whole), **options
    )
    assert resumed.batches == whole[step:], "max_steps"
    resumed, trainer = fit_validated(path, WithValidation(batch_ramp=ramp), max_epochs=6, **options)
    assert resumed.batches and resumed.batches == whole[step : step + len(resumed.batches)], (
        "max_epochs"
    )
    assert trainer.current_epoch == 6 and resumed.after[-1] == len(resumed.batches), (
        "validated at the end of the last epoch"
    )
    return 2


@pytest.mark.parametrize(
    "ramp", [None, {"from": 4, "step": 4, "tokens": 80 * LENGTH}], ids=["no ramp", "ramp"]
)
def test_a_checkpoint_saved_after_fit_resumes_with_the_next_rows(tmp_path: Path, ramp: Any) -> None:
    """In the middle of an epoch, and at its end."""
    whole, end = uninterrupted(ramp), 11 if ramp else 4
    for step in (3, end):
        assert resumes_with_the_same_rows(
            whole, tmp_path / f"{step}.ckpt", AFTER_FIT, step, step, ramp
        )
    assert resumes_with_the_same_rows(
        whole, tmp_path / "epoch.ckpt", "on_train_epoch_end", end, 14, ramp
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{}, {"limit_train_batches": 3}, {"val_check_interval": 0.5}], ids=str
)
@pytest.mark.parametrize(
    "ramp", [None, {"from": 4, "step": 4, "tokens": 80 * LENGTH}], ids=["no ramp", "ramp"]
)
def test_a_checkpoint_saved_anywhere_resumes_with_the_next_rows(
    tmp_path: Path, ramp: Any, options: dict[str, Any]
) -> None:
    whole, length = (
        uninterrupted(ramp, **options),
        3 if "limit_train_batches" in options else 11 if ramp else 4,
    )
    cases = [
        (hook, step, step + more)
        for hook in HOOKS
        for step in (2, length, length + 1)
        for more in (0, 2)
    ]
    made = 0
    for number, (hook, step, stop) in enumerate(cases):
        if hook != AFTER_FIT or step == stop:
            made += resumes_with_the_same_rows(
                whole, tmp_path / f"{number}.ckpt", hook, step, stop, ramp, **options
            )
    assert made > 30


def test_a_checkpoint_saved_after_several_resumed_runs(tmp_path: Path) -> None:
    """Each run ends in the middle of an epoch, where Lightning counts the next one."""
    whole = fit_alone(30, batch_ramp=None)
    found, start = [], None
    for step in (3, 5, 8, 11, 13, 30):
        module, trainer = (
            Read(),
            quiet_trainer(
                max_steps=step, max_epochs=-1, limit_val_batches=0, use_distributed_sampler=False
            ),
        )
        trainer.fit(module, datamodule=Numbered(batch_ramp=None), ckpt_path=start)
        found += module.batches
        trainer.save_checkpoint(start := tmp_path / f"{step}.ckpt")
    assert found == whole


def test_a_checkpoint_of_an_older_version_has_its_position_in_the_loader(tmp_path: Path) -> None:
    whole = fit_alone(20, callbacks=(SaveAt(tmp_path, (3, 8, 11)),), batch_ramp=None)
    for step in (3, 8, 11):
        checkpoint = torch.load(tmp_path / f"{step}.ckpt", weights_only=False)
        assert (
            checkpoint.pop("Numbered")
            == checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
        )
        if step == 8:  # they did not know that the epoch had ended
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"][0] |= {
                "epoch": 0,
                "samples": 96,
            }
        torch.save(checkpoint, tmp_path / "old.ckpt")
        assert fit_alone(20, tmp_path / "old.ckpt", batch_ramp=None) == whole[step:]


# Training

MODEL = {
    "config": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 101,
    }
}
ADAMW = {
    "name": "adamw",
    "lr": 3e-4,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "no_decay": [],
}
STEPS = len(SIZES)


class Double(CausalLM):
    """Without the parts of Llama that compute in float32."""

    def configure_model(self) -> None:
        super().configure_model()
        models.keep_double(self.model)


class Steps(Callback):
    """Keeps the loss and the tokens of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tokens: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(trainer.strategy.last_step.loss)
        self.tokens.append(trainer.strategy.last_step.tokens)


def train(
    layout: str,
    steps: int = STEPS,
    resume: str | None = None,
    save: str | None = None,
    at: int = 3,
    **more: Any,
) -> Any:
    """Train on this rank; saves a checkpoint after step `at`, and one after the last. Returns
    losses and tokens."""
    from lightning_3d.strategy import Lightning3DStrategy

    values, strategy = (
        Steps(),
        Lightning3DStrategy(layout, micro_batch_size=2, zero_stage=0, **more),
    )
    assert strategy.layout is not None
    keep = [SaveAt(Path(save), (at, steps))] if save is not None else []
    trainer = quiet_trainer(
        strategy=strategy,
        devices=strategy.layout.world_size,
        precision="64-true",
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[values, *keep],
    )
    trainer.fit(Double(MODEL, ADAMW), datamodule=Numbered(), ckpt_path=resume)
    if save is not None and steps < STEPS:
        trainer.save_checkpoint(Path(save) / "after.ckpt")
    return values.losses, values.tokens


def plain_losses() -> list[float]:
    """Losses of a plain loop on one process: batches of `SIZES` of the rows in their order without
    a ramp."""
    rows = list(itertools.chain.from_iterable(read(batch_ramp=None)))
    config = LlamaConfig(
        **{key: value for key, value in MODEL["config"].items() if key != "model_type"},
        use_cache=False,
    )
    with torch.device("meta"), default_dtype(torch.float64):
        module = nn.ModuleDict({"model": LlamaForCausalLM(config)})
    initialize(module, 0)
    models.keep_double(module)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8
    )
    losses, start = [], 0
    for size in SIZES:
        ids = torch.tensor(rows[start : start + size])[:, None].expand(size, LENGTH)
        start += size
        logits = module["model"](input_ids=ids).logits  # their own loss would be in float32
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_training_is_exact_and_resumes_bit_by_bit(tmp_path: Path) -> None:
    """On two pipeline ranks, the first batches have 2 micro-batches and the last ones 6; on two
    data-parallel ranks, 1 and 3."""
    expected = plain_losses()
    losses, tokens = run_ranks(train, 2, "pp2", save=str(tmp_path / "a"))[0]
    assert tokens == [size * (LENGTH - 1) for size in SIZES]
    assert losses == pytest.approx(expected, rel=1e-10)
    assert (
        run_ranks(train, 2, "pp2", resume=str(tmp_path / "a/3.ckpt"), save=str(tmp_path / "b"))[0][
            0
        ]
        == losses[3:]
    )
    assert_equal(all_tensors(tmp_path / "b/7.ckpt"), all_tensors(tmp_path / "a/7.ckpt"))
    other = run_ranks(train, 2, "dp2", resume=str(tmp_path / "a/3.ckpt"), save=str(tmp_path / "c"))[
        0
    ]
    assert other[0] == pytest.approx(expected[3:], rel=1e-10) and other[1] == tokens[3:]
    run_ranks(train, 2, "pp2", steps=3, at=9, save=str(tmp_path / "d"))
    again = run_ranks(train, 2, "dp2", resume=str(tmp_path / "d/after.ckpt"))[0]
    assert again == other, "saved after fit, in the middle of the epoch"
    final, whole = all_tensors(tmp_path / "c/7.ckpt"), all_tensors(tmp_path / "a/7.ckpt")
    for name, tensor in whole.items():
        torch.testing.assert_close(final[name], tensor, rtol=0, atol=1e-10)


# Before ranks are started

JOB = [
    "data=tokens",
    "data.train_path=x",
    "data.sequence_length=64",
    "data.global_batch_size=16",
    "trainer.dry=true",
]


@pytest.mark.slow
def test_a_ramp_is_checked_before_ranks_are_started() -> None:
    frozen, plan = check_shapes(
        [*JOB, "parallelism=pp2_dp2", "data.batch_ramp={from:8,step:8,tokens:1e4}"]
    )
    assert (plan.micro_batch_size, plan.micro_batches) == (
        2,
        4,
    ), "the largest micro-batch for all batches"
    assert plan.describe().endswith("batch ramp from 8 by 8 to 16 over 10000 tokens")
    assert frozen["data"]["batch_ramp"] == {"from": 8, "step": 8, "tokens": 10000.0}
    with pytest.raises(
        LayoutError,
        match=(
            r"batch of 4, .* Use data\.batch_ramp\.from=8 and data\.batch_ramp\.step=8, or use a"
            r" smaller"
        ),
    ):
        check_shapes(
            [
                *JOB,
                "parallelism=dp2",
                "parallelism.micro_batch_size=4",
                "data.batch_ramp={from:4,step:4,tokens:1e4}",
            ]
        )
    with pytest.raises(
        ConfigError, match=r"data\.batch_ramp must have the keys from, step and tokens"
    ):
        check_shapes([*JOB, "parallelism=dp2", "data.batch_ramp={start:4,step:4,tokens:1e4}"])


def test_a_blend_must_be_long_enough_for_the_rows_of_the_ramp() -> None:
    """60 rows in three levels: 5 steps of 4, 3 of 8, 2 of 12, and 10 of 16."""
    blend = [
        "data=blend",
        *JOB[2:],
        "parallelism=dp2",
        "trainer.max_steps=20",
        "trainer.val_check_interval=20",
    ]
    ramp = "data.batch_ramp={from:4,step:4,tokens:3840}"
    rows = 5 * 4 + 3 * 8 + 2 * 12 + 10 * 16
    check_shapes([*blend, ramp, f"data.sources={{web:{{train_path:x,tokens:{rows * 64}}}}}"])
    with pytest.raises(
        ConfigError,
        match=rf"the run takes {rows * 64} \(20 steps of 256 to 1024\)\. .* trainer\.max_steps=19",
    ):
        check_shapes(
            [*blend, ramp, f"data.sources={{web:{{train_path:x,tokens:{rows * 64 - 1}}}}}"]
        )
