"""Fine-tune a Transformers checkpoint from disk on 2 CPU ranks, export it, and generate text with
Transformers.

    python examples/finetune.py
    python examples/finetune.py --pretrained /models/SmolLM2-135M --layout pp2 --steps 50

Without `--pretrained`, the script first writes a tiny model with random weights, in place of a
downloaded one.
"""

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from own_trainer import CountingText
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lightning_3d import Lightning3DStrategy, load_pretrained
from lightning_3d.app.cli import main as lightning_3d


class FineTuned(LightningModule):
    """A pretrained model: each rank reads its slices of the files, and no rank holds the whole
    model."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.model: PreTrainedModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            config = AutoConfig.from_pretrained(self.folder, dtype="float32")
            self.model = load_pretrained(AutoModelForCausalLM.from_config(config), self.folder)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_pretrained(folder: Path) -> Path:
    """Write a folder like that of `hf download`. The first process does so before it starts the
    others."""
    if "LOCAL_RANK" not in os.environ:
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pretrained", type=Path, help="config.json and safetensors")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/finetuned"),
        help="folder for the checkpoint and the exported model",
    )
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=Lightning3DStrategy(options.layout, micro_batch_size=8),
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module = FineTuned(options.pretrained or make_pretrained(options.output / "pretrained"))
    trainer.fit(module, DataLoader(CountingText(), batch_size=16, shuffle=True))
    trainer.save_checkpoint(options.output / "last.ckpt")
    if not trainer.is_global_zero:
        return
    print(
        f"loss after {trainer.global_step} steps: {trainer.callback_metrics['train_loss']:.3f}",
        flush=True,
    )
    exported = options.output / "huggingface"
    lightning_3d(
        [
            "export",
            str(options.output / "last.ckpt"),
            "--to",
            "huggingface",
            "--output",
            str(exported),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(exported)
    prompt = torch.tensor([[11, 12, 13, 14]])
    answer = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    print("generated", *answer[0].tolist())


if __name__ == "__main__":
    main()
