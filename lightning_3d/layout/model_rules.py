"""Checks that a layout fits a model, a schedule and a batch. Pure arithmetic: the command line runs
them before torch is imported.

Each check raises an error that says what is wrong, with the numbers and the nearest value that
works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from lightning_3d.errors import ConfigError, LayoutError, listed
from lightning_3d.layout.batch_rules import check_micro_batches
from lightning_3d.layout.given_stages import given_stages
from lightning_3d.layout.layout import Layout, divisors
from lightning_3d.layout.resolve import check_expert_groups, check_schedule, nearest
from lightning_3d.layout.schedules import find_schedule, schedules_for
from lightning_3d.layout.sizes import check_sizes

CP_KINDS = ("ring", "ulysses")
"""Kinds of context parallelism: `ring` passes keys and values around, `ulysses` exchanges tokens
for heads."""


def _check_ulysses(layout: Layout, heads: int | None, cp_kind: str) -> None:
    if (
        layout.cp > 1
        and cp_kind == "ulysses"
        and heads is not None
        and heads % (layout.tp * layout.cp)
    ):
        raise LayoutError(
            "cp_kind=ulysses assigns whole attention heads to the tp * cp ="
            f" {layout.tp * layout.cp} ranks that share a sequence, but {layout.tp * layout.cp}"
            f" does not divide the model's {heads} heads. Use cp_kind=ring."
        )


def _check_sequence(layout: Layout, tokens: int, sequence_parallel: bool) -> None:
    """Refuse a sequence that cannot be split into 2 * cp chunks, two for each rank, which sequence
    parallelism splits over tp ranks."""
    tp, cp = layout.tp if sequence_parallel else 1, layout.cp
    chunks = 2 * cp if cp > 1 else 1
    unit = lcm(chunks, tp * cp)
    near = listed(
        [length for length in (tokens // unit * unit, (tokens // unit + 1) * unit) if length > 0],
        last="or",
    )
    if tokens % chunks:
        raise LayoutError(
            f"cp {cp} splits a sequence into 2 * cp = {chunks} equal chunks, but the sequence has"
            f" {tokens} tokens. Use a sequence length of {near}."
        )
    if tokens % unit:
        part = (
            f"{tokens // cp} of {tokens} tokens that each context-parallel rank has (cp {cp})"
            if cp > 1
            else f"{tokens} tokens"
        )
        raise LayoutError(
            f"With sequence parallelism tp must divide the sequence, but tp {tp} does not divide"
            f" the {part}. Use a sequence length of {near}, or parallelism.sequence_parallel=false."
        )


def _check_experts(layout: Layout, experts: int | None) -> None:
    if layout.ep == 1:
        return
    if experts is None:
        raise LayoutError(
            f"Layout {layout} has expert parallelism (ep {layout.ep}), but the model is dense: it"
            f" has no experts to distribute. Use {replace(layout, ep=1)}."
        )
    if experts % layout.ep:
        ranks = layout.tp * layout.cp * layout.dp
        fits = [ep for ep in divisors(experts) if ranks % ep == 0]
        raise LayoutError(
            f"ep {layout.ep} in {layout} does not divide the model's {experts} experts, but every"
            " rank must get the same number. Use"
            f" {listed((replace(layout, ep=ep).name for ep in nearest(fits, layout.ep)), last='or')}."  # noqa: E501
        )


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that a layout must divide or fill. A size that is None is unknown and not
    checked.

    Attributes:
        heads: attention (query) heads.
        kv_heads: key/value heads; None where there are as many as query heads.
        layers: transformer blocks.
        vocab: rows of the embedding. tp need not divide them: shards may be uneven, but none may be
            empty.
        intermediate: width of the feed-forward layers.
        max_positions: tokens in the longest sequence that the model accepts.
        experts: number of experts of a mixture; None for a dense model.

    Raises:
        ConfigError: a size that is not a positive whole number.
    """

    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    vocab: int | None = None
    intermediate: int | None = None
    max_positions: int | None = None
    experts: int | None = None

    def __post_init__(self) -> None:
        check_sizes(**vars(self))


