"""Calibrate the constants marked [fit] in `lightning_3d.planner.constants` and `software`, and check them on cells that were left out.

Each constant in turn is multiplied and divided by a factor as long as the mean absolute logarithm of predicted / measured shrinks; then the
factor becomes smaller. Constants belong to a type of GPU or to a software, never to a model, a layout or a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from benchmarks.planner_accuracy.allocator import allocated, queue_of
from benchmarks.planner_accuracy.comparison import Comparison
from benchmarks.planner_accuracy.published_runs import Run
from benchmarks.planner_accuracy.software import Published
from lightning_3d.planner.step_time import step_of

Values = dict[tuple[str, str], float]
"""By (type of GPU or name of a software, field)."""

_START = {
    "matmul": 0.75,
    "matmul8": 0.75,
    "memory": 0.7,
    "attention": 0.5,
    "kernel": 5e-6,
    "link": 0.7,
    "network": 0.45,
    "crowding": 0.05,
    "exposed": 0.7,
    "traffic.elementwise": 1.8,
    "attention_speed": 0.5,
    "traffic.logit": 20.0,
    "traffic.parameter": 60.0,
    "host.block": 2e-3,
    "host.collectives": 1.5e-3,
    "host_tensor": 1.5e-3,
    "host.step": 0.03,
    "separate.network": 0.5,
    "allocator.queued": 30.0,
    "allocator.filled": 0.9,
    "allocator.ahead": 1.0,
}
_LIMITS = {
    "matmul": (0.4, 0.92),
    "matmul8": (0.3, 0.92),
    "memory": (0.4, 0.95),
    "attention": (0.2, 0.8),
    "kernel": (2e-6, 3e-5),
    "link": (0.3, 0.9),
    "network": (0.2, 0.95),
    "crowding": (1e-3, 0.5),
    "separate.network": (0.05, 0.95),
    "exposed": (0.2, 1.0),
    "traffic.elementwise": (1.0, 6.0),
    "traffic.logit": (8.0, 80.0),
    "traffic.parameter": (28.0, 150.0),
    "allocator.filled": (0.7, 1.0),
}
_OF_GPU = ("matmul", "memory", "attention", "kernel", "link", "network", "crowding", "exposed")
_OF_SOFTWARE = {
    "nanotron": ("traffic.elementwise", "traffic.logit", "traffic.parameter", "host.block", "host.collectives", "host_tensor", "host.step"),
    "megatron_deepspeed": ("traffic.elementwise", "traffic.logit", "host.block", "host.collectives", "host_tensor", "host.step"),
    "foundry": ("traffic.elementwise", "attention_speed", "traffic.logit", "host.step"),
    "foundry_a100": ("traffic.elementwise", "attention_speed", "traffic.logit", "host.step"),
    "megatron": ("traffic.elementwise", "host.step"),
    "megatron_2021": ("traffic.elementwise", "separate.network"),
}
_OF_MEMORY = {"nanotron": ("allocator.queued", "allocator.filled", "allocator.ahead")}
_MOST = 0.5
"""Larger errors count as this: some runs met a slow machine."""


@dataclass(frozen=True)
class Sample:
    """A run whose job and machine take the constants that are tried, with its weight: all runs of a software weigh the same together."""

    run: Run
    weight: float

    @property
    def owners(self) -> tuple[str, str]:
        return gpu_type(self.run), self.run.software.name


def gpu_type(run: Run) -> str:
    """a100 or h100."""
    return run.machine.gpu.partition("_")[0]


def with_values(run: Run, values: Values) -> Run:
    """Return a run with these constants instead of its own."""
    gpu, software = gpu_type(run), run.software.name
    of_gpu: Any = {name: value for (owner, name), value in values.items() if owner == gpu}
    machine = replace(run.machine, efficiency=replace(run.machine.efficiency, **of_gpu))
    of_software = {name: value for (owner, name), value in values.items() if owner == software}
    return replace(run, machine=machine, job=replace(run.job, stack=_with_fields(run.software, of_software)))


def _with_fields(stack: Published, values: Mapping[str, float]) -> Published:
    """Return a software with other values of fields; `host.step` is a field of a part."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        part, _, entry = name.rpartition(".")
        if part:
            changes[part] = replace(changes.get(part, getattr(stack, part)), **{entry: value})
        else:
            changes[name] = value
    return replace(stack, **changes)


