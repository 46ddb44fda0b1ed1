"""Names and shapes of all parameters of the known model families, as in Transformers. Pure
Python."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.models.spec import (
    EXPERT_COUNTS,
    TOP_K,
    Kept,
    ModelSpec,
    Reader,
    Shapes,
    attention_windows,
)


@dataclass(frozen=True)
class Family:
    """Names and shapes of a family's parameters.

    Attributes:
        block: function from (spec, reader) to the shapes of one block, by names relative to the
            block.
        defaults: Transformers' values of fields that a configuration omits, where they matter here.
        base: name of the module with the blocks.
        blocks: name of the list of blocks in `base`.
        embedding: name of the token embedding in `base`.
        positions: name of the embedding of positions in `base`; None for a family without one.
        final_norm: name of the norm after the blocks in `base`.
        bias_of_norms: norms are LayerNorms with a bias.
        experts: function from (spec, reader) to the shapes that replace a block's `mlp` in a
            mixture; None for a dense family.
        dense_layers: function from (spec, reader) to the layers of a mixture that keep their `mlp`.
        attention_width: function from the reader to the mean width of queries and values; None:
            that of a head.
        biased_routers: routers add a bias to their scores that only affects the choice of experts.
        expert_groups: function from the reader to (groups of experts, groups from which a token
            chooses its experts).
        kept: bytes that blocks keep for the backward pass.
        whole: beginnings of the names of matrices that the tensor-parallel plan of Transformers
            does not shard.
    """

    block: Callable[[ModelSpec, Reader], Shapes]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    base: str = "model"
    blocks: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None
    final_norm: str = "norm"
    bias_of_norms: bool = False
    experts: Callable[[ModelSpec, Reader], Shapes] | None = None
    dense_layers: Callable[[ModelSpec, Reader], Container[int]] = lambda spec, reader: ()
    attention_width: Callable[[Reader], int] | None = None
    biased_routers: bool = False
    expert_groups: Callable[[Reader], tuple[int, int]] = lambda reader: (1, 1)
    kept: Kept = Kept()
    whole: tuple[str, ...] = ()

    @property
    def sparse(self) -> bool:
        """True for a mixture of experts."""
        return self.experts is not None

    def complete(self, spec: ModelSpec, reader: Reader) -> ModelSpec:
        """Return `spec` with the shapes of the whole model."""
        embedding = f"{self.base}.{self.embedding}.weight"
        shapes: Shapes = {embedding: (spec.vocab, spec.hidden)}
        positions = None if self.positions is None else f"{self.base}.{self.positions}.weight"
        if positions is not None:
            shapes[positions] = (reader.size("max_position_embeddings"), spec.hidden)
        block = sparse = self.block(spec, reader)
        if self.experts is not None:
            sparse = {
                name: shape for name, shape in block.items() if not name.startswith("mlp.")
            } | self.experts(spec, reader)
        dense = self.dense_layers(spec, reader)
        for layer in range(spec.layers):
            chosen = block if layer in dense else sparse
            shapes.update(
                {
                    f"{self.base}.{self.blocks}.{layer}.{name}": shape
                    for name, shape in chosen.items()
                }
            )
        for layer in range(spec.layers, spec.layers + spec.ahead):
            chosen = (block if layer in dense else sparse) | _predicting(spec.hidden)
            shapes.update(
                {
                    f"{self.base}.{self.blocks}.{layer}.{name}": shape
                    for name, shape in chosen.items()
                }
            )
        shapes.update(_norm(f"{self.base}.{self.final_norm}", spec.hidden, bias=self.bias_of_norms))
        if not spec.tied:
            shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
        width = spec.head_dim if self.attention_width is None else self.attention_width(reader)
        groups, top_groups = self.expert_groups(reader)
        if spec.experts % groups or spec.experts // groups * top_groups < spec.top_k:
            groups = top_groups = 1  # not a number of groups with which the model runs
        spec = replace(spec, shapes=shapes, embedding=embedding, positions=positions)
        return replace(
            spec,
            head_dim=width,
            groups=groups,
            top_groups=min(top_groups, groups),
            kept=self.kept,
            whole=self.whole,
        )


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def _norm(name: str, size: int, *, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (size,), **({f"{name}.bias": (size,)} if bias else {})}


def _predicting(hidden: int) -> Shapes:
    """Shapes that a module of multi-token prediction has besides its block, under the names of
    DeepSeek's checkpoints."""
    norms = {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return norms | _linear("eh_proj", 2 * hidden, hidden)


def _llama_like(
    *,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    qk_norm: bool = False,
    norms: tuple[str, ...] = (),
) -> Callable[[ModelSpec, Reader], Shapes]:
    """Describe a block of separate q, k, v projections and a gated MLP.

    Args:
        qkv_bias: these projections have a bias; None follows the field `attention_bias`.
        out_bias: the output projection has a bias; None follows the field `attention_bias`.
        qk_norm: the query and the key of each head pass a norm of size head_dim.
        norms: norms other than the two before attention and MLP.
    """

    def block(spec: ModelSpec, reader: Reader) -> Shapes:
        attention_bias, mlp_bias = (
            bool(reader.get("attention_bias", False)),
            bool(reader.get("mlp_bias", False)),
        )
        of_qkv = attention_bias if qkv_bias is None else qkv_bias
        of_out = attention_bias if out_bias is None else out_bias
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shapes = {
            **_linear("self_attn.q_proj", spec.hidden, queries, bias=of_qkv),
            **_linear("self_attn.k_proj", spec.hidden, keys, bias=of_qkv),
            **_linear("self_attn.v_proj", spec.hidden, keys, bias=of_qkv),
            **_linear("self_attn.o_proj", queries, spec.hidden, bias=of_out),
            **_linear("mlp.gate_proj", spec.hidden, spec.intermediate, bias=mlp_bias),
            **_linear("mlp.up_proj", spec.hidden, spec.intermediate, bias=mlp_bias),
            **_linear("mlp.down_proj", spec.intermediate, spec.hidden, bias=mlp_bias),
        }
        if qk_norm:
            shapes |= {
                **_norm("self_attn.q_norm", spec.head_dim),
                **_norm("self_attn.k_norm", spec.head_dim),
            }
        for name in ("input_layernorm", "post_attention_layernorm", *norms):
            shapes |= _norm(name, spec.hidden)
        return shapes

    return block


def _gpt_neox(spec: ModelSpec, reader: Reader) -> Shapes:
    bias = bool(reader.get("attention_bias", True))
    return {
        **_norm("input_layernorm", spec.hidden, bias=True),
        **_norm("post_attention_layernorm", spec.hidden, bias=True),
        **_linear("attention.query_key_value", spec.hidden, 3 * spec.hidden, bias=bias),
        **_linear("attention.dense", spec.hidden, spec.hidden, bias=bias),
        **_linear("mlp.dense_h_to_4h", spec.hidden, spec.intermediate, bias=True),
        **_linear("mlp.dense_4h_to_h", spec.intermediate, spec.hidden, bias=True),
    }


def _gpt2(spec: ModelSpec, reader: Reader) -> Shapes:
    """Describe a block of GPT-2, whose layers store their matrices transposed: (inputs,
    outputs)."""
    sizes = {
        "attn.c_attn": (spec.hidden, 3 * spec.hidden),
        "attn.c_proj": (spec.hidden, spec.hidden),
        "mlp.c_fc": (spec.hidden, spec.intermediate),
        "mlp.c_proj": (spec.intermediate, spec.hidden),
    }
    shapes = {**_norm("ln_1", spec.hidden, bias=True), **_norm("ln_2", spec.hidden, bias=True)}
    for name, (inputs, outputs) in sizes.items():
        shapes |= {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}
    return shapes


def _phi3(spec: ModelSpec, reader: Reader) -> Shapes:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        **_linear("self_attn.o_proj", queries, spec.hidden),
        **_linear("self_attn.qkv_proj", spec.hidden, queries + 2 * keys),
        **_linear("mlp.gate_up_proj", spec.hidden, 2 * spec.intermediate),
        **_linear("mlp.down_proj", spec.intermediate, spec.hidden),
        **_norm("input_layernorm", spec.hidden),
        **_norm("post_attention_layernorm", spec.hidden),
    }


