"""What the strategy costs where it has nothing to do: tp1_pp1_dp1 in a Trainer against a plain
loop.

    python benchmarks/overhead.py --rounds 5

Same model, same micro-batches, same number of threads; the two take turns, step by step.
"""

from __future__ import annotations

import argparse
import json

from measure import Contender, cores, machine, median_ratio, take_turns

PROMISE = 1.05
OURS = ("ours_zero0", "ours")  # ZeRO stages 0 and 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=4, help="timed steps of each contender in a round"
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=cores())
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    total = options.warmup + options.rounds * options.steps
    contenders = [
        Contender(kind, "tp1", 1, steps=total, threads=options.threads) for kind in ("plain", *OURS)
    ]
    rounds = take_turns(
        contenders, rounds=options.rounds, steps=options.steps, warmup=options.warmup
    )
    for stage, kind in enumerate(OURS):
        ratio = median_ratio(rounds, f"{kind} tp1", "plain tp1")
        print(
            f"ZeRO-{stage} / plain loop, {options.threads} threads: {ratio:.3f} (promised: at most"
            f" {PROMISE:.2f})"
        )


if __name__ == "__main__":
    main()