def fit(runs: Sequence[Run], *, rounds: int = 6) -> Values:
    """Calibrate on runs: the constants of time, then, with these, those of memory."""
    timed = [run for run in runs if run.core and run.seconds and run.software.name in _OF_SOFTWARE and not run.job.model.experts]
    softwares = {run.software.name for run in timed}
    values: Values = {(gpu, name): _START[name] for gpu in sorted({gpu_type(run) for run in timed}) for name in _OF_GPU}
    if any(run.job.precision == "fp8" for run in timed):
        values["h100", "matmul8"] = _START["matmul8"]
    values |= {(software, name): _START[name] for software in sorted(softwares) for name in _OF_SOFTWARE[software]}
    values = _descend(_weighted(timed), values, _time_error, rounds)
    full = [with_values(run, values) for run in runs if run.core and run.memory and run.software.name in _OF_MEMORY]
    steps = {id(run): step_of(run.job, run.machine, pipeline="estimate") for run in full}
    kinds = sorted({run.software.name for run in full})
    memory: Values = {(software, name): _START[name] for software in kinds for name in _OF_MEMORY[software]}

    def error(run: Run, tried: Values) -> float:
        tried_run = with_values(run, tried)
        queue = queue_of(steps[id(run)], tried_run.job)
        printed = allocated(tried_run.job, queue=queue, room=tried_run.room, first=run.software.allocator.prints_first)
        return log(printed.total / 2**30 / (run.memory or 1.0))

    return values | _descend(_weighted(full), memory, error, rounds)


def _weighted(runs: Sequence[Run]) -> list[Sample]:
    counts: dict[tuple[str, str], int] = {}
    for run in runs:
        key = run.source, run.software.name
        counts[key] = counts.get(key, 0) + 1
    return [Sample(run, counts[run.source, run.software.name] ** -0.5) for run in runs]


def _time_error(run: Run, values: Values) -> float:
    tried = with_values(run, values)
    return log(step_of(tried.job, tried.machine, pipeline="estimate").seconds / (run.seconds or 1.0))


def _descend(samples: Sequence[Sample], values: Values, error: Callable[[Run, Values], float], rounds: int) -> Values:
    """Run some rounds of coordinate descent and return the values."""

    def cost(sample: Sample, tried: Values) -> float:
        return sample.weight * min(abs(error(sample.run, tried)), _MOST)

    costs = [cost(sample, values) for sample in samples]
    factor = 1.3
    for _ in range(rounds):
        moved = False
        for key in values:
            touched = [index for index, sample in enumerate(samples) if key[0] in sample.owners]
            for step in (factor, 1 / factor):
                while True:
                    tried = values | {key: values[key] * step}
                    low, high = _LIMITS.get(key[1], (0.0, float("inf")))
                    if not low <= tried[key] <= high:
                        break
                    new = {index: cost(samples[index], tried) for index in touched}
                    if sum(new.values()) >= sum(costs[index] for index in touched) - 1e-9:
                        break
                    values, moved = tried, True
                    for index, value in new.items():
                        costs[index] = value
        if not moved or factor > 1.1:
            factor = factor**0.6
    return values


def cross_validate(runs: Sequence[Run], folds: int, predict: Callable[[Run], Comparison]) -> list[Comparison]:
    """Predict every run with constants that were calibrated without its cell, a model on a number of GPUs."""
    cells = sorted({run.cell for run in runs})
    compared = []
    for fold in range(folds):
        held = set(cells[fold::folds])
        values = fit([run for run in runs if run.cell not in held])
        compared += [predict(with_values(run, values)) for run in runs if run.cell in held]
    return compared
