"""Fits that save and resume checkpoints of a small Llama with tied embeddings, and the tensors in
these checkpoints."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from parity import StepValues, micro_batch_rows, quiet_trainer
from plain_module import LanguageModel, TextData
from ranks import run_ranks
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.checkpoint.rng_state import GENERATORS
from lightning_3d.layout import Layout

GLOBAL_BATCH = 16
STEPS_PER_EPOCH = 64 // GLOBAL_BATCH


class TiedModel(LanguageModel):
    """With an embedding on the first and the last stage, a vocabulary that tp does not divide, and
    a buffer."""

    def __init__(self, hidden_size: int = 32, tied: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def configure_model(self) -> None:
        if self.model is None:
            config = LlamaConfig(
                vocab_size=61,
                hidden_size=self.hparams["hidden_size"],
                intermediate_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=12,
                use_cache=False,
                tie_word_embeddings=self.hparams["tied"],
            )
            self.model = LlamaForCausalLM(config)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1


class SaveAtStart(pl.Callback):
    """Writes what was restored, before the first step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def make_trainer(
    layout: str, epochs: int, callbacks: list[Any], precision: str = "32-true", **strategy: Any
) -> Any:
    from lightning_3d.strategy import Lightning3DStrategy

    size = Layout.parse(layout)
    plan = Lightning3DStrategy(
        layout, micro_batch_size=micro_batch_rows(size.dp, size.pp, GLOBAL_BATCH), **strategy
    )
    assert plan.layout is not None
    trainer = quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        precision=precision,
        max_epochs=epochs,
        gradient_clip_val=0.5,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )
    return trainer, TextData(GLOBAL_BATCH // plan.layout.dp)


def fit(
    layout: str,
    epochs: int,
    *,
    resume: str | None = None,
    at_start: str | None = None,
    at_end: str | None = None,
    model: type[TiedModel] = TiedModel,
    **more: Any,
) -> list[float]:
    """The loss of every step of a fit, and of one validation after it."""
    values = StepValues()
    trainer, rows = make_trainer(
        layout, epochs, [values] + ([SaveAtStart(at_start)] if at_start else []), **more
    )
    module = model()
    trainer.fit(module, datamodule=rows, ckpt_path=resume)
    if at_end:
        trainer.save_checkpoint(at_end)
    return [*values.losses, float(trainer.callback_metrics["val_loss"])]


def world_size(layout: str) -> int:
    return math.prod(int(part[2:]) for part in layout.split("_"))


def run_fit(layout: str, *args: Any, **more: Any) -> list[float]:
    return run_ranks(fit, world_size(layout), layout, *args, **more)[0]


def all_tensors(path: Path) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state."""
    folder = TensorFolder(path)
    return {name: folder.read(name) for name in folder.names("") if name != GENERATORS}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different, f"{len(different)} tensors differ, among them {different[:5]}"
