"""Functions on ranks that use real GPUs. With more ranks than GPUs they share them, see
`lightning_3d.app.verification.workers`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import parity
import pytest
import reference
from parity import ACCELERATOR, Cell, Part
from reference import Noise, Recipe, Run

from lightning_3d.app.config.machine import visible_gpus
from lightning_3d.app.verification.workers import Workers

_pools: dict[int, Workers] = {}
_SIZES = (4, 8)


def run(
    fn: Callable[..., Any], ranks: int, *args: Any, seconds: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Results of ``fn(*args, **kwargs)`` on each rank. The ranks stay for the next call."""
    os.environ[ACCELERATOR] = "gpu"
    size = _pool_size(ranks)
    if size not in _pools:
        _pools[size] = Workers(size, min(visible_gpus(), size))
    return _pools[size].call(partial(fn, *args, **kwargs), ranks, seconds)


def nodes(ranks: int) -> int:
    """As a Trainer counts them: ranks that share a GPU are nodes of their own."""
    return ranks if _pool_size(ranks) > visible_gpus() else 1


def _pool_size(ranks: int) -> int:
    return next(size for size in _SIZES if ranks <= size)


def close() -> None:
    """End all ranks."""
    while _pools:
        _pools.popitem()[1].__exit__(None, None, None)


def train(
    cell: Cell, fit: Callable[..., Part] = parity.train_on_rank, **strategy: Any
) -> list[Part]:
    """What each rank has after a run."""
    return run(
        fit,
        cell.world_size,
        cell.recipe,
        nodes=nodes(cell.world_size),
        **parity.strategy_arguments(cell) | strategy,
    )


@functools.cache
def one_process(recipe: Recipe) -> tuple[Run, Noise]:
    """The reference on a GPU: sines and cosines of positions are float32 there, too, and differ
    from a CPU's in the last bit."""
    [found] = run(_on_gpu, 1, recipe)
    return found


def _on_gpu(recipe: Recipe) -> tuple[Run, Noise]:
    model, data = reference.initial_model, reference.data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "initial_model", lambda recipe: model(recipe).cuda())
        patch.setattr(
            reference,
            "data",
            lambda recipe: {key: value.cuda() for key, value in data(recipe).items()},
        )
        found, noise = reference.reference(recipe)
    found.weights.update({name: value.cpu() for name, value in found.weights.items()})
    return found, noise


def check(cell: Cell, **strategy: Any) -> None:
    """Compare losses, gradient norms and final weights with a plain loop in one process, to the
    tolerances of `parity`."""
    expected, noise = one_process(cell.recipe)
    parity.assert_same_run(train(cell, **strategy), expected, cell.dtype, noise)
