"""Sizes of a decoder that memory and time depend on: the weights of a block, and how they are sharded. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.models.families import FAMILIES, read_spec
from lightning_3d.models.spec import ModelSpec

_ROUTED = ("mlp.experts.", "mlp.gate.weight")
_BLOCK = re.compile(r"(?:.+\.)?(?:layers|h)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Matrix:
    """Weights of one matrix product, `outputs` x `inputs`. Tensor parallelism shards `outputs` (column), `inputs` (row), or neither."""

    outputs: int
    inputs: int
    sharded_by: str = "column"

    @property
    def size(self) -> int:
        return self.outputs * self.inputs

    def local(self, tp: int) -> tuple[float, float]:
        """Return (outputs, inputs) on one tensor-parallel rank."""
        return (
            self.outputs / (tp if self.sharded_by == "column" else 1),
            self.inputs / (tp if self.sharded_by == "row" else 1),
        )


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal blocks, some of which may be mixtures.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: attention (query) heads.
        kv_heads: key/value heads.
        vocab: rows of the embedding.
        ffn: inner width of the MLP of a dense block.
        gated: MLPs have a gate projection.
        tied: the output head is the embedding matrix.
        attention: projections of attention.
        query_width: heads * width of a head.
        key_width: width of all keys and values that attention reads, per token.
        dense_layers: blocks with an MLP; the others are mixtures.
        experts: experts of a mixture.
        top_k: experts that see each token.
        expert_ffn: inner width of an expert.
        shared_ffn: inner width of the experts that see every token, together.
        windows: attention window of each block in tokens; None for the whole sequence, an empty tuple for it in all blocks.
        norms: parameters of norms and biases of a block.
        expert_biases: parameters of the biases of one expert.
        positions: parameters of an embedding of positions, which every tensor-parallel rank holds.
        groups: groups of experts of a mixture (node-limited routing, arXiv:2412.19437, section 2.1.2); 1 without.
        top_groups: groups from which a token chooses its experts.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    ffn: int
    gated: bool
    tied: bool
    attention: tuple[Matrix, ...]
    query_width: int
    key_width: int
    dense_layers: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    windows: tuple[int | None, ...] = ()
    norms: int = 0
    expert_biases: int = 0
    positions: int = 0
    groups: int = 1
    top_groups: int = 1

    @classmethod
    def plain(
        cls,
        *,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        vocab: int,
        ffn: int,
        gated: bool,
        tied: bool,
        experts: int = 0,
        top_k: int = 0,
        head_dim: int | None = None,
    ) -> Architecture:
        """Return a decoder with grouped-query attention whose blocks are all dense, or all mixtures of experts of width `ffn`."""
        width = head_dim or hidden // heads
        queries, keys = heads * width, kv_heads * width
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            vocab=vocab,
            ffn=0 if experts else ffn,
            gated=gated,
            tied=tied,
            attention=(Matrix(queries + 2 * keys, hidden), Matrix(hidden, queries, "row")),
            query_width=queries,
            key_width=2 * keys,
            dense_layers=0 if experts else layers,
            experts=experts,
            top_k=top_k,
            expert_ffn=ffn if experts else 0,
            norms=2 * hidden,
        )

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> Architecture:
        """Read the sizes of a model whose parameters are known by name and shape.

        Raises:
            ConfigError: an unknown model family.
        """
        if spec.shapes is None:
            raise ConfigError(
                f"The planner does not know the model family '{spec.model_type}'. Use one of the known families:"
                f" {', '.join(sorted(FAMILIES))}."
            )
        blocks = _blocks(spec)
        mixtures = [shapes for shapes in blocks if any(name.startswith(_ROUTED) for name in shapes)]
        dense = [shapes for shapes in blocks if shapes not in mixtures]
        any_block = blocks[0]
        of_attention = {name: shape for name, shape in any_block.items() if "attn" in name or "attention." in name}
        routed = mixtures[0] if mixtures else {}
        shared = sum(shape[0] for name, shape in routed.items() if "shared" in name and name.endswith(("up_proj.weight",)))
        return cls(
            layers=spec.layers,
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            vocab=spec.vocab,
            ffn=spec.intermediate if dense else 0,
            gated=any("gate" in name for name in any_block),
            tied=spec.tied,
            attention=tuple(_matrix(name, shape) for name, shape in of_attention.items() if len(shape) == 2),
            query_width=spec.heads * spec.head_dim,
            key_width=2 * spec.kv_heads * spec.head_dim,
            dense_layers=len(dense),
            experts=spec.experts,
            top_k=spec.top_k,
            expert_ffn=prod(routed["mlp.experts.down_proj"]) // (spec.experts * spec.hidden) if routed else 0,
            shared_ffn=shared,
            windows=spec.windows if any(spec.windows) else (),
            norms=sum(prod(shape) for shape in any_block.values() if len(shape) == 1),
            expert_biases=sum(shape[1] for name, shape in routed.items() if name.startswith("mlp.experts.") and name.endswith("bias")),
            positions=prod(spec.shapes[spec.positions]) if spec.positions is not None else 0,
            groups=spec.groups,
            top_groups=spec.top_groups,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read the sizes of a model from the fields of its Transformers configuration.

        Raises:
            ConfigError: invalid fields or sizes, or an unknown model family.
        """
        return cls.from_spec(read_spec(config))

    @cached_property
    def attention_size(self) -> int:
        """Weights of attention in one block."""
        return sum(matrix.size for matrix in self.attention)

    def mlp(self, width: int) -> tuple[Matrix, ...]:
        """Return the matrices of an MLP of this inner width."""
        return (Matrix((2 if self.gated else 1) * width, self.hidden), Matrix(self.hidden, width, "row"))

    def mlp_size(self, width: int) -> int:
        return (3 if self.gated else 2) * width * self.hidden

    @cached_property
    def expert_size(self) -> int:
        """Weights of one expert of one block."""
        return self.mlp_size(self.expert_ffn)

    @cached_property
    def dense_block(self) -> int:
        """Parameters of a block without its routed experts, averaged over blocks."""
        mixtures = self.layers - self.dense_layers
        mlp = self.dense_layers * self.mlp_size(self.ffn) + mixtures * (self.mlp_size(self.shared_ffn) + self.experts * self.hidden)
        return self.attention_size + self.norms + mlp // self.layers

    @cached_property
    def routed_block(self) -> int:
        """Parameters of the routed experts of a block, averaged over blocks."""
        return (self.layers - self.dense_layers) * self.experts * (self.expert_size + self.expert_biases) // self.layers

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an output head of its own."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        ends = self.embedding * (1 if self.tied else 2) + self.positions + self.hidden
        return self.layers * (self.dense_block + self.routed_block) + ends

    def context(self, seq: int) -> float:
        """Count the tokens that a token attends to, averaged over tokens and blocks: with a causal mask half of the sequence or window."""
        reach = [min(window or seq, seq) for window in self.windows or (None,)]
        return sum(length * (1 - length / (2 * seq)) for length in reach) / len(reach)

    def model_flops(self, seq: int) -> float:
        """Count the FLOPs of one token, forward and backward, as papers do: without subtracting what the causal mask saves."""
        mixtures = self.layers - self.dense_layers
        weights = self.layers * self.attention_size + self.dense_layers * self.mlp_size(self.ffn) + self.embedding
        weights += mixtures * (self.top_k * self.expert_size + self.mlp_size(self.shared_ffn))
        reach = [min(window or seq, seq) for window in self.windows or (None,)]
        return 6.0 * weights + 12.0 * self.layers * self.query_width * sum(reach) / len(reach)


def _blocks(spec: ModelSpec) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of each block, by names relative to it."""
    assert spec.shapes is not None
    blocks: list[dict[str, tuple[int, ...]]] = [{} for _ in range(spec.layers)]
    for name, shape in spec.shapes.items():
        found = _BLOCK.fullmatch(name)
        if found is not None:
            blocks[int(found[1])][found[2]] = shape
    return blocks


def _matrix(name: str, shape: tuple[int, ...]) -> Matrix:
    """Return a projection of attention as tensor parallelism shards it; down-projections of latent attention are replicated."""
    outputs, inputs = reversed(shape) if "attn.c_" in name else shape  # GPT-2 stores (inputs, outputs)
    if any(part in name for part in ("q_a_proj", "kv_a_proj")):
        return Matrix(outputs, inputs, "none")
    if any(part in name for part in ("o_proj", "attention.dense", "attn.c_proj")):
        return Matrix(outputs, inputs, "row")
    return Matrix(outputs, inputs)
