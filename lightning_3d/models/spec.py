"""Sizes of a model from its configuration, without building the model. Pure Python: no torch, no
Transformers.

`families.read_spec` makes a `ModelSpec` from the dict that a `model/` config file holds under
`config` (the fields of a Transformers configuration). Every configuration gives the numbers that
layouts are checked against (heads, layers, vocabulary, ...). For the families in
`families.FAMILIES` a spec also has the name and shape of every parameter, and from these the
parameter count and the FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from lightning_3d.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]
"""Shape of each parameter by its name."""

# Configurations of older families use other names for the same sizes (`attribute_map` in
# Transformers).
_SYNONYMS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx"),
}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k")


@dataclass(frozen=True)
class Kept:
    """Bytes of a token that blocks of a family keep for the backward pass, in Transformers, beyond
    those of Llama's or Mixtral's blocks.

    Attributes:
        norm: of each number that a norm of a block takes.
        inner: of each number of the inner width of an expert.
        routed: of each number that a router takes.
        score: of each score of attention without a fused kernel: softmax in float32, and its copy
            in 16 bits.
    """

    norm: float = 0.0
    inner: float = 0.0
    routed: float = 0.0
    score: float = 6.0


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a decoder.

    Attributes:
        model_type: name of the family in Transformers.
        hidden: width of the residual stream.
        layers: number of blocks.
        heads: attention (query) heads.
        kv_heads: key/value heads; equal to `heads` without grouped-query attention.
        head_dim: width of a head; where queries are wider than values (multi-head latent
            attention), the mean of the two.
        intermediate: inner width of the MLP.
        vocab: rows of the embedding.
        max_positions: longest sequence that the positions support; None when the configuration does
            not say.
        tied: the output head is the embedding matrix.
        experts: experts of each mixture-of-experts layer; 0 for a dense model.
        top_k: experts that see each token; 0 for a dense model.
        windows: attention window of each layer in tokens; None for the whole sequence.
        shapes: shape of every parameter by its name in Transformers, tied ones once; None for
            families not in `families.FAMILIES`.
        embedding: name of the parameter of the token embedding.
        positions: name of the parameter of the position embedding; None for a model without one.
        groups: groups of experts, of which each token chooses `top_groups` and its experts in them
            (DeepSeek-V3); 1 without groups.
        top_groups: groups from which a token chooses its experts.
        kept: bytes that its blocks keep for the backward pass.
        ahead: modules of multi-token prediction: further blocks, which also run the output head.
        whole: beginnings of the names, relative to a block, of matrices that its tensor-parallel
            plan in Transformers does not shard.
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
    positions: str | None = None
    groups: int = 1
    top_groups: int = 1
    kept: Kept = Kept()
    ahead: int = 0
    whole: tuple[str, ...] = ()

    @property
    def parameters(self) -> int | None:
        """Number of parameters, tied ones counted once; None for an unknown family."""
        return None if self.shapes is None else sum(prod(shape) for shape in self.shapes.values())

    @property
    def parameter_names(self) -> list[list[str]] | None:
        """All names of each parameter: the embedding has a second one if the output head is tied to
        it; None for an unknown family."""
        if self.shapes is None:
            return None
        return [
            [name, "lm_head.weight"] if self.tied and name == self.embedding else [name]
            for name in self.shapes
        ]

    @property
    def active_parameters(self) -> int | None:
        """Number of parameters that a token passes: all but the experts that it is not routed to;
        None for an unknown family."""
        return (
            None
            if self.shapes is None
            else round(sum(self._active(name, shape) for name, shape in self.shapes.items()))
        )

    def _active(self, name: str, shape: tuple[int, ...]) -> float:
        """Count the elements of a parameter that a token passes. Those of routed experts hold one
        matrix or bias for each expert."""
        return prod(shape) * (self.top_k / self.experts if ".experts." in name else 1)

    def flops_per_token(self, seq: int) -> float:
        """Count the floating-point operations of one training token: forward and backward, without
        recomputation.

        Six per weight that takes part in a matrix product (the output head does, also when tied;
        the embedding look-up does not), and for attention 12 x heads x head_dim x context per
        layer, as in PaLM (arXiv:2204.02311, appendix B), where the context is the sequence or the
        layer's window. The half that a causal mask saves is not subtracted.

        Args:
            seq: sequence length in tokens.

        Raises:
            ConfigError: an unknown family.
        """
        if self.shapes is None:
            raise ConfigError(
                f"The FLOPs of model_type '{self.model_type}' are unknown. Add this family to"
                " `lightning_3d.models.families`."
            )
        looked_up = (self.embedding, self.positions)
        multiplied = {
            name: shape
            for name, shape in self.shapes.items()
            if _is_matrix(name, shape) and name not in looked_up
        }
        matrices = sum(self._active(name, shape) for name, shape in multiplied.items())
        matrices += (self.tied + self.ahead) * self.vocab * self.hidden
        context = sum(
            min(seq, window or seq) for window in (*self.windows, *self.windows[-1:] * self.ahead)
        )
        return 6.0 * matrices + 12.0 * self.heads * self.head_dim * context


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter takes part in matrix products; biases of experts have two
    dimensions, too."""
    return len(shape) > 1 and not name.endswith("bias")


class Reader:
    """Fields of a configuration, with synonyms and the defaults of its family."""

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
            raise ConfigError(
                f"{name} of the model must be a whole number of at least 1; got {value!r}."
            )
        return value

    def size(self, name: str) -> int:
        value = self.optional(name)
        if value is None:
            raise ConfigError(
                f"The model configuration has no {name}. Set it, because sizes have no defaults."
            )
        return value

    def first(self, names: tuple[str, ...]) -> int:
        return next((self.optional(name) or 0 for name in names if self.get(name) is not None), 0)


def attention_windows(reader: Reader, layers: int) -> tuple[int | None, ...]:
    """Read the attention window of each layer, from `layer_types` or by Transformers' rule for its
    default."""
    window = reader.optional("sliding_window")
    kinds = reader.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ConfigError(
                "layer_types of the model must have one entry per layer"
                f" (num_hidden_layers={layers}); got {len(kinds)} entries."
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if not reader.get("use_sliding_window", True):
        return (None,) * layers
    every = reader.optional("sliding_window_pattern")
    if every is not None:
        return tuple(None if (layer + 1) % every == 0 else window for layer in range(layers))
    first = int(reader.get("max_window_layers", 0))
    return tuple(window if layer >= first else None for layer in range(layers))
