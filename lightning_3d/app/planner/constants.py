"""All constants of the planner that are not vendors' rates, each with its origin.

`python -m benchmarks.planner_accuracy FILE --folds N` fits the constants marked [fit] again, each
time without the runs that it then predicts. These constants come from published runs (see
benchmarks/planner_accuracy/results.md). The others are facts of the software, from its source or
its documentation.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_3d.app.planner.machine import Efficiency
from lightning_3d.app.planner.stack import Footprint, Host, Overlap, Stack, Traffic

EFFICIENCIES = {
    # [fit] on nanotron's sweep, llm-foundry, Megatron Core (NeMo) and torchtitan, 80 GB and 96 GB
    "h100": Efficiency(matmul=0.72, attention=0.43),
    # [fit] on llm-foundry, vTrain's runs of Megatron-DeepSpeed and Megatron-LM of 2021
    "a100": Efficiency(matmul=0.77, attention=0.56),
}
"""Efficiency by type of GPU. Later types than H100 are assumed to reach the same shares of their
rates as H100."""


def efficiency_of(gpu: str) -> Efficiency:
    """Return the efficiency of the type of GPU that a name contains."""
    return EFFICIENCIES["a100" if "a100" in gpu.lower() else "h100"]


LINK_LATENCY, NETWORK_LATENCY = 0.6e-6, 2.7e-6
"""NCCL 2.30, src/graph/tuning.cc, hwLatencies."""

EAGER = Stack(
    host=Host(block=3.0e-3, collectives=1.3e-3),  # [fit]
    traffic=Traffic(
        elementwise=4.1,  # [fit]
        # torch's AdamW with a kernel for each operation moves 80 bytes, the gradient norm and
        # clipping 12, zeroing 4, copies into and out of buckets 16, and the copy in 16 bits 6
        parameter=118.0,
    ),
    overlap=Overlap(gather=False),
)
"""Eager blocks, as nanotron's runs show them."""

ADAMW = 28.0
"""Bytes that torch's fused AdamW in float32 moves for a parameter: it reads weight, gradient and
two moments, and writes all but the gradient."""

OURS = replace(
    EAGER,
    transformers=True,
    batch_first=True,
    traffic=replace(
        EAGER.traffic,
        # parallel/tensor/loss.py: float32 copies 6, log-softmax 8, the gradients of its output 4
        # and of its input 12, and that in 16 bits 6
        logit=36.0,
        # parallel/tensor/cross_entropy.py: float32 copies 12, maximum 4, scores without it 16,
        # exponentials 16, their sum 4, the factor of each token 8, and the gradient in 16 bits 6
        sharded_logit=66.0,
        # parallel/zero/backend.py: norm 4, clipping 8, torch's fused AdamW (the default on GPUs),
        # and the copy in 16 bits 6
        parameter=ADAMW + 18.0,
    ),
    footprint=Footprint(
        # Counted with `torch.autograd.graph.saved_tensors_hooks` on a block of transformers' Llama
        # in bfloat16: norms keep their input in float32 and its normalized copy, the MLP its gate
        # before and after the activation
        saved=8.0,
        saved_inner=2.0,
        gradient=4.0,  # sums in float32: `sum_dtype` in parallel/zero/gradients.py
        # what a rank keeps of its reduced gradients, or the copy of the largest one in its bucket:
        # the same file
        kept_gradient=4.0,
        # in float32 the log-softmax, its gradient and that of the logits; the 16-bit logits and
        # their copy are gone by then
        logit=12.0,
        kept_logit=4.0,  # the log-softmax
        # parallel/tensor/cross_entropy.py: it keeps the 16-bit logits, and meanwhile has their copy
        # in float32 and its exponentials
        sharded_logit=10.0,
        kept_sharded_logit=2.0,
        stepwise=True,  # parallel/zero/reduction.py
        context=0.9e9,  # an estimate without a measurement; `lightning-3d profile` measures it
        # as nanotron's runs show: with 1, the median error of their memory rises from 2.7 to 4.9 %
        allocator=1.05,
    ),
)
"""This package, without torch.compile."""


def compiled(stack: Stack) -> Stack:
    """Return the same software with blocks that `torch.compile` has fused."""
    # between the fits of software that fuses them: 1.0 (torchtitan with torch.compile) and 1.7
    # (llm-foundry on H100)
    # a profile measures eager blocks
    traffic = replace(stack.traffic, elementwise=1.2, between=None, sharded=())
    return replace(stack, compiled=True, traffic=traffic)
