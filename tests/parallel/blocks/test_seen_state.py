"""A block is recomputed in the state in which it ran first: with swapped parameters, buffers and
flags."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parity import Module, Part, Rows, fit_on_rank, quiet_trainer
from ranks import run_ranks
from reference import Recipe
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.errors import ConfigError
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.parallel.blocks import process_blocks

RECIPE = Recipe(steps=3)


class Block(nn.Module):
    """With a flag, a counter, and a buffer that each call replaces."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.adapter = nn.Linear(width, width)
        self.adapted = True
        self.calls = 0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.down(torch.tanh(self.up(x))) * self.scale / self.calls
        self.scale = self.scale * 0.9
        return x + hidden + (self.adapter(x) if self.adapted else 0)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.leave = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


@contextmanager
def switched_off(network: nn.Module) -> Iterator[None]:
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    for block in blocks:
        block.adapted = False
    try:
        yield
    finally:
        for block in blocks:
            block.adapted = True


def loss_of(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Weight noise for one call, and another one without the adapters."""
    noisy = {name: parameter * 1.05 for name, parameter in network.named_parameters()}
    first = torch.func.functional_call(network, noisy, (x,))
    with switched_off(network):
        second = network(x)
    return (first - y).square().mean() + (second - y).abs().mean()


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_gradients_and_side_effects_are_those_of_a_forward_that_runs_once(recompute: str) -> None:
    found: list[dict[str, Any]] = []
    for options in (BlockOptions(), BlockOptions(recompute=recompute)):
        torch.manual_seed(0)
        network = Network().double()
        process_blocks(list(network.blocks), options)
        x, y = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
        loss_of(network, x, y).backward()
        loss_of(network, x, y).backward()
        first = network.blocks[0]
        assert isinstance(first, Block)
        assert first.calls == 4
        state = {name: parameter.grad for name, parameter in network.named_parameters()}
        found.append({**state, **dict(network.named_buffers())})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-12)


class Fit(Module):
    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = Network()
        for block in network.blocks:
            block.register_forward_hook(_forget)
        super().__init__(RECIPE, network)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        return loss_of(self.model, batch["x"], batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _forget(block: Any, args: Any, output: Any) -> None:
    """One process calls a block twice in a batch, ranks twice in each micro-batch."""
    block.calls, block.scale = 0, torch.ones(())


def rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    count = RECIPE.steps * RECIPE.global_batch
    return Rows(
        {
            "x": torch.randn(count, 8, generator=generator),
            "y": torch.randn(count, 1, generator=generator),
        }
    )


PLAN = {
    "tp": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "pp": {"blocks": (["x"], ["x"]), "leave": (["x"], ["y"])},
}


def fit(**strategy: Any) -> Part:
    return fit_on_rank(RECIPE, rows(), Fit(), micro_batch_size=4, recompute="full", **strategy)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp2", {"zero_stage": 3, "zero_gather": "step"}),
        pytest.param("pp2", {"plan": PLAN, "schedule": "ZBVZeroBubble"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_ranks_recompute_swapped_parameters_as_one_process_uses_them(
    layout: str, options: dict[str, Any]
) -> None:
    module, losses = Fit(), []
    module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))  # type: ignore[method-assign]
    quiet_trainer(devices=1, max_steps=RECIPE.steps, gradient_clip_val=RECIPE.clip).fit(
        module, DataLoader(rows(), RECIPE.global_batch)
    )
    for part in run_ranks(fit, 2, layout=layout, **options):
        assert part.losses == pytest.approx(losses, rel=1e-5)


def test_parameters_that_a_step_computes_from_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"functional_call.*tp = 2"):
        run_ranks(fit, 2, layout="tp2", plan=PLAN)
