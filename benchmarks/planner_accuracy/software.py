"""The training software of published runs, as the planner describes it: constants that were read or fitted from these runs."""

from __future__ import annotations

import re
from dataclasses import replace

from lightning_3d.planner.constants import EAGER, LINK_LATENCY, NETWORK_LATENCY, efficiency_of
from lightning_3d.planner.job import Stack
from lightning_3d.planner.machine import Machine

_RATES = {
    # bytes of memory that can be filled, bytes/s of it, 16-bit, 8-bit and 32-bit (tf32) operations/s, bytes/s of links and of the network:
    # vendors' datasheets
    # The memory is 95 % of what nvidia-smi shows (81,559 MiB of an H100): nanotron's runs that come nearer to it are several times slower,
    # because the allocator frees and allocates anew in every step.
    "h100": (81.2e9, 3.35e12, 989.5e12, 1979.0e12, 494.5e12, 450.0e9, 50.0e9),
    "h100_96gb": (95.0e9, 2.4e12, 989.5e12, 1979.0e12, 494.5e12, 450.0e9, 50.0e9),  # HBM2e, as in torchtitan's tables
    "a100": (81.6e9, 2.039e12, 312.0e12, 312.0e12, 156.0e12, 300.0e9, 25.0e9),
    "a100_40gb": (40.8e9, 1.555e12, 312.0e12, 312.0e12, 156.0e12, 300.0e9, 25.0e9),
    "h200": (141.0e9, 4.8e12, 989.5e12, 1979.0e12, 494.5e12, 450.0e9, 50.0e9),
    "b200": (180.0e9, 8.0e12, 2250.0e12, 4500.0e12, 1125.0e12, 900.0e9, 50.0e9),
}


