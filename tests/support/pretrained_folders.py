"""Folders of pretrained weights as Transformers saves them, changed copies of them, and a module
that loads one."""

import shutil
from pathlib import Path
from typing import Any

import models
import parity
import torch
import transformers
from peft import LoraConfig, get_peft_model
from reference import Recipe
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_3d import load_pretrained

UNTRAINED = {"steps": 1, "learning_rate": 0.0, "weight_decay": 0.0}


def saved(
    family: str, folder: Path, dtype: torch.dtype = torch.float32, size: str = "20KB"
) -> Path:
    """A model with random weights, saved by Transformers in several files."""
    torch.manual_seed(len(family))
    model: Any = models.build(family).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)  # norms too: ones would look alike
    model.save_pretrained(folder, max_shard_size=size)
    return folder


def by_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


class Loaded(parity.Module):
    """As a user writes it."""

    def __init__(self, recipe: Recipe, folder: Path, lora: dict[str, Any] | None = None) -> None:
        super().__init__(recipe)
        self.folder, self.lora = folder, lora

    def configure_model(self) -> None:
        if self.model is None:
            self.model = load_pretrained(
                models.build(self.recipe.model, self.recipe.layers), self.folder
            )
            if self.lora is not None:
                self.model = get_peft_model(self.model, LoraConfig(**self.lora))  # type: ignore[arg-type]


def rewritten(folder: Path, target: Path, rename: Any) -> Path:
    """The folder with all tensors in one file, under other names; `rename` returns None for what is
    left out."""
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    tensors = {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    renamed = {rename(name): value for name, value in tensors.items() if rename(name) is not None}
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def lose_the_weights(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()


def keep_only_a_pickle(folder: Path) -> None:
    lose_the_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
