"""The planner's predictions as text. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_3d.app.planner.frozen import frozen_weights
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Group, Machine
from lightning_3d.app.planner.memory_risk import fit_probability
from lightning_3d.app.planner.rank_memory import RankMemory
from lightning_3d.app.planner.search import Candidate, SearchResult
from lightning_3d.app.planner.stages import parameters_of, stages_of
from lightning_3d.app.planner.step_time import PredictedStep
from lightning_3d.layout.schedules import find_schedule, stages_of_rank
from lightning_3d.storage.numbers import gibibytes

PARTS = ("compute", "communication", "host", "bubble", "data", "optimizer")
"""Parts of a step's seconds, by their names in `PredictedStep`."""

_MEANING = {
    "compute": "computation",
    "communication": "communication inside of layers",
    "host": "starting kernels",
    "bubble": "waiting for other stages",
    "data": "reducing gradients",
    "optimizer": "the optimizer",
}


COMPARED = "compared with the first"
"""Heading of what `compare` returns."""


def memory_table(memory: RankMemory) -> str:
    """List the bytes of a rank by their use, one line each."""
    rows = {**asdict(memory), "all": memory.total}
    return "\n".join(f"  {name:<12} {gibibytes(size):>11}" for name, size in rows.items())


def margin(memory: RankMemory, machine: Machine) -> str:
    """Describe the share of a GPU that a rank is predicted to fill, and what stays free."""
    free, fits = machine.memory - memory.total, fit_probability(memory.total, machine.memory)
    return (
        f"{memory.total / machine.memory:.0%} of {gibibytes(machine.memory)}, {gibibytes(free)}"
        f" free, fits with {fits:.0%}"
    )


def describe(job: Job) -> str:
    """Return the keys of `parallelism` that make this job."""
    words = [
        f"parallelism={job.layout.name}",
        f"micro_batch_size={job.micro_batch}",
        f"zero_stage={job.zero}",
    ]
    if job.shards < job.layout.dp:
        words.append(f"zero_shard_size={job.shards}")
    if job.layout.pp > 1:
        words.append(f"schedule={job.schedule}")
    if job.recompute != "none":
        words.append(f"recompute={job.recompute}")
    if job.layout.tp > 1 and not job.sequence_parallel:
        words.append("sequence_parallel=false")
    if job.blocks is not None:
        words.append(f"stages=[{','.join(map(str, job.blocks))}]")
    if job.layout.order != ("tp", "cp", "pp", "dp"):
        words.append(f"order=[{','.join(job.layout.order)}]")
    return " ".join([words[0], *(f"parallelism.{word}" for word in words[1:])])


def data_line(job: Job, machine: Machine) -> str:
    """Describe what the data-parallel ranks send in a step."""
    traffic = data_traffic(job, machine)
    groups = (
        f" ZeRO shards over groups of {job.shards * job.layout.cp} ranks."
        if job.shards < job.layout.dp
        else ""
    )
    return (
        f"Gradients and parameters: a rank sends {gibibytes(traffic.inside)} per step inside its"
        f" node and {gibibytes(traffic.between)} to other nodes.{groups}"
    )


def compiled_line(faster: Candidate, first: Candidate) -> str:
    """Describe what compiled blocks and a loss in chunks would save."""
    job, saved = faster.job, 1 - faster.step.seconds / first.step.seconds
    return (
        f"With parallelism.compile=true parallelism.loss_chunks={job.loss_chunks},"
        f" {job.layout.name} is predicted to be {saved:.0%} faster: {faster.step.seconds:.3g} s a"
        f" step in {gibibytes(faster.memory.total)}. Compiled blocks keep fewer bytes and move"
        " fewer."
    )


def chunked_line(faster: Candidate, first: Candidate) -> str:
    """Describe what a loss in chunks alone would save."""
    job, saved = faster.job, 1 - faster.step.seconds / first.step.seconds
    return (
        f"With parallelism.loss_chunks={job.loss_chunks}, {job.layout.name} fits and is predicted"
        f" to be {saved:.0%} faster: {faster.step.seconds:.3g} s a step in"
        f" {gibibytes(faster.memory.total)}. Only the logits of a part of the tokens are in memory."
    )


