"""The order of samples depends on the seed and the global batch, never on the layout."""

import lightning.pytorch as pl
import pytest
import torch
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from torch import Tensor
from torch.utils.data import DataLoader

GLOBAL_BATCH, STEPS, EPOCHS = 8, 3, 2
LAYOUTS = ["tp1", "dp2", "dp4", "pp2_dp2", "tp2_dp2"]


class Numbered(Module):
    """Keeps the numbers of the rows that this rank was given in each step."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.append(batch.pop("number").tolist())


def seen_rows(layout: str, shuffle: bool) -> tuple[int, list[list[int]]]:
    """(data-parallel index, rows by step) of this rank over two epochs of a user's own DataLoader."""
    from lightning_3d.strategy import Lightning3DStrategy

    plan = Lightning3DStrategy(layout, micro_batch_size=1)
    assert plan.layout is not None
    pl.seed_everything(7, verbose=False)
    recipe = Recipe(layers=2, steps=STEPS, global_batch=GLOBAL_BATCH)
    rows = Rows(data(recipe) | {"number": torch.arange(STEPS * GLOBAL_BATCH)})
    module = Numbered(recipe)
    trainer = quiet_trainer(strategy=plan, devices=plan.layout.world_size, max_epochs=EPOCHS)
    trainer.fit(module, DataLoader(rows, batch_size=GLOBAL_BATCH // plan.layout.dp, shuffle=shuffle))
    assert plan.mesh is not None
    return plan.mesh.index("dp"), module.seen


def global_batches(layout: str, shuffle: bool) -> list[list[int]]:
    """The rows of every step, over all data-parallel ranks, sorted."""
    from lightning_3d.layout import Layout

    seen = run_ranks(seen_rows, Layout.parse(layout).world_size, layout, shuffle)
    by_rank = dict(seen)
    assert all(rows == by_rank[data_rank] for data_rank, rows in seen), "ranks of one replica read different rows"
    return [sorted(sum(parts, [])) for parts in zip(*by_rank.values(), strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loader_that_does_not_shuffle_keeps_its_order(layout: str) -> None:
    """As on one process: Lightning by itself shuffles the training data of every distributed strategy."""
    in_order = [list(range(start, start + GLOBAL_BATCH)) for start in range(0, STEPS * GLOBAL_BATCH, GLOBAL_BATCH)]
    assert global_batches(layout, shuffle=False) == in_order * EPOCHS


def test_shuffled_batches_are_the_same_in_every_layout() -> None:
    expected = global_batches("tp1", shuffle=True)
    assert expected[:STEPS] != expected[STEPS:]  # epochs differ
    assert sorted(sum(expected[:STEPS], [])) == list(range(STEPS * GLOBAL_BATCH))
    for layout in LAYOUTS[1:]:
        assert global_batches(layout, shuffle=True) == expected, layout
