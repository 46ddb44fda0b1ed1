"""Validation, test and prediction under pipeline and tensor parallelism see what one process
sees."""

import os
import socket
from typing import Any

import models
import pytest
import torch
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, cut, data, initial_model, target_count
from sweeps import by_default
from torch import Tensor
from torch.utils.data import DataLoader

LAYOUTS = [
    {"layout": "pp2"},
    {"layout": "tp2_pp2", "micro_batch_size": 2},
    {"layout": "pp4", "micro_batch_size": 1},
    {"layout": "pp2_dp2", "schedule": "Interleaved1F1B", "micro_batch_size": 2},
    {"layout": "pp2_dp2", "schedule": "ZBVZeroBubble", "micro_batch_size": 1},
    {"layout": "tp2_dp2"},
    {"layout": "pp2_dp2", "zero_stage": 3, "micro_batch_size": 1},
]
every_layout = pytest.mark.parametrize(
    "strategy", LAYOUTS, ids=lambda strategy: "-".join(map(str, strategy.values()))
)
ROWS, BATCH = 13, 4  # the last batches are short, and with two data ranks one row is repeated
TOLERANCE = 1e-5


class Evaluated(Module):
    """Logs its loss; predicts logits and, beside them, which rows they belong to."""

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        assert self.model is not None
        self.log("val_loss", self.model(**batch).loss)

    def test_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        assert self.model is not None
        out = self.model(**batch)
        self.log("test_loss", out.loss)
        self.log("largest_logit", out.logits.max(), reduce_fx="max")
        return out.loss

    def predict_step(self, batch: models.Batch, batch_idx: int) -> dict[str, Tensor]:
        assert self.model is not None
        return {
            "logits": self.model(input_ids=batch["input_ids"]).logits,
            "ids": batch["input_ids"],
        }


def evaluation_rows(recipe: Recipe) -> models.Batch:
    return cut(data(recipe), 0, ROWS)


def evaluate(recipe: Recipe, **strategy: Any) -> tuple[Any, Any, Any]:
    """What ``validate``, ``test`` and ``predict`` return on this rank, before any training."""
    from lightning_3d.strategy import Lightning3DStrategy

    plan = Lightning3DStrategy(**strategy)
    assert plan.layout is not None
    trainer = quiet_trainer(strategy=plan, devices=plan.layout.world_size)
    module = Evaluated(recipe)
    loader = DataLoader(Rows(evaluation_rows(recipe)), batch_size=BATCH)
    validated = trainer.validate(module, loader, verbose=False)
    tested = trainer.test(module, loader, verbose=False)
    predicted = trainer.predict(module, loader)
    return validated, tested, predicted


def whole_outputs(recipe: Recipe) -> tuple[float, Tensor]:
    """(mean loss over all target tokens, logits) on one process."""
    model, rows = initial_model(recipe), evaluation_rows(recipe)
    with torch.no_grad():
        loss = models.causal_token_losses(model, rows).mean().item()
        return loss, model(input_ids=rows["input_ids"]).logits


@pytest.mark.slow
@every_layout
@pytest.mark.parametrize("model", by_default(["llama", "gemma3"], 1))
def test_evaluation_equals_one_process(model: str, strategy: dict) -> None:
    recipe = Recipe(model)
    loss, logits = whole_outputs(recipe)
    ids = evaluation_rows(recipe)["input_ids"]
    world_size = _world_size(strategy)
    for validated, tested, predicted in run_ranks(evaluate, world_size, recipe, **strategy):
        assert validated[0]["val_loss"] == pytest.approx(loss, rel=TOLERANCE)
        assert tested[0]["test_loss"] == pytest.approx(loss, rel=TOLERANCE)
        assert tested[0]["largest_logit"] == pytest.approx(logits.max().item(), rel=TOLERANCE)
        for batch in predicted:
            rows = [int((ids == row).all(1).nonzero()[0]) for row in batch["ids"]]
            assert batch["logits"].shape[0] == len(rows)
            torch.testing.assert_close(batch["logits"], logits[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    by_default(LAYOUTS, 1, 6),
    ids=lambda strategy: "-".join(map(str, strategy.values())),
)
def test_prediction_covers_every_row_once(strategy: dict) -> None:
    recipe = Recipe()
    found = run_ranks(predicted_ids, _world_size(strategy), recipe, **strategy)
    by_data_rank = dict(found)
    assert all(torch.equal(ids, by_data_rank[data_rank]) for data_rank, ids in found)
    together = torch.cat(list(by_data_rank.values()))
    expected = evaluation_rows(recipe)["input_ids"]
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, expected.tolist()))


def predicted_ids(recipe: Recipe, **strategy: Any) -> tuple[int, Tensor]:
    from lightning_3d.strategy import Lightning3DStrategy

    plan = Lightning3DStrategy(**strategy)
    assert plan.layout is not None
    trainer = quiet_trainer(strategy=plan, devices=plan.layout.world_size)
    batches: Any = trainer.predict(
        Evaluated(recipe), DataLoader(Rows(evaluation_rows(recipe)), batch_size=BATCH)
    )
    assert batches is not None and plan.mesh is not None
    return plan.mesh.index("dp"), torch.cat([batch["ids"] for batch in batches])


@pytest.mark.slow
def test_one_trainer_trains_and_evaluates_in_turn() -> None:
    """Without torchrun's agent, as under Lightning's own launcher: every entry point connects the
    ranks anew."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, *others = run_ranks(losses_in_turn, 4, port)
    assert all(losses == first for losses in others)
    assert first[0] > first[1] == first[2]  # before training, after it, and again


def losses_in_turn(port: int) -> list[float]:
    from lightning_3d.strategy import Lightning3DStrategy

    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ["MASTER_PORT"] = str(port)
    recipe = Recipe(steps=4)
    module = Evaluated(recipe)
    trainer = quiet_trainer(strategy=Lightning3DStrategy("tp2_pp2"), devices=4, max_epochs=1)
    rows = DataLoader(Rows(data(recipe)), batch_size=16)
    before = trainer.test(module, rows, verbose=False)
    trainer.fit(module, rows)
    after = [trainer.test(module, rows, verbose=False) for _ in range(2)]
    return [tested[0]["test_loss"] for tested in (before, *after)]


def test_the_epoch_mean_weighs_tokens_not_batches() -> None:
    """13 rows in batches of 4: the last batch of one row must not count as much as a full one."""
    recipe = Recipe()
    rows = evaluation_rows(recipe)
    loss, _ = whole_outputs(recipe)
    batches = [cut(rows, start, BATCH) for start in range(0, ROWS, BATCH)]
    model = initial_model(recipe)
    with torch.no_grad():
        means = [models.causal_token_losses(model, batch).mean().item() for batch in batches]
    counts = [target_count(recipe.model, batch) for batch in batches]
    unweighted = sum(means) / len(means)
    weighted = sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
    assert weighted == pytest.approx(loss, rel=1e-6)
    assert abs(unweighted - loss) > 10 * TOLERANCE * loss  # the tests above can tell the two apart


def _world_size(strategy: dict) -> int:
    from lightning_3d.layout import Layout

    return Layout.parse(strategy["layout"]).world_size
