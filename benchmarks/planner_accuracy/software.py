"""Training software of published runs: constants that were read from its source or fitted to these
runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_3d.app.planner.constants import EAGER, LINK_LATENCY, NETWORK_LATENCY, efficiency_of
from lightning_3d.app.planner.machine import Group, Machine, all_to_all, gather
from lightning_3d.app.planner.stack import Footprint, Host, Overlap, Split, Stack, Traffic, balanced
from lightning_3d.layout.balance import Cost
from lightning_3d.layout.layout import AXES, Layout

_RATES = {
    # bytes of memory that can be filled, bytes/s of it, 16-bit, 8-bit and 32-bit (tf32)
    # operations/s, bytes/s of links and of the network, GPUs that fast links connect: vendors'
    # datasheets The memory is 95 % of what nvidia-smi shows (81,559 MiB of an H100): nanotron's
    # runs that come nearer to it are several times slower, because the allocator frees and
    # allocates again in every step.
    "h100": (81.2e9, 3.35e12, 989.5e12, 1979.0e12, 494.5e12, 450.0e9, 50.0e9, 8),
    # HBM2e, as in torchtitan's tables
    "h100_96gb": (95.0e9, 2.4e12, 989.5e12, 1979.0e12, 494.5e12, 450.0e9, 50.0e9, 8),
    "a100": (81.6e9, 2.039e12, 312.0e12, 312.0e12, 156.0e12, 300.0e9, 25.0e9, 8),
    "a100_40gb": (40.8e9, 1.555e12, 312.0e12, 312.0e12, 156.0e12, 300.0e9, 25.0e9, 8),
    "h200": (141.0e9, 4.8e12, 989.5e12, 1979.0e12, 494.5e12, 450.0e9, 50.0e9, 8),
    "gb200": (186.0e9, 8.0e12, 2500.0e12, 5000.0e12, 1250.0e12, 900.0e9, 50.0e9, 72),
    "gb300": (279.0e9, 8.0e12, 2500.0e12, 5000.0e12, 1250.0e12, 900.0e9, 100.0e9, 72),
    "b300": (270.0e9, 8.0e12, 2250.0e12, 4500.0e12, 1125.0e12, 900.0e9, 100.0e9, 8),
    "b200": (180.0e9, 8.0e12, 2250.0e12, 4500.0e12, 1125.0e12, 900.0e9, 50.0e9, 8),
}


_TIMES_4 = {"gb300": 3.0, "b300": 3.0, "gb200": 2.0, "b200": 2.0}
"""Operations a second in NVFP4, divided by those in FP8 (datasheets, without sparsity)."""

_KINDS = "gb300", "gb200", "b300", "b200", "h200", "h100", "a100"
"""Types of GPU; the first one that a name contains counts."""

_NETWORK = re.compile(r"(IB |InfiniBand )?(?:(\d+) ?x ?)?(\d+) ?G(?:b|bps|b/s|bit/s|bE)\b")
"""A network as tables write it: "800 Gbps" and "4x100Gb" are those of a node, "IB 400Gbps" is a
port of InfiniBand, one for each GPU."""


def published_machine(gpu: str, gpus: int, remark: str = "") -> Machine | None:
    """Return nodes of the GPU that a table of measured runs names: 8 GPUs, or the 72 that NVLink
    connects in a rack. The network is the one of a node that the name or a remark states. None for
    a type that is not known."""
    name = gpu.lower()
    kind = next((kind for kind in _KINDS if kind in name), None)
    if kind is None:
        return None
    kind += (
        "_96gb"
        if kind == "h100" and "96gb" in name
        else "_40gb"
        if kind == "a100" and "40gb" in name
        else ""
    )
    memory, bandwidth, peak, peak8, peak32, link, network, together = _RATES[kind]
    if (stated := _NETWORK.search(f"{gpu} {remark}")) is not None:
        port, ports, gigabits = stated.groups()
        network = float(ports or 1) * float(gigabits) * 1e9 / 8 / (1 if port and not ports else 8)
    # of an H100 that is allowed fewer than 700: products slow down in proportion
    watts = re.search(r"\b(\d+)w\b", name)
    slower = min(1.0, float(watts[1]) / 700.0) if watts and kind.startswith("h100") else 1.0
    peak, peak8, peak32 = peak * slower, peak8 * slower, peak32 * slower
    latencies = LINK_LATENCY, NETWORK_LATENCY
    nodes, peak4 = max(1, -(-gpus // together)), _TIMES_4.get(kind, 0.0) * peak8
    rates = memory, bandwidth, peak, peak8, peak32, link, network
    return Machine(kind, nodes, together, *rates, *latencies, efficiency_of(kind), peak4)


NETWORK = efficiency_of("").network
"""Share of the bandwidth between nodes that NCCL reaches."""

_HEAD_WORK = 0.95
"""Work of nanotron's output head, divided by that of a block with as many weights. Its source has 1
(models/llama.py, get_block_compute_costs), but with 1 the median error of its `core` runs rises by
1.1 points for the time and by 0.9 points for the memory. Why is not known."""

_LARGE_LATENCIES = 3.4e-6, 14.0e-6
"""Seconds of a step of a ring over links and between nodes, protocol Simple (NCCL 2.30,
src/graph/tuning.cc, hwLatencies)."""


def filled(
    blocks: Sequence[Cost], stages: int, embedding: Cost, head: Cost
) -> tuple[list[int], int]:
    """Give blocks to a stage until it has more than its share of all work, then to the next one."""
    counts, stage, done = [0] * stages, 0, 0.0
    total = sum(work for work, _ in blocks) + _HEAD_WORK * head[0]
    for work, _ in blocks:
        counts[stage] += 1
        done += work
        if stage < stages - 1 and done * stages > total * (stage + 1):
            stage += 1
    return counts, stage


def equal(
    blocks: Sequence[Cost], stages: int, embedding: Cost, head: Cost
) -> tuple[list[int], int]:
    """Give every stage as many blocks, whatever they, the embedding and the head cost."""
    base, more = divmod(len(blocks), stages)
    return [base + (index < more) for index in range(stages)], stages - 1


@dataclass(frozen=True)
class Allocator:
    """The caching allocator of a software, and what it holds at its peak beyond what the package
    counts (see `allocator.py`).

    Attributes:
        queued: (batch, seq, hidden) tensors of 16 bits that wait to be freed when collectives run
            next to the work.
        bucket_bytes: of a parameter, in buckets that ZeRO stage 0 keeps next to its gradient.
        gathered_copies: of all parameters, while ZeRO stage 1 gathers them: first in one piece for
            each rank, then in one.
    """

    queued: float = 0.0
    bucket_bytes: float = 0.0
    gathered_copies: int = 0


@dataclass(frozen=True)
class SeparateGathers:
    """ZeRO 3 that gathers the tensors of a block one by one, with nothing else running.

    Attributes:
        tensors: of a block; each is a message of its own.
        network: share of the bandwidth between nodes that these messages reach.
    """

    tensors: int
    network: float


@dataclass(frozen=True)
class Published(Stack):
    """Training software of others: it overrides the points at which it differs from this package.

    Attributes:
        order: of ranks, innermost first.
        sequence_parallel: tensor parallelism splits along the sequence what it does not shard.
        split: `balanced`, `filled` or `equal`.
        reduced_bytes: of a gradient that is sent.
        scatters: ZeRO scatters gradients, otherwise it reduces all of them on every rank.
        scatters_messages: tensor-parallel ranks without sequence parallelism send a part each to
            the next stage, whose ranks gather them.
        attention_speed: rate of its attention kernel, divided by that of the best one of its day.
        network: bandwidth between nodes that its collectives reach, divided by that of NCCL.
        host_tensor: seconds of the host for each block and tensor-parallel rank where a pipeline's
            messages wait for the host.
        kept_logit_bytes: of a logit that lives on while the next micro-batch runs.
        saved_keys: bytes that a block keeps for each number of a key and a value, beyond what its
            backward pass needs.
        selective_share: of what a block keeps, with selective recomputation; None: all but half of
            attention's own.
        shards_experts: tensor-parallel ranks share each expert, and `layout.ep` counts these ranks,
            too.
        expert_streams: CUDA streams on which the products of a rank's experts run at the same time.
        separate: how ZeRO 3 gathers; None: a block at a time, while the one before is computed.
    """

    name: str = ""
    order: tuple[str, ...] = AXES
    sequence_parallel: bool = True
    split: Split = balanced
    reduced_bytes: float = 4.0
    scatters: bool = True
    scatters_messages: bool = False
    attention_speed: float = 1.0
    network: float = 1.0
    host_tensor: float = 0.0
    kept_logit_bytes: float = 0.0
    saved_keys: float = 0.0
    selective_share: float | None = None
    shards_experts: bool = False
    expert_streams: int = 1
    separate: SeparateGathers | None = None
    allocator: Allocator = field(default_factory=Allocator)

    @property
    def scatters_embedding(self) -> bool:
        """True for all that have sequence parallelism: nanotron (parallel/tensor_parallel/nn.py),
        Megatron Core (models/common/embeddings/language_model_embedding.py), torchtitan
        (models/llama3/infra/parallelize.py)."""
        return True

    @property
    def waits_for_stages(self) -> bool:
        return False

    @property
    def repeats_block(self) -> bool:
        return self.selective_share is not None

    def host_seconds(self, layout: Layout, machine: Machine) -> float:
        seconds = super().host_seconds(layout, machine)
        if layout.tp == 1:
            return seconds
        if layout.pp > 1 and machine.group(layout, ("pp",)).nodes > 1:
            seconds += self.host_tensor * layout.tp
        return seconds

    def expert_precision(self, precision: str, weight_bytes: float) -> str:
        return precision

    def expert_starts(
        self, experts: int, precision: str, sizes: Sequence[float], machine: Machine
    ) -> int:
        return -(-experts // self.expert_streams)

    def shards_experts_of(self, layout: Layout) -> bool:
        return self.shards_experts or super().shards_experts_of(layout)

    def exchange_seconds(
        self, machine: Machine, ranks: Group, size: float, crossing: float | None, tp: int
    ) -> tuple[float, float]:
        """Each token is sent straight to each of its experts. If experts are sharded over
        tensor-parallel ranks, these then gather what each of them has received. (Megatron Core,
        moe/token_dispatcher.py, `MoEAlltoAllTokenDispatcher`.)"""
        if not self.shards_experts:
            return all_to_all(machine, ranks, size), 0.0
        sharing = Group(ranks.size // tp, max(1, ranks.local // tp), ranks.near)
        return all_to_all(machine, sharing, size), gather(machine, Group(tp, tp), tp * size)

    def on(self, machine: Machine) -> Machine:
        """Return the machine as this software uses its network."""
        return replace(
            machine, efficiency=replace(machine.efficiency, network=NETWORK * self.network)
        )

    def attention_rate(self, machine: Machine) -> float:
        return super().attention_rate(machine) * self.attention_speed

    def attention_saved(self, key_width: int) -> float:
        return self.saved_keys * key_width

    def selective_bytes(self, whole: float, core: float) -> float:
        return (
            super().selective_bytes(whole, core)
            if self.selective_share is None
            else whole * self.selective_share
        )

    def logit_bytes(self, micro_batches: int) -> float:
        return super().logit_bytes(micro_batches) + (
            self.kept_logit_bytes if micro_batches > 1 else 0.0
        )

    def exposed_gather(self, machine: Machine, ranks: Group, size: float) -> float | None:
        return (
            None
            if self.separate is None
            else gather_separately(machine, ranks, size, self.separate)
        )


def gather_separately(
    machine: Machine, ranks: Group, size: float, gathers: SeparateGathers
) -> float:
    """Seconds of all-gathers, one after the other, of `size` bytes in all: each step of each has
    the latency of NCCL's protocol for large messages, and between nodes they reach a share of the
    bandwidth."""
    n = ranks.size
    if n == 1:
        return 0.0
    steps = (n - ranks.nodes) * _LARGE_LATENCIES[0] + (ranks.nodes - 1) * _LARGE_LATENCIES[1]
    network = machine.network * ranks.local * gathers.network if ranks.nodes > 1 else float("inf")
    return gathers.tensors * steps + (n - 1) / n * size / min(
        machine.link * machine.efficiency.link, network
    )


_MEGATRON_ORDER = ("tp", "cp", "dp", "pp")

NANOTRON = Published(
    name="nanotron",
    order=_MEGATRON_ORDER,  # parallel/context.py
    split=filled,  # models/base.py: blocks are given out by cumulated cost
    host=replace(EAGER.host, step=0.045),  # [fit]
    network=0.53,  # gradients and parameters are joined and split on the way (distributed.py) [fit]
    # its messages between stages carry shapes that the host waits for (pipeline_parallel/p2p.py)
    # [fit]
    host_tensor=2.0e-3,
    # ZeRO 1 reduces whole gradients in float32 to every rank, which takes their norm (4 bytes),
    # clips them (8) and zeroes them (4: optim/clip_grads.py, optim/gradient_accumulator.py).
    # Gathered parameters are copied three times in 16 bits: before, by torch, and after
    # (distributed.py, all_gather_coalesced).
    traffic=replace(EAGER.traffic, whole=16.0, gathered=12.0),
    # gradients in float32 are reduced after the last micro-batch (trainer.py)
    overlap=Overlap(data=False, gather=False, layers=0.67),  # layers [fit]
    scatters=False,  # trainer.py, sync_gradients_across_dp
    # queries stay in one tensor with keys and values, of which rotation takes a copy
    # (models/llama.py)
    saved_keys=2.0,
    # float32 logits of the last micro-batch, until the next one replaces them; runs show 3.8 to 5.2
    kept_logit_bytes=4.0,
    footprint=Footprint(
        saved_inner=2.0,  # the gate is kept before and after its activation (models/llama.py)
        logit=6.0,  # 16-bit logits and their float32 copy; runs show 5.2 to 7.4
        allocator=1.05,  # as ours; CUDA's own memory is not part of what is printed
    ),
    allocator=Allocator(
        # of DistributedDataParallel, which is used where ZeRO is off (trainer.py)
        bucket_bytes=2.0,
        # tensors are joined for each rank (distributed.py, all_gather_coalesced), and torch joins
        # these once more
        gathered_copies=2,
        queued=54.0,  # [fit]
    ),
)
MEGATRON = Published(
    name="megatron",
    order=_MEGATRON_ORDER,
    split=equal,
    # cuDNN's kernel and FlashAttention-3, next to FlashAttention-2 (arXiv:2407.08608, figures 5 and
    # 6)
    attention_speed=1.5,
    # Transformer Engine, common/include/transformer_engine/multi_streams.h, num_streams
    expert_streams=4,
    overlap=Overlap(layers=0.38),  # tensor-parallel communication is split and overlapped [fit]
    traffic=Traffic(elementwise=2.8),  # [fit]
    host=Host(step=0.019),  # [fit]
)
MEGATRON_2021 = replace(
    MEGATRON,
    name="megatron_2021",
    sequence_parallel=False,
    flash=False,
    # One kernel has scale, mask and softmax, and reads what the causal mask leaves
    # (megatron/fused_kernels of 2021, scaled_upper_triang_masked_softmax.h). Forward, a product
    # writes 2 bytes, that kernel reads 1 and writes 2, dropout reads 2 and writes 3 with its mask,
    # and the second product reads 2. Backward, products write 2 and read 2 + 4, dropout reads 3 and
    # writes 2, and softmax reads 2 and writes 2.
    score_bytes=(12.0, 17.0),
    # arXiv:2104.04473, section 4.1; DeepSpeed partitions them likewise (runtime/pipe/engine.py)
    scatters_messages=True,
    attention_speed=1.0,
    overlap=Overlap(all_reduce=False, data=False, gather=False),
    # DeepSpeed's ZeRO 3 of 2021, without model parallelism: four products and two norms, each with
    # a weight and a bias
    separate=SeparateGathers(12, network=0.30),  # [fit]
    traffic=Traffic(elementwise=1.5),  # its kernels join the bias, dropout and residual sum [fit]
    host=Host(),
)
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021,
    name="megatron_deepspeed",
    reduced_bytes=2.0,
    traffic=Traffic(elementwise=1.2),  # [fit]
    host=Host(block=3.3e-3, collectives=0.24e-3, step=0.007),  # [fit]
    host_tensor=0.3e-3,  # [fit]
)
FOUNDRY = Published(
    name="foundry",
    traffic=Traffic(elementwise=1.7),  # on H100 [fit]
    attention_speed=0.44,  # FlashAttention written in Triton [fit]
    host=Host(step=0.17),  # [fit]
)
FOUNDRY_A100 = replace(
    FOUNDRY,
    name="foundry_a100",
    traffic=Traffic(elementwise=1.2),  # the releases of a year earlier [fit]
    attention_speed=0.56,  # [fit]
    host=Host(step=0.069),  # [fit]
)
_FITTED_ATTENTION = (FOUNDRY.name, FOUNDRY_A100.name)
TITAN = Published(
    name="titan",
    traffic=Traffic(elementwise=3.2),  # [fit]
    # 16-bit logits and, in float32, these, their softmax and their gradient
    footprint=Footprint(logit=14.0),
    selective_share=0.5,  # every second product is kept (models/llama3/infra/parallelize.py)
    host=Host(step=0.14),  # [fit]
)
TITAN_COMPILED = replace(TITAN, name="titan_compiled", traffic=Traffic(elementwise=1.0))

ANY = Published(
    name="any",
    overlap=Overlap(layers=0.75),  # [fit] on all other software
    traffic=Traffic(elementwise=1.9),  # [fit]
    host=Host(step=0.049),  # [fit]
)
"""Software of which nothing is known."""


def any_software(software: Published) -> Published:
    """Return what a software's source and documentation say of it, with the constants of software
    of which nothing is known, except those of its attention and its gathers."""
    overlap = replace(software.overlap, layers=ANY.overlap.layers)
    # its bytes of logits and parameters were counted
    traffic = replace(software.traffic, elementwise=ANY.traffic.elementwise)
    return replace(
        software,
        name=ANY.name,
        overlap=overlap,
        traffic=traffic,
        host=ANY.host,
        network=ANY.network,
        host_tensor=0.0,
    )


def unseen_software(software: Published) -> Published:
    """Return `any_software` without anything that was fitted to its runs."""
    speed = ANY.attention_speed if software.name in _FITTED_ATTENTION else software.attention_speed
    separate = software.separate and replace(software.separate, network=ANY.network)
    return replace(any_software(software), attention_speed=speed, separate=separate)


SOURCES: tuple[tuple[tuple[str, ...], Published], ...] = (
    (("ultra-scale",), NANOTRON),
    (("nanotron",), NANOTRON),
    (("narayanan",), MEGATRON_2021),
    (("vtrain",), MEGATRON_DEEPSPEED),
    (("llm-foundry", "a100"), FOUNDRY_A100),
    (("llm-foundry",), FOUNDRY),
    (("torchtitan", "compile"), TITAN_COMPILED),
    (("torchtitan",), TITAN),
    (("megatron",), MEGATRON),
    (("nemo",), MEGATRON),
    (("moe parallel folding",), MEGATRON),
    ((), ANY),
)
"""Words of a run's source, type of GPU and notes, and its software; the first entry all of whose
words occur."""


def shards_experts(notes: str) -> bool:
    """Check whether each expert is itself sharded over the tensor-parallel ranks: Megatron's ETP,
    which is tp where notes leave it open."""
    return bool(re.search(r"ETP=(?!\d)", notes)) and "Folding" not in notes


def family(software: Published) -> str:
    """Return the name that the versions of a software share."""
    return {"foundry_a100": "foundry", "titan_compiled": "titan"}.get(software.name, software.name)
