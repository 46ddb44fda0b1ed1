"""Models whose sizes the columns of a table do not state in full: size of a head, latent attention,
shared experts, first dense blocks.

The fields are those of the published Transformers configurations. A row is such a model if its name
says so and its number of blocks and its hidden size are the same.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.models.families import read_spec

_FIELDS = (
    *(
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    ),
    *("moe_intermediate_size", "num_experts_per_tok"),
)
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_SHARED = {"num_experts": 64, "shared_expert_intermediate_size": 20480, "decoder_sparse_step": 1}
_V3 = {**_DEEPSEEK, "q_lora_rank": 1536, "n_shared_experts": 1}
_LITE = {
    **_DEEPSEEK,
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "first_k_dense_replace": 1,
}
_HEADS = {"head_dim": 128}
_EXPERTS = {"head_dim": 128, "num_experts": 128, "decoder_sparse_step": 1}

_CONFIGS: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    (
        "deepseekv3|deepseekr1",
        ("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, 2048, 8),
        {**_V3, "n_routed_experts": 256, "first_k_dense_replace": 3},
    ),
    (
        "kimik2",
        ("deepseek_v3", 61, 7168, 64, 64, 18432, 163840, 2048, 8),
        {**_V3, "n_routed_experts": 384, "first_k_dense_replace": 1},
    ),
    ("deepseekv2lite|moonlight", ("deepseek_v2", 27, 2048, 16, 16, 10944, 102400, 1408, 6), _LITE),
    ("qwen257b|qwen2.*a14b", ("qwen2_moe", 28, 3584, 28, 4, 18944, 151936, 2560, 8), _SHARED),
    ("qwen3.*a22b", ("qwen3_moe", 94, 4096, 64, 4, 12288, 151936, 1536, 8), _EXPERTS),
    ("qwen3.*a3b", ("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, 768, 8), _EXPERTS),
    ("qwen332b", ("qwen3", 64, 5120, 64, 8, 25600, 151936), _HEADS),
    ("qwen34b", ("qwen3", 36, 2560, 32, 8, 9728, 151936), _HEADS),
)
"""Patterns of a name without signs and spaces, the values of `_FIELDS`, and further fields of the
model."""

_HEAD_SIZES = {"gptoss": 64, "gemma327b": 128, "gemma": 256}
"""Sizes of a head that are not the hidden size divided by the heads, for models whose other sizes
the columns state."""


def named_model(name: str, layers: int, hidden: int) -> Architecture | None:
    """Return the model that a name means, if it has this number of blocks and this hidden size;
    None if the columns are enough."""
    plain = _plain(name)
    for index, (pattern, values, _) in enumerate(_CONFIGS):
        if re.search(pattern, plain) and values[1:3] == (layers, hidden):
            return _architecture(index)
    return None


def head_size(name: str) -> int | None:
    """Return the size of a head of a model by its name; None: the hidden size divided by the
    heads."""
    return next((size for word, size in _HEAD_SIZES.items() if word in _plain(name)), None)


def with_windows(name: str, model: Architecture) -> Architecture:
    """Return GPT-OSS with the sliding window of 128 tokens that every second block has."""
    return (
        replace(model, windows=tuple((128, None)[index % 2] for index in range(model.layers)))
        if "gptoss" in _plain(name)
        else model
    )


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


@lru_cache(maxsize=32)
def _architecture(index: int) -> Architecture:
    _, values, others = _CONFIGS[index]
    spec = read_spec({**dict(zip(_FIELDS, values, strict=False)), **others})
    # these programs shard what the plans of Transformers leave whole
    return Architecture.from_spec(replace(spec, whole=()))
