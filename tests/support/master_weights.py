"""The reference for bf16: a loop on one process with float32 master weights and float32 sums of
gradients."""

from collections.abc import Callable

import models
import torch
from reference import STEPS, Recipe, Run, cut, data, initial_model, one_thread, split, target_count
from torch import nn

RECIPE = Recipe(dtype="bfloat16", steps=50 if STEPS > 4 else 20)  # in the long sweeps, by default


@one_thread()
def train_with_masters(
    recipe: Recipe = RECIPE, prepare: Callable[[nn.Module], None] | None = None
) -> Run:
    """Mixed precision as Megatron's: gradients of each micro-batch are added in float32, AdamW
    steps float32 weights.

    Args:
        prepare: changes the model before it is trained.
    """
    model = initial_model(recipe)
    if prepare is not None:
        prepare(model)
    task = models.task(recipe.model)
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    optimizer = torch.optim.AdamW(
        masters.values(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
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
