"""Time of head and loss with `parallelism.loss_chunks`, against all logits at once.

    python benchmarks/loss_chunks.py --rounds 7

One process computes an output head, its loss and all gradients on every core, or on a GPU where
torch finds one. Both ways take turns, and the table shows the median, smallest and largest ratio of
a round. Promised: at most 1.02. Other programs make the ratios useless: the last line says how much
of the processor time this process had.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch
import torch.nn.functional as F
from load import LoadMeter
from measure import machine
from torch import Tensor

from lightning_3d.parallel.deferred_logits import deferred
from lightning_3d.parallel.tensor.loss import summed_losses

PROMISE = 1.02


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1024, 2048],
        help="of a micro-batch; one line of the table each",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chunks", nargs="+", default=["2", "auto"])
    parser.add_argument(
        "--rounds", type=int, default=7, help="timed rounds, after one that is not timed"
    )
    options = parser.parse_args()
    print(json.dumps(machine(), indent=2))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    meter = LoadMeter(())
    for tokens in options.tokens:
        race(options, tokens, device, meter)
    load = meter.read()
    print(f"{'cannot tell, the machine is too busy: ' if load.too_busy else ''}{load}")


def race(options: argparse.Namespace, tokens: int, device: str, meter: LoadMeter) -> None:
    """Print one line for each number of chunks."""
    asked = [int(chunks) if chunks.isdigit() else chunks for chunks in options.chunks]
    head = Head(tokens, options.hidden, options.vocabulary, getattr(torch, options.dtype), device)
    rounds = []
    for number in range(options.rounds + 1):
        ways = [None, *asked] if number % 2 else [*reversed(asked), None]
        rounds.append({way: head.seconds(way) for way in ways})
        meter.look()
    for chunks in asked:
        ratios = sorted(each[chunks] / each[None] for each in rounds[1:])
        whole, parts = (median(each[way] for each in rounds[1:]) for way in (None, chunks))
        verdict = "kept" if median(ratios) <= PROMISE else "not kept"
        spread = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(
            f"{tokens} tokens, loss_chunks={chunks}: {parts:.3f} s, at once {whole:.3f} s, ratio"
            f" {spread}: promise {verdict}",
            flush=True,
        )


class Head:
    """A head with its input, whose loss is computed in one way or another.

    Args:
        tokens, hidden, vocabulary: sizes of the input (1, tokens, hidden) and of the weight
            (vocabulary, hidden).
    """

    def __init__(
        self, tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: str
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = (
            torch.randn(1, tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
        )
        self.weight = (
            (torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5)
            .to(device, dtype)
            .requires_grad_()
        )
        self.labels = torch.randint(vocabulary, (1, tokens), generator=generator).to(device)

    def seconds(self, chunks: int | str | None) -> float:
        """Of the forward and the backward; None: all logits at once, with the loss of torch."""
        self.hidden.grad = self.weight.grad = None
        self._wait()
        started = time.perf_counter()
        self._loss(chunks).backward()
        self._wait()
        return time.perf_counter() - started

    def _loss(self, chunks: int | str | None) -> Tensor:
        if chunks is None:
            logits = F.linear(self.hidden, self.weight).float()
            return F.cross_entropy(
                logits.view(-1, logits.shape[-1]), self.labels.view(-1), reduction="sum"
            )
        return summed_losses(deferred(self.hidden, self.weight, None, chunks), self.labels)

    def _wait(self) -> None:
        if self.hidden.is_cuda:
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
