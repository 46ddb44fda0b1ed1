"""Functions on ranks that use real GPUs. With more ranks than GPUs they share them, see `lightning_3d.selftest.workers`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import parity
from parity import ACCELERATOR, Cell, Part
from reference import reference

from lightning_3d.config.machine import visible_gpus
from lightning_3d.selftest.workers import Workers

_pools: dict[int, Workers] = {}


def run(fn: Callable[..., Any], ranks: int, *args: Any, seconds: float = 120.0, **kwargs: Any) -> list[Any]:
    """Results of ``fn(*args, **kwargs)`` on each rank. The ranks stay for the next call with as many."""
    os.environ[ACCELERATOR] = "gpu"
    if ranks not in _pools:
        close()
        _pools[ranks] = Workers(ranks, min(visible_gpus(), ranks))
    return _pools[ranks].call(partial(fn, *args, **kwargs), ranks, seconds)


def close() -> None:
    """End all ranks."""
    while _pools:
        _pools.popitem()[1].__exit__(None, None, None)


def train(cell: Cell, fit: Callable[..., Part] = parity.train_on_rank, **strategy: Any) -> list[Part]:
    """What each rank has after a run. Ranks that share a GPU are nodes of their own."""
    nodes = cell.world_size if cell.world_size > visible_gpus() else 1
    return run(fit, cell.world_size, cell.recipe, nodes=nodes, **parity.strategy_arguments(cell) | strategy)


def check(cell: Cell, **strategy: Any) -> None:
    """Compare losses, gradient norms and final weights with one process on the CPU, to the tolerances of `parity`."""
    expected, noise = reference(cell.recipe)
    parity.assert_same_run(train(cell, **strategy), expected, cell.dtype, noise)
