"""Modules that do what most do not, under ZeRO 2 and 3: as exact as stage 0, or refused."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from parity import Data, quiet_trainer
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.errors import ConfigError, DataError

WIDTH = 8
MODES: dict[str, dict[str, Any]] = {
    "0": {"zero_stage": 0},
    "2": {"zero_stage": 2, "zero_reduce": "micro_batch"},
    "3": {"zero_stage": 3},
    "3 step": {"zero_stage": 3, "zero_gather": "step"},
}
SHARDED = list(MODES)[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, both: bool = True) -> Tensor:
        changed = torch.tanh(self.linear(hidden))
        return hidden + changed + (torch.sin(self.more(changed)) if both else 0.0)


class Net(nn.Module):
    """Three blocks between two layers."""

    reduction: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def run(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def loss(self, rows: Tensor, target: Tensor) -> Tensor:
        return (self.run(self.embed(rows)) - target).square().mean()


class SkipsPartOfABlock(Net):
    """On one of the two data ranks: what lacks a gradient there counts as zero."""

    def run(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, bool(torch.distributed.get_rank() == 0))
        return self.head(hidden)


class SkipsABlock(Net):
    """Another one on each of the two data ranks."""

    def run(self, hidden: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            hidden = hidden if index == torch.distributed.get_rank() else block(hidden)
        return self.head(hidden)


class Adversarial(Net):
    """A gradient of the hidden states inside the step, and a second pass over all blocks."""

    reduction = "mean"  # of micro-batches: the gradient is that of a mean over their rows

    def loss(self, rows: Tensor, target: Tensor) -> Tensor:
        hidden = self.embed(rows)
        loss = (self.run(hidden) - target).square().mean()
        [gradient] = torch.autograd.grad(loss, hidden, retain_graph=True)
        return loss + (self.run(hidden + 0.5 * gradient) - target).square().mean()


class Sensitive(Net):
    """The loss weighs rows by a gradient inside the step, which fails where the proof of the loss
    tries it. The last batch of a fit is tried, too: what that has gathered are not the weights
    after the step."""

    def loss(self, rows: Tensor, target: Tensor) -> Tensor:
        hidden = self.embed(rows)
        found = self.run(hidden)
        [gradient] = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
        return ((found - target).square() * gradient.square().sum(1, keepdim=True)).mean()


class OneBlock(Net):
    """Called three times, each in a reentrant checkpoint, so that its gradients come in three
    parts."""

    def run(self, hidden: Tensor) -> Tensor:
        for _ in range(3):
            hidden = checkpoint(self.blocks[0], hidden, use_reentrant=True)
        return self.head(hidden)


class NestedLists(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH)]) for _ in range(2)
        )

    def run(self, hidden: Tensor) -> Tensor:
        for first, second in self.blocks:  # type: ignore[misc]
            hidden = hidden + torch.tanh(second(first(hidden)))
        return self.head(hidden)


class Again(torch.autograd.Function):
    """Runs a block without autograd, and its parts again in the backward, as reversible layers do
    (Reformer)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, block: Any, calls: bool) -> Tensor:
        ctx.block, ctx.calls = block, calls
        ctx.save_for_backward(hidden)
        return block(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        linear, more = (
            (
                layer
                if ctx.calls
                else partial(nn.functional.linear, weight=layer.weight, bias=layer.bias)
            )
            for layer in (ctx.block.linear, ctx.block.more)
        )
        with torch.enable_grad():
            hidden = ctx.saved_tensors[0].detach().requires_grad_(True)
            changed = torch.tanh(linear(hidden))
            torch.autograd.backward(hidden + changed + torch.sin(more(changed)), gradient)
        return hidden.grad, None, None


class CallsPartsOfABlock(Net):
    """In a backward of its own, without the block."""

    calls = True

    def run(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = Again.apply(hidden, block, self.calls)
        return self.head(hidden)


class TakesWeightsOfABlock(CallsPartsOfABlock):
    """In a backward of its own, without calling any module."""

    calls = False


class SharedOutside(Net):
    """A weight of the first block is used beside the blocks too."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Linear(WIDTH, WIDTH)
        self.after.weight = self.blocks[0].linear.weight  # type: ignore[union-attr, assignment]

    def run(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(torch.tanh(self.after(hidden)))


@dataclass
class Output:
    hidden: Tensor


class Wrapped(Block):
    def forward(self, hidden: Tensor, both: bool = True) -> Output:  # type: ignore[override]
        return Output(super().forward(hidden))


class Dataclasses(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapped() for _ in range(3))

    def run(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden).hidden
        return self.head(hidden)


class SecondOrder(Net):
    """A penalty on the gradient of the rows: its backward goes through the blocks in another
    order."""

    def loss(self, rows: Tensor, target: Tensor) -> Tensor:
        rows = rows.clone().requires_grad_(True)
        found = self.run(self.embed(rows))
        [gradient] = torch.autograd.grad(found.sum(), rows, create_graph=True)
        return (found - target).square().mean() + gradient.square().mean()


class Task(pl.LightningModule):
    def __init__(self, net: type[Net], raises_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net()
        self.raises_at = raises_at
        self.seen = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        if self.seen == self.raises_at:
            raise ArithmeticError("cannot go on")
        return self.net.loss(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows() -> TensorDataset:
    values = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(3))
    return TensorDataset(values, values.sum(1, keepdim=True).sin())


def trainer_of(
    mode: str,
    ranks: int = 2,
    callbacks: Any = None,
    max_epochs: int = 1,
    reduction: str | None = None,
) -> pl.Trainer:
    from lightning_3d.strategy import Lightning3DStrategy

    strategy = Lightning3DStrategy(
        f"dp{ranks}", micro_batch_size=2, loss_reduction=reduction, **MODES[mode]
    )
    return quiet_trainer(
        strategy=strategy, devices=ranks, max_epochs=max_epochs, callbacks=callbacks
    )


def small_buckets() -> Any:
    """Buckets that hold one small layer."""
    from lightning_3d.parallel.zero import make_backend

    return patch(
        "lightning_3d.engine.build.make_backend",
        partial(make_backend, bucket_bytes=4 * WIDTH * WIDTH),
    )


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def train(net: type[Net], mode: str, callback: Callable[[], pl.Callback] | None = None) -> Tensor:
    """All weights after one epoch."""
    module = Task(net)
    with small_buckets():
        trainer_of(mode, callbacks=[callback()] if callback else None, reduction=net.reduction).fit(
            module, datamodule=Data(rows(), 4)
        )
    return weights_of(module)


EXACT = [
    CallsPartsOfABlock,
    SkipsPartOfABlock,
    Adversarial,
    Sensitive,
    OneBlock,
    NestedLists,
    SharedOutside,
    Dataclasses,
    Net,
]


@pytest.mark.parametrize("mode", by_default(SHARDED, 1))
@pytest.mark.parametrize("net", EXACT, ids=lambda net: net.__name__)
def test_as_at_stage_0(net: type[Net], mode: str) -> None:
    [expected, _] = run_ranks(train, 2, net, "0")
    for found in run_ranks(train, 2, net, mode):
        assert torch.allclose(found, expected, rtol=0, atol=1e-6), (found - expected).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "error"),
    [(SkipsABlock, DataError), (SecondOrder, ConfigError), (TakesWeightsOfABlock, ConfigError)],
)
def test_what_needs_whole_parameters_is_refused_block_by_block(
    net: type[Net], error: type[Exception]
) -> None:
    with pytest.raises(error, match="Use zero_gather=step"):
        run_ranks(train, 2, net, "3")
    [expected, _] = run_ranks(train, 2, net, "0")
    [found, _] = run_ranks(train, 2, net, "3 step")
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


class Writes(pl.Callback):
    """Clips the weights, as some adversarial networks do."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any
    ) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.1, 0.1)


