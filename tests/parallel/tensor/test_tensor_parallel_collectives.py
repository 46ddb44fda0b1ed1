"""The four ways into and out of a tensor-parallel region, forward and backward, against arithmetic
on one process."""

import pytest
import torch
import torch.distributed as dist
from counting import recording
from ranks import run_ranks
from torch import Tensor

from lightning_3d.parallel.tensor.collectives import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    split_to_region,
)

SHAPE = (2, 3, 5)


def inputs(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    """One tensor for each rank."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(dist.get_world_size())
    ]


def check_copy(dtype: torch.dtype) -> list[str]:
    mine, group = inputs(dtype)[dist.get_rank()], dist.group.WORLD
    x = torch.ones(SHAPE, dtype=dtype, requires_grad=True)
    with recording() as recorder:
        # The addition hands one gradient tensor to two receivers: only one of them may see it
        # summed.
        y = torch.zeros(SHAPE, dtype=dtype, requires_grad=True)
        (copy_to_region(x, group) + y).backward(mine)
    assert torch.equal(y.grad, mine)
    assert torch.allclose(
        x.grad, sum(inputs(dtype)), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6
    )
    return [call.name for call in recorder.calls]


def check_reduce(dtype: torch.dtype, owned: bool, contiguous: bool) -> list[str]:
    mine, group = inputs(dtype)[dist.get_rank()].requires_grad_(), dist.group.WORLD
    before = mine.detach().clone()
    part = mine.transpose(0, 1) if not contiguous else mine
    with recording() as recorder:
        total = reduce_from_region(part * 1.0 if owned else part, group, owned=owned)
        total.backward(torch.ones_like(total))
    expected = sum(tensor.transpose(0, 1) if not contiguous else tensor for tensor in inputs(dtype))
    assert torch.allclose(total, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(mine, before)
    assert torch.equal(mine.grad, torch.ones_like(mine))
    return [call.name for call in recorder.calls]


def check_gather_and_split(dtype: torch.dtype, dim: int, sizes: tuple[int, ...]) -> list[str]:
    rank, group = dist.get_rank(), dist.group.WORLD
    shape = list(SHAPE)
    shape[dim] = sum(sizes)
    full, gradient = inputs(dtype, tuple(shape))[:2]
    start = sum(sizes[:rank])
    own = full.narrow(dim, start, sizes[rank]).detach().requires_grad_()
    with recording() as recorder:
        gathered = gather_from_region(own, group, dim=dim, sizes=sizes)
        assert torch.equal(gathered, full)
        gathered.backward(gradient)
        assert torch.equal(own.grad, gradient.narrow(dim, start, sizes[rank]))

        whole = full.clone().requires_grad_()
        part = split_to_region(whole, group, dim=dim, sizes=sizes)
        assert torch.equal(part, full.narrow(dim, start, sizes[rank]))
        assert part.is_contiguous()
        part.backward(gradient.narrow(dim, start, sizes[rank]))
        assert torch.equal(whole.grad, gradient)
    return [call.name for call in recorder.calls]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_copy_sums_its_gradient_and_nobody_elses(dtype: torch.dtype) -> None:
    assert run_ranks(check_copy, 2, dtype) == [["all_reduce"]] * 2


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_reduction_leaves_its_input_alone_and_passes_the_gradient(
    dtype: torch.dtype, contiguous: bool, owned: bool
) -> None:
    assert run_ranks(check_reduce, 2, dtype, owned, contiguous) == [["all_reduce"]] * 2


@pytest.mark.parametrize(("dim", "sizes"), [(-1, (3, 3)), (-1, (4, 1)), (0, (2, 1)), (1, (1, 5))])
def test_gathering_and_splitting_are_inverse(dim: int, sizes: tuple[int, ...]) -> None:
    assert (
        run_ranks(check_gather_and_split, 2, torch.float64, dim, sizes)
        == [["all_gather_into_tensor"] * 2] * 2
    )
