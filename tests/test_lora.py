"""PEFT's LoRA adapters on sharded layers equal the same PEFT model on one process."""

from dataclasses import replace
from typing import Any

import models
import parity
import pytest
import torch
from parity import Cell, Part, Rows, assert_same_run, fit_on_rank
from ranks import run_ranks
from reference import Recipe, data, initial_model, train
from test_finetuning import MODES, Finetuned

pytest.importorskip("peft")

QUERIES = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
EVERYWHERE = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def train_on_rank(recipe: Recipe, *, eager: bool = False, **strategy: Any) -> Part:
    return fit_on_rank(recipe, Rows(data(recipe)), Finetuned(recipe, initial_model(recipe) if eager else None), **strategy)


def recipe_of(cell: Cell, lora: dict[str, Any], steps: int = 20) -> Recipe:
    words = {key: tuple(value) if isinstance(value, list) else value for key, value in lora.items()}
    return replace(cell.recipe, lora=tuple(words.items()), steps=steps)


def check(
    lora: dict[str, Any],
    layout: str,
    schedule: str = "1F1B",
    mode: str = "zero0",
    model: str = "llama",
    *,
    dtype: str = "float32",
    steps: int = 20,
    eager: bool = False,
) -> None:
    """Losses, gradient norms, adapters as on one process; the frozen weights bit for bit those of the beginning."""
    degrees = {part[:2]: int(part[2:]) for part in layout.split("_")}
    stage, options = MODES[mode]
    cell = Cell(model, schedule=schedule, zero=stage, dtype=dtype, options=tuple(sorted(options.items())), **degrees)
    recipe = recipe_of(cell, lora, steps)
    before = {f"model.{name}": parameter for name, parameter in initial_model(recipe).named_parameters()}
    parts = run_ranks(train_on_rank, cell.world_size, recipe, eager=eager, **parity.strategy_arguments(cell), timeout=180)
    assert_same_run(parts, train(recipe), dtype)
    whole, _ = parity.assemble(parts)
    trained = {name for name, parameter in before.items() if parameter.requires_grad}
    assert trained and len(trained) < len(before)
    for name, parameter in before.items():
        assert torch.equal(whole[name], parameter) != (name in trained), name


CHOSEN = [
    (QUERIES, "tp2", "1F1B", "zero0", "llama"),
    (QUERIES, "pp2", "1F1B", "zero0", "llama"),
    (EVERYWHERE, "tp2_pp2_dp2", "1F1B", "zero0", "llama"),
    (EVERYWHERE, "tp2_pp2_dp2", "1F1B", "zero1", "llama"),
    (EVERYWHERE, "tp2_pp2_dp2", "1F1B", "zero2 eager", "llama"),
    (EVERYWHERE, "tp2_pp2_dp2", "1F1B", "zero3 by block, eager", "llama"),
]


def names(values: Any) -> str | None:
    return "all-linear" if values is EVERYWHERE else "queries" if values is QUERIES else None


@pytest.mark.parametrize(("lora", "layout", "schedule", "mode", "model"), CHOSEN, ids=names)
def test_layouts(lora: dict[str, Any], layout: str, schedule: str, mode: str, model: str) -> None:
    check(lora, layout, schedule, mode, model)
