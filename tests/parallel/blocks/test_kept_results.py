"""What a selective recomputation keeps: the results of expensive operators that it reads, and no
others."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.parallel.blocks.kept_results import KeptResults
from lightning_3d.parallel.blocks.recompute import Recompute, _keeps, expensive


class Operators(TorchDispatchMode):
    """Counts operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.ran[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


class Block(nn.Module):
    """A residual sum around attention and one around a gated MLP."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(8, 8, dtype=torch.float64)) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, gate, up, out, down = self.weights
        heads = linear(x.tanh(), q)[:, None]
        x = x + dropout(
            linear(
                scaled_dot_product_attention(heads, heads, heads, dropout_p=self.rate)[:, 0], out
            ),
            self.rate,
        )
        y = x.tanh()
        return x + dropout(linear(silu(linear(y, gate)) * linear(y, up), down), self.rate)


def train(block: Block, recompute: Recompute | None) -> tuple[list[Tensor], Counter[str]]:
    torch.manual_seed(1)
    block.zero_grad()
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8).requires_grad_()
    result = block(x) if recompute is None else recompute(block.forward, (x,), {})
    with Operators() as counted:
        result.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in block.parameters())], counted.ran  # type: ignore[list-item]


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_the_same_gradients_without_another_product(rate: float) -> None:
    torch.manual_seed(0)
    block = Block(rate)
    (expected, plain), (found, again) = train(block, None), train(block, Recompute(expensive()))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert again["mm"] == plain["mm"] and again["tanh"] == plain["tanh"] + 2
    if rate == 0.0:
        assert again["_scaled_dot_product_flash_attention_for_cpu"] == 0


def kept_by(forward: Any, x: Tensor) -> list[bool]:
    """Whether each result that could be kept was kept."""
    made = KeptResults(lambda operator, args, kwargs: _keeps(expensive(), operator, args, kwargs))
    result = torch.utils.checkpoint.checkpoint(
        made.noting(forward), x, use_reentrant=False, context_fn=made.contexts
    )
    kept = [one is not None and not one.stand_in for one in made.results]
    result.sum().backward()
    return kept


def test_results_that_nothing_reads_are_not_kept() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    assert kept_by(lambda x: x + linear(linear(x, weight).tanh(), weight), x) == [True, False]
    assert kept_by(lambda x: (x + linear(linear(x, weight).tanh(), weight)).exp().tanh(), x) == [
        True,
        True,
    ]


def test_a_result_that_is_overwritten_is_computed_again() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    assert kept_by(lambda x: linear(x, weight).mul_(2).tanh().exp(), x) == [False]
    inner = Recompute(expensive())(lambda x: linear(x, weight).mul_(2).tanh().exp(), (x,), {}).sum()
    expected, found = (
        torch.autograd.grad(value, x)[0]
        for value in ((2 * linear(x, weight)).tanh().exp().sum(), inner)
    )
    torch.testing.assert_close(found, expected)


def test_a_second_backward_is_refused() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, 8, requires_grad=True)
    result = Recompute(expensive())(lambda x: linear(x, weight).tanh().exp(), (x,), {}).sum()
    result.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        result.backward()