def _experts(spec: ModelSpec, width: int) -> Shapes:
    """Shapes of the router and of experts with gated MLPs of this width."""
    return {
        "mlp.gate.weight": (spec.experts, spec.hidden),
        "mlp.experts.gate_up_proj": (spec.experts, 2 * width, spec.hidden),
        "mlp.experts.down_proj": (spec.experts, spec.hidden, width),
    }


def _mlp(name: str, spec: ModelSpec, width: int) -> Shapes:
    return {
        **_linear(f"{name}.gate_proj", spec.hidden, width),
        **_linear(f"{name}.up_proj", spec.hidden, width),
        **_linear(f"{name}.down_proj", width, spec.hidden),
    }


def _mixtral_experts(spec: ModelSpec, reader: Reader) -> Shapes:
    return _experts(spec, spec.intermediate)


def _qwen3_experts(spec: ModelSpec, reader: Reader) -> Shapes:
    return _experts(spec, reader.size("moe_intermediate_size"))


def _qwen2_experts(spec: ModelSpec, reader: Reader) -> Shapes:
    shared = _mlp("mlp.shared_expert", spec, reader.size("shared_expert_intermediate_size"))
    return _qwen3_experts(spec, reader) | shared | _linear("mlp.shared_expert_gate", spec.hidden, 1)


