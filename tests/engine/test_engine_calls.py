"""The methods of ``Engine`` besides a plain fit: skipped steps, forwards, weights, and calls in a
wrong order."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from engine_fits import batches_of, make_engine, make_model, train_with_engine
from ranks import run_ranks
from reference import Recipe, cut, data, initial_model
from safetensors.torch import load_file
from torch import Tensor, nn

import lightning_3d
from lightning_3d.errors import CallOrderError, ConfigError, NonFiniteError

RECIPE = Recipe(steps=3)


def scaled_step(model: nn.Module, batch: models.Batch) -> Tensor:
    batch = dict(batch)
    scale = batch.pop("scale")
    return models.task("llama").step(model, batch) * scale.mean()


def fit_with_a_bad_batch(
    how: str, **options: Any
) -> tuple[list[float], list[bool], dict[str, Tensor]]:
    """Losses, which steps were skipped, and this rank's weights; the second step has a row whose
    loss is not a number."""
    losses, skipped = [], []
    with make_engine(RECIPE, nonfinite=how, **options) as engine:
        for step in range(RECIPE.steps):
            (batch,) = batches_of(RECIPE, step, engine)
            batch["scale"] = torch.ones(len(batch["labels"]))
            if step == 1 and engine.distributed_sampler_kwargs["rank"] == 0:
                batch["scale"][0] = math.nan
            engine.forward_backward(batch, scaled_step)
            numbers = engine.optimizer_step()
            losses.append(numbers.loss)
            skipped.append(numbers.skipped)
        weights = {
            name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()
        }
    return losses, skipped, weights


def fit_without_it(**options: Any) -> dict[str, Tensor]:
    with make_engine(RECIPE, **options) as engine:
        for step in (0, 2):
            engine.forward_backward(batches_of(RECIPE, step, engine)[0], models.task("llama").step)
            engine.optimizer_step()
        return {
            name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()
        }


@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_skipped_step_is_as_if_its_batch_had_been_left_out(zero_stage: int) -> None:
    options = {"layout": "pp2_dp2", "micro_batch_size": 4, "zero_stage": zero_stage}
    found = run_ranks(fit_with_a_bad_batch, 4, "skip", **options)
    expected = run_ranks(fit_without_it, 4, **options)
    for (losses, skipped, weights), others in zip(found, expected, strict=True):
        assert skipped == [False, True, False] and math.isnan(losses[1])
        assert all(torch.equal(weights[name], others[name]) for name in others)


def test_a_step_that_is_not_finite_stops_all_ranks() -> None:
    with pytest.raises(NonFiniteError):
        run_ranks(fit_with_a_bad_batch, 2, "stop", layout="pp2", micro_batch_size=4)


def forward_and_weights(recipe: Recipe, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    with make_engine(recipe, **options) as engine:
        batch = cut(data(recipe), 0, 4)
        logits = engine.forward(batch)["logits"]
        assert engine.model.training
        return logits, {name: tensor.clone() for name, tensor in engine.weights()}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen2", {"layout": "tp2_pp2", "zero_stage": 1}),
        pytest.param("qwen3_moe", {"layout": "tp2_dp2_ep4"}, marks=pytest.mark.slow),
        pytest.param("llama", {"layout": "dp2", "zero_stage": 3}, marks=pytest.mark.slow),
    ],
)
def test_forwards_and_weights_are_those_of_one_process(
    model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The weights are what `save_pretrained` writes."""
    recipe = Recipe(model)
    whole = initial_model(recipe).eval()
    with torch.no_grad():
        expected = whole(**cut(data(recipe), 0, 4)).logits
    whole.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    ranks = lightning_3d.Layout.parse(options["layout"]).world_size
    for logits, weights in run_ranks(
        forward_and_weights, ranks, recipe, micro_batch_size=2, **options
    ):
        assert torch.allclose(logits, expected, atol=1e-5)
        assert weights.keys() == written.keys()
        assert all(torch.equal(weights[name], value) for name, value in written.items())


