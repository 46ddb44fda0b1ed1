"""A tiny configuration for every family of causal language models in Transformers: few layers of
every kind, small widths.

Sizes are set by the names that configurations have for them. What that does not fit is in
`OVERRIDES`, by family; families that do not train on one process are in `NO_REFERENCE`, with the
reason.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch

from lightning_3d.models.mixtures import find_mixtures

SEQUENCE = 16  # tokens of a row
VOCABULARY = 67  # which two ranks do not divide
LAYERS = 4

# By name: the size in every configuration that has one of this name. Nested configurations are
# shrunk in the same way.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "embedding_dim",
            "emb_dim",
            "attention_hidden_size",
            "lru_width",
        ),
        32,
    ),
    **dict.fromkeys(
        ("embedding_size", "word_embed_proj_dim", "input_embedding_size", "output_embedding_size"),
        32,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("num_decoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "depth"), 2),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        ("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("swa_num_attention_heads", "num_query_groups", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        (
            "head_dim",
            "swa_head_dim",
            "dim_head",
            "d_head",
            "attention_head_size",
            "linear_head_dim",
            "kv_channels",
        ),
        8,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"),
        48,
    ),
    **dict.fromkeys(("d_inner", "dim_ff", "dff"), 48),
    **dict.fromkeys(
        ("dense_intermediate_size", "intermediate_size_mlp", "feed_forward_size", "n_inner"), 48
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
        ),
        24,
    ),
    **dict.fromkeys(
        (
            "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        24,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "zero_expert_num": 2,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(
        (
            "q_lora_rank",
            "kv_lora_rank",
            "o_lora_rank",
            "adapter_rank",
            "hc_lowrank",
            "laurel_rank",
            "router_hidden_size",
        ),
        16,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("qk_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("index_topk", "index_topk_blocks", "index_block_size"), 4),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "context_length",
            "max_target_positions",
        ),
        64,
    ),
    **dict.fromkeys(
        ("model_max_length", "original_max_position_embeddings", "max_source_positions"), 64
    ),
    **dict.fromkeys(
        (
            "sliding_window",
            "sliding_window_size",
            "attention_window_size",
            "local_attention",
            "window_size",
        ),
        8,
    ),
    **dict.fromkeys(
        ("attention_chunk_size", "floor_scale", "rel_extent", "local_attention_window_len"), 8
    ),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_d_ssm",), 64),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("block_size",), 8),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("num_kv_shared_layers", "num_nextn_predict_layers"), 0),
    "hidden_size_per_layer_input": 8,
    "type_vocab_size": 2,
    "image_size": 16,
    "patch_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "output_router_logits": False,
    "is_decoder": True,
    "is_encoder_decoder": False,
}

# What the general sizes do not fit, on top of them. A dictionary under the name of a nested
# configuration belongs to that.
_DOTS3_SLIDING = {f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")} | {
    f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim")
}
_DOTS3_TEXT = _DOTS3_SLIDING | {
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
    "num_key_value_heads": 4,
}
_MIXTURE = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
_GEMMA4_TEXT = {"global_head_dim": 16}
_INDEXER_SIZES = {"n_heads": 2, "kv_heads": 1, "head_dim": 16, "budget": 8, "compress_ratio": 2}
_INDEXER = {f"indexer_{name}": size for name, size in _INDEXER_SIZES.items()}
_QWEN4_TEXT = {"ngram_vocab_size_base": 32, "ple_embed_dim": 32, "split_ngram_parts": 1, **_INDEXER}
_AXIAL_TEXT = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {
        "hidden_size": 32,
        "encoder_hash_byte_group_vocab": 32,
        "encoder_hash_byte_group_size": [2, 3],
        "encoder_config": {"hidden_size_global": 64, "hidden_size": 32},
        "decoder_config": {"hidden_size_global": 64, "hidden_size": 32},
        "global_config": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
        "patcher_config": {"hidden_size": 32},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _AXIAL_TEXT}},
    "dots3_note": {
        "text_config": _DOTS3_TEXT,
        "vision_config": {
            "pyramid_num_routed": [-1, -1],
            "num_hidden_layers": 2,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "downsample_hidden_size": 8,
        },
    },
    "dots3_note_text": _DOTS3_TEXT,
    "gemma3n_text": {"activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0]},
    "gemma4": {"text_config": _GEMMA4_TEXT | _MIXTURE},
    "gemma4_text": _GEMMA4_TEXT | _MIXTURE,
    "gemma4_unified": {"text_config": _GEMMA4_TEXT},
    "gemma4_unified_text": _GEMMA4_TEXT,
    "got_ocr2": {"vision_config": {"mlp_dim": 48, "output_channels": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "use_mamba_kernels": False,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "phi4_multimodal": {"audio_config": {"nemo_conv_channels": 32}},
    "qwen4_exp": {"text_config": _QWEN4_TEXT},
    "qwen4_exp_text": _QWEN4_TEXT,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 16,
        "shape_vocab_size": 16,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}

NO_REFERENCE: dict[str, str] = {
    "gemma3n": "its vision tower needs the package timm; gemma3n_text is the same without",
    "gemma4_assistant": "drafts for another model, whose hidden states it must be given",
    "gemma4_unified_assistant": "drafts for another model, whose hidden states it must be given",
    "git": "its logits begin with those of an image, without which labels have another length",
    "musicgen": (
        "Transformers builds MusicgenForCausalLM from the decoder's configuration only, and labels"
        " are of several codebooks"
    ),
    "musicgen_melody": "as musicgen",
}


def families() -> list[str]:
    """Every family that Transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_held_out(family: str) -> bool:
    """Whether a family is in the third, chosen by hash, that nobody looks at while derived plans
    and repairs are built."""
    return zlib.crc32(family.encode()) % 3 == 0


