"""Split layers into pipeline stages by cost. Pure Python, used by the pipeline and the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
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

    The slowest stage sets the pace of a pipeline, so this minimizes, in this order: the largest
    FLOPs of a stage; the largest parameters of a stage (memory); the sum of squared FLOPs
    (evenness). Among equal splits later stages get more layers, because they keep the activations
    of fewer micro-batches.

    Args:
        flops: FLOPs of each layer.
        params: parameters of each layer.
        stages: number of stages.
        first_extra: (FLOPs, parameters) of what runs before the layers (embedding), counted in the
            first stage.
        last_extra: (FLOPs, parameters) of what runs after them (norm, head), counted in the last
            stage.

    Returns:
        One range of layer indices for each stage.

    Raises:
        LayoutError: fewer layers than stages.
    """
    if len(flops) != len(params):
        raise ValueError(
            f"flops and params must each have one entry per layer; got {len(flops)} and"
            f" {len(params)} entries."
        )
    if stages < 1 or len(flops) < stages:
        raise LayoutError(
            f"{len(flops)} layers cannot be assigned to {stages} pipeline stages: each stage needs"
            f" at least one layer. Use at most {len(flops)} stages (pp * vp)."
        )
    return list(_split(tuple(flops), tuple(params), stages, tuple(first_extra), tuple(last_extra)))


@lru_cache(maxsize=256)
def _split(
    flops: tuple[float, ...], params: tuple[float, ...], stages: int, first: Cost, last: Cost
) -> tuple[range, ...]:
    work, held = _Costs(flops, stages, first[0], last[0]), _Costs(params, stages, first[1], last[1])
    slowest, _ = _best_split(work, [])
    largest, _ = _best_split(held, [(work, slowest)])
    _, split = _best_split(work, [(work, slowest), (held, largest)], even=True)
    return split


class _Costs:
    """Costs of a stage, by its number and the layers begin .. end - 1."""

    def __init__(self, costs: tuple[float, ...], stages: int, first: float, last: float) -> None:
        self.total = [0.0, *accumulate(costs)]
        self.layers, self.stages = len(costs), stages
        self._first, self._last = first, last

    def extra(self, stage: int) -> Cost:
        """Return what a stage has in addition to its layers: as the first one, and as the last
        one."""
        return self._first * (stage == 0), self._last * (stage == self.stages - 1)

    def begins(self, stage: int, ends: range, bound: float) -> Iterator[int]:
        """Yield for each end the first layer of the longest stage whose cost is at most `bound`;
        the end itself where there is none."""
        total, (first, last), begin = self.total, self.extra(stage), stage
        for end in ends:
            while begin < end and total[end] - total[begin] + first + last > bound:
                begin += 1
            yield begin


def _best_split(
    cost: _Costs, bounds: Sequence[tuple[_Costs, float]], *, even: bool = False
) -> Choice:
    """Find the split whose largest stage costs least, and whose stages have at most the cost of
    each bound.

    Dynamic programming over (stages used, layers used). Costs rise as a stage grows, so growing
    stops early.

    Args:
        even: the sum of squared costs is to be as small as possible, instead of the largest cost.
    """
    total, layers, stages = cost.total, cost.layers, cost.stages
    best: dict[int, Choice] = {0: (0.0 if even else -inf, ())}
    for stage in range(stages):
        longer: dict[int, Choice] = {}
        ends = (
            range(stage + 1, layers - (stages - stage - 1) + 1)
            if stage < stages - 1
            else range(layers, layers + 1)
        )
        begins = zip(
            repeat(stage, len(ends)),
            *(costs.begins(stage, ends, bound) for costs, bound in bounds),
            strict=True,
        )
        first, last = cost.extra(stage)
        for end, longest in zip(ends, begins, strict=True):
            chosen, start = inf, end
            for begin in range(end - 1, max(longest) - 1, -1):
                own = total[end] - total[begin] + first + last
                own = own**2 if even else own
                if own > chosen:
                    break
                if begin in best:
                    before = best[begin][0]
                    # `max` takes twice as long
                    combined = before + own if even else max(own, before)
                    # `<=` keeps the latest stage as long as possible: the first layer of a stage is
                    # searched from the right.
                    if combined <= chosen:
                        chosen, start = combined, begin
            if start < end:
                longer[end] = (chosen, (*best[start][1], range(start, end)))
        best = longer
    return best[layers]
