"""Random numbers that samples draw are those of plain Lightning on one process; those that a step
draws are the same on all stages."""

import os
import random
from unittest.mock import PropertyMock, patch

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from parity import quiet_trainer
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

VOCABULARY, ROWS = 512, 16
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


class Augmented(Dataset[Tensor]):
    """Draws from every generator for each sample."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        drawn = (
            torch.randint(VOCABULARY, ()),
            numpy.random.randint(VOCABULARY),
            random.randrange(VOCABULARY),
        )
        return torch.tensor([index, *map(int, drawn)])


class Module(pl.LightningModule):
    """Keeps the samples of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
        self.seen: list[list[list[int]]] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch.tolist())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Drawing(Module):
    """Draws from every generator before and after the call of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[tuple[float, ...]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.before.append(drawn())
        loss = super().training_step(batch, batch_idx)
        drawn()
        return loss


def drawn() -> tuple[float, ...]:
    return float(torch.rand(())), float(numpy.random.rand()), random.random()


def fit(kind: type[Module], layout: str) -> Module:
    """Train for two epochs; plain Lightning without a layout."""
    pl.seed_everything(3, verbose=False)
    module = kind()
    strategy = Lightning3DStrategy(layout, self_check="never") if layout else "auto"
    devices = Layout.parse(layout).world_size if layout else 1
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2)
    trainer.fit(module, DataLoader(Augmented(), batch_size=8, shuffle=True))
    return module


def samples(layout: str) -> list[list[list[int]]]:
    return fit(Module, layout).seen


def test_workers_are_seeded_by_the_index_of_their_data() -> None:
    """Lightning itself seeds them by the global rank, after `seed_everything(workers=True)`, unless
    the loader has a function for it."""
    strategy = Lightning3DStrategy("tp2_dp2")
    loader = DataLoader(Augmented(), num_workers=1)
    data = {"num_replicas": 2, "rank": 1}
    with (
        patch.dict(os.environ, PL_SEED_WORKERS="1"),
        patch.object(
            Lightning3DStrategy, "distributed_sampler_kwargs", PropertyMock(return_value=data)
        ),
    ):
        strategy.process_dataloader(loader)
    inside = loader.worker_init_fn.args[1]  # type: ignore[union-attr]
    assert inside.func is pl_worker_init_function and inside.keywords == {"rank": 1}


@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        pytest.param("pp2", marks=pytest.mark.slow),
        pytest.param("cp2", marks=pytest.mark.slow),
    ],
)
def test_samples_are_those_of_one_process(layout: str) -> None:
    alone = run_ranks(samples, 1, "", process_group=False)[0]
    found = run_ranks(samples, Layout.parse(layout).world_size, layout, process_group=False)
    assert found == [alone] * len(found)


def numbers(
    layout: str,
) -> tuple[list[list[list[int]]], list[tuple[float, ...]], tuple[float, ...]]:
    """(samples, what the steps drew before they called the model, what a draw after the fit
    gives)."""
    module = fit(Drawing, layout)
    assert isinstance(module, Drawing)
    return module.seen, module.before, drawn()


def test_what_a_step_draws_is_the_same_on_all_stages() -> None:
    """The last stage draws more than the first, which must shift neither the next micro-batch nor
    the next samples."""
    first, last = run_ranks(numbers, 2, "pp2", process_group=False)
    assert first[0] == last[0] and first[2] == last[2]
    assert set(last[1]) <= set(first[1])  # the first stage runs the first micro-batch once more
    assert len(set(last[1])) == len(last[1]) > 4
