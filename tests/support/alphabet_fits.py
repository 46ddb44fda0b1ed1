"""The smallest model and optimizer of a configuration, and a Trainer that fits them to the alphabet
on one process."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.app.training.callbacks import ProgressBar
from lightning_3d.app.training.data.packing import Tokens
from lightning_3d.app.training.data.python_stdlib import PythonStdlib

MODEL = {
    "name": "smallest",
    "attn_implementation": "sdpa",
    "config": {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
}
OPTIMIZER = {
    "name": "adamw",
    "lr": 1e-2,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "no_decay": ["norm", "bias", "embedding"],
    "scheduler": {"name": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1},
}


class Alphabet(PythonStdlib):
    """A text that a small model learns in a few steps."""

    def load_tokens(self) -> tuple[Tokens, Tokens]:
        text = torch.arange(26).repeat(200).numpy().astype("uint16") + 97
        return Tokens(text, "the alphabet"), Tokens(text[:650], "the alphabet")


def alphabet(**kwargs: Any) -> Alphabet:
    return Alphabet(**{"sequence_length": 16, "global_batch_size": 4, "vocab_size": 257, **kwargs})


def trainer(folder: Path, *callbacks: Callback, **kwargs: Any) -> Trainer:
    options = {
        "max_steps": 20,
        "limit_val_batches": 4,
        "val_check_interval": 20,
        "check_val_every_n_epoch": None,
    }
    options |= {
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    }
    options |= {
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks)
    }
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{**options, **kwargs},
    )
