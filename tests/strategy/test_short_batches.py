"""Batches that are not all alike: other lengths, short last ones, padding, rows that the sampler
repeats."""

from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from parity import Module, Part, Rows, assert_same_run, fit_on_rank
from ranks import run_ranks
from reference import Recipe, cut, data, split, train_on
from sweeps import by_default
from torch import Tensor, nn
from uneven_batches import batches_of_all_lengths, train_batches, train_rows

LAYOUTS = [
    {"layout": "pp2_dp2"},
    {"layout": "tp2_dp2", "zero_stage": 1},
    {"layout": "pp2_dp2", "schedule": "Interleaved1F1B", "zero_stage": 1},
    {"layout": "pp2_dp2", "schedule": "DualPipeV"},
    {"layout": "dp4"},
    {"layout": "pp2_dp2", "zero_stage": 2, "zero_reduce": "micro_batch"},
    {"layout": "pp2_dp2", "zero_stage": 3, "zero_gather": "micro_batch"},
]
names = lambda strategy: "-".join(map(str, strategy.values()))  # noqa: E731
some_layouts = pytest.mark.parametrize("strategy", by_default(LAYOUTS, 1, 6), ids=names)
one_layout = pytest.mark.parametrize("strategy", by_default(LAYOUTS, 6), ids=names)


def padded(rows: models.Batch) -> models.Batch:
    """Right padding of 0 to 15 tokens, so that a row has 16 to 1 targets; every fifth row has none
    at all."""
    count, length = rows["input_ids"].shape
    kept = length - (7 * torch.arange(count)) % length
    real = torch.arange(length) < kept[:, None]
    targets = real & (torch.arange(count) % 5 != 0)[:, None]
    return {
        "input_ids": torch.where(real, rows["input_ids"], 0),
        "attention_mask": real.long(),
        "labels": torch.where(targets, rows["input_ids"], models.IGNORE),
    }


def degrees(strategy: dict) -> tuple[int, int]:
    """(data-parallel ranks, all ranks)"""
    from lightning_3d.layout import Layout

    layout = Layout.parse(strategy["layout"])
    return layout.dp, layout.world_size


@pytest.mark.slow
@some_layouts
def test_lengths_differ_from_step_to_step_and_between_data_ranks(strategy: dict) -> None:
    recipe = Recipe(steps=6)
    dp, world_size = degrees(strategy)
    batches = batches_of_all_lengths(recipe, 6 * dp)
    parts = run_ranks(train_batches, world_size, recipe, batches, micro_batch_size=1, **strategy)
    expected = train_on(
        recipe, [batches[start : start + dp] for start in range(0, len(batches), dp)]
    )
    assert_same_run(parts, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "extra"),
    by_default(
        [(strategy, extra) for strategy in LAYOUTS for extra in (1, 5, 10)], 0, 4, 7, 14, 18
    ),
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_short_last_batch_counts_each_row_once(strategy: dict, extra: int) -> None:
    """DistributedSampler repeats rows from the beginning to give all ranks as many: those weigh
    nothing."""
    recipe = Recipe(steps=10)
    rows = cut(data(recipe), 0, 2 * recipe.global_batch + extra)
    parts = run_ranks(
        train_rows, degrees(strategy)[1], recipe, rows, micro_batch_size=2, **strategy
    )
    expected = train_on(recipe, [split(batch, 2) for batch in split(rows, recipe.global_batch)])
    assert len(expected.losses) == 3
    assert_same_run(parts, expected)


@pytest.mark.slow
@one_layout
def test_tokens_weigh_equally_whatever_the_padding(strategy: dict) -> None:
    recipe = Recipe(steps=4)
    rows = padded(cut(data(recipe), 0, 4 * recipe.global_batch))
    parts = run_ranks(
        train_rows, degrees(strategy)[1], recipe, rows, micro_batch_size=1, **strategy
    )
    expected = train_on(recipe, [split(batch, 2) for batch in split(rows, recipe.global_batch)])
    assert_same_run(parts, expected)


def own_loss(model: nn.Module, batch: models.Batch) -> Tensor:
    """A loss from the logits, as users write it: the mean over this micro-batch's targets."""
    logits = model(batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=models.IGNORE
    )


class OwnLoss(Module):
    def training_step(self, batch: models.Batch, batch_idx: int) -> dict[str, Tensor]:
        assert self.model is not None
        return {"loss": own_loss(self.model, batch)}


def train_own_loss(recipe: Recipe, rows: models.Batch, **strategy: Any) -> Part:
    return fit_on_rank(recipe, Rows(rows), OwnLoss(recipe), **strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    by_default([{"layout": "tp2_pp2"}, {"layout": "pp2", "zero_stage": 1}], 0),
    ids=["tp2_pp2", "pp2"],
)
def test_a_loss_of_the_users_own_is_weighted_by_rows(strategy: dict) -> None:
    """Without data parallelism the micro-batches are the reference's; 13 rows become 13
    micro-batches of one."""
    recipe = Recipe(steps=4)
    rows = cut(data(recipe), 0, 2 * recipe.global_batch + 13)
    parts = run_ranks(
        train_own_loss,
        degrees(strategy)[1],
        recipe,
        rows,
        micro_batch_size=2,
        loss_reduction="mean",
        **strategy,
    )
    *full, last = split(rows, recipe.global_batch)
    expected = train_on(recipe, [*(split(batch, 2) for batch in full), split(last, 1)], own_loss)
    assert_same_run(parts, expected)


@pytest.mark.slow
def test_a_hand_written_model_with_short_batches() -> None:
    recipe = Recipe(models.PLAIN, steps=4)
    rows = cut(data(recipe), 0, recipe.global_batch + 7)
    strategy: dict[str, Any] = {
        "layout": "tp2_pp2_dp2",
        "plan": models.PlainModel.plan,
        "micro_batch_size": 2,
    }
    parts = run_ranks(train_rows, 8, recipe, rows, **strategy)
    assert_same_run(
        parts, train_on(recipe, [split(batch, 2) for batch in split(rows, recipe.global_batch)])
    )
