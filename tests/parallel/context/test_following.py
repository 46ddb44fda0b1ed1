"""The tokens that follow those of a rank, which multi-token prediction reads: values and gradients
are those of the whole sequence."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor

from lightning_3d.models.multi_token import following
from lightning_3d.parallel.context import ContextParallel
from lightning_3d.parallel.context.following import following_tokens
from lightning_3d.parallel.context.zigzag import own_tokens


def weights_of(tokens: int, distance: int) -> Tensor:
    return torch.randn(
        2, tokens, 3, generator=torch.Generator().manual_seed(distance), dtype=torch.float64
    )


def compared(tokens: int, most: int) -> tuple[list[float], float]:
    """Largest differences of the values at each distance, and of the gradient, on this rank."""
    context = ContextParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
    whole = weights_of(tokens, 0).requires_grad_()
    expected = [following(whole, distance, 0.0) for distance in range(1, most + 1)]
    sum(
        (value * weights_of(tokens, distance)).sum() for distance, value in enumerate(expected, 1)
    ).backward()
    own = own_tokens(whole.detach(), context.size, context.rank).requires_grad_()
    found = list(following_tokens(own, most, context))
    parts = [
        own_tokens(weights_of(tokens, distance), context.size, context.rank)
        for distance in range(1, most + 1)
    ]
    sum((value * part).sum() for value, part in zip(found, parts, strict=True)).backward()
    differences = [
        (value - own_tokens(one, context.size, context.rank)).abs().max().item()
        for value, one in zip(found, expected, strict=True)
    ]
    return (
        differences,
        (own.grad - own_tokens(whole.grad, context.size, context.rank)).abs().max().item(),
    )


@pytest.mark.parametrize(
    ("ranks", "tokens", "most"),
    by_default([(2, 12, 2), (2, 4, 3), (2, 8, 9), (4, 32, 3), (4, 8, 5)], 0, 1),
    ids=lambda value: str(value),
)
def test_values_and_gradients_are_those_of_the_whole_sequence(
    ranks: int, tokens: int, most: int
) -> None:
    """Also where a distance is longer than the chunks of a rank, or than the sequence."""
    for differences, of_gradient in run_ranks(compared, ranks, tokens, most):
        assert differences == [0.0] * most
        assert of_gradient < 1e-14
