"""A script with a Trainer of its own: a small custom model on two data-parallel ranks with ZeRO
stage 3.

    python script.py FOLDER            trains on two ranks, saves checkpoints in FOLDER, and writes FOLDER/losses.json
    python script.py FOLDER plain      on one process without a strategy, for a checkpoint that `lightning-3d import` converts
"""  # noqa: E501

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

WORDS, WIDTH, ROWS, STEPS, SAVE_EVERY = 32, 8, 128, 12, 5


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


class NextWord(nn.Module):
    """Guess a word from the two before it."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("shares", torch.tensor([0.25, 0.75]))

    def forward(self, pairs: Tensor) -> Tensor:
        hidden = torch.einsum("bpw,p->bw", self.embedding(pairs), self.shares)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Guesser(pl.LightningModule):
    """The user's module: two parameter groups and a schedule of the learning rate."""

    def __init__(self, width: int = WIDTH, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = NextWord(WORDS, width)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pairs, after = batch
        loss = nn.functional.cross_entropy(self.model(pairs), after)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [value for value in self.parameters() if value.ndim > 1]
        vectors = [value for value in self.parameters() if value.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0, "lr": 3e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"])
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.95**step
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Losses(pl.Callback):
    """Keep the logged loss of each step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.by_step[trainer.global_step] = float(trainer.callback_metrics["loss"])


def loader(batch_size: int, shuffle: bool = True) -> DataLoader:
    """ROWS pairs of words, and the word that follows each."""
    pairs = torch.randint(0, WORDS, (ROWS, 2), generator=torch.Generator().manual_seed(1))
    rows = [(pair, (3 * pair[0] + pair[1]) % WORDS) for pair in pairs]
    return DataLoader(rows, batch_size=batch_size, shuffle=shuffle)  # type: ignore[arg-type]


def fit(
    folder: str,
    resume: str | None = None,
    layout: str | None = "dp2",
    shuffle: bool = True,
    **strategy: Any,
) -> dict[int, float]:
    """Train to the last step and return the losses by step.

    Args:
        resume: a checkpoint.
        layout: None trains on one process without a strategy.
        shuffle: whether the loader shuffles the rows.
        **strategy: of `Lightning3DStrategy`.
    """
    torch.manual_seed(0)
    losses, ranks = Losses(), 1
    saver = ModelCheckpoint(
        folder,
        filename="step_{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=SAVE_EVERY,
        save_top_k=-1,
    )
    settings: dict[str, Any] = {}
    if layout is not None:
        from lightning_3d import Lightning3DStrategy

        plan = Lightning3DStrategy(layout, micro_batch_size=2, seed=0, **strategy)
        assert plan.layout is not None
        settings, ranks = {"strategy": plan}, plan.layout.dp
        settings["devices"] = plan.layout.world_size
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[saver, losses],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"devices": 1} | settings),
    )
    trainer.fit(Guesser(), loader(8 // ranks, shuffle=shuffle), ckpt_path=resume)
    return losses.by_step


def main() -> None:
    folder = sys.argv[1]
    losses = (
        fit(folder, layout=None, shuffle=False)
        if "plain" in sys.argv
        else fit(folder, zero_stage=3)
    )
    Path(folder, "losses.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    main()
