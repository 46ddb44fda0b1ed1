"""ZeRO 3: modules that several blocks share, and calls of the model when no rank has its
parameters."""

from typing import Any

import pytest
import torch
from parity import Module, Part, Rows, fit_on_rank, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data, initial_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.errors import ConfigError

RECIPE = Recipe(steps=3)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """All blocks have one norm, the first and the last one matrix, and the second's bias is used
    after the blocks, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.leave = nn.Linear(8, 8)
        first, second, _, last = self.blocks
        for block in self.blocks:
            block.norm = first.norm
        last.up.weight = first.up.weight  # type: ignore[union-attr]
        self.leave.bias = second.down.bias  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Shared(Module):
    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = Network()
        super().__init__(RECIPE, network)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        return (self.model(batch["x"]) - batch["x"].sin()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def rows() -> Rows:
    return Rows(
        {
            "x": torch.randn(
                RECIPE.steps * RECIPE.global_batch, 8, generator=torch.Generator().manual_seed(1)
            )
        }
    )


def fit(**strategy: Any) -> Part:
    return fit_on_rank(RECIPE, rows(), Shared(), micro_batch_size=4, **strategy)


@pytest.mark.parametrize("gather", ["micro_batch", "step"])
def test_a_module_that_blocks_share_trains_as_on_one_process(gather: str) -> None:
    module, losses = Shared(), []
    module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))  # type: ignore[method-assign]
    quiet_trainer(devices=1, max_steps=RECIPE.steps, gradient_clip_val=RECIPE.clip).fit(
        module, DataLoader(rows(), RECIPE.global_batch)
    )
    expected = {f"model.{name}": value.detach() for name, value in module.model.named_parameters()}  # type: ignore[union-attr]
    for part in run_ranks(fit, 2, layout="dp2", zero_stage=3, zero_gather=gather):
        assert part.losses == pytest.approx(losses, rel=1e-5)
        assert part.weights.keys() == expected.keys()
        assert all(
            (part.weights[name] - value).abs().max() < 5e-5 for name, value in expected.items()
        )


class Calling(Module):
    """Calls the model in a hook."""

    def __init__(self, kind: str) -> None:
        super().__init__(RECIPE, initial_model(RECIPE))
        self.kind = kind

    def on_train_batch_end(self, *_: Any) -> None:
        model: Any = self.model
        ids = torch.arange(6)[None]
        match self.kind:
            case "generate":
                model.generate(ids, max_new_tokens=2, do_sample=False)
            case "forward":
                model(input_ids=ids)
            case "embed":
                model.get_input_embeddings()(ids)
            case "block":
                model.model.layers[0](torch.zeros(1, 6, 64), position_embeddings=None)


KINDS = ("generate", "forward", "embed", "block")


def refusals(**strategy: Any) -> dict[str, str]:
    found = {}
    for kind in KINDS:
        try:
            fit_on_rank(
                RECIPE,
                Rows(data(RECIPE)),
                Calling(kind),
                layout="dp2",
                zero_stage=3,
                self_check="never",
                **strategy,
            )
        except ConfigError as error:
            found[kind] = str(error)
    return found


@pytest.mark.parametrize("gather", ["micro_batch", "step"])
def test_a_call_of_the_model_outside_of_a_step_is_refused(gather: str) -> None:
    for found in run_ranks(refusals, 2, zero_gather=gather, process_group=False):
        assert set(found) == set(KINDS)
        assert all("zero_stage" in message for message in found.values())
