"""Work of one rank for one cell: train with the strategy, or compare one attention kernel. Runs in
a worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_3d.app.verification.cells import CHECKPOINT, Cell, micro_batch
from lightning_3d.app.verification.rank_rows import RankRows
from lightning_3d.app.verification.tiny_models import (
    LEARNING_RATE,
    SEED,
    STEPS,
    Recipe,
    ReferenceResult,
    batches,
    build,
    train_plainly,
)
from lightning_3d.layout.layout import Layout
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.strategy.silent_trainer import silence
from lightning_3d.strategy.strategy import Lightning3DStrategy

_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-true"}


@dataclass(frozen=True)
class RankResult:
    """Values of the steps on one rank, and its shards of the weights."""

    losses: list[float]
    norms: list[float]
    shards: dict[str, tuple[Tensor, ShardSpec]]


def recipe_of(cell: Cell) -> Recipe:
    return Recipe(cell.model, cell.layers, cell.precision)


def reference(recipe: Recipe, accelerator: str) -> ReferenceResult:
    """Train the reference in this process."""
    return train_plainly(recipe, "cuda:0" if accelerator == "gpu" else "cpu")


def train(cell: Cell, accelerator: str, folder: str) -> RankResult:
    """Train one rank of a cell. A checkpoint is saved after half of the steps, and a new Trainer
    resumes it in the other layout."""
    if cell.kind != CHECKPOINT:
        return _fit(cell, cell.layout, accelerator, epochs=2)
    assert cell.resume is not None
    path = f"{folder}/checkpoint"
    first = _fit(cell, cell.layout, accelerator, epochs=1, save=path)
    second = _fit(cell, cell.resume, accelerator, epochs=2, resume=path)
    return RankResult([*first.losses, *second.losses], [*first.norms, *second.norms], second.shards)


def attention(cell: Cell, accelerator: str, folder: str) -> tuple[float, float, float]:
    """Compare the flash kernel of context parallelism with the plain product in float32: output,
    lse and gradients."""
    from lightning_3d.compat.torch import flash_attention, flash_attention_backward

    generator = torch.Generator("cuda").manual_seed(SEED)
    query, key, value, grad = (
        torch.randn(2, 4, 128, 64, device="cuda", generator=generator)
        .to(torch.bfloat16)
        .float()
        .requires_grad_()
        for _ in range(4)
    )
    scale = 64**-0.5
    hidden = torch.ones(128, 128, dtype=torch.bool, device="cuda").triu(1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    wanted = scores.softmax(-1) @ value
    gradients = torch.autograd.grad(wanted, (query, key, value), grad)
    q, k, v, g = (x.detach().to(torch.bfloat16) for x in (query, key, value, grad))
    out, lse = flash_attention(q, k, v, causal=True, scale=scale)
    found = flash_attention_backward(
        g, q, k, v, out.contiguous(), lse.contiguous(), causal=True, scale=scale
    )
    worst = max(_relative(one, other) for one, other in zip(found, gradients, strict=True))
    return _relative(out, wanted), _relative(lse, scores.logsumexp(-1)), worst


def _relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted).abs().max() / wanted.abs().max()).item()


class _Module(pl.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self._recipe)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)


def _batches_of(epoch: int) -> list[Tensor]:
    """Return the global batches of an epoch: half of the steps, so that a checkpoint ends one."""
    first = (epoch % 2) * STEPS // 2
    return batches()[first : first + STEPS // 2]


class _Values(pl.Callback):
    """Callback that records the loss and the gradient norm of every step, and saves when the epoch
    ends."""

    def __init__(self, save: str | None) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._save = save

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step = trainer.strategy.last_step  # type: ignore[attr-defined]
        self.losses.append(step.loss)
        self.norms.append(step.grad_norm)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._save:
            trainer.save_checkpoint(self._save)


def _fit(
    cell: Cell,
    layout: str,
    accelerator: str,
    *,
    epochs: int,
    save: str | None = None,
    resume: str | None = None,
) -> RankResult:
    values, module = _Values(save), _Module(recipe_of(cell))
    size = Layout.parse(layout)
    options = {
        key: value
        for key, value in cell.strategy.items()
        if size.dp > 1 or not key.startswith("zero_")
    }
    strategy = Lightning3DStrategy(
        layout, micro_batch_size=micro_batch(layout), seed=SEED, **options
    )
    on_node = int(os.environ["LOCAL_WORLD_SIZE"])
    place: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": on_node,
        "num_nodes": size.world_size // on_node,
    }
    with silence():
        trainer = pl.Trainer(
            strategy=strategy,
            precision=_PRECISIONS[cell.precision],  # type: ignore[arg-type]
            max_epochs=epochs,
            reload_dataloaders_every_n_epochs=1,
            callbacks=[values],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **place,
        )
        trainer.fit(module, datamodule=RankRows(_batches_of, size.dp), ckpt_path=resume)
    shards = {
        name: (parameter.detach().cpu(), strategy.specs[name])
        for name, parameter in module.named_parameters()
    }
    return RankResult(values.losses, values.norms, shards)
