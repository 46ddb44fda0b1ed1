"""What the watches that are on by default cost, in one run: with and without, in turns.

    python benchmarks/reliability_cost.py [--layout tp2_dp2] [--rounds 6] [--steps 40]

Trains the same small model in pairs of fits, of which one has all default watches (heartbeat, watch
for hangs, pace, loss spikes, replicas) and one has none. torch's flight recorder runs in both, as
it does by default. Prints the ratios of the median times of a step and of the processor time of the
whole fit, with their spread over the rounds, and those of two fits without watches as the noise of
this machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
OFF = (
    *(
        "trainer.hang_timeout=null",
        "trainer.check_replicas_every_n_steps=null",
        "trainer.slow_rank_factor=null",
    ),
    *("trainer.loss_spikes=ignore", "trainer.nonfinite=ignore", "trainer.lost_node_timeout=null"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2_dp2")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times: dict[str, list[tuple[float, float]]] = {
            "with": [],
            "without": [],
            "without again": [],
        }
        for round_ in range(options.rounds):
            for name in list(times) if round_ % 2 else reversed(list(times)):
                times[name].append(measure(options, Path(folder) / f"{round_} {name}", name))
    middle = median(step for step, _ in times["without"]) * 1e3
    print(
        f"{options.layout}, {options.rounds} rounds of {options.steps} steps, median step"
        f" {middle:.1f} ms without"
    )
    for place, what in enumerate(("step", "processor time")):
        for title, name in (("all watches", "with"), ("nothing (noise)", "without again")):
            values = [
                one[place] / other[place]
                for one, other in zip(times[name], times["without"], strict=True)
            ]
            print(
                f"{what:<15} {title:<16} ratio {median(values):.4f}, from {min(values):.4f} to"
                f" {max(values):.4f}"
            )
    return 0


def measure(options: argparse.Namespace, folder: Path, name: str) -> tuple[float, float]:
    """Train. Returns the median time of a step, without the first quarter, and the processor time
    of all ranks together, in seconds."""
    words = [
        *(
            f"parallelism={options.layout}",
            "cluster=local_cpu",
            "precision=fp32",
            f"trainer.max_steps={options.steps}",
        ),
        *(
            f"trainer.val_check_interval={options.steps}",
            "trainer.limit_val_batches=1",
            "callbacks.checkpoint=null",
        ),
        *(
            "data.sequence_length=128",
            "data.global_batch_size=8",
            "data.val_sequences=4",
            "parallelism.micro_batch_size=2",
        ),
        f"hydra.run.dir={str(folder).replace(' ', '_')}",
        *(OFF if name != "with" else ()),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    rows = (Path(str(folder).replace(" ", "_")) / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("step_seconds")
    seconds = [float(row.split(",")[column]) for row in rows[1:]]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return median(seconds[len(seconds) // 4 :]), used


if __name__ == "__main__":
    sys.exit(main())
