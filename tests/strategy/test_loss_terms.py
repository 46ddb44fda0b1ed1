"""Label smoothing and z-loss of the training loss: what the plain formula gives on one process, in
every layout."""

import lightning.pytorch as pl
import models
import parity
import pytest
import torch
import torch.nn.functional as F
from parity import Cell, Data, Module, Rows, check, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d.engine.step import LossWeights, TokenMeanLoss
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.options.loss import LossOptions
from lightning_3d.parallel.deferred_logits import deferred
from lightning_3d.parallel.tensor.loss import summed_losses
from lightning_3d.strategy import Lightning3DStrategy

BOTH = (("label_smoothing", 0.1), ("z_loss", 0.01))
CHUNKED = (*BOTH, ("loss_chunks", 3))
LAYOUTS = [
    Cell(tp=2, pp=2, dtype="float64", options=CHUNKED),
    Cell(cp=2, tp=2, dtype="float64", options=BOTH),
    Cell(pp=2, dp=2, schedule="ZBVZeroBubble", dtype="float64", options=(("z_loss", 0.01),)),
    Cell(tp=2, dp=2, zero=3, options=(("label_smoothing", 0.1),)),
    Cell(dp=2, zero=1, options=CHUNKED),
    Cell("gemma3", tp=2, dp=2, dtype="float64", options=CHUNKED),
    Cell(cp=2, dtype="float64", options=(*BOTH, ("cp_kind", "ulysses"))),
]


@pytest.mark.slow
@pytest.mark.parametrize("cell", by_default(LAYOUTS, 0, 1), ids=lambda cell: cell.name)
def test_layouts_train_as_one_process_does(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(("smoothing", "z"), [(0.1, 0.0), (0.0, 0.01), (0.2, 0.02)])
def test_the_loss_of_whole_logits_and_its_gradients_are_those_of_the_formula(
    smoothing: float, z: float, chunks: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 6, dtype=torch.float64, generator=generator, requires_grad=True)
        for n in (9, 11)
    )
    labels = torch.randint(11, (9,), generator=generator)
    expected = models.terms_of_loss(F.linear(hidden, weight), labels, smoothing, z)[2:].sum()
    labels[:2] = -100
    found = summed_losses(
        deferred(hidden, weight, None, chunks),
        labels,
        terms=LossOptions(label_smoothing=smoothing, z_loss=z),
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    for got, wanted in zip(
        *(torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected)), strict=True
    ):
        assert (got - wanted).abs().max() < 1e-13


def test_evaluation_computes_the_cross_entropy_alone() -> None:
    torch.manual_seed(0)  # of random logits, some have a lower loss when it is smoothed
    logits, labels = torch.randn(2, 5, 11, dtype=torch.float64), torch.randint(11, (2, 5))
    loss = TokenMeanLoss(LossWeights(LossOptions(label_smoothing=0.1, z_loss=0.01)))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()
    with torch.no_grad():
        assert loss(logits, labels, 11).item() == pytest.approx(expected, rel=1e-13)
    assert loss(logits, labels, 11).item() > expected * 1.01


class WithGradients(Module):
    """Turns gradients on in validation, as for the sensitivity of an output, and computes the same
    rows again in plain PyTorch."""

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        with torch.enable_grad():
            loss = self.model(**batch).loss
            plain = models.causal_token_losses(self.model, batch).mean()
        self.log_dict({"found": loss, "expected": plain})


def validated() -> tuple[float, float]:
    recipe = Recipe()
    trainer = quiet_trainer(
        strategy=Lightning3DStrategy("dp1", label_smoothing=0.1, z_loss=0.01), devices=1
    )
    [numbers] = trainer.validate(
        WithGradients(recipe), DataLoader(Rows(data(recipe)), batch_size=4), verbose=False
    )
    return numbers["found"], numbers["expected"]


def test_evaluation_with_gradients_computes_the_cross_entropy_alone() -> None:
    [(found, expected)] = run_ranks(validated, 1)
    assert found == pytest.approx(expected, rel=1e-6)


class OwnLoss(Module):
    """Computes the loss in the step."""

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        return models.causal_token_losses(self.model, batch).mean()


def refused(kind: type[pl.LightningModule], recipe: Recipe, **options: float) -> str:
    arguments = parity.strategy_arguments(Cell(recipe.model, dp=2))
    trainer = quiet_trainer(
        strategy=Lightning3DStrategy(**arguments, **options), devices=2, max_steps=1
    )
    with pytest.raises(PlanError) as error:
        trainer.fit(kind(recipe), datamodule=Data(Rows(data(recipe)), 4))
    return str(error.value)


def test_terms_without_effect_are_refused() -> None:
    for message in run_ranks(refused, 2, OwnLoss, Recipe(), label_smoothing=0.1, z_loss=0.01):
        assert (
            message.startswith(
                "label_smoothing=0.1 and z_loss=0.01 have no effect on the loss of this step"
            )
            and "labels=" in message
        )
    for message in run_ranks(refused, 2, Module, Recipe(models.PLAIN), z_loss=0.01):
        assert (
            message.startswith("z_loss=0.01 has no effect: ")
            and "add the term to the loss of your step" in message
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"label_smoothing": 1.0},
            "label_smoothing must be at least 0 and less than 1, for example 0.1; got 1.",
        ),
        ({"label_smoothing": -0.1}, "label_smoothing must be a finite number of at least 0"),
        ({"z_loss": float("nan")}, "z_loss must be a finite number of at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Lightning3DStrategy("dp1", **options)
    assert words in str(error.value)
