"""Whether a layout fits a model, a schedule and a batch. Pure arithmetic: the command line asks before torch is
imported.

Each check returns when all is well and raises otherwise, with what is wrong, the numbers, and the nearest thing that
works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, lcm

from lightning_3d.errors import ConfigError, LayoutError, did_you_mean, listed
from lightning_3d.layout import Layout, divisors
from lightning_3d.schedules import (
    SCHEDULES,
    ScheduleInfo,
    default_schedule,
    find_schedule,
    predicted_bubble,
    schedules_for,
)

CP_KINDS = ("ring", "ulysses")
"""How context-parallel ranks attend to each other's tokens: keys and values go round, or heads are dealt for tokens."""

LARGEST_SIZE = 2**40
"""Sizes above this are refused as slips: the largest real one, tokens in a data set, stays below."""


def resolve_layout(
    layout: str | Layout, schedule: str | None = None, vp: int | None = None, order: Sequence[str] | None = None
) -> tuple[Layout, str]:
    """Bring together what a layout's name, the schedule and the keyword `vp=` say about stages per rank.

    Args:
        layout: name or layout as the user gave it; vp 1 in it is the same as none given.
        schedule: name in any case; None for `default_schedule`.
        vp: the keyword, None when not given. It may repeat the layout's, not contradict it.
        order: rank order, None for the layout's own.

    Returns:
        The layout, with vp 2 for a V or a looped schedule when none is given and there is a pipeline, and the
        schedule's name.

    Raises:
        LayoutError: vp contradicts the layout or the schedule, or is above 1 without a pipeline.
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout, order=order)
    elif order is not None:
        layout = replace(layout, order=tuple(order))
    if vp is not None and layout.vp not in (1, vp):
        raise LayoutError(
            f"The layout {layout} says vp {layout.vp}, but the option vp={vp} says otherwise. Give only one of them."
        )
    if vp is not None:
        layout = replace(layout, vp=vp)
    info = find_schedule(schedule) if schedule is not None else default_schedule(layout.vp)
    if layout.pp > 1 and layout.vp == 1 and vp is None:
        layout = replace(layout, vp=info.default_vp)
    check_schedule(layout, info.name)
    return layout, info.name


def resolve_available(
    layout: str | Layout | None, schedule: str | None, vp: int | None, order: Sequence[str] | None
) -> tuple[Layout | None, str]:
    """`resolve_layout`, with None for data parallelism over all ranks, of a layout that this version runs.

    Raises:
        LayoutError: as `resolve_layout` and `check_available`; options of a layout without one.
    """
    if layout is None:
        if vp is not None or order is not None:
            raise LayoutError("vp= and order= belong to a layout: name one, for example Lightning3DStrategy('pp2_dp2', vp=2).")
        return None, find_schedule(schedule or "1F1B").name
    if layout == "auto":
        raise LayoutError(
            'layout="auto" needs the planner, which must know model, cluster and batch: Lightning3DStrategy(**lightning_3d.planned(module,'
            ' cluster="h100_4x8", sequence_length=4096, global_batch_size=256)). Or name a layout.'
        )
    resolved, name = resolve_layout(layout, schedule, vp, order)
    check_available(resolved)
    return resolved, name


def check_schedule(layout: Layout, schedule: str) -> ScheduleInfo:
    """Refuse a number of stages per rank that the schedule, or a single pipeline rank, cannot run.

    Args:
        layout: resolved (`resolve_layout`).

    Raises:
        LayoutError: with the vp, or the schedules, that would work.
    """
    info = find_schedule(schedule)
    if layout.pp == 1:
        if layout.vp > 1:
            without = replace(layout, vp=1)
            raise LayoutError(
                f"Layout {layout} has {layout.vp} stages on each pipeline rank (vp) but only one pipeline rank (pp 1)."
                f" Use {without}, or a pp of at least 2."
            )
        return info
    if not info.allows_vp(layout.vp):
        need = "exactly 2 stages" if info.v_shaped else "one stage"
        right = replace(layout, vp=info.default_vp)
        raise LayoutError(
            f"The schedule {info.name} runs {need} on each pipeline rank, but the layout {layout} has vp {layout.vp}."
            f" Use {right} (vp {right.vp}), or for vp {layout.vp} the schedule {schedules_for(layout.vp)}."
        )
    return info


def check_available(layout: Layout) -> None:
    """Refuse axes that this version does not have, and expert groups that do not fill the ranks of a stage.

    Raises:
        LayoutError: an ep that does not divide tp * cp * dp.
    """
    _check_expert_groups(layout)


def _check_expert_groups(layout: Layout) -> None:
    ranks = layout.tp * layout.cp * layout.dp
    if ranks % layout.ep == 0:
        return
    relation = "is more than" if layout.ep > ranks else "does not divide"
    factors = " * ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "dp") if getattr(layout, axis) > 1) or "no axis above 1"
    raise LayoutError(
        f"Expert parallelism is laid over the ranks of one pipeline stage, but ep {layout.ep} {relation} the {ranks} of {layout}"
        f" ({factors}). Use {listed((replace(layout, ep=ep).name for ep in nearest(divisors(ranks), layout.ep)), last='or')}."
    )


def nearest(choices: Sequence[int], wanted: int) -> list[int]:
    """The largest choice up to `wanted` and the smallest above it."""
    return [*[max(choice for choice in choices if choice <= wanted)], *[choice for choice in choices if choice > wanted][:1]]


def check_cp_kind(kind: str) -> str:
    """The name of a kind of context parallelism. Raises ConfigError for any other."""
    if kind not in CP_KINDS:
        raise ConfigError(f'cp_kind is "{kind}".{did_you_mean(str(kind), CP_KINDS)} It must be {listed(CP_KINDS, last="or")}.')
    return kind


def _check_ulysses(layout: Layout, heads: int | None, cp_kind: str) -> None:
    if layout.cp > 1 and cp_kind == "ulysses" and heads is not None and heads % (layout.tp * layout.cp):
        raise LayoutError(
            f"cp_kind=ulysses deals whole attention heads to the tp * cp = {layout.tp * layout.cp} ranks that share a sequence, but the"
            f" model has {heads} heads. Use cp_kind=ring."
        )


def _check_sequence(layout: Layout, tokens: int, sequence_parallel: bool) -> None:
    """A sequence is cut into 2 * cp chunks, of which each rank has two; with sequence parallelism tp ranks share these."""
    tp, cp = layout.tp if sequence_parallel else 1, layout.cp
    chunks = 2 * cp if cp > 1 else 1
    unit = lcm(chunks, tp * cp)
    near = listed([length for length in (tokens // unit * unit, (tokens // unit + 1) * unit) if length > 0], last="or")
    if tokens % chunks:
        raise LayoutError(
            f"cp {cp} cuts a sequence into 2 * cp = {chunks} equal chunks, but it has {tokens} tokens. Use a sequence length of {near}."
        )
    if tokens % unit:
        where = f"a context-parallel rank has {tokens // cp} of its {tokens} tokens (cp {cp})" if cp > 1 else f"it has {tokens} tokens"
        raise LayoutError(
            f"With sequence parallelism tp must divide the sequence, but {where} and tp is {tp}. Use a sequence length of {near}, or"
            " parallelism.sequence_parallel=false."
        )


def _check_experts(layout: Layout, experts: int | None) -> None:
    if layout.ep == 1:
        return
    if experts is None:
        raise LayoutError(
            f"Layout {layout} has expert parallelism (ep {layout.ep}), but the model is dense: it has no experts to"
            f" distribute. Use {replace(layout, ep=1)}."
        )
    if experts % layout.ep:
        ranks = layout.tp * layout.cp * layout.dp
        fits = [ep for ep in divisors(experts) if ranks % ep == 0]
        raise LayoutError(
            f"ep {layout.ep} in {layout} does not divide the model's {experts} experts, of which every rank gets as many. Use"
            f" {listed((replace(layout, ep=ep).name for ep in nearest(fits, layout.ep)), last='or')}."
        )


def _without(layout: Layout, axis: str) -> Layout:
    """The layout without an axis; its ranks become data parallel."""
    return replace(layout, **{axis: 1, "dp": layout.dp * getattr(layout, axis)})


def check_model(
    layout: Layout,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    layers: int | None = None,
    vocab: int | None = None,
    intermediate: int | None = None,
    sequence_length: int | None = None,
    max_positions: int | None = None,
    sequence_parallel: bool = False,
    experts: int | None = None,
    schedule: str | None = None,
    micro_batches: int | None = None,
    cp_kind: str = "ring",
) -> None:
    """Refuse a layout that does not fit a model. Whatever is None is unknown and not checked.

    Args:
        layout: resolved (`resolve_layout`).
        heads: attention (query) heads. kv_heads: key/value heads; None when as many.
        layers: transformer blocks.
        vocab: rows of the embedding. tp need not divide them: shards may be uneven, but none may be empty.
        intermediate: width of the feed-forward layers.
        sequence_length: tokens in a sequence. max_positions: the longest sequence that the model knows.
        sequence_parallel: tensor-parallel ranks share each sequence.
        experts: number of experts of a mixture; None for a dense model.
        schedule: name of the pipeline schedule. micro_batches: of one optimizer step. cp_kind: how context-parallel ranks attend.

    Raises:
        ConfigError: a size that is no positive whole number; a sequence longer than the model's positions.
        LayoutError: anything that the layout does not divide or fill.
    """
    check_sizes(
        heads=heads,
        kv_heads=kv_heads,
        layers=layers,
        vocab=vocab,
        intermediate=intermediate,
        sequence_length=sequence_length,
        max_positions=max_positions,
        experts=experts,
        micro_batches=micro_batches,
    )
    _check_experts(layout, experts)
    check_available(layout)
    if schedule is not None:
        check_schedule(layout, schedule)
    _check_ulysses(layout, heads, cp_kind)
    _check_tensor_parallel(layout, heads, kv_heads, vocab, intermediate)
    if layers is not None:
        _check_layers(layout, layers, schedule)
    if sequence_length is not None and max_positions is not None and sequence_length > max_positions:
        raise ConfigError(
            f"The sequence has {sequence_length} tokens, but the model has only {max_positions} positions."
            f" Use a sequence length of at most {max_positions}."
        )
    if sequence_length is not None:
        _check_sequence(layout, sequence_length, sequence_parallel)
    if schedule is not None and micro_batches is not None:
        check_micro_batches(layout, schedule, micro_batches)


def _check_tensor_parallel(
    layout: Layout, heads: int | None, kv_heads: int | None, vocab: int | None, intermediate: int | None
) -> None:
    tp = layout.tp
    repair = f"Use {_tensor_parallel_degrees(heads, kv_heads, vocab, intermediate)}."
    if heads is not None and heads % tp:
        raise LayoutError(
            f"Tensor parallelism deals whole attention heads to ranks, but tp {tp} does not divide {heads} heads."
            f" {repair}"
        )
    if kv_heads is not None and not _shares_kv_heads(kv_heads, tp):
        raise LayoutError(
            f"tp {tp} is neither a divisor nor a multiple of the model's {kv_heads} key/value heads, so they can be"
            f" neither dealt nor replicated evenly. {repair}"
        )
    if intermediate is not None and intermediate % tp:
        raise LayoutError(f"tp {tp} does not divide the width of the feed-forward layers, {intermediate}. {repair}")
    if vocab is not None and vocab < tp:
        raise LayoutError(
            f"The vocabulary has {vocab} entries, fewer than the {tp} ranks (tp) that share it, so some would have"
            f" none. {repair}"
        )


def _shares_kv_heads(kv_heads: int, tp: int) -> bool:
    """Whether each rank has whole key/value heads (tp divides them) or each head whole ranks (they divide tp)."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _tensor_parallel_degrees(
    heads: int | None, kv_heads: int | None, vocab: int | None, intermediate: int | None
) -> str:
    """All degrees of tensor parallelism that fit the sizes known, as a phrase."""
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
        f"Layout {layout} has {stages} stages ({product}), but the model has only {_layers(layers)}, and each stage"
        f" needs at least one. Use {', or '.join(repairs)}."
    )


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def check_batch(layout: Layout, global_batch: int, micro_batch: int, schedule: str | None = None) -> int:
    """Refuse a global batch that cannot be cut into micro-batches as the layout and the schedule need them.

    Args:
        layout: resolved (`resolve_layout`).
        global_batch: rows of one optimizer step over all data-parallel ranks.
        micro_batch: rows that pass through the model at once.
        schedule: name; None for the default.

    Returns:
        Micro-batches of one optimizer step on each data-parallel rank.

    Raises:
        ConfigError: a size that is no positive whole number.
        LayoutError: with the nearest global batches that work.
    """
    check_sizes(global_batch=global_batch, micro_batch=micro_batch)
    info = find_schedule(schedule) if schedule is not None else default_schedule(layout.vp)
    unit = micro_batch * layout.dp
    if global_batch % unit:
        near = [count * unit for count in _counts_around(layout, info, global_batch // unit)]
        works = f"batches that work are {listed(near)}" if len(near) > 1 else f"batch that works is {near[0]}"
        raise LayoutError(
            f"The global batch of {global_batch} is not divisible by micro-batch {micro_batch} * dp {layout.dp} ="
            f" {unit}. The nearest global {works}."
        )
    check_micro_batches(layout, info.name, global_batch // unit, micro_batch=micro_batch)
    return global_batch // unit


def _counts_around(layout: Layout, info: ScheduleInfo, below: int) -> list[int]:
    """The nearest numbers of micro-batches that the schedule accepts, at most `below` and above it."""
    pp, vp = layout.pp, layout.vp
    down = [count for count in info.nearest_micro_batches(pp, vp, below) if 0 < count <= below]
    up = [count for count in info.nearest_micro_batches(pp, vp, below + 1) if count > below]
    return [*down, *up]


def check_micro_batches(layout: Layout, schedule: str, micro_batches: int, *, micro_batch: int | None = None) -> None:
    """Refuse a number of micro-batches that the schedule cannot run.

    Args:
        layout: resolved (`resolve_layout`).
        micro_batches: of one optimizer step on each data-parallel rank.
        micro_batch: rows of one, when known: the message then speaks of global batches.

    Raises:
        LayoutError: with the nearest numbers, and the schedules that take this one.
    """
    info = check_schedule(layout, schedule)
    pp, vp = layout.pp, layout.vp
    if info.accepts(pp, vp, micro_batches):
        return
    least = info.min_micro_batches(pp, vp)
    if micro_batches < least:
        reason = f"needs at least as many micro-batches as stages, {least}, but a step has {micro_batches}"
    else:
        rounds = info.divisor(pp, micro_batches)
        reason = (
            f"runs {micro_batches} micro-batches over {pp} pipeline ranks in {rounds} rounds, but {micro_batches} is"
            f" not divisible by {rounds}"
        )
    repairs = _micro_batch_repairs(layout, info, micro_batches, micro_batch)
    raise LayoutError(f"The schedule {info.name} {reason}. Use {repairs}.")


def _micro_batch_repairs(layout: Layout, info: ScheduleInfo, micro_batches: int, micro_batch: int | None) -> str:
    pp, vp = layout.pp, layout.vp
    near = info.nearest_micro_batches(pp, vp, micro_batches)
    repairs = [f"{listed(near, last='or')} micro-batches"]
    if micro_batch is not None:
        unit = micro_batch * layout.dp
        repairs = [f"a global batch of {listed((count * unit for count in near), last='or')}"]
        rows = micro_batches * micro_batch
        sizes = [size for size in divisors(rows) if info.accepts(pp, vp, rows // size)]
        if sizes:
            repairs.append(f"a micro-batch of {min(sizes, key=lambda size: abs(size - micro_batch))}")
    others = [other for other in SCHEDULES.values() if other.allows_vp(vp) and other.accepts(pp, vp, micro_batches)]
    if others:
        repairs.append(f"the schedule {listed((other.name for other in others), last='or')}")
    return listed(repairs, last="or")


def few_micro_batches(layout: Layout, schedule: str, micro_batches: int) -> str | None:
    """A warning, with the predicted bubble, when there are fewer micro-batches than stages; None otherwise."""
    stages = layout.pp * layout.vp
    if layout.pp == 1 or micro_batches >= stages:
        return None
    info = find_schedule(schedule)
    idle = predicted_bubble(info, layout.pp, layout.vp, micro_batches)
    enough = 4 * stages
    better = predicted_bubble(info, layout.pp, layout.vp, enough)
    counted = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    return (
        f"A step has {counted} for {stages} pipeline stages: with {info.name} each rank is"
        f" predicted to idle {idle:.0%} of the step. With {enough} micro-batches it would be {better:.0%}."
    )


def check_sizes(**sizes: int | None) -> None:
    """Refuse sizes that are no positive whole numbers, or absurdly large. None is unknown and passes.

    Raises:
        ConfigError: names the size.
    """
    for name, size in sizes.items():
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int):
            raise ConfigError(f"{name} must be a whole number, not {size!r}.")
        if size < 1:
            raise ConfigError(f"{name} is {size}, but must be at least 1.")
        if size > LARGEST_SIZE:
            raise ConfigError(f"{name} is {size}, more than any real one. The largest accepted is {LARGEST_SIZE}.")


def check_number(name: str, value: float, *, least: float = 0.0, most: float | None = None) -> None:
    """Refuse a number that is NaN, infinite or out of range, such as a learning rate.

    Raises:
        ConfigError: names the option, its value and the range.
    """
    limits = f"at least {least:g}" if most is None else f"between {least:g} and {most:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number {limits}, not {value!r}.")
    if not isfinite(value) or value < least or (most is not None and value > most):
        raise ConfigError(f"{name} is {value}, but must be a finite number {limits}.")
