"""Users' scripts with one fault each, for `lightning-3d verify SCRIPT`."""

BODY = """
import sys
import torch, torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_3d import Layout, Lightning3DStrategy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, out, y):
        return F.mse_loss(out, y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

Mine, callbacks, more, undivided, stream = Plain, [], {}, {}, None
rows, workers = None, 0
SPLIT = {"tp": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}
"""
"""A script without a fault, up to the place where a fault follows."""

END = """
seed_everything(0, workers=True)
layout = sys.argv[1]
data = TensorDataset(torch.randn(48, 8), torch.randn(48, 8)) if rows is None else rows
shape = Layout.parse(layout)
strategy = Lightning3DStrategy(layout, **{"plan": "auto", "micro_batch_size": 2, **more})
more = {"max_epochs": 2, "callbacks": callbacks, "log_every_n_steps": 1, **undivided}
trainer = Trainer(strategy=strategy, devices=shape.world_size, accelerator="cpu", **more)
size = {"batch_size": 8 // shape.dp, "num_workers": workers}
loader = DataLoader(data, shuffle=True, **size) if stream is None else DataLoader(stream, **size)
trainer.fit(Mine(), loader, DataLoader(data, **size))
print("after the fit")
"""

RIGHT = """
class Mine(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = torch.randn_like(x)
        out = self.net(F.dropout(x, 0.1) + torch.rand(len(x), 1) * noise)
        loss = self.loss(out, y + noise)
        self.log("train_loss", loss)
        return loss
"""
"""A step that draws random numbers for its rows."""

ZERO = '\nmore = {"zero_stage": 3}\n'

ACCUMULATED = RIGHT + '\nundivided = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}\n'

PARTLY_TRAINED = """
class Mine(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.leave.parameters(), lr=1e-2)
"""
"""Parameters that no optimizer has get gradients, too."""

PENALTY = """
class Mine(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 1e-2 * sum(p.square().sum() for p in self.net.parameters())
"""  # noqa: E501

SUM = """
class Mine(Plain):
    def loss(self, out, y):
        return F.mse_loss(out, y, reduction="sum")
"""

CLIPPED = """
class Mine(Plain):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
"""

BUFFER = """
class Mine(Plain):
    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)
"""

LOGGED = """
class Mine(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("spread", batch[1].square().mean().sqrt())
        return loss
"""

WEIGHTS = """
class Shrink(Callback):
    def on_train_batch_end(self, trainer, module, *args):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 - 1e-2 * trainer.global_rank)

callbacks = [Shrink()]
"""

DATA = """
undivided = {"use_distributed_sampler": False}
"""
"""All data-parallel ranks read the same rows."""

STREAM = """
class Numbers(IterableDataset):
    def __iter__(self):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        generator = torch.Generator().manual_seed(rank)
        for _ in range(64):
            yield torch.randn(8, generator=generator), torch.randn(8, generator=generator)

stream = Numbers()
"""
"""Not a fault: the script divides an endless data set itself."""


def script(text: str) -> str:
    """Complete a fault to a script that takes the layout as its argument."""
    return BODY + text + END


UNPROVED = """
from lightning_3d.engine.step.loss_proof import LossProof
LossProof.begin_fit = lambda self: None
"""
UNWATCHED_READS = """
from lightning_3d.engine.step.outside_reads import OutsideReads
OutsideReads.begin = lambda self: None
"""
UNWATCHED_HOOKS = """
from contextlib import nullcontext
from lightning_3d.strategy.gradient_hooks import GradientHooks
GradientHooks.watching = lambda self: nullcontext()
"""
"""Switch off what refuses or serves a fault before verify could see it."""
