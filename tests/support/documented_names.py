"""What Python blocks of the documentation take for given: a module, its rows, a folder of weights.
Each is made when it is asked for."""

import io
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_3d import Lightning3DStrategy

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


class Module(LightningModule):
    """A Llama, as one has it."""

    def __init__(self) -> None:
        super().__init__()
        self.model: LlamaForCausalLM | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class MyModule(Module):
    """The same, of a configuration, with batches that are dicts."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        if self.model is None:
            self.model = LlamaForCausalLM(self.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return super().training_step(batch["tokens"], batch_idx)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    """What the plan of docs/your_model.md is for."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 97)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Batches:
    """Rows of counting text, a few batches of them."""

    def __new__(cls, rows: int = 64) -> Any:
        starts = torch.randint(97, (rows, 1), generator=torch.Generator().manual_seed(1))
        return DataLoader((starts + torch.arange(16)) % 97, batch_size=8)  # type: ignore[arg-type]


def strategy() -> Lightning3DStrategy:
    return Lightning3DStrategy("tp2_pp2_dp2", micro_batch_size=2)


def trainer() -> Trainer:
    return Trainer(
        accelerator="cpu", devices=8, strategy=strategy(), max_steps=6, enable_progress_bar=False
    )


def checkpoint(where: Path) -> None:
    """A checkpoint of two steps of the module."""
    first = Trainer(
        accelerator="cpu",
        devices=8,
        strategy=strategy(),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    first.fit(Module(), Batches())
    first.save_checkpoint(where)


def folder() -> str:
    """A folder of weights in Transformers' format."""
    LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).save_pretrained("llama")
    return "llama"


def transformers(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def peft(name: str) -> Any:
    import peft

    return getattr(peft, name)


def load_pretrained() -> Any:
    from lightning_3d import load_pretrained

    return load_pretrained


def engine() -> Any:
    from lightning_3d import Engine

    return Engine(
        LlamaForCausalLM(small_config()),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    )


def small_config() -> LlamaConfig:
    return LlamaConfig(**SIZES, num_key_value_heads=2)


MAKERS: dict[str, Any] = {
    "module": Module,
    "loader": Batches,
    "trainer": trainer,
    "network": Network,
    "model": lambda: LlamaForCausalLM(small_config()),
    "texts": lambda: [{"input_ids": batch, "labels": batch} for batch in Batches()],
    "engine": engine,
    "path": folder,
    "config": small_config,
    "small_config": small_config,
    "MyModule": lambda: MyModule,
    "plan": lambda: None,  # that of Transformers
    "batches": lambda: [{"tokens": batch} for batch in Batches()],
    "optimizer": lambda: None,
    "file": io.StringIO,
    "AutoConfig": lambda: transformers("AutoConfig"),
    "AutoModelForCausalLM": lambda: transformers("AutoModelForCausalLM"),
    "LoraConfig": lambda: peft("LoraConfig"),
    "get_peft_model": lambda: peft("get_peft_model"),
    "load_pretrained": load_pretrained,
}


def made(names: list[str]) -> dict[str, Any]:
    """What a block takes for given, by name."""
    found = {name: MAKERS[name]() for name in names}
    if "optimizer" in found:
        found["module"].configure_model()
        found["optimizer"] = found["module"].configure_optimizers()
    return found
