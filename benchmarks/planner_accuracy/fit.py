"""Calibration of the constants marked [fit] in `lightning_3d.planner.constants` and `software`, checked on cells that were left out.

Each constant in turn is multiplied and divided by a factor as long as the mean absolute logarithm of predicted / measured shrinks; then the
factor becomes smaller. Constants belong to a type of GPU or to a software, never to a model, a layout or a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from benchmarks.planner_accuracy.comparison import Comparison
from benchmarks.planner_accuracy.published_runs import Run
from lightning_3d.planner.memory import memory_of
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
    "traffic": 1.8,
    "attention_speed": 0.5,
    "logit_traffic": 20.0,
    "optimizer_traffic": 60.0,
    "host_block": 2e-3,
    "host_collectives": 1.5e-3,
    "host_tensor": 1.5e-3,
    "host_step": 0.03,
    "apart_network": 0.5,
    "queued": 30.0,
    "filled": 0.9,
    "ahead": 1.0,
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
    "apart_network": (0.05, 0.95),
    "exposed": (0.2, 1.0),
    "traffic": (1.0, 6.0),
    "logit_traffic": (8.0, 80.0),
    "optimizer_traffic": (28.0, 150.0),
    "filled": (0.7, 1.0),
}
_OF_GPU = ("matmul", "memory", "attention", "kernel", "link", "network", "crowding", "exposed")
_OF_SOFTWARE = {
    "nanotron": ("traffic", "logit_traffic", "optimizer_traffic", "host_block", "host_collectives", "host_tensor", "host_step"),
    "megatron_deepspeed": ("traffic", "logit_traffic", "host_block", "host_collectives", "host_tensor", "host_step"),
    "foundry": ("traffic", "attention_speed", "logit_traffic", "host_step"),
    "foundry_a100": ("traffic", "attention_speed", "logit_traffic", "host_step"),
    "megatron": ("traffic", "host_step"),
    "megatron_2021": ("traffic", "apart_network"),
}
_OF_MEMORY = {"nanotron": ("queued", "filled", "ahead")}
_MOST = 0.5
"""Larger errors count as this: some runs met a slow machine."""


@dataclass(frozen=True)
class Sample:
    """A run whose job and machine take the constants that are tried, with its weight: all runs of a software weigh the same together."""

    run: Run
    weight: float

    @property
    def owners(self) -> tuple[str, str]:
        return gpu_type(self.run), self.run.job.stack.name


def gpu_type(run: Run) -> str:
    """a100 or h100."""
    return run.machine.gpu.partition("_")[0]


def with_values(run: Run, values: Values) -> Run:
    """A run with these constants instead of its own."""
    gpu, software = gpu_type(run), run.job.stack.name
    of_gpu: Any = {name: value for (owner, name), value in values.items() if owner == gpu}
    of_stack: Any = {name: value for (owner, name), value in values.items() if owner == software}
    machine = replace(run.machine, efficiency=replace(run.machine.efficiency, **of_gpu))
    return replace(run, machine=machine, job=replace(run.job, stack=replace(run.job.stack, **of_stack)))


def fit(runs: Sequence[Run], *, rounds: int = 6) -> Values:
    """Calibrate on runs: the constants of time, then, with these, those of memory."""
    timed = [run for run in runs if run.core and run.seconds and run.job.stack.name in _OF_SOFTWARE and not run.job.model.experts]
    softwares = {run.job.stack.name for run in timed}
    values: Values = {(gpu, name): _START[name] for gpu in sorted({gpu_type(run) for run in timed}) for name in _OF_GPU}
    if any(run.job.precision == "fp8" for run in timed):
        values["h100", "matmul8"] = _START["matmul8"]
    values |= {(software, name): _START[name] for software in sorted(softwares) for name in _OF_SOFTWARE[software]}
    values = _descend(_weighted(timed), values, _time_error, rounds)
    full = [with_values(run, values) for run in runs if run.core and run.memory and run.job.stack.name in _OF_MEMORY]
    steps = {id(run): step_of(run.job, run.machine, pipeline="estimate") for run in full}
    kinds = sorted({run.job.stack.name for run in full})
    memory: Values = {(software, name): _START[name] for software in kinds for name in _OF_MEMORY[software]}

    def error(run: Run, tried: Values) -> float:
        tried_run = with_values(run, tried)
        queue = steps[id(run)].queue(tried_run.job)
        printed = memory_of(tried_run.job, queue=queue, room=tried_run.room, first=run.job.stack.prints_first)
        return log(printed.total / 2**30 / (run.memory or 1.0))

    return values | _descend(_weighted(full), memory, error, rounds)


def _weighted(runs: Sequence[Run]) -> list[Sample]:
    counts: dict[tuple[str, str], int] = {}
    for run in runs:
        key = run.source, run.job.stack.name
        counts[key] = counts.get(key, 0) + 1
    return [Sample(run, counts[run.source, run.job.stack.name] ** -0.5) for run in runs]


def _time_error(run: Run, values: Values) -> float:
    tried = with_values(run, values)
    return log(step_of(tried.job, tried.machine, pipeline="estimate").seconds / (run.seconds or 1.0))


def _descend(samples: Sequence[Sample], values: Values, error: Callable[[Run, Values], float], rounds: int) -> Values:
    """The values after some rounds of coordinate descent."""

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
    """Every run predicted with constants that were calibrated without its whole cell, a model on a number of GPUs."""
    cells = sorted({run.cell for run in runs})
    compared = []
    for fold in range(folds):
        held = set(cells[fold::folds])
        values = fit([run for run in runs if run.cell not in held])
        compared += [predict(with_values(run, values)) for run in runs if run.cell in held]
    return compared
