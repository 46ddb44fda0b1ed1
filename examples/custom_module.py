"""Train your own model, with your own plan, on 4 CPU ranks: tensor x pipeline parallel.

    python examples/custom_module.py
    python examples/custom_module.py --layout tp4
    python examples/custom_module.py --layout tp2_pp2_dp2 --devices 8

The model is plain PyTorch. For `tp`, the plan says how layers are sharded: `colwise` by outputs,
`rowwise` by inputs. A pair of the two needs one all-reduce. For `pp`, it lists the modules in the
order in which they run, with the names of their inputs and outputs. A list of modules is split
among the pipeline ranks.
"""

import argparse

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import Layout, Lightning3DStrategy

PLAN = {
    "tp": {"blocks.*.up": "colwise", "blocks.*.gate": "colwise", "blocks.*.down": "rowwise"},
    "pp": {
        "read": (["x"], ["hidden"]),
        "blocks": (["hidden"], ["hidden"]),
        "answer": (["hidden"], ["logits"]),
    },
}


class Block(nn.Module):
    """A gated layer with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Classifier(nn.Module):
    """A classifier of vectors."""

    def __init__(self, features: int, classes: int, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.read = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.answer = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.read(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.answer(hidden)


class Module(LightningModule):
    """An ordinary LightningModule, written for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Classifier | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Classifier(features=16, classes=10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        x, target = batch
        logits = self.model(x)
        loss = F.cross_entropy(logits, target)
        self.log_dict(
            {"train_loss": loss, "accuracy": (logits.argmax(-1) == target).float().mean()}
        )
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def clusters(rows: int = 512) -> TensorDataset:
    """Make points around ten centres."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(10, 16, generator=generator)
    target = torch.randint(10, (rows,), generator=generator)
    return TensorDataset(centres[target] + torch.randn(rows, 16, generator=generator), target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2_pp2")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=Lightning3DStrategy(options.layout, micro_batch_size=8, plan=PLAN),
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    replicas = Layout.parse(options.layout).dp  # data-parallel replicas, which share a batch
    trainer.fit(Module(), DataLoader(clusters(), batch_size=64 // replicas, shuffle=True))
    if trainer.is_global_zero:
        numbers = trainer.callback_metrics
        print(
            f"loss after {trainer.global_step} steps: {numbers['train_loss']:.4f}, accuracy"
            f" {numbers['accuracy']:.2f}"
        )


if __name__ == "__main__":
    main()
