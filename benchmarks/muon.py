"""Time of a step with Muon (AdamW for embeddings, norms and head) and with AdamW alone.

    python benchmarks/muon.py --layouts dp1 dp2 tp2

Trains the Llama of `peers_worker.py` with both, and prints for each the processor time of a whole
step and of its optimizer on the slowest rank. Processor time leaves out waiting for other ranks,
but it is right on a busy machine, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from statistics import median
from typing import Any

import peers_worker
from measure import environments, machine

from lightning_3d.layout import Layout

PRELOAD = [
    "peers_worker",
    "lightning.pytorch",
    "transformers.models.llama.modeling_llama",
    "lightning_3d.strategy.strategy",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument(
        "--rows", type=int, default=peers_worker.GLOBAL_BATCH, help="sequences of a step"
    )
    parser.add_argument("--layouts", nargs="+", default=["dp1", "dp2", "tp2"])
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=1)
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    for layout in options.layouts:
        (step, own), (muon_step, muon) = (run(layout, options, muon=muon) for muon in (False, True))
        print(
            f"{layout}, ZeRO-{options.zero_stage}: step {step:.2f} s with AdamW, {muon_step:.2f} s"
            f" with Muon ({muon_step / step:.2f} x); of that the optimizer {own * 1e3:.0f} ms and"
            f" {muon * 1e3:.0f} ms",
            flush=True,
        )


def run(layout: str, options: argparse.Namespace, *, muon: bool) -> tuple[float, float]:
    """Median processor seconds (of a step, of its optimizer) on the rank where they are largest."""
    variables = environments(Layout.parse(layout).world_size, threads=1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with context.Pool(len(variables), maxtasksperchild=1) as ranks:
        given = [
            (each, layout, options.warmup + options.steps, options.rows, options.zero_stage, muon)
            for each in variables
        ]
        measured = ranks.starmap_async(measure, given, chunksize=1).get(timeout=1800)
    kept = [steps[options.warmup :] for steps in measured]
    return max(median(step for step, _ in steps) for steps in kept), max(
        median(own for _, own in steps) for steps in kept
    )


def measure(
    variables: dict[str, str], layout: str, steps: int, rows: int, zero_stage: int, muon: bool
) -> list[tuple[float, float]]:
    """Train on one rank. Returns processor seconds (of a step, of its optimizer) of each step."""
    os.environ.update(variables)
    import torch

    from lightning_3d.parallel.zero import DataParallelBackend

    torch.set_num_threads(1)
    peers_worker.GLOBAL_BATCH = rows
    turns = _Meter()
    step = DataParallelBackend.step

    def timed(self: DataParallelBackend, *args: Any, **given: Any) -> None:
        started = time.process_time()
        step(self, *args, **given)
        turns.of_optimizer = time.process_time() - started

    DataParallelBackend.step = timed  # type: ignore[method-assign]
    peers_worker.ours(layout, steps, turns, zero_stage=zero_stage, muon=muon)
    return turns.steps


class _Meter(peers_worker.Turns):
    """Notes the processor time of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.of_optimizer = 0.0
        self.steps: list[tuple[float, float]] = []
        self._last = time.process_time()

    def step_ended(self) -> None:
        now = time.process_time()
        self.steps.append((now - self._last, self.of_optimizer))
        self._last = now


if __name__ == "__main__":
    main()
