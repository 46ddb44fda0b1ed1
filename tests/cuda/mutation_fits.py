"""Short fits that notice a missing synchronization, by the files in which it may be missing
(`tools/cuda_sim/mutations.py`).

With each fit are parts of the paths of these files. A fit is tried before others where a longer
part fits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import simulated_fits
import simulated_ranks
from parity import Cell
from simulated_parity import LATE, assert_close, check


def _cell(
    model: str, options: dict[str, Any], strategy: dict[str, Any] | None = None, **degrees: Any
) -> Callable[[], None]:
    cell = Cell(model, options=tuple(sorted(options.items())), **degrees)
    return lambda: check(cell, {"CUDASIM_HANG": 20}, **strategy or {})


def _checkpoint() -> None:
    """A save in the background, whose copies to the host come as late as they may; a run that goes
    on from it."""
    with tempfile.TemporaryDirectory() as folder:
        [whole, *_] = simulated_ranks.run(simulated_fits.straight, 2, "pp2", environment=LATE)
        [found, *_] = simulated_ranks.run(
            simulated_fits.resumed, 2, "pp2", "pp2", folder, environment=LATE
        )
    assert_close(found, whole)


def _average() -> None:
    [found, _] = simulated_ranks.run(simulated_fits.averaged_in_shards, 2, environment=LATE)
    [expected, _] = simulated_ranks.run(simulated_fits.averaged_in_shards, 2, accelerator="cpu")
    assert_close(found, expected)


def _paces() -> None:
    assert simulated_ranks.run(simulated_fits.paces, 2, environment=LATE) == [[1.0, 2.0]] * 2


def _trace() -> None:
    results = simulated_ranks.run(simulated_fits.traces, 2, "pp2", environment=LATE)
    assert all(worked for _, _, worked in results), "work in the trace took no time"


EAGER = {"zero_reduce": "micro_batch", "zero_gather": "micro_batch"}
UNITS = "zero zero/parameter_units"
FITS: list[tuple[str, Callable[[], None]]] = [
    (
        "blocks/offload",
        _cell("llama", {}, {"fit": simulated_fits.offloading, "recompute": "full"}, dp=2),
    ),
    ("blocks/offload", _cell("llama", {}, {"fit": simulated_fits.offloading}, pp=2)),
    (
        "blocks/offload",
        lambda: (
            simulated_ranks.run(simulated_fits.brought_back_in_vain, 1, environment=LATE) and None
        ),
    ),
    ("context", _cell("llama", {"cp_kind": "ring"}, cp=2)),
    ("context", _cell("llama", {"cp_kind": "ulysses"}, cp=2)),
    ("expert", _cell("deepseek_v3", {}, ep=2, dp=2)),
    ("host_copy", _cell("llama", {}, pp=2)),
    ("pipeline", _cell("llama", {}, pp=2)),
    ("pipeline", _cell("llama", {}, pp=4, schedule="ZBVZeroBubble")),
    ("tensor", _cell("llama", {}, tp=2)),
    ("tensor", _cell("llama", {}, {"sequence_parallel": False}, tp=2)),
    ("tensor", _cell("olmo2", {}, tp=2)),
    ("tensor/whole", _cell("llama", {}, {"fit": simulated_fits.read_whole}, tp=2)),
    ("zero", _cell("qwen2", {}, dp=2)),
    ("zero", _cell("qwen2", {"zero_reduce": "micro_batch"}, dp=2, zero=2)),
    (
        "zero",
        _cell("qwen2", {"zero_reduce": "step", "zero_reduce_scatter": True}, dp=2, pp=2, zero=2),
    ),
    ("zero/deepspeed_stepper", _average),
    ("zero/reduction zero/gradients", _cell("qwen2", {"zero_shard_size": 2}, dp=4, zero=1)),
    (
        "zero/reduction zero/gradients",
        _cell("qwen2", {"zero_shard_size": 2}, {"fit": simulated_fits.small_buckets}, dp=4, zero=2),
    ),
    (
        "zero/reduction zero/gradients",
        _cell("qwen2", {"zero_shard_size": 2}, {"fit": simulated_fits.small_buckets}, dp=4, zero=1),
    ),
    ("zero/parameter_store", _cell("qwen2", {"zero_overlap_gather": True}, dp=2, zero=1)),
    # Without the proof of the loss, which is the first to read weights in the second step.
    (
        "zero/parameter_store",
        _cell(
            "qwen2",
            {"zero_overlap_gather": True, "self_check": "never"},
            {"fit": simulated_fits.read_beside},
            dp=2,
            zero=1,
        ),
    ),
    (UNITS, _cell("qwen2", EAGER, dp=2, zero=3)),
    (UNITS, _cell("qwen2", {"zero_gather": "step"}, dp=2, pp=2, zero=3)),
    (UNITS, _cell("qwen2", {"zero_offload": "parameters"}, dp=2, zero=3)),
    (
        UNITS,
        lambda: simulated_ranks.run(simulated_fits.gathered_in_vain, 2, environment=LATE) and None,
    ),
    ("checkpoint", _checkpoint),
    (
        "health/replicas",
        _cell("llama", {}, {"reliability": {"check_replicas_every_n_steps": 1}}, tp=2),
    ),
    ("strategy/pace", _paces),
    ("tracing", _trace),
]
