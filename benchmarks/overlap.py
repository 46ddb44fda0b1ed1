"""What is gained by reducing gradients while the last backward still runs, and what is lost by
gathering parameters only after the optimizer's step.

    python benchmarks/overlap.py --rounds 5

The first is measured with two runs that take turns, step by step: as the strategy works, and with
all reductions after the last backward. A line for each bucket of one step shows when it was sent
and had arrived, and between which ranks. With dp4, shards have replicas (`zero_shard_size=2`). For
the second, the gather of one step's parameters and the optimizer's step on a rank's part are timed
by themselves: at best the shorter of the two would be hidden.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from measure import Contender, machine, median_ratio, median_step, take_turns
from peers_worker import MESSAGES, count, llama

from lightning_3d.layout import Layout

RANKS = 2  # that share parameters
REPEATS = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=4, help="timed steps of each contender in a round"
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--layouts", nargs="+", default=["dp2", "pp2_dp2", "pp2_dp2_vp2"])
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    total = options.warmup + options.rounds * options.steps
    for layout in options.layouts:
        degrees = Layout.parse(layout)
        kind = (
            "ours"
            if degrees.pp > 1
            else "ours_replicas"
            if degrees.dp > 2
            else "ours_small_buckets"
        )
        kinds = (kind, f"{kind}_waiting")
        with tempfile.TemporaryDirectory() as folder:
            os.environ[MESSAGES] = str(Path(folder) / "messages.json")
            contenders = [
                Contender(kind, layout, degrees.world_size, steps=total) for kind in kinds[:1]
            ]
            os.environ.pop(MESSAGES)
            contenders += [
                Contender(kind, layout, degrees.world_size, steps=total) for kind in kinds[1:]
            ]
            rounds = take_turns(
                contenders, rounds=options.rounds, steps=options.steps, warmup=options.warmup
            )
            print_messages(layout, json.loads((Path(folder) / "messages.json").read_text()))
        ratio = median_ratio(rounds, f"{kinds[0]} {layout}", f"{kinds[1]} {layout}")
        step = median_step(rounds, f"{kinds[0]} {layout}")
        print(f"{layout}: overlapped / waiting: {ratio:.3f}")
        if degrees.pp == 1:
            continue
        parameters = count(llama()) // 2  # of a pipeline rank
        gather, update = gather_and_update(parameters)
        print(
            f"{layout}: gather of {parameters / 1e6:.1f} M parameters over {RANKS} ranks"
            f" {gather * 1e3:.0f} ms, AdamW on a part {update * 1e3:.0f} ms, step {step:.2f} s: at"
            f" most {min(gather, update) / step:.1%} of a step is lost"
        )


def print_messages(layout: str, step: dict[str, Any]) -> None:
    """Print when the buckets of a step were under way, and the share of that time in which the
    backward still ran."""
    over, messages = step["backward_over"], step["messages"]
    begin = min(sent for sent, *_ in messages)
    end = max(step["reduced"], *(arrived for _, arrived, *_ in messages))
    hidden = sum(max(0.0, min(arrived, over) - sent) for sent, arrived, *_ in messages)
    whole = sum(arrived - sent for sent, arrived, *_ in messages)

    def place(time: float) -> int:
        return round(60 * (time - begin) / (end - begin))

    print(
        f"{layout}: from the first bucket to the end of the reduction, {(end - begin) * 1e3:.0f}"
        " ms; | is the end of the last backward"
    )
    for sent, arrived, size, ranks in messages:
        line = "." * place(sent) + "=" * max(1, place(arrived) - place(sent))
        line = f"{line:<61}"
        print(
            f"  {size / 2**20:5.1f} MiB  {line[: place(over)]}|{line[place(over) :]} ranks {ranks}"
        )
    print(
        f"  {hidden / whole:.0%} of the time in which buckets were under way lay inside the"
        " backward"
    )


def gather_and_update(parameters: int) -> tuple[float, float]:
    """Median seconds of an all-gather of float32 parameters over `RANKS` processes, and of AdamW on
    one rank's part."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.get_context("spawn").Pool(RANKS) as ranks:
        measured = ranks.starmap_async(
            _measure, [(rank, parameters, port) for rank in range(RANKS)], chunksize=1
        ).get(timeout=300)
    return max(gather for gather, _ in measured), max(update for _, update in measured)


def _measure(rank: int, parameters: int, port: int) -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    from lightning_3d.parallel.collectives import all_gather_flat

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    part = torch.nn.Parameter(torch.zeros(parameters // RANKS))
    part.grad = torch.ones_like(part)
    whole = torch.empty(RANKS * part.numel())
    optimizer = torch.optim.AdamW([part])
    gathers, updates = [], []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        all_gather_flat(whole, part.detach(), dist.group.WORLD).wait()
        between = time.perf_counter()
        optimizer.step()
        gathers.append(between - started)
        updates.append(time.perf_counter() - between)
    dist.destroy_process_group()
    return median(gathers), median(updates)


if __name__ == "__main__":
    main()
