"""Fits with PEFT's LoRA adapters on ranks, compared with the same PEFT model on one process."""

from dataclasses import replace
from typing import Any

import parity
import torch
from finetuned import MODES, Finetuned
from parity import Cell, Part, Rows, assert_same_run, fit_on_rank
from ranks import run_ranks
from reference import STEPS, Recipe, data, initial_model, train

QUERIES = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
EVERYWHERE = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def train_on_rank(recipe: Recipe, **strategy: Any) -> Part:
    model = initial_model(recipe) if recipe.adapted_in_memory else None
    return fit_on_rank(recipe, Rows(data(recipe)), Finetuned(recipe, model), **strategy)


def recipe_of(
    cell: Cell, lora: dict[str, Any], steps: int = STEPS, in_memory: bool = False
) -> Recipe:
    words = {key: tuple(value) if isinstance(value, list) else value for key, value in lora.items()}
    return replace(cell.recipe, lora=tuple(words.items()), steps=steps, adapted_in_memory=in_memory)


def check(
    lora: dict[str, Any],
    layout: str,
    schedule: str = "1F1B",
    mode: str = "zero0",
    model: str = "llama",
    *,
    dtype: str = "float32",
    steps: int = STEPS,
    in_memory: bool = False,
) -> None:
    """Losses, gradient norms, adapters as on one process; the frozen weights bit for bit those of
    the beginning."""
    degrees = {part[:2]: int(part[2:]) for part in layout.split("_")}
    stage, options = MODES[mode]
    cell = Cell(
        model,
        schedule=schedule,
        zero=stage,
        dtype=dtype,
        options=tuple(sorted(options.items())),
        **degrees,
    )
    recipe = recipe_of(cell, lora, steps, in_memory)
    before = {
        f"model.{name}": parameter for name, parameter in initial_model(recipe).named_parameters()
    }
    parts = run_ranks(
        train_on_rank, cell.world_size, recipe, **parity.strategy_arguments(cell), timeout=180
    )
    assert_same_run(parts, train(recipe), dtype)
    whole, _ = parity.assemble(parts)
    trained = {name for name, parameter in before.items() if parameter.requires_grad}
    assert trained and len(trained) < len(before)
    for name, parameter in before.items():
        assert torch.equal(whole[name], parameter) != (name in trained), name