def overlapped_line(faster: Candidate, first: Candidate) -> str:
    """Describe what gathering parameters while the next forward runs would save."""
    saved = 1 - faster.step.seconds / first.step.seconds
    return (
        f"With parallelism.zero_overlap_gather=true, {faster.job.layout.name} is predicted to be"
        f" {saved:.0%} faster: {faster.step.seconds:.3g} s a step. New parameters are gathered"
        " while the next forward runs."
    )


def tokens_per_second(candidate: Candidate) -> float:
    """Return the tokens per second of all GPUs."""
    job = candidate.job
    return job.calls * job.global_batch * job.seq / candidate.step.seconds


def share_of_peak(candidate: Candidate, gpus: int, machine: Machine) -> float:
    """Return the MFU, 0 to 1: model FLOPs of a step, as papers count them, divided by the peak in
    the precision of the run, as in `metrics.csv`.

    Args:
        gpus: GPUs that run the candidate.
        machine: their rates.
    """
    job = candidate.job
    return (
        job.model.model_flops(job.seq)
        * tokens_per_second(candidate)
        / gpus
        / machine.peak_of(job.precision)
    )


def compare(candidate: Candidate, first: Candidate) -> str:
    """Compare a candidate with the first: time and memory, then the part of its step that takes
    longer by most.

    All differences have a sign. Those of times are shares of the first's step, so that the part and
    the whole can be compared.
    """
    if candidate is first:
        return "the fastest"
    whole = first.step.seconds
    time = candidate.step.seconds / whole - 1
    memory = candidate.memory.total - first.memory.total
    longer = {part: _seconds(candidate.step, part) - _seconds(first.step, part) for part in PARTS}
    worst = max(longer, key=longer.__getitem__)
    text = (
        f"{_signed(100 * time)}% time, {_signed(memory / 2**30)} GiB; {_MEANING[worst]}"
        f" {_signed(100 * longer[worst] / whole)}%"
    )
    if candidate.job.recompute != first.job.recompute and worst == "compute":
        text += f" (needs recompute={candidate.job.recompute} to fit in memory)"
    return text


def _signed(value: float) -> str:
    """Show a difference with its sign and one decimal; a difference of nothing is `+0.0`."""
    return f"{round(value, 1) + 0.0:+.1f}"


def _seconds(step: PredictedStep, part: str) -> float:
    return float(getattr(step, part))


