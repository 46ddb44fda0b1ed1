"""bf16 parameters with float32 master weights and sums of gradients, over many steps, against the same on one process."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from parity import train_on_rank
from ranks import run_ranks
from reference import STEPS, Recipe, Run, cut, data, initial_model, one_thread, split, target_count
from torch import nn

RECIPE = Recipe(dtype="bfloat16", steps=50 if STEPS > 4 else 20)  # in the long sweeps, by default
LAYOUTS = [
    pytest.param("dp4", {}, marks=pytest.mark.full),
    pytest.param("tp2_pp2_dp2", {"zero_stage": 1}, marks=pytest.mark.full),
    ("pp2_dp2", {"zero_stage": 2, "zero_reduce": "micro_batch", "schedule": "ZBVZeroBubble"}),
    pytest.param("tp2_dp2", {"zero_stage": 3}, marks=pytest.mark.full),
]


@one_thread()
def train_with_masters(recipe: Recipe = RECIPE, prepare: Callable[[nn.Module], None] | None = None) -> Run:
    """Mixed precision as Megatron's: gradients of each micro-batch are added in float32, AdamW steps float32 weights.

    Args:
        prepare: changes the model before it is trained.
    """
    model = initial_model(recipe)
    if prepare is not None:
        prepare(model)
    task = models.task(recipe.model)
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    rows, losses, norms = data(recipe), [], []
    for start in range(0, recipe.steps * recipe.global_batch, recipe.global_batch):
        batch = cut(rows, start, recipe.global_batch)
        whole, loss = target_count(recipe.model, batch), 0.0
        for micro_batch in split(batch, 4):
            part = task.token_losses(model, micro_batch).sum() / whole
            part.backward()
            loss += part.item()
            for parameter, master in masters.items():
                assert parameter.grad is not None and parameter.dtype == torch.bfloat16
                arrived = parameter.grad.float()
                master.grad = arrived if master.grad is None else master.grad + arrived
                parameter.grad = None
        losses.append(loss)
        norms.append(nn.utils.clip_grad_norm_(masters.values(), recipe.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    return Run(losses, norms, {})


@pytest.fixture(scope="module")
def expected() -> Run:
    return train_with_masters()


@pytest.mark.parametrize(("layout", "strategy"), LAYOUTS, ids=str)
def test_many_steps_stay_close(layout: str, strategy: dict[str, Any], expected: Run) -> None:
    degrees = [int(part[2:]) for part in layout.split("_")]
    ranks = torch.tensor(degrees).prod().item()
    parts = run_ranks(train_on_rank, ranks, RECIPE, layout=layout, micro_batch_size=2, **strategy, timeout=180)
    losses = parts[0].losses
    assert all(part.losses == losses for part in parts)
    errors = [(loss - true) / true for loss, true in zip(losses, expected.losses, strict=True)]
    assert max(map(abs, errors)) < 2e-2
    assert abs(sum(errors[-20:]) / 20) < 2e-3, "the losses drift apart"
    assert parts[0].grad_norms == pytest.approx(expected.grad_norms, rel=5e-2)
    assert losses[-1] < losses[0]
