"""The order of samples depends on the seed and the global batch, never on the layout."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity import Module, Rows, micro_batch_rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data, initial_model
from sweeps import by_default
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

from lightning_3d.errors import DataError
from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

GLOBAL_BATCH, STEPS, EPOCHS = 8, 3, 2
LAYOUTS = ["tp1", "dp2", "dp4", "pp2_dp2", "tp2_dp2"]


class Numbered(Module):
    """Keeps the numbers of the rows that this rank was given in each step."""

    def __init__(self, recipe: Recipe, model: nn.Module | None = None) -> None:
        super().__init__(recipe, model)
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.append(batch.pop("number").tolist())


def seen_rows(layout: str, shuffle: bool, **options: Any) -> tuple[int, list[list[int]]]:
    """(data-parallel index, rows by step) of this rank over two epochs of a user's own
    DataLoader."""
    from lightning_3d.strategy import Lightning3DStrategy

    size = Layout.parse(layout)
    plan = Lightning3DStrategy(
        layout, micro_batch_size=micro_batch_rows(size.dp, size.pp, GLOBAL_BATCH)
    )
    assert plan.layout is not None
    pl.seed_everything(7, verbose=False)
    recipe = Recipe(layers=2, steps=STEPS, global_batch=GLOBAL_BATCH)
    rows = Rows(data(recipe) | {"number": torch.arange(STEPS * GLOBAL_BATCH)})
    module = Numbered(recipe)
    trainer = quiet_trainer(
        strategy=plan, devices=plan.layout.world_size, max_epochs=EPOCHS, **options
    )
    trainer.fit(
        module, DataLoader(rows, batch_size=GLOBAL_BATCH // plan.layout.dp, shuffle=shuffle)
    )
    assert plan.mesh is not None
    return plan.mesh.index("dp"), module.seen


def global_batches(layout: str, shuffle: bool, **options: Any) -> list[list[int]]:
    """The rows of every step, over all data-parallel ranks, sorted."""
    seen = run_ranks(seen_rows, Layout.parse(layout).world_size, layout, shuffle, **options)
    by_rank = dict(seen)
    assert all(rows == by_rank[data_rank] for data_rank, rows in seen), (
        "ranks of one replica read different rows"
    )
    return [sorted(sum(parts, [])) for parts in zip(*by_rank.values(), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(LAYOUTS, 3))
def test_a_loader_that_does_not_shuffle_keeps_its_order(layout: str) -> None:
    """As on one process: Lightning by itself shuffles the training data of every distributed
    strategy."""
    in_order = [
        list(range(start, start + GLOBAL_BATCH))
        for start in range(0, STEPS * GLOBAL_BATCH, GLOBAL_BATCH)
    ]
    assert global_batches(layout, shuffle=False) == in_order * EPOCHS


@pytest.mark.slow
def test_overfit_batches_are_the_same_rows_in_every_epoch() -> None:
    """Lightning replaces the sampler: each data-parallel rank must still read rows of its own."""
    in_order = [list(range(start, start + GLOBAL_BATCH)) for start in (0, GLOBAL_BATCH)]
    assert global_batches("dp2", shuffle=True, overfit_batches=2) == in_order * EPOCHS


@pytest.fixture(scope="module")
def shuffled() -> list[list[int]]:
    """The batches of one rank."""
    return global_batches("tp1", shuffle=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(LAYOUTS[1:], 1, 2))
def test_shuffled_batches_are_the_same_in_every_layout(
    layout: str, shuffled: list[list[int]]
) -> None:
    assert global_batches(layout, shuffle=True) == shuffled


def test_every_epoch_is_shuffled_by_itself(shuffled: list[list[int]]) -> None:
    assert shuffled[:STEPS] != shuffled[STEPS:]
    assert sorted(sum(shuffled[:STEPS], [])) == list(range(STEPS * GLOBAL_BATCH))


def shuffled_rows(layout: str, family: str) -> list[list[int]]:
    """What a model in memory reads: on one process in a plain Trainer, without a layout."""
    strategy = (
        {"strategy": Lightning3DStrategy(layout), "devices": Layout.parse(layout).world_size}
        if layout
        else {"devices": 1}
    )
    pl.seed_everything(7, verbose=False)
    recipe = Recipe(family, layers=2, steps=2, global_batch=GLOBAL_BATCH)
    module = Numbered(recipe, initial_model(recipe))
    rows = Rows(data(recipe) | {"number": torch.arange(2 * GLOBAL_BATCH)})
    quiet_trainer(max_epochs=1, **strategy).fit(
        module, DataLoader(rows, batch_size=GLOBAL_BATCH, shuffle=True)
    )
    return module.seen


@pytest.mark.parametrize(
    ("family", "layout"),
    by_default([("llama", "tp2_pp2"), ("mixtral", "tp2"), ("mixtral", "tp2_ep2")], 0, 2),
)
def test_how_layers_can_be_sharded_is_tried_without_a_draw_from_the_generator_of_the_order(
    family: str, layout: str
) -> None:
    alone = run_ranks(shuffled_rows, 1, "", family)[0]
    assert sorted(sum(alone, [])) == list(range(2 * GLOBAL_BATCH)) != sum(alone, [])
    assert (
        run_ranks(shuffled_rows, Layout.parse(layout).world_size, layout, family)
        == [alone] * Layout.parse(layout).world_size
    )


# The order of one process: a script's module in a plain Trainer, and in this strategy.

SAMPLES = 23


class Numbers(Dataset):
    """The numbers of the samples. `noisy`: each draws as many random numbers as it says, so that
    data ranks draw unequally many."""

    def __init__(self, noisy: bool) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if self.noisy:
            torch.rand(index)
        return torch.tensor([float(index)])


class Script(pl.LightningModule):
    """A model that is made at once, as in a script, and so draws from the generator that loaders
    shuffle by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append([int(number) for number in batch.flatten()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Its loader draws too."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


def loader(kind: str, rows: int, plan: Any) -> DataLoader:
    """A training loader of `rows` rows a batch and rank."""
    data = Numbers(noisy=kind == "noisy")
    if kind == "own generator":
        return DataLoader(data, rows, shuffle=True, generator=torch.Generator().manual_seed(5))
    if kind == "weighted":
        return DataLoader(
            data, rows, sampler=WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], 19)
        )
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=Batches(RandomSampler(data), rows, False))
    if kind == "distributed":
        return DataLoader(
            data, rows, sampler=DistributedSampler(data, **plan.distributed_sampler_kwargs, seed=7)
        )
    return DataLoader(data, rows, shuffle=True, drop_last=kind == "drop_last")


