"""Train a mixture of experts on 4 CPU ranks, with its experts spread over the ranks and balanced by
a loss.

    python examples/mixture.py
    python examples/mixture.py --layout tp2_ep2_dp2 --aux-loss 0.1

`ep4` adds no ranks: each of the 4 ranks of `dp4` holds two of the 8 experts of each layer, and
tokens are sent to the rank of their expert.
"""

import argparse
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from own_trainer import CountingText, LanguageModel
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_3d import Lightning3DStrategy


class Mixture(LanguageModel):
    """The step of own_trainer.py with another model: nothing here depends on experts."""

    def configure_model(self) -> None:
        if self.model is None:
            sizes = {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            }
            self.model = MixtralForCausalLM(
                MixtralConfig(vocab_size=97, num_local_experts=8, num_experts_per_tok=2, **sizes)
            )


class PrintLoad(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.is_global_zero and trainer.global_step % 10 == 0:
            step = trainer.strategy.last_step
            loads = ", ".join(f"{load:.2f}" for load in step.routers.max_over_mean)
            print(
                f"step {trainer.global_step}: loss {step.loss:.3f}, fullest expert of each layer"
                f" {loads} x the mean",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="ep4_dp4")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--aux-loss", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=Lightning3DStrategy(
            options.layout, micro_batch_size=4, moe_aux_loss=options.aux_loss
        ),
        max_steps=options.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[PrintLoad()],
    )
    trainer.fit(Mixture(), DataLoader(CountingText(), batch_size=4, shuffle=True))


if __name__ == "__main__":
    main()
