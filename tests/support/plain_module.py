"""What a user has before looking at this project: a LightningModule around a Transformers model,
with the usual extras.

Imports nothing of ours. It runs on one process with any Trainer, and unchanged with our strategy.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 61
SEQUENCE = 12


class LanguageModel(pl.LightningModule):
    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model: LlamaForCausalLM | None = None
        self.train_accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
        self.val_accuracy = MulticlassAccuracy(VOCABULARY, average="micro")

    def configure_model(self) -> None:
        if self.model is not None:
            return
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        out = self.model(**batch)
        self.train_accuracy(out.logits[:, :-1].argmax(-1), batch["labels"][:, 1:])
        self.log("train_loss", out.loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return out.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert self.model is not None
        out = self.model(**batch)
        self.val_accuracy(out.logits[:, :-1].argmax(-1), batch["labels"][:, 1:])
        self.log("val_loss", out.loss, prog_bar=True)
        self.log_dict({"val_accuracy": self.val_accuracy, "val_bits": out.loss / 0.6931})

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss_seen_at_epoch_end", self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        assert self.model is not None
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        other = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.97**step
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class RepeatingText(Dataset):
    """Rows that count upwards from a random token: easy to learn, so that the accuracy moves."""

    def __init__(self, rows: int, seed: int) -> None:
        starts = torch.randint(
            0, VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(seed)
        )
        self.rows = (starts + torch.arange(SEQUENCE)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class TextData(pl.LightningDataModule):
    """``batch_size`` rows per process that reads its own data."""

    def __init__(self, batch_size: int, train_rows: int = 64, val_rows: int = 30) -> None:
        super().__init__()
        self.batch_size, self.train_rows, self.val_rows = batch_size, train_rows, val_rows

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RepeatingText(self.train_rows, seed=1), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(RepeatingText(self.val_rows, seed=2), batch_size=self.batch_size)