class Batches(BatchSampler):
    """A batch sampler of one's own."""


class SaveInTheMiddle(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == STEPS + 2:
            trainer.save_checkpoint(f"{self.folder}/middle")


def seen_in_script(
    kind: str, dp: int, folder: str = "", resume: bool = False, steps: int = -1
) -> list[list[int]]:
    """The rows by step of this rank; `dp` 0 is plain Lightning. With `steps`, the fit ends after so
    many, and is saved then."""
    from lightning_3d.strategy import Lightning3DStrategy

    pl.seed_everything(7, verbose=False)
    module, plan = Script(), Lightning3DStrategy(f"dp{dp}") if dp else None
    options: dict[str, Any] = {"strategy": plan, "devices": dp} if plan else {"devices": 1}
    validation = DataLoader(Numbers(noisy=False), 5, shuffle=True)
    callbacks = [SaveInTheMiddle(folder)] if folder and not resume and steps < 0 else []
    trainer = quiet_trainer(
        max_epochs=3, max_steps=steps, callbacks=callbacks, limit_val_batches=2, **options
    )

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return loader(kind, GLOBAL_BATCH // max(dp, 1), plan)

        def val_dataloader(self) -> DataLoader:
            return validation

    trainer.fit(module, datamodule=Data(), ckpt_path=f"{folder}/middle" if resume else None)
    if steps > 0:
        trainer.save_checkpoint(f"{folder}/middle")
    return module.seen


def together(parts: list[list[list[int]]]) -> list[set[int]]:
    """Global batches from those of the ranks; repeated rows are in the first or the last batch of
    an epoch anyway."""
    return [set(sum(rows, [])) for rows in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    "kind",
    by_default(["shuffle", "drop_last", "own generator", "weighted", "batch sampler"], 0, 3, 4),
)
def test_shuffled_batches_are_those_of_one_process(kind: str) -> None:
    (alone,) = run_ranks(seen_in_script, 1, kind, 0, process_group=False)
    epoch = len(alone) // 3
    assert (
        len(alone) == 3 * (2 if kind == "drop_last" else 3)
        and alone[:epoch] != alone[epoch : 2 * epoch]
    )
    for dp in (1, 2, 4) if kind == "shuffle" else (2,):
        found = together(run_ranks(seen_in_script, dp, kind, dp, process_group=False))
        for batch, (rows, expected) in enumerate(zip(found, alone, strict=True)):
            # To give all ranks as many, the last batch of an epoch also holds rows from its
            # beginning, which weigh nothing.
            first = set(alone[batch // epoch * epoch])
            assert rows == set(expected) or (
                batch % epoch == epoch - 1 and set(expected) < rows <= set(expected) | first
            ), (dp, batch)


def test_ranks_that_draw_unequally_read_every_sample_once() -> None:
    found = together(run_ranks(seen_in_script, 2, "noisy", 2, process_group=False))
    for epoch in range(3):
        assert set.union(*found[3 * epoch : 3 * epoch + 3]) == set(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["noisy", "own generator", "weighted"])
def test_a_resumed_epoch_keeps_its_order_on_another_number_of_ranks(
    kind: str, tmp_path: Path
) -> None:
    whole = together(run_ranks(seen_in_script, 2, kind, 2, str(tmp_path), process_group=False))
    same = together(run_ranks(seen_in_script, 2, kind, 2, str(tmp_path), True, process_group=False))
    assert same == whole[STEPS + 2 :]
    other = together(
        run_ranks(seen_in_script, 1, kind, 1, str(tmp_path), True, process_group=False)
    )
    assert other[0] <= same[0] and len(other) == len(same)
    if kind == "own generator":
        assert all(rows <= expected for rows, expected in zip(other, same, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("steps", by_default([2, 3, 5, 6], 0, 1))
def test_a_fit_that_max_steps_ended_goes_on_at_the_next_rows(steps: int, tmp_path: Path) -> None:
    whole = run_ranks(seen_in_script, 2, "shuffle", 2, process_group=False)
    begin = run_ranks(
        seen_in_script, 2, "shuffle", 2, str(tmp_path), False, steps, process_group=False
    )
    rest = run_ranks(seen_in_script, 2, "shuffle", 2, str(tmp_path), True, process_group=False)
    assert [len(rows) for rows in begin] == [steps, steps]
    assert [first + second for first, second in zip(begin, rest, strict=True)] == whole


def resume_without_order(folder: str) -> tuple[list[list[int]], list[str]]:
    """Resume a checkpoint as it was before orders were saved."""
    import warnings

    from lightning_3d.checkpoint import ORDERS, CheckpointStore

    load = CheckpointStore.load
    CheckpointStore.load = lambda *args: {
        key: value for key, value in load(*args).items() if key != ORDERS
    }  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = seen_in_script("shuffle", 2, folder, True)
    finally:
        CheckpointStore.load = load  # type: ignore[method-assign]
    return seen, [str(warning.message) for warning in caught]


def test_a_checkpoint_from_before_orders_were_saved_goes_on_in_the_order_that_it_had(
    tmp_path: Path,
) -> None:
    """That of Lightning's DistributedSampler, which this strategy's loaders had: no row is read
    twice."""
    whole = together(
        run_ranks(seen_in_script, 2, "distributed", 2, str(tmp_path), process_group=False)
    )
    parts = run_ranks(resume_without_order, 2, str(tmp_path), process_group=False)
    found = together([seen for seen, _ in parts])
    assert found[0] == whole[STEPS + 2]
    assert set.union(*found[1:4]) == set(range(SAMPLES)) and found[1:4] != whole[2 * STEPS :]
    assert any("does not contain the random state" in warning for warning in parts[0][1])


class OfItsRank(RandomSampler):
    """A mistake: every rank draws its own order."""

    def __iter__(self) -> Any:
        import torch.distributed as dist

        yield from torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(dist.get_rank())
        ).tolist()


def orders_that_differ() -> None:
    from lightning_3d.strategy import Lightning3DStrategy

    trainer = quiet_trainer(strategy=Lightning3DStrategy("dp2"), devices=2, max_epochs=1)
    data = Numbers(noisy=False)
    trainer.fit(Script(), DataLoader(data, 4, sampler=OfItsRank(data)))


def test_ranks_whose_orders_differ_are_refused() -> None:
    with pytest.raises(
        DataError, match="OfItsRank orders the samples differently on different ranks"
    ):
        run_ranks(orders_that_differ, 2, process_group=False)