def found_table(found: SearchResult, machine: Machine) -> str:
    """Return a table of the best candidates, one row each."""
    settings, sizes = (
        ("layout", "schedule", "micro-batch", "ZeRO", "recompute"),
        ("GiB", f"of {machine.unit}", "GiB free", "fits"),
    )
    head = (*settings, "s/step", "tokens/s", "MFU", *sizes, COMPARED)
    rows = [head]
    for one in found.best:
        job = one.job
        rows.append(
            (
                job.layout.name,
                job.schedule if job.layout.pp > 1 else "-",
                str(job.micro_batch),
                str(job.zero) + (f" in {job.shards}s" if job.shards < job.layout.dp else ""),
                job.recompute,
                f"{one.step.seconds:.3g}",
                f"{tokens_per_second(one):,.0f}",
                f"{share_of_peak(one, machine.gpus, machine):.0%}",
                f"{one.memory.total / 2**30:.0f}",
                f"{one.memory.total / machine.memory:.0%}",
                f"{(machine.memory - one.memory.total) / 2**30:.0f}",
                f"{fit_probability(one.memory.total, machine.memory):.0%}",
                compare(one, found.best[0]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def as_data(candidate: Candidate, machine: Machine) -> dict[str, Any]:
    """Return a candidate as plain values for JSON."""
    job = candidate.job
    return {
        "layout": job.layout.name,
        "order": list(job.layout.order),
        "schedule": job.schedule,
        "vp": job.layout.vp,
        "micro_batch_size": job.micro_batch,
        "micro_batches": job.micro_batches,
        "zero_stage": job.zero,
        "zero_shard_size": job.shards if job.shards < job.layout.dp else None,
        "recompute": job.recompute,
        "sequence_parallel": job.sequence_parallel,
        "arguments": describe(job),
        "seconds": candidate.step.seconds,
        "waiting_share": candidate.step.waiting,
        "seconds_of": {part: _seconds(candidate.step, part) for part in PARTS},
        "tokens_per_second": tokens_per_second(candidate),
        "mfu": share_of_peak(candidate, machine.gpus, machine),
        "bytes": candidate.memory.total,
        "bytes_free": machine.memory - candidate.memory.total,
        "memory_share": candidate.memory.total / machine.memory,
        "fit_probability": fit_probability(candidate.memory.total, machine.memory),
        "bytes_of": asdict(candidate.memory),
        "data_bytes_sent": asdict(data_traffic(job, machine)),
    }


Table = list[list[str]]


def table(head: Sequence[str], rows: Table) -> list[str]:
    """Return the lines of a Markdown table with aligned columns."""
    cells = [list(head), *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| "
        + " | ".join(value.ljust(width) for value, width in zip(row, widths, strict=True))
        + " |"
        for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


# Bytes that data-parallel ranks send in a step, inside nodes and between them.


@dataclass(frozen=True)
class DataTraffic:
    """Bytes that a rank sends in a step, on average over the ranks of a node.

    Attributes:
        inside: to ranks of the same node.
        between: to other nodes.
    """

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: DataTraffic) -> DataTraffic:
        return DataTraffic(self.inside + other.inside, self.between + other.between)


def data_traffic(job: Job, machine: Machine) -> DataTraffic:
    """Return the traffic of gradients and parameters of the rank with the most parameters, without
    experts that ep splits, and of a frozen second model.

    Collectives are rings: of n ranks, each passes on (n - 1) / n of the bytes of an all-gather or a
    reduce-scatter, and twice as many of an all-reduce. In a ring over several nodes, one of the
    ranks of a node sends to the next node.
    """
    most = max(_parameters(job, rank) for rank in range(job.layout.pp))
    return sum(
        (_passed(ranks, size) for ranks, size in _collectives(job, machine, most)), DataTraffic()
    )


def _parameters(job: Job, rank: int) -> float:
    """Count the parameters of a pipeline rank, without experts that ep splits."""
    layout, stages = job.layout, stages_of(job)
    v_shaped = layout.pp > 1 and find_schedule(job.schedule).v_shaped
    held = [
        parameters_of(job, stages[index])
        for index in stages_of_rank(rank, layout.pp, layout.vp, v_shaped)
    ]
    return sum(dense + (routed if layout.ep == 1 else 0.0) for dense, routed in held)


def _collectives(job: Job, machine: Machine, parameters: float) -> Iterator[tuple[Group, float]]:
    """Yield (ranks, bytes that are gathered or scattered over them in a step)."""
    layout, stack = job.layout, job.stack
    everyone = machine.group(layout, ("dp", "cp"))
    inside, replicas = machine.shard_groups(layout, job.shards)
    gradients = stack.reduced_bytes * parameters * job.trained
    if job.zero == 0:
        yield everyone, 2 * gradients
        return
    times = job.micro_batches if job.reduces_often else 1
    yield everyone if job.is_uneven else inside, times * gradients * (1 if job.scatters else 2)
    if not job.is_uneven:
        yield replicas, 2 * gradients / inside.size
    yield inside, frozen_weights(job).gathered
    times = 2 * job.micro_batches if job.gathers_often else 1
    yield inside, times * job.number * parameters * (1 if job.zero == 3 else job.trained)


def _passed(ranks: Group, size: float) -> DataTraffic:
    passed = (ranks.size - 1) / ranks.size * size
    between = passed / ranks.local if ranks.nodes > 1 else 0.0
    return DataTraffic(passed - between, between)
