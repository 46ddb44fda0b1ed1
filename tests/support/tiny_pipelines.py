"""Tiny models, and stand-ins for the user's module and the strategy, for tests of the pipeline
engine by itself."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

ROWS, LENGTH, VOCABULARY = 2, 6, 32
NO_DROPOUT = SimpleNamespace(enabled=False, layer=lambda index: None)


def tiny(family: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "use_cache": False,
    }
    if family == "gpt_neox":
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(num_attention_heads=2, max_position_embeddings=16, **common)
        ).double()
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * layers
        config = Gemma3TextConfig(
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            sliding_window=4,
            layer_types=kinds[:layers],
            **common,
        )
        return Gemma3ForCausalLM(config).double()
    return LlamaForCausalLM(
        LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **common)
    ).double()


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)
    )


class Owner(nn.Module):
    """Plays the user's module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def step(self, tokens: Tensor) -> Tensor:
        return loss_of(self.model(input_ids=tokens).logits, tokens)


class CountedStep:
    """Plays what the strategy gives the engine."""

    def __init__(self, user: Owner, tokens: Tensor) -> None:
        self.user, self.tokens = user, tokens
        self.losses: list[float] = []
        self.calls = 0

    def enter(self, micro_batch: int) -> None:
        """Nothing random here."""

    def __call__(self, micro_batch: int) -> Tensor:
        self.calls += 1
        loss = self.user.step(self.tokens[micro_batch])
        self.losses.append(loss.item())
        return loss
