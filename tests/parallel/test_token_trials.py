"""Trials that show whether a module treats every token of a sequence separately, against modules
whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.parallel.trials.tokens import mixing_tokens, treats_tokens_separately

WIDTH = 12


class Mlp(nn.Module):
    """Separate."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Shift(nn.Module):
    """Each token sees the one before; no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 1, -1))


class Counts(nn.Module):
    """Adds a number that depends on the place of the token. It changes no other token's result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * torch.arange(x.shape[1]).unsqueeze(-1)


class Limited(Mlp):
    """Would drop tokens beyond its capacity; the tokens of a trial are fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.expert_capacity = 64

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.arange(x.shape[1]) < self.expert_capacity).unsqueeze(-1)


class Experts(nn.Module):
    """Separate, by the interface of Transformers' experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.ones(4, WIDTH))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states * (self.weight[top_k_index] * top_k_weights.unsqueeze(-1)).sum(1)


class Shares(Experts):
    """Weighs all tokens alike."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights / top_k_weights.sum())


class Mean(nn.Module):
    """All tokens see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) + x.mean(1, keepdim=True)


class Wide(nn.Module):
    """Matrices of 2**23 elements. Where all of their rows are one, a layer norm takes away what the
    tokens are.

    Args:
        mixes: all tokens see each other.
    """

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        width = 2**23 // WIDTH
        self.up, self.norm, self.down = (
            nn.Linear(WIDTH, width),
            nn.LayerNorm(width),
            nn.Linear(width, WIDTH),
        )
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.up(x))
        return x + self.down(inner.mean(1, keepdim=True) if self.mixes else inner)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("make", "separate"),
    [
        (Mlp, True),
        (lambda: nn.LayerNorm(WIDTH), True),
        (nn.SiLU, True),
        (nn.Identity, True),
        (Shift, False),
        (Counts, False),
        (Limited, False),
        (Experts, True),
        (Shares, False),
        (Mean, False),
        (lambda: Wide(mixes=False), True),
        (lambda: Wide(mixes=True), False),
        (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), False),
    ],
)
def test_each_kind_of_module_is_told_apart(
    make: type[nn.Module], separate: bool, device: str
) -> None:
    with torch.device(device):
        module = make()
    assert treats_tokens_separately(module, WIDTH) is separate


def test_what_mixes_tokens_in_a_block_is_found_with_and_without_parameters() -> None:
    block = nn.Module()
    block.shift, block.mlp, block.act = Shift(), Mlp(), nn.GELU()
    block.inner = nn.ModuleList([Mean(), Mlp()])
    assert list(mixing_tokens(block, WIDTH)) == [block.shift, block.inner[0]]