def _deepseek_experts(spec: ModelSpec, reader: Reader) -> Shapes:
    shared = reader.size("moe_intermediate_size") * reader.size("n_shared_experts")
    return _qwen3_experts(spec, reader) | _mlp("mlp.shared_experts", spec, shared)


def _gpt_oss_block(spec: ModelSpec, reader: Reader) -> Shapes:
    """Describe attention with biases and a sink for each head. All blocks are mixtures."""
    bias = bool(reader.get("attention_bias", True))
    block = _llama_like(qkv_bias=bias, out_bias=bias)(spec, reader)
    return block | {"self_attn.sinks": (spec.heads,)}


def _gpt_oss_experts(spec: ModelSpec, reader: Reader) -> Shapes:
    """Describe a router and experts with biases. The matrices of an expert are (inputs,
    outputs)."""
    return {
        **_linear("mlp.router", spec.hidden, spec.experts, bias=True),
        "mlp.experts.gate_up_proj": (spec.experts, spec.hidden, 2 * spec.intermediate),
        "mlp.experts.gate_up_proj_bias": (spec.experts, 2 * spec.intermediate),
        "mlp.experts.down_proj": (spec.experts, spec.intermediate, spec.hidden),
        "mlp.experts.down_proj_bias": (spec.experts, spec.hidden),
    }


def _qwen_dense_layers(spec: ModelSpec, reader: Reader) -> Container[int]:
    every = reader.size("decoder_sparse_step")
    return {layer for layer in range(spec.layers) if (layer + 1) % every} | set(
        reader.get("mlp_only_layers") or ()
    )


def _deepseek_dense_layers(spec: ModelSpec, reader: Reader) -> Container[int]:
    return range(int(reader.get("first_k_dense_replace", 0)))


def _deepseek_groups(reader: Reader) -> tuple[int, int]:
    """Read the groups of DeepSeek-V3's routers; those of DeepSeek-V2 have some only with one of
    their methods."""
    if reader.get("topk_method", "group_limited_greedy") != "group_limited_greedy":
        return 1, 1
    return int(reader.get("n_group", 1)), int(reader.get("topk_group", 1))