def test_calls_in_a_wrong_order_are_refused() -> None:
    run_ranks(wrong_orders, 1)


def wrong_orders() -> None:
    step = models.task("llama").step
    with make_engine(RECIPE, accumulate_grad_batches=2, micro_batch_size=4) as engine:
        first, second = batches_of(RECIPE, 0, engine, 2)
        refused: Callable[..., Any] = partial(pytest.raises, CallOrderError)
        with refused(match="forward_backward"):
            engine.optimizer_step()
        engine.forward_backward(first, step)
        with refused(match="1 of 2"):
            engine.optimizer_step()
        for early in (
            partial(engine.load, "nowhere"),
            partial(engine.save, "nowhere"),
            partial(engine.forward, first),
            engine.weights,
        ):
            with refused(match="optimizer_step"):
                early()
        engine.forward_backward(second, step)
        with refused(match="optimizer_step"):
            engine.forward_backward(first, step)
        assert engine.optimizer_step().weight > 0 and engine.steps == 1


def test_an_error_drops_the_step_and_changed_gradients_are_measured() -> None:
    run_ranks(after_an_error, 1)


def after_an_error() -> None:
    step = models.task("llama").step
    with make_engine(RECIPE, accumulate_grad_batches=2, micro_batch_size=4) as engine:
        first, second = batches_of(RECIPE, 0, engine, 2)
        engine.forward_backward(first, step)
        with pytest.raises(ZeroDivisionError):
            engine.forward_backward(second, lambda model, batch: 1 / 0)
        with pytest.raises(CallOrderError):
            engine.optimizer_step()
        engine.forward_backward(first, step)
        engine.forward_backward(second, step)
        for parameter in engine.model.parameters():
            parameter.grad *= 100
        changed = engine.optimizer_step()
        assert changed.grad_norm > 20 * RECIPE.clip > 0
        engine.forward_backward(first, step)
        engine.forward_backward(second, step)
        assert engine.optimizer_step().weight == changed.weight


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    run_ranks(save_what_is_not_finite, 1, str(tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()


def save_what_is_not_finite(path: str) -> None:
    with make_engine(RECIPE) as engine:
        with torch.no_grad():
            next(engine.model.parameters()).fill_(math.nan)
        with pytest.raises(NonFiniteError):
            engine.save(path)


def test_what_is_wrong_in_the_arguments_is_one_message() -> None:
    run_ranks(wrong_arguments, 1)


def wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="zero_stage"):
        make_engine(RECIPE, zero_stge=1)
    with pytest.raises(ConfigError, match="trains nothing"):
        frozen = make_model(RECIPE).requires_grad_(False)
        lightning_3d.Engine(frozen, optimizer=torch.optim.SGD)
    engine = lightning_3d.Engine(make_model(RECIPE))
    with pytest.raises(CallOrderError, match="optimizer"):
        engine.forward_backward(cut(data(RECIPE), 0, 4))
    engine.close()


@pytest.mark.slow
def test_learning_rates_are_those_of_the_users_optimizer() -> None:
    """A schedule that halves the rate trains other weights, the same in every layout."""
    (one,) = run_ranks(scheduled, 1, micro_batch_size=4)
    two = run_ranks(scheduled, 2, layout="dp2", zero_stage=1, micro_batch_size=4)
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)
    constant = run_ranks(train_with_engine, 1, RECIPE, micro_batch_size=4)[0]
    assert abs(one[-1] - constant.losses[-1]) > 1e-4


def scheduled(**options: Any) -> list[float]:
    losses = []
    with make_engine(RECIPE, **options) as engine:
        schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.1**step)
        for step in range(RECIPE.steps):
            engine.forward_backward(batches_of(RECIPE, step, engine)[0], models.task("llama").step)
            losses.append(engine.optimizer_step().loss)
            schedule.step()
    return losses