def published_machine(gpu: str, gpus: int, remark: str = "") -> Machine | None:
    """Nodes of 8 of the GPU that a table of measured runs names, with the network of a node that this name or a remark states in Gbps;
    None for a type that is not known."""
    name = gpu.lower()
    kind = next((kind for kind in ("h100", "a100", "h200", "b200") if kind in name), None)
    if kind is None:
        return None
    kind += "_96gb" if kind == "h100" and "96gb" in name else "_40gb" if kind == "a100" and "40gb" in name else ""
    memory, bandwidth, peak, peak8, peak32, link, network = _RATES[kind]
    stated = re.search(r"(\d+) ?gbps", f"{name} {remark.lower()}")
    network = float(stated[1]) * 1e9 / 8 / 8 if stated else network
    watts = re.search(r"\b(\d+)w\b", name)  # of an H100 that is allowed fewer than 700: products slow down in proportion
    slower = min(1.0, float(watts[1]) / 700.0) if watts and kind.startswith("h100") else 1.0
    peak, peak8, peak32 = peak * slower, peak8 * slower, peak32 * slower
    nodes = max(1, -(-gpus // 8))
    latencies = LINK_LATENCY, NETWORK_LATENCY
    return Machine(kind, nodes, 8, memory, bandwidth, peak, peak8, peak32, link, network, *latencies, efficiency_of(kind))


_MEGATRON_ORDER = ("tp", "cp", "dp", "pp")

NANOTRON = replace(
    EAGER,
    name="nanotron",
    order=_MEGATRON_ORDER,  # parallel/context.py
    split="filled",  # models/base.py: blocks are given out by cumulated cost
    overlaps_data=False,  # gradients in float32 are reduced after the last micro-batch, unless ZeRO is off (trainer.py)
    scatters=False,  # trainer.py, sync_gradients_across_dp
    every_traffic=16.0,  # float32 gradients are read for their norm, scaled, and set to zero
    bucket_bytes=2.0,  # of DistributedDataParallel, which is used where ZeRO is off (trainer.py)
    gathered_copies=2,  # tensors are joined for each rank (distributed.py, all_gather_coalesced), and torch joins these once more
    largest_gradient=True,  # 16-bit gradients live until the backward pass ends (optim/gradient_accumulator.py)
    saved_keys=2.0,  # queries stay in one tensor with keys and values, of which rotation takes a copy (models/llama.py)
    saved_inner=2.0,  # the gate is kept before and after its activation (models/llama.py)
    prints_first=True,  # helpers.py, log_throughput: the reserved memory of rank 0, whose peak was reset after the last pass
    logit_bytes=6.0,  # 16-bit logits and their float32 copy; runs show 5.2 to 7.4
    kept_logit_bytes=4.0,  # float32 logits of the last micro-batch, until the next one replaces them; runs show 3.8 to 5.2
    queued=54.0,  # [fit]
    filled=0.85,  # [fit]
    ahead=1.16,  # [fit]
    overhead=1.05,  # as ours; CUDA's own memory is not part of what is printed
    host_tensor=2.0e-3,  # its messages between stages carry shapes that the host waits for (pipeline_parallel/p2p.py) [fit]
    host_network=0.32e-3,  # [fit]
    host_step=0.05,  # [fit]
)
MEGATRON = Stack(
    name="megatron",
    order=_MEGATRON_ORDER,
    split="equal",
    traffic=1.2,  # [fit]
    host_block=0.5e-3,
    host_step=0.045,  # [fit]
)
MEGATRON_2021 = replace(
    MEGATRON,
    name="megatron_2021",
    sequence_parallel=False,
    flash=False,
    overlaps_all_reduce=False,
    overlaps_data=False,
    overlaps_gather=False,
    apart=12,  # DeepSpeed's ZeRO 3 of 2021, without model parallelism: four products and two norms, each with a weight and a bias
    apart_network=0.28,  # [fit]
    traffic=1.0,  # [fit]
    host_block=1.0e-3,
    host_step=0.0,
)
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021,
    name="megatron_deepspeed",
    reduced_bytes=2.0,
    optimizer_traffic=28.0,  # 4-byte gradient, weight and two moments read, three written, 2-byte weight written
    traffic=1.6,  # [fit]
    logit_traffic=50.0,  # [fit]
    host_block=1.6e-3,  # [fit]
    host_collectives=2.0e-3,  # [fit]
    host_tensor=1.5e-3,  # [fit]
    host_step=0.007,  # [fit]
)
FOUNDRY = Stack(
    name="foundry",
    traffic=1.0,  # on H100 [fit]
    attention_speed=0.42,  # FlashAttention written in Triton [fit]
    logit_traffic=9.0,  # [fit]
    host_block=1.0e-3,
    host_step=0.13,  # [fit]
)
FOUNDRY_A100 = replace(
    FOUNDRY,
    name="foundry_a100",
    traffic=2.0,  # the releases of a year earlier [fit]
    attention_speed=0.55,  # [fit]
    logit_traffic=19.0,  # [fit]
    host_step=0.037,  # [fit]
)
TITAN = Stack(
    name="titan",
    traffic=2.4,
    logit_bytes=14.0,  # 16-bit logits and, in float32, these, their softmax and their gradient
    selective_share=0.5,  # every second product is kept (models/llama3/infra/parallelize.py)
    host_block=1.0e-3,
    host_step=0.04,
)
TITAN_COMPILED = replace(TITAN, name="titan_compiled", traffic=1.0)

SOURCES: tuple[tuple[tuple[str, ...], Stack], ...] = (
    (("ultra-scale",), NANOTRON),
    (("nanotron",), NANOTRON),
    (("narayanan",), MEGATRON_2021),
    (("vtrain",), MEGATRON_DEEPSPEED),
    (("llm-foundry", "a100"), FOUNDRY_A100),
    (("llm-foundry",), FOUNDRY),
    (("torchtitan", "compile"), TITAN_COMPILED),
    (("torchtitan",), TITAN),
    ((), MEGATRON),
)
"""Words of a run's source, type of GPU and notes, and its software; the first entry all of whose words occur."""
