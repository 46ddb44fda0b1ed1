"""What the strategy costs where it has nothing to do: tp1_pp1_dp1 in a Trainer against a plain loop.

    python benchmarks/overhead.py --rounds 5

Same model, same micro-batches, same number of threads; the runs alternate, and the median ratio of all rounds is shown.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

from measure import cores, launch, machine

PROMISE = 1.05


def measure(rounds: int, steps: int, warmup: int, threads: int) -> list[tuple[float, float]]:
    """(plain, ours) median step in seconds, per round."""
    measured = []
    for index in range(rounds):
        order = ("plain", "ours_zero0") if index % 2 == 0 else ("ours_zero0", "plain")
        step = {name: launch(name, "tp1", 1, steps=steps, warmup=warmup, threads=threads).step for name in order}
        print(f"round {index + 1}  plain {step['plain']:.3f} s  ours {step['ours_zero0']:.3f} s", flush=True)
        measured.append((step["plain"], step["ours_zero0"]))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each run")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--threads", type=int, default=cores())
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    measured = measure(options.rounds, options.steps, options.warmup, options.threads)
    ratio = median(ours / plain for plain, ours in measured)
    print(f"ours / plain loop with {options.threads} threads: {ratio:.3f} (promised: at most {PROMISE:.2f})")


if __name__ == "__main__":
    main()
