"""Train LoRA adapters of PEFT on a sharded model: 4 CPU ranks, two pipeline stages with two
tensor-parallel ranks each.

    pip install "lightning-3d[peft]"
    python examples/lora.py
    python examples/lora.py --layout pp2_dp2 --zero-stage 3 --checkpoint adapters.ckpt

The model is tiny and starts from random weights. For pretrained weights, use
`load_pretrained(LlamaForCausalLM(config), folder)` instead.
"""

import argparse
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from own_trainer import CountingText
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d import Lightning3DStrategy


class Adapted(LightningModule):
    """A causal language model with frozen weights and trained adapters on all its linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.sizes = (0, 0)

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
            self.model = get_peft_model(
                LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear")
            )
            # Here the model is still whole; later each rank has its shard.
            trained = sum(
                parameter.numel() for parameter in self.parameters() if parameter.requires_grad
            )
            self.sizes = (trained, sum(parameter.numel() for parameter in self.parameters()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            filter(lambda parameter: parameter.requires_grad, self.parameters()), lr=1e-2
        )


class PrintLoss(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.is_global_zero and trainer.global_step % 10 == 0:
            print(
                f"step {trainer.global_step}: loss {trainer.callback_metrics['train_loss']:.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2_pp2")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--checkpoint",
        help="where to save the adapters and the frozen weights under their full shapes",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    seed_everything(1)
    module = Adapted()
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=Lightning3DStrategy(
            options.layout, micro_batch_size=4, zero_stage=options.zero_stage
        ),
        max_steps=options.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[PrintLoss()],
    )
    trainer.fit(module, DataLoader(CountingText(), batch_size=16, shuffle=True))
    if options.checkpoint:
        trainer.save_checkpoint(options.checkpoint)
    if trainer.is_global_zero:
        trained, all_parameters = module.sizes
        print(f"trained {trained} of {all_parameters} parameters ({trained / all_parameters:.1%})")


if __name__ == "__main__":
    main()
