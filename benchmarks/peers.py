"""Our step time against others' and against the ideal, on one machine: `python benchmarks/peers.py --rounds 5`.

For every layout the plain loop on one thread, the peer and ours take turns, step by step, all with clipping on and the same
micro-batches. A ratio is our median step over the peer's in the same round; the table shows the median ratio of all rounds. The
ideal is the plain loop's step divided by the number of cores.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from measure import Contender, Round, cores, machine, median_ratio, median_step, take_turns

from lightning_3d.layout import Layout


@dataclass(frozen=True)
class Race:
    """A layout of ours and who runs beside it.

    Attributes:
        peer: contender, None where ours is compared with the ideal only. title: of the peer.
        promise: the largest ratio of step times that we promise.
    """

    layout: str
    peer: str | None = None
    title: str = ""
    promise: float | None = None


RACES = (
    Race("pp2_dp2", "deepspeed_pipeline", "DeepSpeed PipelineEngine, ZeRO-1", promise=1.0),
    Race("pp4_dp2", "deepspeed_pipeline", "DeepSpeed PipelineEngine, ZeRO-1", promise=1.0),
    Race("tp2_dp2", "transformers_tp_fsdp", "Transformers DistributedConfig, FSDP2"),
    Race("tp2_pp2_dp2"),
)


def run(race: Race, rounds: int, steps: int, warmup: int) -> list[Round]:
    """Step times of the plain loop, the peer and ours (ZeRO-1, 1F1B)."""
    total = warmup + rounds * steps
    ranks = Layout.parse(race.layout).world_size
    contenders = [Contender("plain", "tp1", 1, steps=total), Contender("ours", race.layout, ranks, steps=total)]
    if race.peer is not None:
        contenders.insert(1, Contender(race.peer, race.layout, ranks, steps=total))
    return take_turns(contenders, rounds=rounds, steps=steps, warmup=warmup)


HEADER = (
    f"{'layout':12} {'peer':38} {'peer s':>8} {'ours s':>8} {'ratio':>7} {'promise':>8} {'peer ideal':>11}"
    f" {'our ideal':>10} {'ideal s':>8}"
)


def row(race: Race, rounds: list[Round]) -> str:
    """A line of the table: medians over the rounds of step times, of the ratio, and of fractions of the ideal."""
    ours, peer = f"ours {race.layout}", f"{race.peer} {race.layout}"

    def of_ideal(name: str) -> str:
        return f"{median_ratio(rounds, 'plain tp1', name) / cores():.0%}"

    theirs = ("", "", "")
    if race.peer is not None:
        theirs = (f"{median_step(rounds, peer):.3f}", f"{median_ratio(rounds, ours, peer):.3f}", of_ideal(peer))
    promise = "" if race.promise is None else f"{race.promise:.2f}"
    return (
        f"{race.layout:12} {race.title:38} {theirs[0]:>8} {median_step(rounds, ours):8.3f} {theirs[1]:>7} {promise:>8}"
        f" {theirs[2]:>11} {of_ideal(ours):>10} {median_step(rounds, 'plain tp1') / cores():8.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each contender in a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--layouts", nargs="*", help="only these layouts")
    parser.add_argument("--output", type=Path, help="JSON file for all step times")
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    table, all_rounds = [HEADER], {}
    for race in (race for race in RACES if not options.layouts or race.layout in options.layouts):
        rounds = run(race, options.rounds, options.steps, options.warmup)
        all_rounds[race.layout] = rounds
        table.append(row(race, rounds))
    if options.output:
        options.output.write_text(json.dumps({"machine": machine(), "rounds": all_rounds}, indent=1))
    print("\n".join(table))


if __name__ == "__main__":
    main()
