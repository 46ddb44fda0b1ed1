"""The tiny models and batches of a self-test, and the plain loop on one rank with which every
layout is compared.

The loop is ordinary PyTorch: micro-batches, summed gradients, AdamW on float32 master weights. Of
the package it uses `initialize`, for the same initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.app.verification.cells import BF16, ROWS
from lightning_3d.parallel.default_dtype import default_dtype
from lightning_3d.weights.initialize import initialize

STEPS = 4
SEQUENCE = 16
LEARNING_RATE = 1e-3
SEED = 0
_VOCABULARY = 96
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
    "use_cache": False,
}


@dataclass(frozen=True)
class Recipe:
    """A model and its precision: all that the reference depends on."""

    model: str
    layers: int
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == BF16 else torch.float32


@dataclass(frozen=True)
class ReferenceResult:
    """Loss and gradient norm of each step, and the final weights by name, on the CPU."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def build(recipe: Recipe) -> nn.Module:
    """Build the model on the current default device, in the current default dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    if recipe.model == "mixtral":
        return MixtralForCausalLM(
            MixtralConfig(
                **_SIZES,
                num_hidden_layers=recipe.layers,
                num_local_experts=4,
                num_experts_per_tok=2,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            **_SIZES, num_hidden_layers=recipe.layers, tie_word_embeddings=recipe.model == "tied"
        )
    )


def batches() -> list[Tensor]:
    """Make the tokens of each step's global batch, of shape (ROWS, SEQUENCE)."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return [
        torch.randint(0, _VOCABULARY, (ROWS, SEQUENCE), generator=generator) for _ in range(STEPS)
    ]


def train_plainly(recipe: Recipe, device: str, rows: int = 2) -> ReferenceResult:
    """Train on one rank in a plain loop with micro-batches of `rows` rows."""
    model = _initial(recipe).to(device)
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE)
    losses, norms = [], []
    for batch in batches():
        loss, gradients = 0.0, [torch.zeros_like(master) for master in masters]
        for tokens in batch.to(device).split(rows):
            part = _mean_loss(model, tokens) * len(tokens) / ROWS
            part.backward()
            loss += part.item()
            for total, parameter in zip(gradients, parameters, strict=True):
                # an expert may get no token
                total += 0.0 if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        losses.append(loss)
        norms.append(
            torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt().item()
        )
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return ReferenceResult(
        losses,
        norms,
        {f"model.{name}": value.detach().cpu() for name, value in model.named_parameters()},
    )


def _mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _initial(recipe: Recipe) -> nn.Module:
    """Build the model with the weights that every layout gets: a function of the seed and the names
    of the parameters."""
    with default_dtype(recipe.dtype):
        with torch.device("meta"):
            module = nn.ModuleDict({"model": build(recipe)})
        initialize(module, SEED)
    return module["model"]
