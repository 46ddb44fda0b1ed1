"""Selective recomputation of blocks that write into a kept result where autograd does not count it,
or that read one where no operator does: the gradients are those of the plain block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.nn.functional import linear

from lightning_3d.parallel.blocks.recompute import Recompute, expensive, operators

Block = Callable[[Tensor, Tensor], Tensor]


def written_through_data(x: Tensor, weight: Tensor) -> Tensor:
    y = linear(x, weight)
    y.data.mul_(2)
    return y.tanh().exp()


def freed_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    y = linear(x, weight)
    z = y.tanh()
    y.untyped_storage().resize_(0)
    return z.exp().sin()


def steers_random_numbers(x: Tensor, weight: Tensor) -> Tensor:
    """How many numbers `poisson` draws on the CPU depends on its argument."""
    y = linear(x.tanh(), weight)
    noise = torch.poisson(y.detach().abs() * 30)
    return x.exp() * torch.rand_like(x) + y + noise


def steers_python(x: Tensor, weight: Tensor) -> Tensor:
    y = linear(x.sin(), weight)
    positive = (y.detach() > 0).sum(0)
    largest = max(positive.tolist())  # no operator on the CPU
    return (x * largest).exp().sin() + y + positive


def has_a_mean_that_numpy_reads(x: Tensor, weight: Tensor) -> Tensor:
    y = linear(x.sin(), weight)
    mean = float(y.detach().abs().mean().numpy())
    return (x * mean).exp().sin() + y


def has_a_view(x: Tensor, weight: Tensor) -> Tensor:
    """The view is kept, so that nobody reads its base before it, but somebody after it."""
    base = linear(x, weight) * 2
    view = base.view(-1)
    return (base + 1).exp() + (view + 1).view(base.shape) + linear(x, weight)


def gradients(block: Block, keep: frozenset[Any] | None) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, dtype=torch.float64) / 3, torch.randn(4, 8, dtype=torch.float64)
    weight, x = weight.requires_grad_(), x.requires_grad_()
    result = Recompute(keep)(block, (x, weight), {}) if keep is not None else block(x, weight)
    return torch.autograd.grad(result.sum(), (x, weight))


BLOCKS = [
    written_through_data,
    freed_by_hand,
    steers_random_numbers,
    steers_python,
    has_a_mean_that_numpy_reads,
    has_a_view,
]


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_those_of_the_plain_block(block: Block) -> None:
    keep = operators(["mm", "view"]) if block is has_a_view else expensive()
    torch.testing.assert_close(
        gradients(block, keep), gradients(block, None), rtol=1e-12, atol=1e-12
    )


def test_python_reads_a_mean_that_nothing_else_reads() -> None:
    """A module may store it: the recomputation stores the same number."""
    stored: list[Tensor] = []

    def block(x: Tensor, weight: Tensor) -> Tensor:
        y = linear(x.tanh(), weight)
        stored.append(y.detach().mean())
        return x.exp() + y

    gradients(block, expensive())
    first, again = stored
    assert first == again


class Sum(torch.autograd.Function):
    """Sum over ranks in place, as Megatron-LM and others write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def difference(block: Block) -> float:
    pairs = zip(gradients(block, expensive()), gradients(block, None), strict=True)
    return max((found - expected).abs().max().item() for found, expected in pairs)


def summed(x: Tensor, weight: Tensor) -> Tensor:
    return Sum.apply(linear(x.sin(), weight)).tanh().exp()


@pytest.mark.slow
def test_ranks_are_summed_once_in_place() -> None:
    """Such messages give the tensor no new version."""
    assert max(run_ranks(partial(difference, summed), 2)) < 1e-12
