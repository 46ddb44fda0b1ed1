"""Calibrate the constants marked [fit] in `lightning_3d.app.planner.constants` and `software`, and
check them on runs that were left out.

The mean absolute logarithm of predicted / measured is minimized by iteratively reweighted least
squares (Gauss and Newton's steps on the logarithms of the constants). Constants belong to a type of
GPU or to a software, never to a model, a layout or a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np

from benchmarks.planner_accuracy.comparison import Comparison
from benchmarks.planner_accuracy.published_runs import Run
from benchmarks.planner_accuracy.software import Published, any_software, family, unseen_software
from lightning_3d.app.planner.step_time import step_of

Values = dict[tuple[str, str], float]
"""By (type of GPU or name of a software, field)."""

_START = {
    "matmul": 0.75,
    "attention": 0.5,
    "network": 0.6,
    "overlap.layers": 0.8,
    "traffic.elementwise": 1.8,
    "attention_speed": 0.5,
    "host.block": 1.5e-3,
    "host.collectives": 1.0e-3,
    "host_tensor": 1.5e-3,
    "host.step": 0.03,
    "separate.network": 0.5,
}
_LIMITS = {
    "matmul": (0.4, 0.92),
    "attention": (0.2, 0.8),
    "network": (0.2, 0.95),
    "separate.network": (0.05, 0.95),
    "overlap.layers": (0.2, 1.0),
    "traffic.elementwise": (0.5, 6.0),
    "host.block": (1e-4, 1e-2),
    "host.collectives": (1e-4, 1e-2),
    "host_tensor": (1e-4, 1e-2),
    "host.step": (1e-3, 0.3),
}
_OF_GPU = ("matmul", "attention")
_OF_SOFTWARE = {
    "nanotron": (
        "traffic.elementwise",
        "network",
        "overlap.layers",
        "host.block",
        "host.collectives",
        "host_tensor",
        "host.step",
    ),
    "megatron_deepspeed": (
        "traffic.elementwise",
        "overlap.layers",
        "host.block",
        "host.collectives",
        "host_tensor",
        "host.step",
    ),
    "foundry": ("traffic.elementwise", "attention_speed", "host.step"),
    "foundry_a100": ("traffic.elementwise", "attention_speed", "host.step"),
    "megatron": ("traffic.elementwise", "overlap.layers", "host.step"),
    "megatron_2021": ("traffic.elementwise", "overlap.layers", "separate.network"),
    "titan": ("traffic.elementwise", "host.step"),
    "titan_compiled": ("traffic.elementwise", "overlap.layers", "host.step"),
    "any": ("traffic.elementwise", "overlap.layers", "host.step"),
}
_MOST = 0.5
"""Larger errors weigh less: some runs met a slow machine."""

_EXACT = 0.02
"""Smaller errors weigh no more."""

_SAMPLED = 40
"""Most runs of a source that are calibrated on: its runs are alike."""


@dataclass(frozen=True)
class Sample:
    """A run whose job and machine take the constants that are tried, with its weight: all runs of a
    software weigh the same together."""

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
    stack = _with_fields(run.software, of_software)
    return replace(run, machine=stack.on(machine), job=replace(run.job, stack=stack))


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


def fit(runs: Sequence[Run], *, rounds: int = 8) -> Values:
    """Calibrate the constants of time on runs."""
    timed = [run for run in runs if _usual(run) and run.software.name in _OF_SOFTWARE]
    softwares = {run.software.name for run in timed}
    values: Values = {
        (gpu, name): _START[name]
        for gpu in sorted({gpu_type(run) for run in timed})
        for name in _OF_GPU
    }
    values |= {
        (software, name): _START[name]
        for software in sorted(softwares)
        for name in _OF_SOFTWARE[software]
    }
    return _descend(_weighted(timed), values, _time_error, rounds)


def _usual(run: Run) -> bool:
    """Check whether a run can be calibrated on: useful, not slowed by its cluster, and with a
    stated micro-batch."""
    return run.core and bool(run.seconds) and not run.job.model.experts and not run.assumed


def _weighted(runs: Sequence[Run]) -> list[Sample]:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.source, run.software.name), []).append(run)
    sampled = [members[:: -(-len(members) // _SAMPLED)] for members in groups.values()]
    return [Sample(run, len(members) ** -0.5) for members in sampled for run in members]


def _time_error(run: Run, values: Values) -> float:
    tried = with_values(run, values)
    return log(
        step_of(tried.job, tried.machine, pipeline="estimate").seconds / (run.seconds or 1.0)
    )


def _descend(
    samples: Sequence[Sample], values: Values, error: Callable[[Run, Values], float], rounds: int
) -> Values:
    """Run some rounds of reweighted least squares and return the values."""
    keys = list(values)
    low, high = (_bounds(keys, side) for side in (0, 1))
    weights = np.array([sample.weight for sample in samples])
    touched = {
        key: [index for index, sample in enumerate(samples) if key[0] in sample.owners]
        for key in keys
    }

    def errors(place: np.ndarray, which: Sequence[int]) -> np.ndarray:
        tried = {key: exp(value) for key, value in zip(keys, place, strict=True)}
        return np.array([error(samples[index].run, tried) for index in which])

    def cost(found: np.ndarray) -> float:
        return float(np.sum(weights * np.minimum(np.abs(found), _MOST)))

    everyone = range(len(samples))
    place = np.array([log(value) for value in values.values()])
    now, damping = errors(place, everyone), 1e-2
    for _ in range(rounds):
        size = np.abs(now)
        weight = (
            weights
            * np.minimum(1.0, (_MOST / np.maximum(size, 1e-9)) ** 2)
            / np.maximum(size, _EXACT)
        )
        slopes = np.zeros((len(samples), len(keys)))
        for column, key in enumerate(keys):
            moved = place.copy()
            moved[column] += 0.02
            slopes[touched[key], column] = (errors(moved, touched[key]) - now[touched[key]]) / 0.02
        square = slopes.T @ (slopes * weight[:, None])
        gradient = slopes.T @ (weight * now)
        for _ in range(4):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -gradient)
            tried = np.clip(place + np.clip(step, -0.4, 0.4), low, high)
            found = errors(tried, everyone)
            if cost(found) < cost(now) - 1e-9:
                place, now, damping = tried, found, damping / 3
                break
            damping *= 6
        else:
            break
    return {key: exp(value) for key, value in zip(keys, place, strict=True)}


def _bounds(keys: Sequence[tuple[str, str]], side: int) -> np.ndarray:
    return np.array(
        [log(_LIMITS[name][side]) if name in _LIMITS else (-50.0, 50.0)[side] for _, name in keys]
    )


def leave_out(runs: Sequence[Run], predict: Callable[[Run], Comparison]) -> list[Comparison]:
    """Predict every run as one of software that is not known: with what its documentation says of
    it, and with constants that were calibrated for any software, without the runs of this one."""
    calibrated = [
        replace(run, job=replace(run.job, stack=any_software(run.software))) for run in runs
    ]
    unknown = [
        replace(run, job=replace(run.job, stack=unseen_software(run.software))) for run in runs
    ]
    found: dict[str, Values] = {}
    for name in sorted({family(run.software) for run in runs}):
        others = [
            run
            for run, one in zip(calibrated, runs, strict=True)
            if family(one.software) != name and _usual(one)
        ]
        found[name] = fit(others)
    return [
        predict(with_values(run, found[family(one.software)]))
        for run, one in zip(unknown, runs, strict=True)
    ]


def cross_validate(
    runs: Sequence[Run], folds: int, predict: Callable[[Run], Comparison]
) -> list[Comparison]:
    """Predict every run with constants that were calibrated without its cell, a model on a number
    of GPUs."""
    cells = sorted({run.cell for run in runs})
    compared = []
    for fold in range(folds):
        held = set(cells[fold::folds])
        values = fit([run for run in runs if run.cell not in held])
        compared += [predict(with_values(run, values)) for run in runs if run.cell in held]
    return compared
