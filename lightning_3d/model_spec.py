"""What a model configuration says about sizes, without building the model. Pure Python: no torch, no Transformers.

`ModelSpec.from_config` reads the dict that a `model/` config file holds under `config` (the fields of a Transformers
configuration). Every configuration yields the numbers that layouts are checked against (heads, layers, vocabulary,
...). For the dense families listed in `FAMILIES` it also yields the name and shape of every parameter, hence parameters
and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from lightning_3d.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]

# Configurations of older families use other names for the same sizes (`attribute_map` in Transformers).
_SYNONYMS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a decoder.

    Attributes:
        hidden: width of the residual stream.
        kv_heads: key/value heads; equals `heads` without grouped-query attention.
        intermediate: inner width of the MLP.
        max_positions: longest sequence the positions are made for; None when the configuration does not say.
        tied: the output head is the embedding matrix.
        experts: experts per mixture-of-experts layer; 0 for a dense model.
        top_k: experts that see each token; 0 for a dense model.
        windows: per layer, how many tokens back attention reaches; None for all of them.
        shapes: shape of every parameter by its name in Transformers, tied ones once; None for families not in
            `FAMILIES`.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int | None
    tied: bool
    experts: int
    top_k: int
    windows: tuple[int | None, ...]
    shapes: Shapes | None = field(repr=False)
    embedding: str = "model.embed_tokens.weight"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read the fields of a Transformers configuration.

        Args:
            config: `model_type` and the fields, as in `conf/model/*.yaml` or `PretrainedConfig.to_dict()`.

        Raises:
            ConfigError: `model_type` or a size is missing, not a whole number, or not positive.
        """
        if not config.get("model_type"):
            raise ConfigError("The model configuration has no model_type. Add one, for example `model_type: llama`.")
        model_type = str(config["model_type"])
        family = FAMILIES.get(model_type)
        reader = _Reader(config, family.defaults if family else {})
        hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
        layers = reader.size("num_hidden_layers")
        experts = reader.first(_EXPERTS)
        known = family is not None and experts == 0
        spec = cls(
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
            top_k=reader.first(_TOP_K) if experts else 0,
            windows=_windows(reader, layers),
            shapes=None,
        )
        if not known or family is None:
            return spec
        return family.complete(spec, reader)

    @property
    def parameters(self) -> int | None:
        """Number of parameters, tied ones counted once; None for a family whose shapes are not known here."""
        return None if self.shapes is None else sum(prod(shape) for shape in self.shapes.values())

    def flops_per_token(self, seq: int) -> float:
        """Floating-point operations of one training token: forward and backward, no recomputation.

        Six per weight that takes part in a matrix product (the output head does, also when tied; the embedding look-up
        does not), and for attention 12 x heads x head_dim x context per layer, as in PaLM (arXiv:2204.02311, appendix
        B), where the context is the sequence or the layer's window. The half that a causal mask saves is not
        subtracted.

        Args:
            seq: sequence length in tokens.

        Raises:
            ConfigError: the shapes of this family are not known.
        """
        if self.shapes is None:
            raise ConfigError(
                f"FLOPs of model_type '{self.model_type}' are not known. Known dense families:"
                f" {', '.join(sorted(FAMILIES))}."
            )
        matrices = sum(prod(shape) for name, shape in self.shapes.items() if len(shape) == 2 and name != self.embedding)
        if self.tied:
            matrices += self.vocab * self.hidden
        context = sum(min(seq, window or seq) for window in self.windows)
        return 6.0 * matrices + 12.0 * self.heads * self.head_dim * context


