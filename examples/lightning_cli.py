"""Choose the layout on the command line of LightningCLI. Needs pip install "lightning-3d[cli]".

    python examples/lightning_cli.py fit --trainer.strategy=lightning_3d --trainer.strategy.layout=tp2_pp2 --trainer.devices=4

Only the marked line is there for lightning_3d. Without it, write
--trainer.strategy=lightning_3d.Lightning3DStrategy.
"""  # noqa: E501

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_3d.strategy  # noqa: F401  this line: it registers the name


class Counting(LightningDataModule):
    """Rows that count upwards from a random token."""

    def __init__(self, rows: int = 256, length: int = 32, batch_size: int = 8) -> None:
        super().__init__()
        self.rows, self.length, self.batch_size = rows, length, batch_size

    def train_dataloader(self) -> DataLoader:
        starts = torch.randint(97, (self.rows, 1), generator=torch.Generator().manual_seed(1))
        return DataLoader(
            TensorDataset((starts + torch.arange(self.length)) % 97),
            batch_size=self.batch_size,
            shuffle=True,
        )


class LanguageModel(LightningModule):
    """A small Llama."""

    def __init__(self, hidden_size: int = 64, layers: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        self.sizes = {
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": layers,
        }
        self.lr = lr
        self.model: LlamaForCausalLM | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=97, num_attention_heads=4, num_key_value_heads=2, **self.sizes
                )
            )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        (tokens,) = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    defaults = {
        "accelerator": "cpu",
        "max_steps": 20,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    cli = LightningCLI(
        LanguageModel,
        Counting,
        trainer_defaults=defaults,
        save_config_callback=None,
        seed_everything_default=1,
    )
    if cli.trainer.is_global_zero:
        print(
            f"loss after {cli.trainer.global_step} steps:"
            f" {cli.trainer.callback_metrics['train_loss']:.3f}"
        )


if __name__ == "__main__":
    main()