def check_model(
    layout: Layout,
    sizes: ModelSizes,
    *,
    schedule: str | None = None,
    micro_batches: int | None = None,
    sequence_length: int | None = None,
    sequence_parallel: bool = False,
    cp_kind: str = "ring",
    stages: Sequence[int] | None = None,
) -> None:
    """Refuse a layout that does not fit a model or its training step. Arguments that are None are
    not checked.

    Args:
        layout: resolved (`resolve_layout`).
        schedule: name of the pipeline schedule.
        micro_batches: number of them in one optimizer step.
        sequence_length: tokens in a sequence.
        sequence_parallel: whether tensor-parallel ranks share each sequence.
        cp_kind: how context-parallel ranks attend to each other's tokens.
        stages: number of blocks of each pipeline stage.

    Raises:
        ConfigError: a size that is not a positive whole number; a sequence longer than the model's
            positions.
        LayoutError: anything that the layout does not divide or fill.
    """
    check_sizes(sequence_length=sequence_length, micro_batches=micro_batches)
    _check_experts(layout, sizes.experts)
    check_expert_groups(layout)
    if schedule is not None:
        check_schedule(layout, schedule)
    _check_ulysses(layout, sizes.heads, cp_kind)
    _check_tensor_parallel(layout, sizes.heads, sizes.kv_heads, sizes.vocab, sizes.intermediate)
    if sizes.layers is not None:
        _check_layers(layout, sizes.layers, schedule)
    if stages is not None:
        given_stages(stages, layout, sizes.layers)
    if (
        sequence_length is not None
        and sizes.max_positions is not None
        and sequence_length > sizes.max_positions
    ):
        raise ConfigError(
            f"The sequence has {sequence_length} tokens, but the model has only"
            f" {sizes.max_positions} positions. Use a sequence length of at most"
            f" {sizes.max_positions}."
        )
    if sequence_length is not None:
        _check_sequence(layout, sequence_length, sequence_parallel)
    if schedule is not None and micro_batches is not None:
        check_micro_batches(layout, schedule, micro_batches)


def _check_tensor_parallel(
    layout: Layout,
    heads: int | None,
    kv_heads: int | None,
    vocab: int | None,
    intermediate: int | None,
) -> None:
    tp = layout.tp
    repair = f"Use {_tensor_parallel_degrees(heads, kv_heads, vocab, intermediate)}."
    if heads is not None and heads % tp:
        raise LayoutError(
            f"Tensor parallelism assigns whole attention heads to ranks, but tp {tp} does not"
            f" divide {heads} heads. {repair}"
        )
    if kv_heads is not None and not _shares_kv_heads(kv_heads, tp):
        raise LayoutError(
            f"tp {tp} is neither a divisor nor a multiple of the model's {kv_heads} key/value"
            f" heads, so they can be neither sharded nor replicated evenly. {repair}"
        )
    if intermediate is not None and intermediate % tp:
        raise LayoutError(
            f"tp {tp} does not divide the width of the feed-forward layers, {intermediate}."
            f" {repair}"
        )
    if vocab is not None and vocab < tp:
        raise LayoutError(
            f"The vocabulary has {vocab} entries, fewer than the {tp} ranks (tp) that share it, so"
            f" some ranks would have none. {repair}"
        )


def _shares_kv_heads(kv_heads: int, tp: int) -> bool:
    """Check whether each rank has whole key/value heads (tp divides them) or each head whole ranks
    (they divide tp)."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _tensor_parallel_degrees(
    heads: int | None, kv_heads: int | None, vocab: int | None, intermediate: int | None
) -> str:
    """List all degrees of tensor parallelism that fit the known sizes, as a phrase."""
    widest = heads or intermediate or kv_heads
    if widest is None:
        return f"a tp of at most {vocab}"
    good = [
        tp
        for tp in divisors(widest)
        if (kv_heads is None or _shares_kv_heads(kv_heads, tp))
        and (vocab is None or vocab >= tp)
        and (intermediate is None or intermediate % tp == 0)
    ]
    return f"tp {listed(good, last='or')}"


def _check_layers(layout: Layout, layers: int, schedule: str | None) -> None:
    stages = layout.pp * layout.vp
    if layers >= stages:
        return
    repairs = []
    if layers >= layout.vp:
        most = layers // layout.vp
        repairs.append(f"a pp of at most {most}" if most > 1 else "pp 1")
    if layers >= layout.pp and schedule is not None and find_schedule(schedule).v_shaped:
        repairs.append(f"vp 1 with the schedule {schedules_for(1)}")
    elif layers >= layout.pp:
        fewer = layers // layout.pp
        repairs.append("vp 1" if fewer == 1 else f"a vp of at most {fewer}")
    elif layout.vp > 1:
        repairs.append(f"vp 1 and a pp of at most {layers}")
    product = f"pp {layout.pp}" if layout.vp == 1 else f"pp {layout.pp} * vp {layout.vp}"
    raise LayoutError(
        f"Layout {layout} has {stages} stages ({product}), but the model has only"
        f" {_layers(layers)}, and each stage needs at least one. Use {', or '.join(repairs)}."
    )


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"
