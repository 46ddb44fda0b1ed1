"""``check(cell)``: a layout on simulated GPUs computes what one process computes, and what the same
layout computes on gloo."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import reference
import simulated_ranks
from parity import Cell, Part
from reference import Noise, Recipe, Run

LATE = {"CUDASIM_DELAY": 0.05, "CUDASIM_HOST_DELAY": 1000}
"""A stream that nobody waits for is far behind, and the host sees no copy that it has not waited
for."""
GLOO = 1e-5
"""Largest relative difference from gloo of a loss or a gradient norm, where one process does not
compute the same."""


REFERENCES = "SIMULATED_REFERENCES"
"""Variable with a folder in which all processes of a session share what one process computes."""


@functools.cache
def one_process(recipe: Recipe) -> tuple[Run, Noise]:
    """The reference, in a process of its own: after a backward this one could not fork any more.
    Stored in `REFERENCES`, if that is set."""
    stored = Path(os.environ.get(REFERENCES, ""), hashlib.sha256(repr(recipe).encode()).hexdigest())
    if REFERENCES in os.environ and stored.exists():
        return pickle.loads(stored.read_bytes())
    [found] = simulated_ranks.run(reference.reference, 1, recipe, accelerator="cpu")
    if REFERENCES in os.environ:
        written = stored.with_suffix(f".{os.getpid()}")
        written.write_bytes(pickle.dumps(found))
        written.replace(stored)  # at once: another process may look for it
    return found


def train(
    cell: Cell,
    environment: dict[str, Any] | None = None,
    nodes: int = 1,
    accelerator: str = "gpu",
    fit: Callable[..., Part] = parity.train_on_rank,
    **strategy: Any,
) -> list[Part]:
    """What each rank has after a run."""
    arguments = parity.strategy_arguments(cell) | strategy
    place = {"environment": LATE | (environment or {}), "hosts": nodes, "accelerator": accelerator}
    return simulated_ranks.run(fit, cell.world_size, cell.recipe, nodes=nodes, **place, **arguments)


def check(
    cell: Cell, environment: dict[str, Any] | None = None, nodes: int = 1, **strategy: Any
) -> None:
    """Compare losses, gradient norms and final weights with one process, to the tolerances of
    `parity`: 1e-5 in float32."""
    expected, noise = one_process(cell.recipe)
    error, drift = parity.differences(train(cell, environment, nodes, **strategy), expected)
    assert drift == 0.0, f"ranks that hold the same shard differ by {drift:.1e}"
    assert error.within(parity.limits(cell.dtype, noise)), error


def check_like_gloo(cell: Cell, tolerance: float = GLOO, **strategy: Any) -> None:
    """Compare with the same layout on CPU ranks; for precisions in which the order of a sum
    shows."""
    found, expected = (
        train(cell, accelerator=accelerator, **strategy)[0] for accelerator in ("gpu", "cpu")
    )
    assert_close(found.losses + found.grad_norms, expected.losses + expected.grad_norms, tolerance)


def assert_close(found: list[float], expected: list[float], tolerance: float = GLOO) -> None:
    far = [
        (a, b) for a, b in zip(found, expected, strict=True) if not abs(a - b) <= tolerance * abs(b)
    ]
    assert not far, f"found and expected: {far}"
