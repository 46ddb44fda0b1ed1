"""Our step time against others' and against the ideal, on one machine: `python benchmarks/peers.py --rounds 5`.

Every round runs each contender once, ours right beside its peer and in alternating order, so that a machine that gets
slower slows both. A ratio is our median step over the peer's in the same round; the table shows the median ratio of all
rounds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from measure import Run, cores, launch, machine

from lightning_3d.layout import Layout


@dataclass(frozen=True)
class Peer:
    """What we are compared with at one layout, and the largest ratio of step times that we promise."""

    title: str
    contender: str
    layout: str
    promise: float | None = None


PEERS = (
    Peer("DeepSpeed PipelineEngine, ZeRO-1", "deepspeed_pipeline", "pp2_dp2", promise=1.0),
    Peer("DeepSpeed PipelineEngine, ZeRO-1", "deepspeed_pipeline", "pp4_dp2", promise=1.0),
    Peer("Transformers DistributedConfig, FSDP2", "transformers_tp_fsdp", "tp2_dp2"),
)
ALONE = ("tp2_pp2_dp2",)  # layouts of ours that are compared with the ideal only


def run_ours(layout: str, steps: int = 12, warmup: int = 3) -> Run:
    """An unmodified LightningModule under `Lightning3DStrategy(layout, micro_batch_size=2, zero_stage=1)`, 1F1B."""
    return launch("ours", layout, Layout.parse(layout).world_size, steps=steps, warmup=warmup)


def run_other(contender: str, layout: str, steps: int = 12, warmup: int = 3) -> Run:
    """A peer, or the plain loop ("plain", "tp1"), on as many ranks as the layout has."""
    return launch(contender, layout, Layout.parse(layout).world_size, steps=steps, warmup=warmup)


def measure(peers: list[Peer], alone: list[str], rounds: int, steps: int, warmup: int) -> list[dict[str, Run]]:
    """All runs of all rounds, by "contender layout"."""
    measured = []
    for index in range(rounds):
        runs: dict[str, Run] = {}
        for contender, layout in _order(peers, alone, backwards=index % 2 == 1):
            run = (
                run_ours(layout, steps, warmup) if contender == "ours" else run_other(contender, layout, steps, warmup)
            )
            runs[f"{contender} {layout}"] = run
            print(f"round {index + 1}  {contender:22} {layout:12} {run.step:7.3f} s a step", flush=True)
        measured.append(runs)
    return measured


def _order(peers: list[Peer], alone: list[str], *, backwards: bool) -> list[tuple[str, str]]:
    """(contender, layout) of one round; ours comes right after its peer, or right before it when `backwards`."""
    order = [("plain", "tp1")]
    for peer in peers:
        order += [(peer.contender, peer.layout), ("ours", peer.layout)]
    order += [("ours", layout) for layout in alone]
    return order[::-1] if backwards else order


def report(peers: list[Peer], alone: list[str], measured: list[dict[str, Run]]) -> str:
    """The table: medians over the rounds of step times, of ratios within a round, and of fractions of the ideal."""
    heads = f"{'peer s':>8} {'ours s':>8} {'ratio':>7} {'promise':>8} {'peer ideal':>11} {'our ideal':>10}"
    lines = [f"{'layout':12} {'peer':38} {heads}"]
    for peer in peers:
        theirs = [runs[f"{peer.contender} {peer.layout}"].step for runs in measured]
        mine = [runs[f"ours {peer.layout}"].step for runs in measured]
        ratio = median(our / their for our, their in zip(mine, theirs, strict=True))
        promise = "" if peer.promise is None else f"{peer.promise:.2f}"
        lines.append(
            f"{peer.layout:12} {peer.title:38} {median(theirs):8.3f} {median(mine):8.3f} {ratio:7.3f} {promise:>8}"
            f" {_of_ideal(measured, f'{peer.contender} {peer.layout}'):>11.0%}"
            f" {_of_ideal(measured, f'ours {peer.layout}'):>10.0%}"
        )
    for layout in alone:
        mine = [runs[f"ours {layout}"].step for runs in measured]
        ideal = _of_ideal(measured, f"ours {layout}")
        lines.append(f"{layout:12} {'':38} {'':8} {median(mine):8.3f} {'':7} {'':8} {'':11} {ideal:>10.0%}")
    plain = median(runs["plain tp1"].step for runs in measured)
    lines.append(
        f"one process, one thread: {plain:.3f} s a step; the ideal on {cores()} cores is {plain / cores():.3f} s"
    )
    return "\n".join(lines)


def _of_ideal(measured: list[dict[str, Run]], key: str) -> float:
    """Median over the rounds of (one thread's step / cores) / step."""
    return median(runs["plain tp1"].step / cores() / runs[key].step for runs in measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each run")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--layouts", nargs="*", help="only these layouts")
    parser.add_argument("--output", type=Path, help="JSON file for all step times")
    options = parser.parse_args()
    peers = [peer for peer in PEERS if not options.layouts or peer.layout in options.layouts]
    alone = [layout for layout in ALONE if not options.layouts or layout in options.layouts]
    print(json.dumps(machine(), indent=2))
    measured = measure(peers, alone, options.rounds, options.steps, options.warmup)
    if options.output:
        rounds = [{key: asdict(run) for key, run in runs.items()} for runs in measured]
        options.output.write_text(json.dumps({"machine": machine(), "rounds": rounds}, indent=1))
    print(report(peers, alone, measured))


if __name__ == "__main__":
    main()
