"""Constants from what `lightning-3d profile` measured, instead of vendors' rates and published
runs. Pure Python.

Each operation costs operations / rate + bytes / bandwidth + a constant, as in `block_costs` and
`machine`. The rates minimize the squared relative errors, with terms that are not negative (Lawson
and Hanson, "Solving Least Squares Problems", 1974, chapter 23):

    copy          the bandwidth of memory: the largest
    elementwise   bytes / (memory * bandwidth): the largest
    matmul        operations / (matmul * peak) + kernel, after its bytes are taken off
    attention     operations / (attention * peak), forward and backward together
    optimizer     parameters * optimizer_traffic / memory's rate, and host_step
    collectives   by placement: messages * latency + bytes / (link or network), whose counts are those of `machine`; on a CPU, where ranks
                  share memory, each collective within a node for itself
    norm          a norm and a residual sum: traffic between sharded layers
    backward      some blocks of the model with a whole and with a split backward: halves
    model         some blocks of the model, whole and as narrow as a tensor-parallel rank has them: traffic and logit_traffic, after
                  products, attention and norms are taken off; the same with few tokens: host_block; bytes that are kept: saved,
                  logit_bytes
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.block_costs import work_of
from lightning_3d.app.planner.block_memory import block_activations
from lightning_3d.app.planner.constants import ADAMW, efficiency_of
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import MESSAGES, NCCL, ONE, Machine
from lightning_3d.app.planner.stack import Host, Overlap, Stack, Traffic
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.options.precision import FLOAT32_MATMUL
from lightning_3d.storage.json_file import parse_json

FORMAT = "lightning_3d profile 1"
LINKS_FORMAT = "lightning_3d doctor 1"
"""Format of what `lightning-3d doctor --json` writes, which has measurements of links only."""
_NEEDED = ("format", "date", "device", "name", "ranks", "ranks_per_node", "operations")
_NEEDED_OF_PROFILE = ("memory", "precision")
_ONCE = ("copy", "elementwise", "matmul", "attention", "optimizer", "model", "host")
"""Kinds of operations that every profile has. Collectives need at least two ranks."""


@dataclass(frozen=True)
class Profile:
    """A measured machine.

    Attributes:
        device: `cuda` or `cpu`.
        name: the system's name of the device.
        memory: bytes of one rank.
        ranks: number of ranks.
        ranks_per_node: ranks that ran at the same time on one machine.
        precision: precision of the measurements: fp32, fp64 or bf16.
        operations: measurements, each with its `kind` and `seconds`.
        context: bytes of a GPU that are neither free nor the allocator's.
        float32_matmul: what `torch.get_float32_matmul_precision` returned.
    """

    device: str
    name: str
    memory: float
    ranks: int
    ranks_per_node: int
    precision: str
    operations: tuple[Mapping[str, Any], ...]
    context: float = 0.0
    float32_matmul: str = FLOAT32_MATMUL[0]

    @property
    def has_only_links(self) -> bool:
        """True if only collectives were measured, by lightning-3d doctor."""
        return all(one["kind"] == "collective" for one in self.operations)

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the measurements of a kind."""
        return [one for one in self.operations if one["kind"] == kind]

    @property
    def sequence(self) -> int | None:
        """Tokens of the longest sequence with which blocks of the model were measured; None if only
        links were."""
        return max((one["seq"] for one in self.of("model")), default=None)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of the largest copy, which no cache holds."""
        return _rate_of_largest(self.of("copy"))

    @cached_property
    def memory_rate(self) -> float:
        """Bytes a second that the largest operation bound by memory reaches."""
        return _rate_of_largest(self.of("elementwise"))

    @cached_property
    def products(self) -> tuple[float, float]:
        """Return (operations per second of large matrix products, additional seconds of each
        product)."""
        width = 4 if self.precision in ("fp32", "fp64") else 2

        def moved(one: Mapping[str, Any]) -> float:
            tokens, outputs, inputs = one["tokens"], one["outputs"], one["inputs"]
            return width * (tokens * (outputs + inputs) + outputs * inputs) / self.memory_rate

        def work(one: Mapping[str, Any]) -> float:
            return 2.0 * one["tokens"] * one["outputs"] * one["inputs"]

        slope, start = _fit(self.of("matmul"), lambda one: (work(one), 1.0), moved)
        return (
            1 / slope if slope else max(work(one) / one["seconds"] for one in self.of("matmul"))
        ), start

    @cached_property
    def attention(self) -> float:
        """Operations a second of fused attention, forward and backward."""
        (slope,) = _fit(self.of("attention"), lambda one: (one["flops"],))
        return 1 / slope if slope else self.products[0]

    @cached_property
    def collectives(self) -> dict[str, tuple[float, float]]:
        """Return (seconds of a message, bytes a second) of each collective that was measured within
        a node."""
        found = {name: self.link("node", name) for name in MESSAGES}
        return {name: one for name, one in found.items() if one is not None}

    def link(self, placement: str, name: str | None = None) -> tuple[float, float] | None:
        """Return (seconds of a message, bytes a second) of the collectives in a `node` or `between`
        nodes, of one kind or of all; None if none was measured."""
        found = [
            one
            for one in self.of("collective")
            if one["placement"] == placement and name in (None, one["name"])
        ]
        if not found:
            return None

        def counted(one: Mapping[str, Any]) -> tuple[float, float]:
            messages, share = MESSAGES[one["name"]](one["ranks"])
            return messages, share * one["bytes"]

        latency, slope = _fit(found, counted)
        return latency, 1 / slope if slope else max(one["bytes"] / one["seconds"] for one in found)


def read_profile(path: Path) -> Profile:
    """Read the profile in a file.

    Raises:
        ConfigError: no such file, or a damaged one.
    """
    hint = "Write a profile with lightning-3d profile."
    try:
        # a folder, or a device, which would be read forever
        if path.exists() and not path.is_file():
            raise ConfigError(f"profile={path} is not a file. {hint}")
        content = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"profile={path} cannot be read:"
            f" {getattr(error, 'strerror', None) or 'it is not JSON'}. {hint}"
        ) from error
    if isinstance(content, dict) and content.get("format") == LINKS_FORMAT:
        return _read_links(path, content)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(
            f'profile={path} is not a profile: its "format" is not "{FORMAT}". {hint}'
        )
    missing = [name for name in (*_NEEDED, *_NEEDED_OF_PROFILE) if name not in content]
    if missing:
        raise ConfigError(f"profile={path} is damaged: {missing[0]} is missing. {hint}")
    try:
        profile = Profile(
            device=str(content["device"]),
            name=str(content["name"]),
            memory=_positive(content["memory"]),
            ranks=int(_positive(content["ranks"])),
            ranks_per_node=int(_positive(content["ranks_per_node"])),
            precision=str(content["precision"]),
            operations=tuple(content["operations"]),
            context=float(content.get("context", 0.0)),
            float32_matmul=str(content.get("float32_matmul_precision", FLOAT32_MATMUL[0])),
        )
        lacking = [kind for kind in _ONCE if not profile.of(kind)]
        if lacking:
            raise ValueError(f"it has no measurements of {lacking[0]}")
        for one in profile.operations:
            _positive(one["seconds"])
        stack_of_profile(profile, machine_of_profile(profile), Stack())
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"profile={path} is damaged: {type(error).__name__}: {error}. {hint}"
        ) from error
    return profile


def _read_links(path: Path, content: Mapping[str, Any]) -> Profile:
    """Read what lightning-3d doctor measured: links, and nothing of a model.

    Raises:
        ConfigError: a damaged file, or one without links.
    """
    hint = "Write it with lightning-3d doctor --json."
    if content.get("simulated"):
        raise ConfigError(
            f"profile={path} was measured on simulated GPUs, whose times say nothing about real"
            " ones."
        )
    try:
        operations = [
            one for one in content["operations"] if one["placement"] in ("node", "between")
        ]
        for one in operations:
            _positive(one["seconds"])
        ranks, per_node = (
            int(_positive(content["ranks"])),
            int(_positive(content["ranks_per_node"])),
        )
        profile = Profile(
            str(content["device"]),
            str(content["name"]),
            0.0,
            ranks,
            per_node,
            "",
            tuple(operations),
        )
        found = profile.link("node") or profile.link("between")
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"profile={path} is damaged: {type(error).__name__}: {error}. {hint}"
        ) from error
    if found is None:
        raise ConfigError(
            f"profile={path} has no measurement of a link. Run lightning-3d doctor with at least 2"
            " ranks."
        )
    return profile


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"{value} is not a positive number")
    return number


def require_same_gpu(profile: Profile, gpu: str | None, accelerator: str) -> None:
    """Refuse a profile that was measured on other hardware than the cluster's.

    Args:
        profile: the profile.
        gpu: the cluster's name of its GPUs; None if it is unknown.
        accelerator: cpu, gpu or auto.

    Raises:
        ConfigError: the profile was measured on other hardware.
    """
    kind = "gpu" if profile.device == "cuda" else "cpu"
    if accelerator not in ("auto", kind):
        wanted = gpu or accelerator.upper()
        raise ConfigError(
            f"The profile was measured on {profile.name} ({kind}), but the cluster has {wanted}."
            " Profile that cluster."
        )
    types = set(gpu_types(gpu or ""))
    if kind == "gpu" and types and not types & set(gpu_types(profile.name)):
        raise ConfigError(
            f"The profile was measured on {profile.name}, but the cluster has {gpu}. Profile that"
            " cluster."
        )


def gpu_types(name: str) -> list[str]:
    """Find words such as h100 in the name of a GPU."""
    return re.findall(r"(?<![a-z0-9])[a-z]{1,2}\d{2,3}(?![a-z0-9])", name.lower())


def machine_of_profile(
    profile: Profile, stated: Machine | None = None, *, nodes: int = 1
) -> Machine:
    """Convert a profile to a machine.

    Args:
        profile: the measurements.
        stated: cluster with known vendors' rates; the measurements become shares of these rates.
            None: only the measurements are known.
        nodes: number of nodes where `stated` is None.

    Raises:
        ConfigError: only links were measured, and `stated` is None.
    """
    if profile.has_only_links:
        return _with_links(profile, stated)
    rate, kernel = profile.products
    inside, between = profile.link("node"), profile.link("between")
    if stated is None:
        link = inside or (0.0, profile.bandwidth)
        outer = between or link
        known = efficiency_of(profile.name)
        sizes = nodes, profile.ranks_per_node, profile.memory, profile.bandwidth
        protocols = ONE if profile.device == "cpu" else NCCL
        stated = Machine(
            profile.name,
            *sizes,
            rate,
            rate,
            rate,
            link[1],
            outer[1],
            link[0],
            outer[0],
            known,
            protocols=protocols,
        )
    peak = stated.peak32 if profile.precision in ("fp32", "fp64") else stated.peak
    reached: dict[str, Any] = {
        "matmul": rate / peak,
        "memory": profile.memory_rate / stated.bandwidth,
        "attention": profile.attention / peak,
        "kernel": kernel,
    }
    measured = replace(stated, efficiency=replace(stated.efficiency, **reached))
    if profile.device == "cpu":
        measured = replace(measured, collectives=profile.collectives, unit="CPU rank")
    return _with_links(profile, measured)


def _with_links(profile: Profile, stated: Machine | None) -> Machine:
    """Replace the shares that links reach, and their latencies, by those of the profile."""
    if stated is None:
        raise ConfigError(
            "A file of lightning-3d doctor has measurements of links only, so the cluster must"
            " state the rates of its GPUs. Name it, for example cluster=h100, or measure everything"
            " with lightning-3d profile."
        )
    inside, between = profile.link("node"), profile.link("between")
    reached: dict[str, Any] = {}
    latencies: dict[str, Any] = {}
    if inside is not None:
        latencies["link_latency"], reached["link"] = inside[0], inside[1] / stated.link
    if between is not None:
        latencies["network_latency"], reached["network"] = between[0], between[1] / stated.network
    elif stated.network == stated.link and inside is not None:
        reached["network"] = reached["link"]
    return replace(stated, **latencies, efficiency=replace(stated.efficiency, **reached))


def stack_of_profile(profile: Profile, machine: Machine, stack: Stack) -> Stack:
    """Return the software as measured on the machine: its host, its operations bound by memory, and
    what it keeps for the backward pass."""
    if profile.has_only_links:
        return stack
    per_parameter, step = _fit(profile.of("optimizer"), lambda one: (one["parameters"], 1.0))
    # bytes that a step moves for a parameter besides the optimizer that was measured
    around = stack.traffic.parameter - ADAMW
    host = _host_seconds(profile, machine, stack)
    whole = _whole(profile)
    largest = max(whole, key=lambda one: one["tokens"])
    kept = [one for one in whole if one["tokens"] == largest["tokens"]]
    by_block, fixed = _fit(
        [{**one, "seconds": one["kept"]} for one in kept], lambda one: (_layers(one), 1.0)
    )
    footprint = replace(stack.footprint, saved=0.0)
    job = _job(profile, largest, replace(stack, footprint=footprint))
    footprint = replace(
        footprint,
        saved=max(0.0, by_block - block_activations(job, job.model.kinds[0]))
        / job.tokens
        / job.model.hidden,
        logit=fixed / (job.tokens * job.model.vocab),
        context=profile.context,
    )
    measured = replace(
        stack,
        host=replace(
            host, collectives=stack.host.collectives if profile.device == "cuda" else 0.0, step=step
        ),
        traffic=replace(
            _traffic(profile, machine, stack, host),
            parameter=per_parameter * machine.memory_rate + around,
        ),
        footprint=footprint,
    )
    measured = replace(measured, halves=_halves(profile, machine, measured))
    if profile.device == "cuda":
        return measured
    # On a CPU nothing overlaps with the work of the cores, and only the bytes of tensors are
    # counted.
    return replace(
        measured,
        overlap=Overlap(False, False, False, blocks=False),
        footprint=replace(footprint, allocator=1.0),
    )


def _host_seconds(profile: Profile, machine: Machine, stack: Stack) -> Host:
    """Return the host as it starts a block of the model. On a CPU, a block of few tokens also takes
    its products, and of the rest of the work of many tokens its share."""
    few = profile.of("host")
    block, _ = _fit(few, lambda one: (_layers(one), 1.0))
    if profile.device == "cuda":
        return Host(block)
    most = max(one["tokens"] for one in _whole(profile))
    many = [one for one in _whole(profile) if one["tokens"] == most]
    plain = replace(stack, traffic=Traffic(0.0, 0.0))

    def counted(one: Mapping[str, Any]) -> float:
        job = _job(profile, one, plain)
        return sum(work_of(job, machine).of(job.model.counts).seconds()[:2]) / job.model.layers

    rest = _fit(many, lambda one: (_layers(one), 1.0))[0] - counted(many[0])
    share = few[0]["tokens"] / most
    return Host(
        max(0.0, (block - counted(few[0]) - share * rest) / (1 - share)) if share < 1 else 0.0,
        computes=True,
    )


def _traffic(profile: Profile, machine: Machine, stack: Stack, host: Host) -> Traffic:
    """Return the traffic of a block and of the loss, as it fits the seconds of the model's blocks,
    whole and as narrow as tensor-parallel ranks have them. What is between sharded layers is
    measured alone: blocks do not say how much of their time it is."""
    between = _between(profile, machine)

    def seconds(one: Mapping[str, Any], elementwise: float = 0.0, logit: float = 0.0) -> float:
        job = _job(
            profile, one, replace(stack, traffic=Traffic(elementwise, logit, between=between))
        )
        work = work_of(job, machine)
        started = host.block * job.model.layers if host.computes else 0.0
        return sum((work.of(job.model.counts) + work.embedding + work.head).seconds()[:2]) + started

    def terms(one: Mapping[str, Any]) -> tuple[float, float]:
        base = seconds(one)
        return seconds(one, elementwise=1.0) - base, seconds(one, logit=1.0) - base

    elementwise, logit = _fit(_whole(profile), terms, seconds)  # of one rank: its loss is whole
    degrees = sorted({one["tp"] for one in profile.of("model") if "tp" in one})
    narrow = [[one for one in profile.of("model") if one.get("tp") == tp] for tp in degrees]
    inside = [
        _fit(found, lambda one: terms(one)[:1], partial(seconds, logit=logit))[0]
        for found in narrow
    ]
    of_loss = (
        stack.traffic.sharded_logit and stack.traffic.sharded_logit / stack.traffic.logit * logit
    )
    return Traffic(
        elementwise,
        logit,
        of_loss,
        between=between,
        sharded=tuple(zip(degrees, inside, strict=True)),
    )


def _between(profile: Profile, machine: Machine) -> float | None:
    """Return `Traffic.between` as it was measured: a norm and a residual sum, forward and backward;
    None if it was not."""
    measured = profile.of("norm")
    if not measured:
        return None
    width = 4 if profile.precision in ("fp32", "fp64") else 2
    (slope,) = _fit(measured, lambda one: (15.0 * width * one["tokens"] * one["hidden"],))
    return slope * machine.memory_rate


def _halves(profile: Profile, machine: Machine, stack: Stack) -> float:
    """Return `Stack.halves` as it was measured; 1 if it was not. What a split backward takes longer
    is compared with the backward of all blocks and of the head."""
    seconds = {bool(one["split"]): one["seconds"] for one in profile.of("backward")}
    if not seconds:
        return 1.0
    job = _job(profile, profile.of("backward")[0], stack)
    work = work_of(job, machine)
    return max(
        1.0, 1 + (seconds[True] - seconds[False]) / (work.of(job.model.counts) + work.head).backward
    )


def _whole(profile: Profile) -> list[Mapping[str, Any]]:
    """Return the measurements of whole blocks."""
    return [one for one in profile.of("model") if "tp" not in one]


def _rate_of_largest(measured: Sequence[Mapping[str, Any]]) -> float:
    largest = max(measured, key=lambda one: float(one["bytes"]))
    return float(largest["bytes"] / largest["seconds"])


def _layers(one: Mapping[str, Any]) -> int:
    return Architecture.from_config(one["config"]).layers


def _job(profile: Profile, one: Mapping[str, Any], stack: Stack) -> Job:
    """Return a measured model as a job of one rank."""
    model = Architecture.from_config(one["config"])
    rows = one["tokens"] // one["seq"]
    precision = "fp32" if profile.precision in ("fp32", "fp64") else "bf16"
    return Job(model, Layout(), one["seq"], rows, rows, precision=precision, stack=stack)


def _fit(
    measured: Sequence[Mapping[str, Any]],
    terms: Callable[[Mapping[str, Any]], tuple[float, ...]],
    known: Callable[[Mapping[str, Any]], float] = lambda one: 0.0,
) -> tuple[float, ...]:
    """Fit factors of terms, none negative, that minimize the squared relative error of the seconds.

    Args:
        measured: measurements, each with its `seconds`.
        terms: function from a measurement to the terms whose factors are unknown.
        known: function from a measurement to the seconds that are known already.
    """
    rows = [(terms(one), one["seconds"] - known(one), one["seconds"]) for one in measured]
    count = len(rows[0][0])
    best, least = (0.0,) * count, float("inf")
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            table = [
                ([row[column] / whole for column in chosen], rest / whole)
                for row, rest, whole in rows
            ]
            found = _solve(table)
            if found is None or min(found) < 0:
                continue
            cost = sum(
                (sum(a * b for a, b in zip(row, found, strict=True)) - rest) ** 2
                for row, rest in table
            )
            if cost < least - 1e-12:
                values = dict(zip(chosen, found, strict=True))
                best, least = tuple(values.get(column, 0.0) for column in range(count)), cost
    return best


def _solve(table: Sequence[tuple[Sequence[float], float]]) -> list[float] | None:
    """Solve least squares of one or two unknowns by their normal equations; None if the rows do not
    determine them."""
    if len(table[0][0]) == 1:
        square = sum(row[0] ** 2 for row, _ in table)
        return [sum(row[0] * rest for row, rest in table) / square] if square else None
    aa, ab, bb = (sum(row[i] * row[j] for row, _ in table) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(row[i] * rest for row, rest in table) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return None
    return [(ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant]
