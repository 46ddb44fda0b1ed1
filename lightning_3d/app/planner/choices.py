"""Ways to run a job on a cluster: layouts, micro-batches, schedules, recomputation and ZeRO stages.
Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from lightning_3d.app.planner.fitting_stages import fitting_job
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Machine, on_one_node
from lightning_3d.app.planner.memory import RankMemory, memory_within
from lightning_3d.errors import LayoutError
from lightning_3d.layout.layout import Layout, divisors
from lightning_3d.layout.schedules import SCHEDULES, find_schedule, predicted_bubble
from lightning_3d.layout.shard_size import suits
from lightning_3d.options.blocks import RECOMPUTE
from lightning_3d.options.zero import ZeroOptions

ORDERS = (("tp", "cp", "pp", "dp"), ("tp", "cp", "dp", "pp"))
_MOST_CHUNKS = 12
"""Most virtual stages of a rank: each more sends more messages and hides less of the bubble."""

_LONGEST_SHARE = 1024
"""Fewest tokens of a sequence that context parallelism leaves each rank."""


@dataclass(frozen=True)
class Fixed:
    """Values that the user has set, which are not searched. None: the search may choose the value.
    `max_bubble` is the largest share of a step that the ranks of a pipeline may wait for each
    other. `fit_stages`: give stages other numbers of blocks where a job does not fit otherwise.
    `zero_options`: options of ZeRO that the user has set, with which not every stage runs; their
    own stage is not read."""

    layout: Layout | None = None
    schedule: str | None = None
    micro_batch: int | None = None
    zero: int | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None
    order: tuple[str, ...] | None = None
    max_bubble: float = 1.0
    fit_stages: bool = False
    zero_options: ZeroOptions = ZeroOptions(1)


def degrees(job: Job) -> tuple[int, ...]:
    """Return the degrees of tensor, pipeline, data, context and expert parallelism of a job."""
    layout = job.layout
    return layout.tp, layout.pp, layout.dp, layout.cp, layout.ep


def shapes(job: Job, machine: Machine, fixed: Fixed) -> Iterator[Job]:
    """Yield all degrees, rank orders, micro-batches and forms of tensor parallelism that divide the
    model and the batch."""
    for layout in [fixed.layout] if fixed.layout is not None else _layouts(job, machine):
        if job.global_batch % layout.dp or not _suits_shards(job, layout):
            continue
        rows = job.global_batch // layout.dp
        sizes = (
            [fixed.micro_batch]
            if fixed.micro_batch
            else [size for size in divisors(rows) if size & (size - 1) == 0 and size <= 64]
        )
        splits = (
            [fixed.sequence_parallel]
            if fixed.sequence_parallel is not None
            else [True, False]
            if layout.tp > 1
            else [True]
        )
        orders = (
            [fixed.order]
            if fixed.order
            else ORDERS
            if layout.pp > 1 and layout.dp > 1
            else ORDERS[:1]
        )
        for placed, size, split in product(
            [replace(layout, order=order, vp=1) for order in orders], sizes, splits
        ):
            if rows % size == 0 and (not split or job.seq % (layout.tp * layout.cp) == 0):
                yield job.but(
                    layout=placed,
                    micro_batch=size,
                    sequence_parallel=split and layout.tp > 1,
                    schedule="",
                    zero=1,
                )


def _suits_shards(job: Job, layout: Layout) -> bool:
    """True if a layout works with the shard size that the user has given."""
    return job.shard_size is None or suits(job.shard_size, layout)


def node_shard_size(job: Job, machine: Machine) -> int | None:
    """Return the largest number of data-parallel indices whose ranks can shard within a node.

    None where ZeRO shards nothing, the user has given a number, all ranks that shard are on one
    node, or no two indices are.
    """
    if job.zero == 0 or job.shard_size is not None:
        return None
    return _shard_size_of_node(job.layout, machine.gpus_per_node)


@lru_cache(maxsize=4096)
def _shard_size_of_node(layout: Layout, per_node: int) -> int | None:
    if on_one_node(layout, layout.dp, per_node):
        return None
    sizes = [size for size in divisors(layout.dp) if 1 < size <= per_node and suits(size, layout)]
    return max((size for size in sizes if on_one_node(layout, size, per_node)), default=None)


def _layouts(job: Job, machine: Machine) -> Iterator[Layout]:
    """Yield degrees whose product is the number of GPUs. Tensor parallelism stays within the GPUs
    that fast links connect."""
    model, gpus = job.model, machine.gpus
    widths = [width for width in (model.ffn, model.expert_ffn, model.shared_ffn) if width]
    for tp in divisors(min(machine.gpus_per_node, gpus)):
        if (
            gpus % tp
            or model.heads % tp
            or (model.kv_heads % tp and tp % model.kv_heads)
            or any(width % tp for width in widths)
        ):
            continue
        for pp in divisors(gpus // tp):
            if pp > model.layers:
                break
            for cp in divisors(gpus // tp // pp):
                if cp > 1 and (job.seq % (2 * cp) or job.seq // cp < _LONGEST_SHARE):
                    continue
                dp = gpus // tp // pp // cp
                for ep in (
                    [ep for ep in divisors(tp * cp * dp) if model.experts % ep == 0]
                    if model.experts
                    else [1]
                ):
                    yield Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)


def schedules(job: Job, fixed: Fixed) -> Iterator[Job]:
    """Yield the schedules of a shape. GPipe and LoopedBFS are left out: they are as fast as 1F1B
    and its interleaved form, but need more memory."""
    layout = job.layout
    if layout.pp == 1:
        yield job.but(schedule=fixed.schedule or "1F1B")
        return
    if fixed.schedule is not None:
        infos: Sequence = [find_schedule(fixed.schedule)]
    else:
        infos = [info for info in SCHEDULES.values() if info.name not in ("GPipe", "LoopedBFS")]
    for info in infos:
        if fixed.layout is not None and fixed.layout.vp > 1:
            chunks = [fixed.layout.vp]
        else:
            chunks = (
                [2]
                if info.v_shaped
                else _chunks(job.model.layers, layout.pp)
                if info.looped
                else [1]
            )
        for vp in chunks:
            fits = layout.pp * vp <= job.model.layers and info.accepts(
                layout.pp, vp, job.micro_batches
            )
            if fits and (
                fixed.max_bubble >= 1
                or predicted_bubble(info, layout.pp, vp, job.micro_batches) <= fixed.max_bubble
            ):
                yield job.but(layout=_with_chunks(layout, vp), schedule=info.name)


@lru_cache(maxsize=4096)
def _with_chunks(layout: Layout, vp: int) -> Layout:
    return replace(layout, vp=vp)


def _chunks(layers: int, pp: int) -> list[int]:
    """Return the numbers of virtual stages of a rank that are worth a try: powers of two, and those
    with equal stages."""
    equal = divisors(layers // pp) if layers % pp == 0 else []
    return sorted(vp for vp in {2, 4, 8, *equal} if 1 < vp <= min(_MOST_CHUNKS, layers // pp))


def ways(job: Job, fixed: Fixed) -> list[Job]:
    """Return the ways to run a job: each useful ZeRO stage, with the recomputation of the job or
    the next level that runs.

    Stage 0 sends more than stage 1, and with a pipeline stage 2 is the same as stage 1. With a
    split backward, stage 3 would hold all parameters. Where options of the user refuse all of these
    stages, another one is useful.
    """
    runs = runnable(job, fixed)
    if runs is None:
        return []
    job, split = runs, job.splits_backward
    if fixed.zero is not None:
        return [job.but(zero=fixed.zero)]
    stages = (
        [1]
        if job.layout.dp * job.layout.cp == 1
        else [1, 2, 3]
        if job.layout.pp == 1
        else [1]
        if split
        else [1, 3]
    )
    possible = [
        stage for stage in (1, 2, 3) if has_options(replace(fixed.zero_options, stage=stage), job)
    ]
    return [
        job.but(zero=stage)
        for stage in [stage for stage in stages if stage in possible] or possible
    ]


def runnable(job: Job, fixed: Fixed) -> Job | None:
    """Return the job with its recomputation, or the next level that runs: selective recomputation
    does not run with a split backward (see `BlockOptions`). None if no level runs."""
    return (
        more_recomputed(job, fixed) if job.splits_backward and job.recompute == "selective" else job
    )


def has_options(options: ZeroOptions, job: Job) -> bool:
    """Return whether the stage of these options has all of them, with the schedule of a job."""
    return _has_options(options, job.schedule or "1F1B", job.layout.pp > 1)


@lru_cache(maxsize=1024)
def _has_options(options: ZeroOptions, schedule: str, piped: bool) -> bool:
    try:
        options.resolve(schedule, 2 if piped else 1)
    except LayoutError:
        return False
    return True


def more_recomputed(job: Job, fixed: Fixed) -> Job | None:
    """Return the same job with the next level of recomputation that runs, which is slower; None if
    there is none."""
    levels = () if fixed.recompute else RECOMPUTE[RECOMPUTE.index(job.recompute) + 1 :]
    level = next(
        (level for level in levels if level != "selective" or not job.splits_backward), None
    )
    return None if level is None else job.but(recompute=level)


def fitting(job: Job, room: float, fixed: Fixed) -> tuple[Job, RankMemory] | None:
    """Return a job and its memory, with other stages where the user lets the planner choose them;
    None if it needs more than `room` bytes."""
    if fixed.fit_stages and job.layout.pp > 1:
        job = fitting_job(job, room) or job
    memory = memory_within(job, room)
    return None if memory is None else (job, memory)
