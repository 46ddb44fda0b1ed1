"""Peak memory and time of ring attention by the length of the sequence, on 1, 2 and 4 CPU ranks:
forward and backward of one attention.

    python benchmarks/ring_attention.py                              causal: the time grows with the square of the length
    python benchmarks/ring_attention.py --window 1024 --lengths 65536 262144
    python benchmarks/ring_attention.py --window 256 --tile 256 --lengths 262144 786432      more tokens in the same time

Each cell is measured in processes of its own. Memory is what the resident set of the largest rank
grew by, from before its queries were made, so that it includes the tiles of scores, whose size does
not depend on the sequence.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import machine

from lightning_3d.parallel.context import kernels
from lightning_3d.parallel.context.attention import KINDS
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.kernels import Scores
from lightning_3d.parallel.context.masks import Mask


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    length: int
    size: int
    heads: int
    key_heads: int
    width: int
    window: int | None
    kind: str
    tile: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        help="ranks; 1 is the same computation without a ring",
    )
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument(
        "--window", type=int, help="of sliding attention; none is full causal attention"
    )
    parser.add_argument(
        "--tile",
        type=int,
        default=kernels.LARGEST_TILE,
        help="rows and columns of scores that exist at a time, at most",
    )
    parser.add_argument("--kind", choices=sorted(KINDS), default="ring")
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    print(
        f"{options.kind}, float32, {options.heads} heads of {options.width}, {options.key_heads}"
        f" key heads, window {options.window}"
    )
    columns = [f"cp{size} MiB  seconds  of cp{options.sizes[0]}" for size in options.sizes]
    print(f"{'tokens':>9}   {'   '.join(f'{column:>24}' for column in columns)}")
    for length in options.lengths:
        shape = (
            options.heads,
            options.key_heads,
            options.width,
            options.window,
            options.kind,
            options.tile,
        )
        cells = [Cell(length, size, *shape) for size in options.sizes]
        measured = [measure(cell) for cell in cells]
        texts = [
            f"{peak / 2**20:8.0f}  {seconds:7.1f}  {peak / measured[0][0]:6.2f}"
            for peak, seconds in measured
        ]
        print(f"{length:>9}   {'   '.join(f'{text:>24}' for text in texts)}", flush=True)


def measure(cell: Cell) -> tuple[int, float]:
    """(bytes of the largest rank, seconds of the slowest)."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run, args=(cell, rank, str(Path(folder, "store")), answers))
            for rank in range(cell.size)
        ]
        for rank in ranks:
            rank.start()
        try:
            found = [answers.get(timeout=3600) for _ in ranks]
        finally:
            for rank in ranks:
                rank.join(10) if rank.exitcode is None else None
                rank.kill()
    return max(peak for peak, _ in found), max(seconds for _, seconds in found)


def _run(cell: Cell, rank: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    kernels.LARGEST_TILE = cell.tile
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, cell.size), rank=rank, world_size=cell.size
    )
    group = dist.group.WORLD
    assert group is not None
    context = ContextParallel(group, cell.size, rank, cell.kind)
    attend(cell, context, 2 * cell.size)  # loads what is loaded at the first use
    dist.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    seconds = attend(cell, context, cell.length)
    answers.put((_status("VmHWM") - before, seconds))
    dist.barrier()
    dist.destroy_process_group()


def attend(cell: Cell, context: ContextParallel, length: int) -> float:
    """Seconds of a forward and a backward."""
    shapes = [
        (1, heads, length // context.size, cell.width)
        for heads in (cell.heads, cell.key_heads, cell.key_heads)
    ]
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    begun = time.monotonic()
    out = KINDS[cell.kind](
        query, key, value, Mask(context, length, window=cell.window), Scores(cell.width**-0.5)
    )
    out.backward(torch.ones_like(out))
    return time.monotonic() - begun


def _status(name: str) -> int:
    """A number of this process's memory, in bytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
