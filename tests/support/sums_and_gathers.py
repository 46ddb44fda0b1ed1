"""Sums and gathers over all ranks of the world, compared with arithmetic on one process."""

import torch
import torch.distributed as dist
from counting import recording
from torch import Tensor

from lightning_3d.parallel.collectives import all_gather_flat, all_reduce_flat, reduce_scatter_flat

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def inputs(dtype: torch.dtype, numel: int) -> Tensor:
    """(ranks, numel): small whole numbers, whose sums are exact in every type."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-8, 9, (dist.get_world_size(), numel), generator=generator).to(dtype)


def check(numel: int) -> None:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for dtype in DTYPES:
        all_of = inputs(dtype, numel * ranks)
        own, total = all_of[rank], sum(all_of[1:], start=all_of[0])
        for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, all_of.max(0).values)):
            found = own.clone().view(ranks, numel)
            all_reduce_flat(found, group, op)
            assert torch.equal(found.view(-1), expected), (dtype, op)
        part = own.new_empty(numel)
        reduce_scatter_flat(part, own, group).wait()
        assert torch.equal(part, total[rank * numel : (rank + 1) * numel]), dtype
        whole = own.new_empty(ranks * ranks * numel)
        all_gather_flat(whole, own, group).wait()
        assert torch.equal(whole, all_of.view(-1)), dtype
    number = torch.tensor(float(rank))  # no dimension
    all_reduce_flat(number, group)
    assert number == ranks * (ranks - 1) / 2


def sums() -> tuple[Tensor, list[str]]:
    """What each rank gets as the sum of numbers whose sum depends on the order."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    with recording() as recorder:
        all_reduce_flat(x, dist.group.WORLD)
    return x, [call.name for call in recorder.calls]
