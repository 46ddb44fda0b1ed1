"""Modules whose blocks leave values in attributes, lists and hooks, which the step reads, and plain
Lightning on one process for them."""

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from parity import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.strategy import Lightning3DStrategy

WIDTH, BLOCKS, ROWS, STEPS = 16, 4, 8, 3
PLAN = {"enter": (["x"], ["h"]), "blocks": (["h"], ["h"]), "leave": (["h"], ["y"])}
WITH_SIDE = PLAN | {"blocks": (["h", "loss"], ["h", "loss"])}
SINK: list[Tensor] = []
LEAVES: dict[str, Callable[[Any, Tensor], Any]] = {
    "attribute": lambda block, value: vars(block).update(balance=value),
    "counter": lambda block, value: vars(block).update(calls=block.calls + 1),
    "created": lambda block, value: vars(block).update(fresh=value),
    "list": lambda block, value: block.losses.append(value),
    "dict": lambda block, value: block.stats.update(balance=value),
    "buffer": lambda block, value: block.load.copy_(value.detach()),
    "inner": lambda block, value: vars(block.gate).update(balance=value),
    "global": lambda block, value: SINK.append(value),
    "outside": lambda block, value: vars(block.owner[0]).update(total=block.owner[0].total + value),
}
"""What the forward of a block does with its term of the loss, by kind."""

READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda network: sum(block.balance for block in network.blocks),
    "assigned": lambda network: sum(block.balance for block in network.blocks),
    "counter": lambda network: sum(block.calls for block in network.blocks),
    "created": lambda network: sum(getattr(block, "fresh", 0.0) for block in network.blocks),
    "list": lambda network: sum(loss for block in network.blocks for loss in block.losses[-1:]),
    "dict": lambda network: sum(block.stats.get("balance", 0.0) for block in network.blocks),
    "buffer": lambda network: sum(block.load for block in network.blocks),
    "inner": lambda network: sum(getattr(block.gate, "balance", 0.0) for block in network.blocks),
    "side": lambda network: network.aux,
    "loop": lambda network: network.aux,
    "early": lambda network: network.kept[0].pow(2).mean(),
    "late": lambda network: network.kept[-1].pow(2).mean(),
    "weight": lambda network: sum(block.gate.weight.pow(2).sum() for block in network.blocks),
    "constants": lambda network: sum(
        block.index * block.width + (block.kind == "odd") for block in network.blocks
    ),
    "hook": lambda network: sum(value.pow(2).mean() for value in network.seen),
    "inner hook": lambda network: sum(value.pow(2).mean() for value in network.seen),
    "global": lambda network: sum(SINK),
    "outside": lambda network: network.total,
}
"""The term of the loss that the step adds, by kind."""


class Block(nn.Module):
    def __init__(self, how: str, index: int, owner: "Network") -> None:
        super().__init__()
        self.how, self.index, self.width, self.kind = (
            how,
            index,
            WIDTH,
            "odd" if index % 2 else "even",
        )
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 4, bias=False),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.balance: Any = 0.0
        self.losses: list[Tensor] = []
        self.stats: dict[str, Tensor] = {}
        self.calls, self.flag, self.owner = 0, 1.0, [owner] if how == "outside" else []
        self.register_buffer("load", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, loss: Tensor | None = None) -> Any:
        shares = self.gate(x).softmax(-1)
        value = shares.pow(2).sum(-1).mean()
        if self.how in ("assigned", "loop"):
            self.keep(value)
        elif self.how in LEAVES:
            LEAVES[self.how](self, value)
        x = x + self.flag * self.down(torch.tanh(self.up(x))) * shares[:, :1]
        return x if loss is None else (x, loss + value)

    def keep(self, value: Tensor) -> None:
        self.balance = value


class Network(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.total, self.aux = how, 0.0, 0.0
        self.kept: list[Tensor] = []
        self.seen: list[Tensor] = []
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(how, index, self) for index in range(BLOCKS))
        for block in self.blocks:
            if how == "hook":
                block.register_forward_hook(lambda module, args, output: self.seen.append(output))
            elif how == "inner hook":
                block.gate.register_forward_hook(
                    lambda module, args, output: self.seen.append(output)
                )  # type: ignore[union-attr]
            elif how == "scaling hook":
                block.register_forward_hook(lambda module, args, output: output * 0.9)

    def forward(self, x: Tensor) -> Tensor:
        self.kept, self.total, aux = [], 0.0, x.new_zeros(())
        x = self.enter(x)
        for block in self.blocks:
            if self.how == "side":
                x, aux = block(x, aux)
                continue
            x = block(x)
            self.kept.append(x)
            if self.how == "loop":
                aux = aux + block.balance
        self.aux = aux
        return self.leave(x)


class Balanced(pl.LightningModule):
    """Adds to its loss what `READS` says, or sets attributes of blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.network = how, Network(how)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.network.seen.clear()
        SINK.clear()
        if self.how == "set before":
            self._set(0.5 + batch_idx)
        loss = nn.functional.mse_loss(self.network(x), y)
        if self.how == "set after":
            self._set(0.5)
        if self.how == "logged":
            self.log("balance", sum(block.balance for block in self.network.blocks))
        if self.how in READS:
            loss = loss + 5 * READS[self.how](self.network)
        self.log("loss", loss)
        return loss

    def _set(self, flag: float) -> None:
        for block in self.network.blocks:
            block.flag = flag

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
        if self.how == "set between":
            self._set(0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data(batch_size: int = ROWS) -> DataLoader:
    x = torch.randn(STEPS * ROWS, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=batch_size)


def one_process(how: str) -> list[float]:
    """The losses of plain Lightning."""
    module = Balanced(how)
    quiet_trainer(devices=1, max_steps=STEPS).fit(module, data())
    return module.losses


def fit(
    hows: tuple[str, ...], layout: str, cache: str, plan: Any = None, **options: Any
) -> dict[str, list[float]]:
    """The losses of this rank, by kind."""
    os.environ["XDG_CACHE_HOME"] = cache
    found = {}
    for how in hows:
        module = Balanced(how)
        given = plan or {"pp": WITH_SIDE if how == "side" else PLAN}
        if given == "auto":
            module.example_input_array = torch.randn(2, 8)
        strategy = Lightning3DStrategy(layout, plan=given, **options)
        assert strategy.layout is not None
        quiet_trainer(strategy=strategy, devices=strategy.layout.world_size, max_steps=STEPS).fit(
            module, data(ROWS // strategy.layout.dp)
        )
        found[how] = module.losses
    return found
