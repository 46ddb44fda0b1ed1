"""Our step time against others' and against the ideal, on one machine: `python benchmarks/peers.py
--rounds 5`.

For every layout the plain loop on one thread, the peer and ours take turns, step by step, with the
same micro-batches, and all but picotron with clipping on. A ratio is our median step over the
peer's in the same round; the table shows the median ratio of all rounds. The ideal is the plain
loop's step divided by the number of cores.

picotron is fetched from its public repository at one commit, or taken from a checkout or Git
directory (`--picotron PATH`); see `peers_picotron.py` for what is replaced to run it on CPU.
torchtitan is not among the peers: see benchmarks/peers.md.

Other programs on the machine make step times useless. The table shows the smallest and the largest
ratio of all rounds, and where the contenders had less than 90 % of the processor time, or other
processes waited for a core, it says so instead of judging the promise.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from load import Load
from measure import (
    Contender,
    Round,
    cores,
    machine,
    median_ratio,
    median_step,
    ratios,
    take_turns_under_load,
)
from peer_sources import PICOTRON, source_folder
from peers_picotron import FOLDER

from lightning_3d.layout import Layout


@dataclass(frozen=True)
class Race:
    """A layout of ours and the peer that runs it, too.

    Attributes:
        peer: contender. title: of the peer.
        promise: the largest ratio of step times that we promise.
    """

    layout: str
    peer: str
    title: str
    promise: float

    @property
    def name(self) -> str:
        return f"{self.layout} against {self.peer}"


RACES = (
    Race("pp2_dp2", "deepspeed_pipeline", "DeepSpeed PipelineEngine, ZeRO-1", promise=0.95),
    Race("pp4_dp2", "deepspeed_pipeline", "DeepSpeed PipelineEngine, ZeRO-1", promise=0.90),
    Race("tp2_dp2", "transformers_tp_fsdp", "Transformers DistributedConfig, FSDP2", promise=0.55),
    Race("tp2_dp2", "picotron", "picotron, no clipping", promise=0.85),
    Race("tp2_pp2_dp2", "picotron", "picotron, no clipping", promise=0.85),
)


def run(race: Race, rounds: int, steps: int, warmup: int) -> tuple[list[Round], Load]:
    """Step times of the plain loop, the peer and ours (ZeRO-1, 1F1B), and the load of the
    machine."""
    total = warmup + rounds * steps
    ranks = Layout.parse(race.layout).world_size
    contenders = [
        Contender("plain", "tp1", 1, steps=total),
        Contender(race.peer, race.layout, ranks, steps=total),
        Contender("ours", race.layout, ranks, steps=total),
    ]
    return take_turns_under_load(contenders, rounds=rounds, steps=steps, warmup=warmup)


HEADER = (
    f"{'layout':12} {'peer':38} {'peer s':>8} {'ours s':>8} {'ratio':>7} {'min':>7} {'max':>7}"
    f" {'promise':>8} {'peer ideal':>11} {'our ideal':>10} {'ideal s':>8}  promise kept?"
)


def row(race: Race, rounds: list[Round], load: Load) -> str:
    """A line of the table: medians over the rounds of step times, of the ratio, and of fractions of
    the ideal; and the verdict."""
    ours, peer = f"ours {race.layout}", f"{race.peer} {race.layout}"
    found = ratios(rounds, ours, peer)

    def of_ideal(name: str) -> str:
        return f"{median_ratio(rounds, 'plain tp1', name) / cores():.0%}"

    return (
        f"{race.layout:12} {race.title:38} {median_step(rounds, peer):8.3f}"
        f" {median_step(rounds, ours):8.3f} {median(found):7.3f} {found[0]:7.3f} {found[-1]:7.3f}"
        f" {race.promise:8.2f} {of_ideal(peer):>11} {of_ideal(ours):>10}"
        f" {median_step(rounds, 'plain tp1') / cores():8.3f}  {verdict(found, race.promise, load)}"
    )


def verdict(found: list[float], promise: float, load: Load) -> str:
    """Judge the ratios of all rounds, the smallest first; say so where the machine was too busy, or
    the rounds disagree."""
    if load.too_busy:
        return f"cannot tell: the machine is too busy ({load})"
    if found[0] <= promise < found[-1]:
        return "cannot tell: the promise is within the spread"
    return "yes" if found[-1] <= promise else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps of each contender in a round"
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument(
        "--layouts",
        nargs="*",
        help="only these layouts",
        choices=sorted({race.layout for race in RACES}),
    )
    parser.add_argument(
        "--peers", nargs="*", help="only these peers", choices=sorted({race.peer for race in RACES})
    )
    parser.add_argument(
        "--picotron",
        type=Path,
        metavar="PATH",
        help="checkout or Git directory of picotron; by default it is fetched",
    )
    parser.add_argument("--output", type=Path, help="JSON file for all step times")
    options = parser.parse_args()
    chosen = [
        race
        for race in RACES
        if _is_chosen(race.layout, options.layouts) and _is_chosen(race.peer, options.peers)
    ]
    print(json.dumps(machine(), indent=2))
    table, measured = [HEADER], {}
    with tempfile.TemporaryDirectory(prefix="lightning_3d_peers_") as scratch:
        if any(race.peer == "picotron" for race in chosen):
            os.environ[FOLDER] = str(
                source_folder(PICOTRON, options.picotron, Path(scratch)).resolve()
            )
        for race in chosen:
            rounds, load = run(race, options.rounds, options.steps, options.warmup)
            measured[race.name] = {"rounds": rounds, "share": load.share, "waiting": load.waiting}
            table.append(row(race, rounds, load))
    if options.output:
        options.output.write_text(json.dumps({"machine": machine(), "races": measured}, indent=1))
    print("\n".join(table))


def _is_chosen(name: str, names: list[str] | None) -> bool:
    return not names or name in names


if __name__ == "__main__":
    main()