class _Reader:
    """Fields of a configuration, with the defaults of its family and synonyms resolved."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._config = config
        self._defaults = defaults

    def get(self, name: str, default: Any = None) -> Any:
        for key in (name, *_SYNONYMS.get(name, ())):
            if self._config.get(key) is not None:
                return self._config[key]
        return self._defaults.get(name, default)

    def optional(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} of the model is {value!r}; it must be a whole number of at least 1.")
        return value

    def size(self, name: str) -> int:
        value = self.optional(name)
        if value is None:
            raise ConfigError(f"The model configuration has no {name}. Sizes have no defaults here: state it.")
        return value

    def first(self, names: tuple[str, ...]) -> int:
        return next((self.optional(name) or 0 for name in names if self.get(name) is not None), 0)


def _windows(reader: _Reader, layers: int) -> tuple[int | None, ...]:
    """Attention window of each layer, from `layer_types` or from the rule that Transformers fills it in by."""
    window = reader.optional("sliding_window")
    kinds = reader.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ConfigError(f"layer_types of the model has {len(kinds)} entries for num_hidden_layers={layers}.")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if not reader.get("use_sliding_window", True):
        return (None,) * layers
    every = reader.optional("sliding_window_pattern")
    if every is not None:
        return tuple(None if (layer + 1) % every == 0 else window for layer in range(layers))
    first = int(reader.get("max_window_layers", 0))
    return tuple(window if layer >= first else None for layer in range(layers))


@dataclass(frozen=True)
class Family:
    """How a dense family names and shapes its parameters.

    Attributes:
        block: shapes of one block from (spec, reader), by names relative to the block.
        defaults: values that Transformers takes for fields a configuration leaves out, where they matter here.
        bias_of_norms: norms are LayerNorms with a bias.
    """

    block: Callable[[ModelSpec, _Reader], Shapes]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    base: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    bias_of_norms: bool = False

    def complete(self, spec: ModelSpec, reader: _Reader) -> ModelSpec:
        """`spec` with the shapes of the whole model."""
        embedding = f"{self.base}.{self.embedding}.weight"
        shapes: Shapes = {embedding: (spec.vocab, spec.hidden)}
        block = self.block(spec, reader)
        for layer in range(spec.layers):
            shapes.update({f"{self.base}.layers.{layer}.{name}": shape for name, shape in block.items()})
        shapes.update(_norm(f"{self.base}.{self.final_norm}", spec.hidden, bias=self.bias_of_norms))
        if not spec.tied:
            shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
        return ModelSpec(**{**spec.__dict__, "shapes": shapes, "embedding": embedding})


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def _norm(name: str, size: int, *, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (size,), **({f"{name}.bias": (size,)} if bias else {})}


def _llama_like(
    *, qkv_bias: bool | None = None, out_bias: bool | None = None, qk_norm: bool = False, norms: tuple[str, ...] = ()
) -> Callable[[ModelSpec, _Reader], Shapes]:
    """Block of separate q, k, v projections and a gated MLP.

    Args:
        qkv_bias, out_bias: whether these projections have a bias; None follows the field `attention_bias`.
        qk_norm: each head's query and key pass a norm of size head_dim.
        norms: norms besides the two before attention and MLP.
    """

    def block(spec: ModelSpec, reader: _Reader) -> Shapes:
        attention_bias, mlp_bias = bool(reader.get("attention_bias", False)), bool(reader.get("mlp_bias", False))
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
            shapes |= {**_norm("self_attn.q_norm", spec.head_dim), **_norm("self_attn.k_norm", spec.head_dim)}
        for name in ("input_layernorm", "post_attention_layernorm", *norms):
            shapes |= _norm(name, spec.hidden)
        return shapes

    return block


def _gpt_neox(spec: ModelSpec, reader: _Reader) -> Shapes:
    bias = bool(reader.get("attention_bias", True))
    return {
        **_norm("input_layernorm", spec.hidden, bias=True),
        **_norm("post_attention_layernorm", spec.hidden, bias=True),
        **_linear("attention.query_key_value", spec.hidden, 3 * spec.hidden, bias=bias),
        **_linear("attention.dense", spec.hidden, spec.hidden, bias=bias),
        **_linear("mlp.dense_h_to_4h", spec.hidden, spec.intermediate, bias=True),
        **_linear("mlp.dense_4h_to_h", spec.intermediate, spec.hidden, bias=True),
    }


def _phi3(spec: ModelSpec, reader: _Reader) -> Shapes:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        **_linear("self_attn.o_proj", queries, spec.hidden),
        **_linear("self_attn.qkv_proj", spec.hidden, queries + 2 * keys),
        **_linear("mlp.gate_up_proj", spec.hidden, 2 * spec.intermediate),
        **_linear("mlp.down_proj", spec.intermediate, spec.hidden),
        **_norm("input_layernorm", spec.hidden),
        **_norm("post_attention_layernorm", spec.hidden),
    }


_FOUR_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")

_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True}

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
        {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
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
    "gpt_neox": Family(
        _gpt_neox,
        {"max_position_embeddings": 2048},
        base="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        bias_of_norms=True,
    ),
}
