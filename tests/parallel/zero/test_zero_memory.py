"""What each ZeRO stage keeps, in bytes of live tensors, against the formulas of docs/zero.md."""

import gc
from dataclasses import dataclass

import pytest
import torch
from memory import LiveBytes
from processes import wait_until
from ranks import run_ranks
from torch import Tensor, nn

from lightning_3d.layout import Layout
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import replicated
from lightning_3d.parallel.zero import make_backend

BLOCKS, WIDTH, RANKS = 16, 128, 4
BLOCK = 4 * (WIDTH * WIDTH)  # bytes of one
N = BLOCKS * BLOCK  # bytes of all parameters
BUCKET = BLOCK
ACTIVATIONS = 64 * 1024  # more than those of one row, and the small tensors in between


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.sum()


@dataclass(frozen=True)
class Measured:
    """Bytes of live tensors of one rank: between steps, and at the most while two micro-batches are
    worked on, in the best of some steps. What else is still alive, of a message or in a cycle,
    depends on other threads."""

    kept: int
    working: int


def measure(options: ZeroOptions, most: float) -> Measured:
    """Measure; wait after the steps until no more than `most` bytes are alive."""
    mesh = Mesh(Layout(dp=RANKS))
    with LiveBytes() as memory:
        module = Stack()
        specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
        backend = make_backend(options, mesh, specs, bucket_bytes=BUCKET)
        backend.shard(module, [list(module.blocks)], torch.device("cpu"), lambda block: True)
        backend.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
        peaks = []
        for _ in range(4):
            gc.collect()
            with backend.gradient_scope():
                with backend.parameters_in_use():
                    memory.reset()
                    for _ in range(2):
                        module(torch.ones(1, WIDTH)).backward()
                        backend.after_backward(module.parameters())
                    peaks.append(memory.peak)
                backend.reduce(1.0)
            backend.step()
        for parameter in module.parameters():
            parameter.grad = None
        gc.collect()  # an autograd graph in a cycle holds the gradients until then
        wait_until(lambda: memory.now <= most)
        kept = memory.now
    backend.teardown()
    return Measured(kept, min(peaks[1:]))  # the first step has no state yet


CASES = {
    # parameters; optimizer state, with DeepSpeed's master weights above stage 0; gradients while
    # working
    "0": (ZeroOptions(0, "step"), N, 2 * N, N),
    "1": (ZeroOptions(1, "step"), N, 3 * N / RANKS, N),
    "2 step": (ZeroOptions(2, "step"), N, 3 * N / RANKS, N),
    "2 micro_batch": (ZeroOptions(2, "micro_batch"), N, 3 * N / RANKS, N / RANKS + 4 * BUCKET),
    "3 step": (ZeroOptions(3, "step", "step"), N / RANKS, 3 * N / RANKS, N + N + N / RANKS),
    # What is offloaded is in the same memory here: beside state and master weights the gradient
    # and, before they are copied back, the new weights, or, with parameters offloaded, these alone.
    "1 offloaded": (ZeroOptions(1, "step", offload="optimizer"), N, 5 * N / RANKS, N),
    "3 offloaded": (
        ZeroOptions(3, "micro_batch", "micro_batch", offload="parameters"),
        N / RANKS,
        4 * N / RANKS,
        N / RANKS + 4 * BUCKET + 3 * BLOCK,
    ),
    "3 micro_batch": (
        ZeroOptions(3, "micro_batch", "micro_batch"),
        N / RANKS,
        3 * N / RANKS,
        N / RANKS + 4 * BUCKET + 3 * BLOCK,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_stage_keeps(case: str) -> None:
    options, parameters, state, gradients = CASES[case]
    most = max(1.05 * (parameters + state), parameters + state + ACTIVATIONS)
    for measured in run_ranks(measure, RANKS, options, most):
        assert measured.kept == pytest.approx(parameters + state, rel=0.05, abs=ACTIVATIONS)
        assert measured.working <= 1.05 * (parameters + state + gradients) + ACTIVATIONS
        assert measured.working >= parameters + state + 0.5 * gradients