def _latent_attention(spec: ModelSpec, reader: Reader) -> Shapes:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) and a gated MLP."""
    bias = bool(reader.get("attention_bias", False))
    rope, nope, value = (
        reader.size(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    latent, query_latent = reader.size("kv_lora_rank"), reader.get("q_lora_rank")
    queries = spec.heads * (rope + nope)
    if query_latent is None:
        shapes = _linear("self_attn.q_proj", spec.hidden, queries)
    else:
        shapes = {
            **_linear("self_attn.q_a_proj", spec.hidden, query_latent, bias=bias),
            **_norm("self_attn.q_a_layernorm", query_latent),
            **_linear("self_attn.q_b_proj", query_latent, queries),
        }
    return {
        **shapes,
        **_linear("self_attn.kv_a_proj_with_mqa", spec.hidden, latent + rope, bias=bias),
        **_norm("self_attn.kv_a_layernorm", latent),
        **_linear("self_attn.kv_b_proj", latent, spec.heads * (nope + value)),
        **_linear("self_attn.o_proj", spec.heads * value, spec.hidden, bias=bias),
        **_mlp("mlp", spec, spec.intermediate),
        **_norm("input_layernorm", spec.hidden),
        **_norm("post_attention_layernorm", spec.hidden),
    }


def _latent_width(reader: Reader) -> int:
    return (
        reader.size("qk_rope_head_dim")
        + reader.size("qk_nope_head_dim")
        + reader.size("v_head_dim")
    ) // 2


_FLOAT_ROUTERS = Kept(routed=4.0)
"""Routers take tokens in float32."""

_FOUR_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")

_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

# Defaults are those of the configuration classes of Transformers 5.
FAMILIES: dict[str, Family] = {
    "llama": Family(_llama_like(), {"max_position_embeddings": 2048}),
    "mistral": Family(
        _llama_like(qkv_bias=False, out_bias=False),
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        _llama_like(qkv_bias=True, out_bias=False),
        _QWEN,
    ),
    "qwen3": Family(
        _llama_like(qk_norm=True),
        {**_QWEN, "head_dim": 128},
    ),
    "gemma": Family(
        _llama_like(),
        {
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": Family(
        _llama_like(norms=_FOUR_NORMS),
        {**_GEMMA, "max_position_embeddings": 8192, "sliding_window_pattern": 2},
    ),
    "gemma3_text": Family(
        _llama_like(qk_norm=True, norms=_FOUR_NORMS),
        {**_GEMMA, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
    ),
    "phi3": Family(_phi3, {"max_position_embeddings": 4096}),
    "mixtral": Family(
        _llama_like(qkv_bias=False, out_bias=False),
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "num_experts_per_tok": 2},
        experts=_mixtral_experts,
    ),
    "qwen2_moe": Family(
        _llama_like(qkv_bias=True, out_bias=False),
        {**_QWEN, "num_key_value_heads": 16, "decoder_sparse_step": 1, "num_experts_per_tok": 4},
        experts=_qwen2_experts,
        dense_layers=_qwen_dense_layers,
        whole=("mlp.shared_expert.",),
    ),
    "qwen3_moe": Family(
        _llama_like(qk_norm=True),
        {**_QWEN, "num_key_value_heads": 4, "decoder_sparse_step": 1, "num_experts_per_tok": 8},
        experts=_qwen3_experts,
        dense_layers=_qwen_dense_layers,
    ),
    "deepseek_v2": Family(
        _latent_attention,
        {"max_position_embeddings": 2048, "first_k_dense_replace": 0, "topk_method": "greedy"},
        experts=_deepseek_experts,
        dense_layers=_deepseek_dense_layers,
        attention_width=_latent_width,
        expert_groups=_deepseek_groups,
        kept=_FLOAT_ROUTERS,
    ),
    "deepseek_v3": Family(
        _latent_attention,
        {
            "max_position_embeddings": 4096,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
        },
        experts=_deepseek_experts,
        dense_layers=_deepseek_dense_layers,
        attention_width=_latent_width,
        expert_groups=_deepseek_groups,
        biased_routers=True,
        kept=_FLOAT_ROUTERS,
        whole=("self_attn.",),
    ),
    "gpt_neox": Family(
        _gpt_neox,
        {"max_position_embeddings": 2048},
        base="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        bias_of_norms=True,
    ),
    "gpt2": Family(
        _gpt2,
        {"max_position_embeddings": 1024, "tie_word_embeddings": True},
        base="transformer",
        blocks="h",
        embedding="wte",
        positions="wpe",
        final_norm="ln_f",
        bias_of_norms=True,
    ),
    "gpt_oss": Family(
        _gpt_oss_block,
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        experts=_gpt_oss_experts,
        # Norms keep what they have normalized in float32, experts the clamped halves and their
        # product, attention 16-bit scores.
        kept=Kept(norm=2.0, inner=6.0, score=2.0),
    ),
}

MOST_LAYERS = 100_000
"""More are refused as a typing error, before anything is made for each of them."""


def read_spec(config: Mapping[str, Any], ahead: int | None = None) -> ModelSpec:
    """Read the fields of a Transformers configuration.

    Args:
        config: `model_type` and the fields, as in `conf/model/*.yaml` or
            `PretrainedConfig.to_dict()`.
        ahead: modules of multi-token prediction behind the model (`model.mtp_layers`); None for
            none.

    Raises:
        ConfigError: `model_type` or a size is missing, not a whole number, or not positive.
    """
    if not config.get("model_type"):
        raise ConfigError(
            "The model configuration has no model_type. Add one, for example `model_type: llama`."
        )
    model_type = str(config["model_type"])
    family = FAMILIES.get(model_type)
    reader = Reader(config, family.defaults if family else {})
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    layers = reader.size("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers must be at most {MOST_LAYERS}; got {layers}.")
    experts = reader.first(EXPERT_COUNTS)
    known = family is not None and family.sparse == (experts > 0)
    spec = ModelSpec(
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=reader.optional("num_key_value_heads") or heads,
        head_dim=reader.optional("head_dim") or hidden // heads,
        intermediate=reader.optional("intermediate_size") or 4 * hidden,
        vocab=reader.size("vocab_size"),
        max_positions=reader.optional("max_position_embeddings"),
        tied=bool(reader.get("tie_word_embeddings", False)),
        experts=experts,
        top_k=reader.first(TOP_K) if experts else 0,
        windows=attention_windows(reader, layers),
        shapes=None,
        ahead=ahead or 0,
    )
    if not known or family is None:
        return spec
    return family.complete(spec, reader)
