"""Train an ordinary LightningModule with your own Trainer on 8 CPU ranks, in three dimensions.

    python examples/own_trainer.py
    torchrun --nproc-per-node 8 examples/own_trainer.py

Only the two lines marked below differ from a script for one device.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d import Lightning3DStrategy  # this line


class CountingText(Dataset):
    """Make rows that count upwards from a random token."""

    def __init__(self, rows: int = 256, length: int = 32, vocabulary: int = 97) -> None:
        starts = torch.randint(vocabulary, (rows, 1), generator=torch.Generator().manual_seed(1))
        self.rows = (starts + torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class LanguageModel(LightningModule):
    """An ordinary LightningModule: nothing here depends on ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model: LlamaForCausalLM | None = None

    def configure_model(self) -> None:
        if self.model is None:
            config = LlamaConfig(
                vocab_size=97,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
            self.model = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2_pp2_dp2")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        # and this
        strategy=Lightning3DStrategy(
            options.layout, micro_batch_size=2, zero_stage=options.zero_stage
        ),
        max_steps=options.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(LanguageModel(), DataLoader(CountingText(), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print(
            f"loss after {trainer.global_step} steps: {trainer.callback_metrics['train_loss']:.3f}"
        )


if __name__ == "__main__":
    main()