def tiny_config(family: str, dropout: float = 0.0) -> Any:
    """The configuration of a family, made small."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    own = OVERRIDES.get(family, {})
    return kind(
        **_settings(
            kind(**own.get("__init__", {})),
            {k: v for k, v in own.items() if k != "__init__"},
            dropout,
        )
    )


def build(family: str) -> Any:
    """The model with weights in memory."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(tiny_config(family))


@functools.cache
def has_experts(family: str) -> bool:
    """Whether the model of a family has a mixture of experts, decided by its modules."""
    with torch.device("meta"):
        return bool(find_mixtures(build(family)))


def _settings(default: Any, own: dict[str, Any], dropout: float) -> dict[str, Any]:
    """Arguments that make a configuration like `default`, but small."""
    aliases = getattr(default, "attribute_map", {})
    settings = {
        name: value for name, value in SIZES.items() if name in vars(default) or name in aliases
    }
    # latent attention has as many key heads as query heads
    if "kv_lora_rank" in settings or "qk_nope_head_dim" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    settings |= {
        name: dropout
        for name, value in vars(default).items()
        if "drop" in name and isinstance(value, float)
    }
    settings |= {
        name: 0.0
        for name, value in vars(default).items()
        if "jitter" in name and isinstance(value, float)
    }
    for name in getattr(default, "sub_configs", {}):
        nested = getattr(default, name, None)
        if nested is not None and hasattr(nested, "to_dict"):
            settings[name] = {"model_type": nested.model_type} | _settings(
                nested, own.get(name, {}), dropout
            )
    settings |= {
        name: value
        for name, value in own.items()
        if name not in getattr(default, "sub_configs", {})
    }
    for name in (
        "layer_types",
        "mlp_layer_types",
        "layers_block_type",
        "block_types",
        "indexer_types",
    ):
        kinds = list(dict.fromkeys(getattr(default, name, None) or ()))
        fixed = (
            isinstance(getattr(type(default), aliases.get(name, name), None), property)
            or name in own
        )
        if len(kinds) > 1 and not fixed:
            settings[name] = [kinds[index % len(kinds)] for index in range(max(LAYERS, len(kinds)))]
    return settings
