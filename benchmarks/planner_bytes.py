"""Memory of published jobs, here and in Megatron-LM. `python -m benchmarks.planner_bytes` writes
the tables of benchmarks/planner_bytes.md.

Megatron-LM's bytes follow its own theoretical_memory_usage.py and Korthikanti et al.
(arXiv:2205.05198): weights, gradients and optimizer need 6 N + 12 N / d bytes with its distributed
optimizer, for N parameters of the first pipeline stage; interleaved stages hold the activations of
layers * (1 + (pp - 1) / (pp * vp)) blocks.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys
from lightning_3d.app.config.run_config import CompleteRun, complete_run
from lightning_3d.app.planner.advice import job_of
from lightning_3d.app.planner.architecture import Architecture, BlockKind
from lightning_3d.app.planner.constants import compiled
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.memory import memory_of
from lightning_3d.app.planner.rank_memory import RankMemory
from lightning_3d.layout.layout import AXES, Layout
from lightning_3d.layout.resolve import resolve_layout


class Published(NamedTuple):
    """A published job: what it trains, the layout that was published, and the words with which the
    planner proposes its own.

    Attributes:
        name: the job in words.
        words: model, cluster and batch, as on the command line.
        layout: the published layout.
        proposed: words of the planner's first proposal.
    """

    name: str
    words: str
    layout: str
    proposed: str


JOBS = (
    Published(
        "Llama 3 70B on 64 H100",
        "model=llama3_70b cluster=h100_8x8 data.global_batch_size=128 data.sequence_length=8192",
        "tp4_pp4_dp2_cp2_vp5",
        "parallelism=tp2_dp16_cp2 parallelism.zero_stage=3 parallelism.recompute=selective",
    ),
    Published(
        "Llama 3 70B on 128 H100",
        "model=llama3_70b cluster=h100_16x8 data.global_batch_size=256 data.sequence_length=8192",
        "tp4_pp4_dp4_cp2_vp5",
        "parallelism=tp2_dp32_cp2 parallelism.zero_stage=3 parallelism.recompute=selective",
    ),
    Published(
        "Llama 3 70B on 1024 H100",
        "model=llama3_70b cluster=h100_128x8 data.global_batch_size=1024 data.sequence_length=8192",
        "tp4_pp4_dp32_cp2_vp5",
        "parallelism=tp4_pp4_dp64_vp8 parallelism.zero_stage=1 parallelism.schedule=Interleaved1F1B"
        " parallelism.recompute=selective",
    ),
    Published(
        "Mixtral 8x7B on 64 H100",
        "model=mixtral_8x7b cluster=h100_8x8 data.global_batch_size=256 data.sequence_length=4096",
        "pp4_dp16_ep8_vp8",
        "parallelism=pp4_dp8_cp2_ep8_vp2 parallelism.zero_stage=1 parallelism.schedule=DualPipeV",
    ),
    Published(
        "Qwen3-30B-A3B on 16 H100",
        "model=qwen3_30b_a3b cluster=h100_2x8 data.global_batch_size=1024"
        " data.sequence_length=4096",
        "dp16_ep16",
        "parallelism=pp2_dp4_cp2_ep8_vp8 parallelism.zero_stage=1"
        " parallelism.schedule=InterleavedZeroBubble",
    ),
    Published(
        "Llama 3.1 405B on 1024 H100",
        "model=llama3_1_405b cluster=h100_128x8 data.global_batch_size=512"
        " data.sequence_length=8192",
        "tp8_pp8_dp8_cp2_vp8",
        "parallelism=tp4_pp32_dp2_cp4_vp2 parallelism.zero_stage=1"
        " parallelism.schedule=Interleaved1F1B parallelism.recompute=selective",
    ),
)
PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- generated: bytes -->", "<!-- end -->"
MEMORY = 80e9
"""Bytes of an H100."""


def job(words: str) -> Job:
    """The job of a run with these words, in bf16 and with micro-batches of one sequence, as all of
    these jobs have."""
    always = "data=tokens precision=bf16 parallelism.micro_batch_size=1 trainer.dry=true"
    run: CompleteRun = complete_run(check_keys(compose([*always.split(), *words.split()])))
    options = run.parallelism
    layout, schedule = resolve_layout(
        options.layout, options.schedule, options.vp, tuple(options.order or AXES)
    )
    return job_of(run, "bf16", layout, schedule)


def megatron(model: Architecture, layout: Layout, seq: int) -> RankMemory:
    """Bytes of the first pipeline stage of Megatron-LM, without CUDA, collectives and the allocator
    (`other` is 0)."""
    dense = (
        sum(
            count * model.dense_parameters(kind)
            for kind, count in zip(model.kinds, model.counts, strict=True)
        )
        / layout.pp
    )
    routed = (
        sum(
            count * model.routed_parameters(kind)
            for kind, count in zip(model.kinds, model.counts, strict=True)
        )
        / layout.pp
    )
    ends = model.embedding * (1 if layout.pp > 1 or model.tied else 2)
    experts = layout.ep if layout.ep > 1 else layout.tp
    own, of_experts = (dense + ends) / layout.tp, routed / experts
    sharers = layout.dp * layout.cp
    state = 12 * own / sharers + 12 * of_experts * experts / (layout.tp * sharers)
    tokens = seq / layout.cp
    vp = layout.vp if layout.pp > 1 else 1
    blocks = 1 + (layout.pp - 1) / (layout.pp * vp)
    kept = sum(
        count * block_bytes(model, layout, kind)
        for kind, count in zip(model.kinds, model.counts, strict=True)
    )
    loss = 4 * tokens * (model.hidden + model.vocab) / layout.tp if layout.pp == 1 else 0.0
    return RankMemory(
        2 * (own + of_experts), 4 * (own + of_experts), state, tokens * kept * blocks, loss, 0.0
    )


def block_bytes(model: Architecture, layout: Layout, kind: BlockKind) -> float:
    """Bytes that a block of Megatron-LM keeps of a token: arXiv:2205.05198, section 4.1, for a
    gated MLP, grouped-query attention and no dropout, with flash attention and sequence
    parallelism."""
    attention = 4 * model.query_width + 2 * model.key_width + 4 * model.heads + 2 * model.normed
    inner, sent = (
        (model.top_k * model.expert_ffn + model.shared_ffn, 4 * model.top_k)
        if kind.mixture
        else (model.ffn, 0)
    )
    return ((8 + sent) * model.hidden + attention + 6 * inner) / layout.tp


def row(name: str, memory: RankMemory) -> str:
    """A row of the table: the bytes of each use, in GiB."""
    parts = (
        memory.weights,
        memory.gradients,
        memory.optimizer,
        memory.activations,
        memory.loss,
        memory.other,
        memory.total,
    )
    numbers = " | ".join(f"{part / 2**30:.1f}" for part in parts)
    return f"| {name} | {numbers} | {memory.total / MEMORY:.0%} |"


def table() -> str:
    """Bytes of the fullest rank of each published job: of the published layout here and in
    Megatron-LM, and of our first proposal."""
    lines = []
    for one in JOBS:
        here = job(f"{one.words} parallelism={one.layout}")
        chunked = replace(here, loss_chunks="auto")
        fused = replace(chunked, stack=compiled(chunked.stack))
        name = one.proposed.split()[0].removeprefix("parallelism=")
        lines += [
            f"### {one.name}",
            "",
            (
                "| layout, in GiB | weights | gradients | optimizer | activations | loss | other |"
                " all | of the GPU |"
            ),
            "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
            row(f"`{one.layout}` in Megatron-LM", megatron(here.model, here.layout, here.seq)),
            row(f"`{one.layout}`", memory_of(here)),
            *(
                [row(f"`{one.layout}` with `loss_chunks=auto`", memory_of(chunked))]
                if memory_of(chunked) != memory_of(here)
                else []
            ),
            row(f"`{one.layout}` with `loss_chunks=auto compile=true`", memory_of(fused)),
            row(f"our proposal: `{name}`", memory_of(job(f"{one.words} {one.proposed}"))),
            "",
        ]
    return "\n".join(lines).rstrip()


def filled(page: str) -> str:
    """The page with new tables."""
    return re.sub(
        f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", page, flags=re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), encoding="utf-8")