class Overwrites(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for parameter in module.parameters():
            parameter.data = torch.zeros(parameter.shape)


def test_weights_that_a_callback_writes_are_kept() -> None:
    [expected, _] = run_ranks(train, 2, Net, "0", Writes)
    [found, _] = run_ranks(train, 2, Net, "2", Writes)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


def test_weights_that_are_written_while_they_are_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="between (two )?batches"):
        run_ranks(train, 2, Net, "3", Overwrites)


def fail_and_go_on(mode: str, ranks: int, same_trainer: bool) -> Tensor:
    """A step raises; the module is trained on."""
    module = Task(Net, raises_at=3)
    trainer = trainer_of(mode, ranks)
    with pytest.raises(ArithmeticError):
        trainer.fit(module, datamodule=Data(rows(), 4))
    if not same_trainer:
        trainer = trainer_of(mode, ranks, max_epochs=2)
    trainer.fit(module, datamodule=Data(rows(), 4))
    return weights_of(module)


@pytest.mark.slow
@pytest.mark.parametrize("mode", by_default(["3", "3 step"], 0))
def test_a_fit_after_one_that_failed(mode: str) -> None:
    with pytest.raises(ConfigError, match="its weights are still sharded across ranks"):
        run_ranks(fail_and_go_on, 2, mode, 2, False)
    for ranks in (1, 2):
        for same_trainer in (True, False)[: 3 - ranks]:  # on one rank another Trainer goes on, too
            [expected, *_] = run_ranks(fail_and_go_on, ranks, "0", ranks, same_trainer)
            [found, *_] = run_ranks(fail_and_go_on, ranks, mode, ranks, same_trainer)
            assert torch.allclose(found, expected, rtol=0, atol=1e-6)


class Edits(pl.Callback):
    """Leaves one weight out of the checkpoint and writes another value for a second."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint["state_dict"]
        del state["net.embed.weight"]
        state["net.head.weight"] = torch.full((1, WIDTH), 7.0)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "edited.ckpt")


def save_edited(mode: str, folder: str) -> None:
    trainer = trainer_of(mode, callbacks=[Edits()])
    trainer._default_root_dir = folder
    trainer.fit(Task(Net), datamodule=Data(rows(), 4))


@pytest.mark.parametrize("mode", ["0", "3"])
def test_a_hook_may_change_what_is_saved(mode: str, tmp_path: Path) -> None:
    run_ranks(save_edited, 2, mode, str(tmp_path))
    state = load_full_state_dict(tmp_path / "edited.ckpt")
    assert "net.embed.weight" not in state and "net.embed.bias" in state
    assert torch.equal(state["net.head.weight"], torch.full((1, WIDTH), 7.0))
    assert not any(value.isnan().any() for value in state.values())
