"""Parameters without a gradient on some ranks, in a reduction that begins with the last stage."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from lightning_3d.parallel.zero.gradients import GradientSums, Target, end_to_end
from lightning_3d.parallel.zero.reduction import Policy, Reduction
from lightning_3d.parallel.zero.trained import Wave

SIZE = 4


def reduce_on_a_rank(stages: int) -> tuple[int, list[float]]:
    """Rank 1 alone has a gradient for a parameter of the first stage. Returns how many parameters
    count as absent, and the sums of this rank's half."""
    early, late = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(SIZE))
    kept = torch.zeros(SIZE)
    start = dist.get_rank() * SIZE
    own = Target(start, start + SIZE, total=lambda: kept)
    waves = [[early], [late]] if stages == 2 else [[early, late]]
    sums = GradientSums([early, late])
    reduction = Reduction(
        Policy(dist.group.WORLD, 2**20, from_the_end=True),
        end_to_end([early, late]),
        [Wave(stage, parameters) for stage, parameters in enumerate(waves)],
        sums,
        [own],
    )
    reduction.begin()
    late.grad = torch.ones(SIZE)
    if stages == 2:
        reduction.arrived([late])
    if dist.get_rank() == 1:
        early.grad = torch.ones(SIZE)
    if stages == 2:
        reduction.arrived([early])
    return len(reduction.finish(1.0)), kept.tolist()


@pytest.mark.parametrize("stages", [1, 2])
def test_one_rank_with_a_gradient_is_enough(stages: int) -> None:
    (absent, first), (also_absent, second) = run_ranks(reduce_on_a_rank, 2, stages)
    assert absent == also_absent == 0
    assert first == [1.0] * SIZE and second == [2.0] * SIZE
