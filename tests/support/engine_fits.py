"""Fits through ``lightning_3d.Engine``, in a loop without a Trainer, of the recipes of
``reference.py``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import models
import torch
from parity import PRECISIONS, Part
from reference import Recipe, cut, data, tuned
from torch import nn
from torch.optim import Optimizer


def make_model(recipe: Recipe) -> nn.Module:
    return tuned(models.build(recipe.model, recipe.layers), recipe)


def make_optimizer(recipe: Recipe, groups: list[dict[str, Any]]) -> Optimizer:
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)


def make_engine(recipe: Recipe, **options: Any) -> Any:
    import lightning_3d

    return lightning_3d.Engine(
        partial(make_model, recipe),
        optimizer=partial(make_optimizer, recipe),
        max_norm=recipe.clip,
        precision=PRECISIONS[recipe.dtype],
        seed=recipe.seed,
        **options,
    )


def batches_of(recipe: Recipe, step: int, engine: Any, accumulate: int = 1) -> list[models.Batch]:
    """What this rank reads of a global batch: every so many-th row, as a ``DistributedSampler``
    deals them."""
    dealt = engine.distributed_sampler_kwargs
    whole = cut(data(recipe), step * recipe.global_batch, recipe.global_batch)
    own = {key: value[dealt["rank"] :: dealt["num_replicas"]] for key, value in whole.items()}
    rows = recipe.global_batch // dealt["num_replicas"] // accumulate
    return [cut(own, place * rows, rows) for place in range(accumulate)]


def train_with_engine(
    recipe: Recipe,
    accumulate: int = 1,
    *,
    announced: bool | None = True,
    save: str | None = None,
    resume: str | None = None,
    change: Callable[[models.Batch, int], models.Batch] | None = None,
    **options: Any,
) -> Part:
    """Train on a rank, from the first step or that of the checkpoint `resume`.

    Args:
        accumulate: batches of an optimizer step.
        announced: the engine knows that number; False: every call says whether it is the last one;
            None: `optimizer_step` ends the step.
        save: checkpoint to write after the first step.
        change: replaces the batches of a step.
    """
    if announced:
        options["accumulate_grad_batches"] = accumulate
    losses, norms = [], []
    with make_engine(recipe, **options) as engine:
        if resume is not None:
            engine.load(resume)
        for step in range(engine.steps, recipe.steps):
            for place, batch in enumerate(batches_of(recipe, step, engine, accumulate)):
                batch = change(batch, step) if change is not None else batch
                engine.forward_backward(
                    batch,
                    models.task(recipe.model).step,
                    last=place == accumulate - 1 if announced is False else None,
                )
            numbers = engine.optimizer_step()
            losses.append(numbers.loss)
            norms.append(numbers.grad_norm)
            if save is not None and engine.steps == 1:
                engine.save(save)
        root, specs = engine._root, dict(engine._built.parts.specs)
    weights = {
        name: parameter.detach().cpu().clone() for name, parameter in root.named_parameters()
    }
    return Part(losses, norms, weights, specs)
