"""Families of Transformers whose attention context parallelism replaces. Others:
`test_split_blocks`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn

from lightning_3d.engine.step.loss_weights import LossWeights, weigh_loss
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.blocks import find_blocks
from lightning_3d.parallel.context import ContextParallel, share_sequences

SEQUENCE = 24
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
EXACT: dict[str, dict[str, Any]] = {
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 8,
        "attn_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "activation_dropout": 0.0},
    "cohere2": {"sliding_window": 8},
    "granite": {},
    "olmo2": {},
    "phi": {"embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "starcoder2": {"sliding_window": 8, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "smollm3": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "mixtral": MIXTURE,
    "qwen3_moe": MIXTURE | {"head_dim": 8},
    "gpt_oss": MIXTURE | {"head_dim": 8, "sliding_window": 8, "rope_scaling": None},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
IN_FLOAT32 = ("gemma2", "cohere2", "deepseek_v3")  # its softmax, norm, router


def build(family: str, options: dict[str, Any]) -> nn.Module:
    """A tiny model in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | options)
    how = {"experts_implementation": "eager", "attn_implementation": implementation(family)}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **how)
    for parameter in model.parameters():  # away from ones and zeros
        nn.init.normal_(parameter, std=0.2)
    return model.train()


def implementation(family: str) -> str:
    return "eager" if family in ("gemma2", "gpt_oss") else "sdpa"  # soft caps and sinks


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 61, (2, SEQUENCE), generator=generator)
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.2, -100),
    }


def packed_positions() -> Tensor:
    """A document that begins in the middle of a chunk in one row, one document in the other."""
    rows = [torch.cat([torch.arange(5), torch.arange(SEQUENCE - 5)]), torch.arange(SEQUENCE)]
    return torch.stack(rows)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Without the float32 of Transformers' own."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def share(model: nn.Module, kind: str) -> None:
    context = ContextParallel(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), kind)
    assert share_sequences(model, find_blocks(model, ParallelPlan({})), "", context) is None
    weigh_loss(model, LossWeights(), context)


def differences(family: str, options: dict[str, Any]) -> list[float]:
    """(of losses, relative of gradients) with one document and with several, by ring and by
    Ulysses."""
    found = []
    for extra in ({}, {"position_ids": packed_positions()}):
        for kind in ("ring", "ulysses"):
            alone, shared = build(family, options), build(family, options)
            share(shared, kind)
            expected = mean_loss(
                alone(input_ids=batch()["input_ids"], **extra).logits, batch()["labels"]
            )
            loss = shared(**batch(), **extra).loss
            found.append((loss - expected).abs().item())
            expected.backward()
            (loss / dist.get_world_size()).backward()
            gradients = [
                (a.grad, b.grad)
                for a, b in zip(alone.parameters(), shared.parameters(), strict=True)
                if a.grad is not None
            ]
            for gradient, part in gradients:
                part = torch.zeros_like(gradient) if part is None else part
                dist.all_reduce(part)
                found.append(((part - gradient).norm() / gradient.norm().clamp(min=1e-3)).item())
    return found


@pytest.mark.parametrize(
    "family", by_default(list(EXACT), *map(list(EXACT).index, ("gemma2", "opt", "gpt_oss")))
)
def test_a_family_is_cut_exactly(family: str) -> None:
    worst = max(max(found) for found in run_ranks(differences, 2, family, EXACT[family]))
    assert worst < (1e-6 if family in IN_FLOAT32 else 1e-11)
