"""All constants of the planner that are not vendors' rates, each with its origin.

`python -m benchmarks.planner_accuracy FILE --folds N` fits the constants marked [fit] again, each time without the runs that it then
predicts. These constants come from published runs (see docs/planner_accuracy.md). The others are facts of the software, from its source or
its documentation.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_3d.planner.machine import Efficiency
from lightning_3d.planner.stack import Footprint, Host, Overlap, Stack, Traffic

EFFICIENCIES = {
    # [fit] on nanotron's sweep, llm-foundry, Megatron Core (NeMo) and torchtitan, 80 GB and 96 GB
    "h100": Efficiency(matmul=0.72, attention=0.43),
    # [fit] on llm-foundry, vTrain's runs of Megatron-DeepSpeed and Megatron-LM of 2021
    "a100": Efficiency(matmul=0.77, attention=0.56),
}
"""Efficiency by type of GPU. Later types than H100 are assumed to reach the same shares of their rates as H100."""


def efficiency_of(gpu: str) -> Efficiency:
    """Return the efficiency of the type of GPU that a name contains."""
    return EFFICIENCIES["a100" if "a100" in gpu.lower() else "h100"]


LINK_LATENCY, NETWORK_LATENCY = 0.6e-6, 2.7e-6
"""NCCL 2.30, src/graph/tuning.cc, hwLatencies."""

EAGER = Stack(
    host=Host(block=3.0e-3, collectives=1.3e-3),  # [fit]
    traffic=Traffic(
        elementwise=4.1,  # [fit]
        # torch's AdamW with a kernel for each operation reads and writes 80 bytes, the gradient norm and clipping 12, zeroing 4, copies
        # into and out of buckets 16, and the copy in 16 bits 6
        parameter=120.0,
    ),
    overlap=Overlap(gather=False),
)
"""Eager blocks, as nanotron's runs show them."""

OURS = replace(
    EAGER,
    transformers=True,
    footprint=Footprint(
        # Counted with `torch.autograd.graph.saved_tensors_hooks` on a block of transformers' Llama in bfloat16: norms keep their input in
        # float32 and its normalized copy, the MLP its gate before and after the activation
        saved=8.0,
        saved_inner=2.0,
        gradient=4.0,  # docs/zero.md
        kept_gradient=4.0,  # buckets take the place of the gradients, and are added to what a rank keeps (docs/zero.md)
        logit=12.0,  # in float32 the log-softmax, its gradient and that of the logits; the 16-bit logits and their copy are gone by then
        context=0.9e9,
        allocator=1.05,
    ),
)
"""This package, without torch.compile."""


def compiled(stack: Stack) -> Stack:
    """Return the same software with blocks that `torch.compile` has fused."""
    # element-wise operations as in software that fuses them
    return replace(stack, compiled=True, traffic=replace(stack.traffic, elementwise=1.2))
