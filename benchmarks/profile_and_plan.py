"""How near a plan with a profile of this machine's CPU cores comes to what twelve layouts take:
predicted / measured.

    python benchmarks/profile_and_plan.py

A rank has a core of its own. Layouts differ in everything that the planner chooses. Promised: step
times within 10 %, on cores that nothing else uses; the layout is named where it is more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from lightning_3d.app.cli.plan_validation import measure
from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys
from lightning_3d.app.config.run_config import complete_run
from lightning_3d.app.planner.advice import job_of, machine_of_run
from lightning_3d.app.planner.choices import Fixed
from lightning_3d.app.planner.search import Candidate, search
from lightning_3d.layout.layout import AXES
from lightning_3d.layout.resolve import resolve_layout

PROMISE = 0.1
LAYOUTS = (
    "dp2 zero_stage=0",
    "dp2 zero_stage=1",
    "dp2 zero_stage=2",
    "dp2 zero_stage=3",
    "dp2 recompute=full",
    "dp2 micro_batch_size=8",
    "tp2 sequence_parallel=false",
    "tp2 sequence_parallel=true",
    "pp2 schedule=1F1B",
    "pp2 schedule=GPipe",
    "pp2_vp2 schedule=Interleaved1F1B",
    "pp2_vp2 schedule=ZBVZeroBubble",
)


def predicted(words: list[str]) -> Candidate:
    """The candidate that is what these overrides say."""
    run = complete_run(check_keys(compose([*words, "trainer.dry=true"])))
    asked = run.parallelism
    layout, schedule = resolve_layout(asked.layout, asked.schedule, asked.vp, AXES)
    machine = machine_of_run(run)
    assert machine is not None
    fixed = Fixed(
        layout=layout,
        schedule=schedule,
        micro_batch=asked.micro_batch_size,
        zero=asked.zero_stage,
        recompute=asked.recompute or "none",
        sequence_parallel=bool(asked.sequence_parallel),
    )
    return search(job_of(run, "fp32"), machine, fixed=fixed, most=1).best[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layouts",
        nargs="*",
        default=LAYOUTS,
        metavar="'LAYOUT KEY=VALUE ...'",
        help="other layouts on two ranks",
    )
    parser.add_argument(
        "--sequence", type=int, default=256, help="tokens of a sequence; a step has 16 sequences"
    )
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument(
        "--runs", type=int, default=1, help="runs of each layout, of which the median counts"
    )
    options = parser.parse_args()
    shared = [
        "cluster=local_cpu",
        "data.global_batch_size=16",
        f"data.sequence_length={options.sequence}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        profile = f"{folder}/profile.json"
        command = [
            sys.executable,
            "-m",
            "lightning_3d",
            "profile",
            *shared,
            "parallelism.micro_batch_size=4",
        ]
        subprocess.run([*command, "--ranks", "2", "--repeats", "20", "--out", profile], check=True)
        print(f"{'layout':36} {'predicted s':>11} {'measured s':>10} {'ratio':>6} {'memory':>7}")
        ratios = []
        for line in options.layouts:
            layout, *keys = line.split()
            words = [
                *shared,
                f"profile={profile}",
                f"parallelism={layout}",
                "parallelism.micro_batch_size=4",
            ]
            words += [f"parallelism.{key}" for key in keys]
            one = predicted(words)
            found = [
                measure(words, one, options.steps, [], Path(tempfile.mkdtemp(dir=folder)))
                for _ in range(options.runs)
            ]
            if failure := next((each.failure for each in found if each.failure), None):
                sys.exit(f"{line} failed: {failure}")
            seconds = median(each.seconds for each in found if each.seconds)
            memory = median(each.memory for each in found if each.memory)
            ratios.append(one.step.seconds / seconds)
            print(
                f"{line:36} {one.step.seconds:11.3f} {seconds:10.3f} {ratios[-1]:6.2f}"
                f" {one.memory.total / memory:7.2f}",
                flush=True,
            )
    worst, close = (
        max(abs(ratio - 1) for ratio in ratios),
        sum(abs(ratio - 1) <= PROMISE for ratio in ratios),
    )
    print(f"within {PROMISE:.0%}: {close} of {len(ratios)} layouts; largest error {worst:.0%}")


if __name__ == "__main__":
    main()
