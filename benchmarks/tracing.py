"""What it costs to trace a step: every step traced, against none.

    python benchmarks/tracing.py --layout tp2_pp2 --rounds 5

Same model, same layout, same micro-batches; the two take turns, step by step.
"""

from __future__ import annotations

import argparse
import json

from measure import Contender, machine, median_ratio, take_turns

from lightning_3d.layout import Layout

PROMISE = 0.01
EVERY = 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2_pp2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=4, help="timed steps of each contender in a round"
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    total, ranks = (
        options.warmup + options.rounds * options.steps,
        Layout.parse(options.layout).world_size,
    )
    contenders = [
        Contender(kind, options.layout, ranks, steps=total) for kind in ("ours", "ours_traced")
    ]
    rounds = take_turns(
        contenders, rounds=options.rounds, steps=options.steps, warmup=options.warmup
    )
    ratio = median_ratio(rounds, f"ours_traced {options.layout}", f"ours {options.layout}")
    print(f"a traced step / one that is not, {options.layout}: {ratio:.3f}")
    print(
        f"overhead of one step in {EVERY}: {(ratio - 1) / EVERY:.4%} (promised: less than"
        f" {PROMISE:.0%})"
    )


if __name__ == "__main__":
    main()
