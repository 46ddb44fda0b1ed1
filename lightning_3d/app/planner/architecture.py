"""Sizes of a decoder that memory and time depend on: the weights of each kind of block, and how
they are sharded. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from lightning_3d.errors import ConfigError
from lightning_3d.models.families import FAMILIES, read_spec
from lightning_3d.models.spec import Kept, ModelSpec

_ROUTED = "mlp.experts."
_BLOCK = re.compile(r"(?:.+\.)?(?:layers|h)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class WeightMatrix:
    """Weights of one matrix product, `outputs` x `inputs`. Tensor parallelism shards `outputs`
    (column), `inputs` (row), or neither."""

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


class BlockKind(NamedTuple):
    """Kind of a block: whether its MLP is a mixture, and its attention window in tokens (None for
    the whole sequence)."""

    mixture: bool
    window: int | None = None


@dataclass(frozen=True)
class Architecture:
    """A decoder. Its blocks have the same attention; some may be mixtures, and some may have an
    attention window.

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
        query_width: heads * width of a head; where queries are wider than values (latent
            attention), the mean of the two.
        key_width: width of all keys and values that attention reads, per token.
        mixtures: flag of each block that is a mixture; an empty tuple if all are, or none in a
            model without experts.
        experts: experts of a mixture.
        top_k: experts that see each token.
        expert_ffn: inner width of an expert.
        shared_ffn: inner width of the experts that see every token, together.
        windows: attention window of each block in tokens; None for the whole sequence, an empty
            tuple for it in all blocks.
        norms: parameters of norms and biases of a block, without those of its MLP.
        mlp_biases: parameters of the biases of the MLP of a dense block.
        router: parameters of the router of a mixture, and of the gate of its shared experts.
        router_biases: parameters of the biases of a router.
        expert_biases: parameters of the biases of one expert.
        latent: width of the compressed queries and keys of latent attention, which every
            tensor-parallel rank has whole.
        expanded: width of the keys that latent attention keeps a second time.
        normed: width of queries and keys that pass a norm.
        final_norm: parameters of the norm after the blocks.
        positions: parameters of an embedding of positions, which every tensor-parallel rank holds.
        kept: bytes that blocks of its family keep for the backward pass in Transformers.
        groups: groups of experts of a mixture (node-limited routing, arXiv:2412.19437, section
            2.1.2); 1 without.
        top_groups: groups from which a token chooses its experts.
        whole_attention: tensor parallelism does not shard attention.
        whole_shared: tensor parallelism does not shard the experts that see every token.
        ahead: modules of multi-token prediction behind the blocks, on the last stage. Each is one
            more block like the last one, joins it with the embedding, and runs the output head once
            more.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    ffn: int
    gated: bool
    tied: bool
    attention: tuple[WeightMatrix, ...]
    query_width: int
    key_width: int
    mixtures: tuple[bool, ...] = ()
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    windows: tuple[int | None, ...] = ()
    norms: int = 0
    mlp_biases: int = 0
    router: int = 0
    router_biases: int = 0
    expert_biases: int = 0
    latent: int = 0
    expanded: int = 0
    normed: int = 0
    final_norm: int = 0
    positions: int = 0
    kept: Kept = Kept()
    groups: int = 1
    top_groups: int = 1
    ahead: int = 0
    whole_attention: bool = False
    whole_shared: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of all fields, computed once, because caches look models up thousands of times in a
        search."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

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
        """Return a decoder with grouped-query attention whose blocks are all dense, or all mixtures
        of experts of width `ffn`."""
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
            attention=(
                WeightMatrix(queries + 2 * keys, hidden),
                WeightMatrix(hidden, queries, "row"),
            ),
            query_width=queries,
            key_width=2 * keys,
            experts=experts,
            top_k=top_k,
            expert_ffn=ffn if experts else 0,
            norms=2 * hidden,
            router=experts * hidden,
            final_norm=hidden,
        )

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> Architecture:
        """Read the sizes of a model whose parameters are known by name and shape.

        Raises:
            ConfigError: an unknown model family.
        """
        if spec.shapes is None:
            raise ConfigError(
                f"The planner does not know the model family '{spec.model_type}'. Use one of the"
                f" known families: {', '.join(sorted(FAMILIES))}."
            )
        blocks = _blocks(spec)
        mixtures = tuple(
            any(name.startswith(_ROUTED) for name in shapes) for shapes in blocks[: spec.layers]
        )
        any_block, routed = blocks[0], blocks[mixtures.index(True)] if any(mixtures) else {}
        dense = blocks[mixtures.index(False)] if not all(mixtures) else {}
        of_attention = {
            name: shape
            for name, shape in any_block.items()
            if "attn" in name or "attention." in name
        }
        routing = {
            name: shape
            for name, shape in routed.items()
            if name.startswith("mlp.") and not _is_expert(name)
        }
        latent, expanded = _kept_by_latent_attention(any_block, spec)
        return cls(
            layers=spec.layers,
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            vocab=spec.vocab,
            ffn=spec.intermediate if dense else 0,
            gated=any("gate" in name for name in any_block),
            tied=spec.tied,
            attention=tuple(
                _matrix(name, shape, spec.whole)
                for name, shape in of_attention.items()
                if len(shape) == 2
            ),
            query_width=spec.heads * spec.head_dim,
            key_width=2 * spec.kv_heads * spec.head_dim,
            mixtures=mixtures if any(mixtures) else (),
            experts=spec.experts,
            top_k=spec.top_k,
            expert_ffn=(
                prod(routed["mlp.experts.down_proj"]) // (spec.experts * spec.hidden)
                if routed
                else 0
            ),
            shared_ffn=sum(
                shape[0]
                for name, shape in routed.items()
                if "shared" in name and name.endswith("up_proj.weight")
            ),
            windows=spec.windows if any(spec.windows) else (),
            norms=_vectors(
                name_and_shape
                for name_and_shape in any_block.items()
                if not name_and_shape[0].startswith("mlp.")
            ),
            mlp_biases=_vectors(
                name_and_shape
                for name_and_shape in dense.items()
                if name_and_shape[0].startswith("mlp.")
            ),
            router=sum(prod(shape) for shape in routing.values() if len(shape) > 1),
            router_biases=_vectors(routing.items()),
            expert_biases=sum(
                shape[1]
                for name, shape in routed.items()
                if name.startswith(_ROUTED) and name.endswith("bias")
            ),
            latent=latent,
            expanded=expanded,
            normed=(
                (spec.heads + spec.kv_heads) * spec.head_dim
                if "self_attn.q_norm.weight" in any_block
                else 0
            ),
            final_norm=_vectors(
                (name, shape)
                for name, shape in spec.shapes.items()
                if _BLOCK.fullmatch(name) is None
            ),
            positions=prod(spec.shapes[spec.positions]) if spec.positions is not None else 0,
            kept=spec.kept,
            groups=spec.groups,
            top_groups=spec.top_groups,
            ahead=spec.ahead,
            whole_attention="self_attn." in spec.whole,
            whole_shared="mlp.shared_expert." in spec.whole,
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

    @cached_property
    def largest_attention(self) -> int:
        """Weights of the largest projection of attention that tensor parallelism shards, or does
        not if it shards none of them."""
        return max(
            (
                matrix.size
                for matrix in self.attention
                if self.whole_attention or matrix.sharded_by != "none"
            ),
            default=0,
        )

    def shared_mlp(self) -> tuple[WeightMatrix, ...]:
        """Return the matrices of the experts that see every token."""
        matrices = self.mlp(self.shared_ffn)
        return (
            tuple(WeightMatrix(one.outputs, one.inputs, "none") for one in matrices)
            if self.whole_shared
            else matrices
        )

    def mlp(self, width: int) -> tuple[WeightMatrix, ...]:
        """Return the matrices of an MLP of this inner width."""
        return (
            WeightMatrix((2 if self.gated else 1) * width, self.hidden),
            WeightMatrix(self.hidden, width, "row"),
        )

    def mlp_size(self, width: int) -> int:
        return (3 if self.gated else 2) * width * self.hidden

    @cached_property
    def expert_size(self) -> int:
        """Weights of one expert of one block."""
        return self.mlp_size(self.expert_ffn)

    @cached_property
    def _kind_of_block(self) -> tuple[BlockKind, ...]:
        mixtures = self.mixtures or (self.experts > 0,) * self.layers
        return tuple(map(BlockKind, mixtures, self.windows or (None,) * self.layers))

    @cached_property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Different kinds of blocks, in the order in which they first occur."""
        return tuple(dict.fromkeys(self._kind_of_block))

    @cached_property
    def pattern(self) -> tuple[int, ...]:
        """Kind of each block, as an index into `kinds`."""
        return tuple(map(self.kinds.index, self._kind_of_block))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks of each kind."""
        return tuple(map(self.pattern.count, range(len(self.kinds))))

    def dense_parameters(self, kind: BlockKind) -> int:
        """Count the parameters of a block without its routed experts."""
        if kind.mixture:
            return (
                self.attention_size
                + self.norms
                + self.mlp_size(self.shared_ffn)
                + self.router
                + self.router_biases
            )
        return self.attention_size + self.norms + self.mlp_size(self.ffn) + self.mlp_biases

    def routed_parameters(self, kind: BlockKind) -> int:
        """Count the parameters of the routed experts of a block."""
        return self.experts * (self.expert_size + self.expert_biases) if kind.mixture else 0

    @cached_property
    def parameters_of_kinds(self) -> tuple[tuple[int, int, int], ...]:
        """Parameters of a block of each kind: those that every tensor-parallel rank holds (norms,
        routers, down-projections of latent attention, and what the plan of the family does not
        shard), the others, and those of routed experts."""
        everywhere = (
            sum(matrix.size for matrix in self.attention if matrix.sharded_by == "none")
            + self.norms
        )
        in_mixtures = (
            self.router + self.router_biases + self.whole_shared * self.mlp_size(self.shared_ffn)
        )
        whole = [everywhere + (in_mixtures if kind.mixture else 0) for kind in self.kinds]
        dense, routed = (
            map(self.dense_parameters, self.kinds),
            map(self.routed_parameters, self.kinds),
        )
        return tuple(
            (held, all_ - held, experts)
            for held, all_, experts in zip(whole, dense, routed, strict=True)
        )

    def multiplied(self, kind: BlockKind) -> int:
        """Count the weights of a block that a token is multiplied with."""
        if kind.mixture:
            return (
                self.attention_size
                + self.top_k * self.expert_size
                + self.mlp_size(self.shared_ffn)
                + self.router
            )
        return self.attention_size + self.mlp_size(self.ffn)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an output head of its own."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        sizes = [self.dense_parameters(kind) + self.routed_parameters(kind) for kind in self.kinds]
        ends = self.embedding * (1 if self.tied else 2) + self.positions + self.final_norm
        ahead = self.ahead * (sizes[self.pattern[-1]] + self.joining_parameters)
        return (
            ends + ahead + sum(count * size for count, size in zip(self.counts, sizes, strict=True))
        )

    @cached_property
    def joining(self) -> WeightMatrix:
        """The matrix with which a module of multi-token prediction joins hidden states and
        embedding; every tensor-parallel rank has it."""
        return WeightMatrix(self.hidden, 2 * self.hidden, "none")

    @cached_property
    def joining_parameters(self) -> int:
        """Count the parameters of a module of multi-token prediction besides those of its block:
        `joining` and three norms."""
        return self.joining.size + 3 * self.hidden

    @staticmethod
    def context(seq: int, kind: BlockKind) -> float:
        """Count the tokens that a token attends to, averaged over tokens: with a causal mask half
        of the sequence or window."""
        length = min(kind.window or seq, seq)
        return length * (1 - length / (2 * seq))

    def model_flops(self, seq: int) -> float:
        """Count the FLOPs of one token, forward and backward, as papers do: without subtracting
        what the causal mask saves."""
        flops = 6.0 * (self.embedding * (1 + self.ahead) + self.ahead * self.joining.size)
        for index, (kind, count) in enumerate(zip(self.kinds, self.counts, strict=True)):
            count += self.ahead * (index == self.pattern[-1])
            flops += count * (
                6.0 * self.multiplied(kind) + 12.0 * self.query_width * min(kind.window or seq, seq)
            )
        return flops


def _blocks(spec: ModelSpec) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of each block, by names relative to it."""
    assert spec.shapes is not None
    blocks: list[dict[str, tuple[int, ...]]] = [{} for _ in range(spec.layers + spec.ahead)]
    for name, shape in spec.shapes.items():
        found = _BLOCK.fullmatch(name)
        if found is not None:
            blocks[int(found[1])][found[2]] = shape
    return blocks


def _is_expert(name: str) -> bool:
    """True for a weight of a routed expert, or of the projections of a shared one."""
    return name.startswith(_ROUTED) or ("shared" in name and "_proj" in name)


def _vectors(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Count the elements of norms and biases."""
    return sum(prod(shape) for _, shape in shapes if len(shape) == 1)


def _kept_by_latent_attention(
    shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec
) -> tuple[int, int]:
    """Return (width of the compressed queries and keys, width of the keys that are kept twice);
    zeros without latent attention.

    Values and the part of the keys without positions are one tensor, which lives as long as the
    values do. Keys are a copy of this part and the one with positions (DeepSeek-V2,
    arXiv:2405.04434, section 2.1).
    """
    expanded = shapes.get("self_attn.kv_b_proj.weight")
    if expanded is None:
        return 0, 0
    values = shapes["self_attn.o_proj.weight"][1]
    return shapes.get("self_attn.q_a_layernorm.weight", (0,))[0] + expanded[1], expanded[0] - values


def _matrix(name: str, shape: tuple[int, ...], whole: tuple[str, ...]) -> WeightMatrix:
    """Return a projection of attention as tensor parallelism shards it; down-projections of latent
    attention are replicated, and what is `whole` (`ModelSpec.whole`)."""
    # GPT-2 stores (inputs, outputs)
    outputs, inputs = reversed(shape) if "attn.c_" in name else shape
    if any(part in name for part in ("q_a_proj", "kv_a_proj")) or name.startswith(whole):
        return WeightMatrix(outputs, inputs, "none")
    if any(part in name for part in ("o_proj", "attention.dense", "attn.c_proj")):
        return WeightMatrix(outputs, inputs, "row")
    return WeightMatrix(outputs, inputs)
