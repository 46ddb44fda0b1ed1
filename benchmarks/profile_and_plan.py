"""How near a plan with a profile of this machine's CPU cores comes to what the best layouts take: predicted / measured.

    python benchmarks/profile_and_plan.py --ranks 2 --layouts 3

Promised: step times within a factor of 2 in either direction, on cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

PROMISE = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layouts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    command = [sys.executable, "-m", "lightning_3d"]
    with tempfile.TemporaryDirectory() as folder:
        run = ["cluster=local_cpu", "data.global_batch_size=16"]
        measure = ["--ranks", str(options.ranks), "--repeats", str(options.repeats), "--out", f"{folder}/profile.json"]
        subprocess.run([*command, "profile", *run, "parallelism.micro_batch_size=4", *measure], check=True)
        compare = ["--validate", str(options.layouts), "--steps", str(options.steps), "--out", folder]
        done = subprocess.run(
            [*command, "plan", *run, f"profile={folder}/profile.json", *compare], check=True, capture_output=True, text=True
        )
    print(done.stdout)
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    ratios = [float(row[4]) for row in rows if row[4].strip() != "-"]
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    print(f"predicted / measured seconds: {ratios}, within a factor of {worst:.2f} (promised: {PROMISE:.1f})")


if __name__ == "__main__":
    main()
