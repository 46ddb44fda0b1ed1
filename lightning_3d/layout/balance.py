"""Split layers into pipeline stages by cost. Pure Python, used by the pipeline and the planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf

from lightning_3d.errors import LayoutError

Cost = tuple[float, float]
"""FLOPs and parameters, in the same units for all layers."""

Choice = tuple[float, tuple[range, ...]]
"""A combined cost, and the layers of each stage of the split that has it."""


def split_layers(
    flops: Sequence[float],
    params: Sequence[float],
    stages: int,
    *,
    first_extra: Cost = (0.0, 0.0),
    last_extra: Cost = (0.0, 0.0),
) -> list[range]:
    """Assign consecutive layers to stages, at least one to each.

    The slowest stage sets the pace of a pipeline, so this minimizes, in this order: the largest FLOPs of a stage; the largest
    parameters of a stage (memory); the sum of squared FLOPs (evenness). Among equal splits later stages get more layers, because
    they keep the activations of fewer micro-batches.

    Args:
        flops: FLOPs of each layer.
        params: parameters of each layer.
        stages: number of stages.
        first_extra: (FLOPs, parameters) of what runs before the layers (embedding), counted in the first stage.
        last_extra: (FLOPs, parameters) of what runs after them (norm, head), counted in the last stage.

    Returns:
        One range of layer indices for each stage.

    Raises:
        LayoutError: fewer layers than stages.
    """
    if len(flops) != len(params):
        raise ValueError(f"flops and params must each have one entry per layer; got {len(flops)} and {len(params)} entries.")
    if stages < 1 or len(flops) < stages:
        raise LayoutError(
            f"{len(flops)} layers cannot be assigned to {stages} pipeline stages: each stage needs at least one layer."
            f" Use at most {len(flops)} stages (pp * vp)."
        )
    return list(_split(tuple(flops), tuple(params), stages, tuple(first_extra), tuple(last_extra)))


@lru_cache(maxsize=256)
def _split(
    flops: tuple[float, ...], params: tuple[float, ...], stages: int, first: Cost, last: Cost
) -> tuple[range, ...]:
    stage_flops = _stage_cost(flops, stages, first[0], last[0])
    stage_params = _stage_cost(params, stages, first[1], last[1])
    layers = len(flops)

    def nothing_else(stage: int, begin: int, end: int) -> bool:
        return True

    slowest, _ = _best_split(layers, stages, stage_flops, max, stage_flops, inf, nothing_else)

    def fits(stage: int, begin: int, end: int) -> bool:
        return stage_params(stage, begin, end) <= largest

    largest, _ = _best_split(layers, stages, stage_params, max, stage_flops, slowest, nothing_else)
    _, split = _best_split(
        layers, stages, lambda *part: stage_flops(*part) ** 2, lambda a, b: a + b, stage_flops, slowest, fits
    )
    return split


def _stage_cost(costs: tuple[float, ...], stages: int, first: float, last: float) -> Callable[[int, int, int], float]:
    """Return a function for the cost of a stage with the layers begin .. end - 1."""
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        return total[end] - total[begin] + first * (stage == 0) + last * (stage == stages - 1)

    return cost


def _best_split(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
    bounded: Callable[[int, int, int], float],
    bound: float,
    allowed: Callable[[int, int, int], bool],
) -> Choice:
    """Find the split of smallest combined cost whose stages are `allowed` and have a `bounded` cost of at most `bound`.

    Dynamic programming over (stages used, layers used). Both costs rise as a stage grows, so growing stops early.
    """
    best: dict[int, Choice] = {0: (-inf if combine is max else 0.0, ())}
    for stage in range(stages):
        longer: dict[int, Choice] = {}
        ends = range(stage + 1, layers - (stages - stage - 1) + 1) if stage < stages - 1 else range(layers, layers + 1)
        for end in ends:
            chosen: Choice = (inf, ())
            for begin in range(end - 1, stage - 1, -1):
                own = cost(stage, begin, end)
                if own > chosen[0] or bounded(stage, begin, end) > bound:
                    break
                if begin in best and allowed(stage, begin, end):
                    total = combine(best[begin][0], own)
                    # `<=` keeps the latest stage as long as possible: the first layer of a stage is searched from the right.
                    if total <= chosen[0]:
                        chosen = (total, (*best[begin][1], range(begin, end)))
            if chosen[1]:
                longer[end] = chosen
        best = longer
    return best[layers]
