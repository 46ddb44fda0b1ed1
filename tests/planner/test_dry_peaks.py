"""The planner's memory of a rank against the peak of a dry run, which runs the engine on tensors
without values.

Models are real ones with few blocks, so that the embedding, the head and the loss weigh more than
in training. The planner's `other` is left out: CUDA, buffers of collectives and the allocator's
reserve.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from composed_configs import dry
from ranks import run_ranks

from lightning_3d.app.planner.advice import job_of
from lightning_3d.app.planner.block_memory import block_bytes
from lightning_3d.app.planner.memory import stages_in_flight
from lightning_3d.app.planner.rank_memory import RankBytes, memory_of_rank

COMMON = (
    "cluster=h100_1x8",
    "precision=bf16",
    "force=true",
    "data.sequence_length=4096",
    "data.global_batch_size=16",
)
COMMON += ("parallelism.micro_batch_size=1",)
BLOCKS = "model.config.num_hidden_layers=4"
DENSE = ("model=llama3_1_8b", BLOCKS, "data=tokens")
MIXTURE = ("model=mixtral_8x7b", BLOCKS, "data=tokens")
LATENT = (
    "model=deepseek_v3",
    BLOCKS,
    "data=tokens",
    "model.config.first_k_dense_replace=2",
    "model.config.n_routed_experts=16",
)
LATENT += ("model.config.n_group=4", "model.config.topk_group=2")
SHARED = (
    "model=qwen2_57b_a14b",
    "model.config.num_hidden_layers=2",
    "data=tokens",
    "data.sequence_length=1024",
)
PAIRS = (
    "model=llama3_1_8b",
    BLOCKS,
    "objective.name=dpo",
    "data=python_pairs",
    "model.pretrained=required",
)
TEACHER = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 3,
}
TEACHER |= {"num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False}


MIXED = ("precision=bf16_mixed", "data.sequence_length=1024")
SHORT = ("data.sequence_length=16", "data.global_batch_size=8")
ON_CPU = ("cluster=local_cpu", "precision=fp32", "model.config.num_hidden_layers=1")


@dataclass(frozen=True)
class Cell:
    """A run, and the index in its pipeline of the rank that is compared. `spread`: largest
    error."""

    model: tuple[str, ...]
    layout: str
    options: tuple[str, ...] = ()
    rank: int = 0
    spread: float = 0.015
    teacher: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        return (
            *COMMON,
            *self.model,
            f"parallelism={self.layout}",
            *(f"parallelism.{option}" for option in self.options),
        )


FULL, SELECTIVE, GPIPE = "recompute=full", "recompute=selective", "schedule=GPipe"
CELLS = {
    "logits of all micro-batches": Cell(DENSE, "pp4_dp2", (GPIPE,), rank=3),
    "full": Cell(DENSE, "dp8", (FULL,)),
    "selective": Cell(DENSE, "dp8", (SELECTIVE,)),
    "selective, tp": Cell(DENSE, "tp2_dp4", (SELECTIVE,)),
    "both ends gathered": Cell(DENSE, "dp8", ("zero_stage=3",)),
    "unsharded attention": Cell(LATENT, "tp2_pp2_dp2_ep2"),
    "pairs": Cell(PAIRS, "tp4_dp2"),
    "teacher": Cell(DENSE, "tp4_dp2", teacher=True),
    "casts in flight": Cell((*DENSE, *MIXED), "pp4_dp2"),
    "casts, zero 3, few tokens": Cell((*DENSE, *MIXED), "dp8", ("zero_stage=3",)),
    "ends sent last": Cell(
        (*DENSE, *SHORT, "model.config.num_hidden_layers=1"), "dp8", ("zero_stage=3",)
    ),
}
OTHERS = {
    "unsharded shared experts": Cell(SHARED, "tp4_dp2"),
    "gradients that come late": Cell(DENSE, "pp2_dp4", ("schedule=LoopedBFS", "vp=2")),
    "zero 0": Cell(DENSE, "dp8", ("zero_stage=0",)),
    "zero 1": Cell(DENSE, "dp8", ("zero_stage=1",)),
    "zero 2": Cell(DENSE, "dp8", ("zero_stage=2",)),
    "zero 3, gathered once": Cell(DENSE, "dp8", ("zero_stage=3", "zero_gather=step")),
    "zero 3, full": Cell(DENSE, "dp8", ("zero_stage=3", FULL)),
    "zero 3, pipeline": Cell(DENSE, "pp4_dp2", ("zero_stage=3",)),
    "zero 3, experts": Cell(MIXTURE, "dp8_ep8", ("zero_stage=3",)),
    "selective, tp4": Cell(DENSE, "tp4_dp2", (SELECTIVE,)),
    "selective, whole sequences": Cell(DENSE, "tp4_dp2", (SELECTIVE, "sequence_parallel=false")),
    "selective, pipeline": Cell(DENSE, "pp2_dp4", (SELECTIVE,)),
    "selective, experts, tp": Cell(MIXTURE, "tp4_dp2", (SELECTIVE,)),
    "selective, experts": Cell(MIXTURE, "pp2_dp4_ep4", (SELECTIVE,)),
    "selective, context": Cell(DENSE, "cp4_dp2", (SELECTIVE,)),
    "selective, latent": Cell(LATENT, "tp2_pp2_dp2_ep2", (SELECTIVE,)),
    "whole sequences": Cell(DENSE, "tp4_dp2", ("sequence_parallel=false",)),
    "context": Cell(DENSE, "cp4_dp2"),
    "gpipe, first": Cell(DENSE, "pp4_dp2", (GPIPE,)),
    "gpipe, full": Cell(DENSE, "pp4_dp2", (GPIPE, FULL), rank=3),
    "1f1b, first": Cell(DENSE, "pp4_dp2"),
    "1f1b, last": Cell(DENSE, "pp4_dp2", rank=3),
    "interleaved": Cell(DENSE, "pp2_dp4", ("schedule=Interleaved1F1B", "vp=2"), rank=1),
    "looped, last": Cell(DENSE, "pp2_dp4", ("schedule=LoopedBFS", "vp=2"), rank=1),
    "zero bubble, first": Cell(DENSE, "pp2_dp4", ("schedule=InterleavedZeroBubble", "vp=2")),
    "zero bubble, last": Cell(DENSE, "pp2_dp4", ("schedule=InterleavedZeroBubble", "vp=2"), rank=1),
    "v, ends": Cell(DENSE, "pp2_dp4", ("schedule=ZBVZeroBubble",)),
    "v, middle": Cell(DENSE, "pp2_dp4", ("schedule=ZBVZeroBubble",), rank=1, spread=0.03),
    "v, middle, full": Cell(
        DENSE, "pp2_dp4", ("schedule=ZBVZeroBubble", FULL), rank=1, spread=0.05
    ),
    "chunks": Cell(DENSE, "dp8", ("loss_chunks=auto",)),
    "chunks of one product": Cell(DENSE, "dp8", ("loss_chunks=4",)),
    "chunks, full": Cell(DENSE, "pp4_dp2", ("loss_chunks=auto", FULL), rank=3),
    "tied": Cell((*DENSE, "model.config.tie_word_embeddings=true"), "dp8", ("zero_stage=3",)),
    "experts": Cell(MIXTURE, "pp2_dp4_ep4"),
    "experts, tp": Cell(MIXTURE, "tp4_dp2"),
    "latent": Cell(LATENT, "pp2_dp4_ep4"),
    "tokens ahead": Cell((*LATENT, "model.mtp_layers=1"), "tp2_pp2_dp2_ep2", rank=1),
    "casts": Cell((*DENSE, *MIXED, "data.sequence_length=4096"), "dp8"),
    "casts, full": Cell((*DENSE, *MIXED), "dp8", (FULL,)),
    "casts, full, pipeline": Cell((*DENSE, *MIXED), "pp4_dp2", (FULL,)),
    "casts, last": Cell((*DENSE, *MIXED), "pp4_dp2", rank=3, spread=0.02),
    "casts, zero 0": Cell((*DENSE, *MIXED), "dp8", ("zero_stage=0",)),
    "casts, zero 3": Cell((*DENSE, *MIXED, "data.sequence_length=4096"), "dp8", ("zero_stage=3",)),
    "casts, tied": Cell((*DENSE, *MIXED, "model.config.tie_word_embeddings=true"), "tp4_dp2"),
    "casts, experts": Cell((*MIXTURE, *MIXED), "dp8_ep8"),
    "casts, few tokens": Cell((*DENSE, *SHORT, "precision=bf16_mixed"), "dp8"),
    "ends sent last, more blocks": Cell((*DENSE, *SHORT), "dp8", ("zero_stage=3",)),
    "steps on a CPU": Cell((*DENSE, *SHORT, *ON_CPU), "dp2", ("zero_stage=0",)),
    "ends sent last, tied": Cell(
        (*DENSE, *SHORT, "model.config.tie_word_embeddings=true"), "dp8", ("zero_stage=3",)
    ),
    "pairs, full": Cell(PAIRS, "dp8", (FULL,)),
    "pairs, zero 2": Cell(PAIRS, "dp8", ("zero_stage=2",)),
    "pairs, zero 3": Cell(PAIRS, "tp4_dp2", ("zero_stage=3",)),
    "pairs, zero 3, gathered once": Cell(PAIRS, "dp8", ("zero_stage=3", "zero_gather=step")),
    "pairs, zero 3, tied": Cell(
        (*PAIRS, "model.config.tie_word_embeddings=true"), "dp8", ("zero_stage=3",)
    ),
    "pairs, pipeline": Cell(PAIRS, "pp2_dp4", rank=1),
    "teacher, pipeline": Cell(DENSE, "pp2_dp4", rank=1, teacher=True),
    "teacher, full": Cell(DENSE, "tp2_dp4", (FULL,), teacher=True),
}


def dry_peaks(cells: dict[str, tuple[tuple[str, ...], int]]) -> dict[str, float]:
    """Bytes of a rank at its peak, by name of (words, index of the rank in its pipeline)."""
    from lightning_3d.app.cli.dryrun import job_of
    from lightning_3d.app.dryrun.run import dry_run
    from lightning_3d.app.runs.check import check_shapes

    found = {}
    for name, (words, index) in cells.items():
        config, plan = check_shapes(words)
        teacher = plan.run.objective.teacher_fields(plan.model["config"]["vocab_size"])
        report = dry_run(job_of(config, plan, teacher), plan.layout.group_of(0, "pp")[index])
        found[name] = float(sum(report.usage.peak.values()))
    return found


def assert_equal(cells: dict[str, Cell], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(TEACHER))
    teacher = ("objective.name=distillation", f"objective.teacher={folder}")
    words = {name: cell.words + (teacher if cell.teacher else ()) for name, cell in cells.items()}
    [peaks] = run_ranks(
        dry_peaks,
        1,
        {name: (words[name], cells[name].rank) for name in cells},
        process_group=False,
        timeout=600,
    )
    wrong = {}
    for name, cell in cells.items():
        _, plan = dry(*words[name])
        precision = [
            word.partition("=")[2] for word in words[name] if word.startswith("precision=")
        ][-1]
        job = job_of(plan.run, precision, plan.layout, plan.schedule, plan.micro_batch_size)
        memory = memory_of_rank(job, stages_in_flight(job)[cell.rank], block_bytes(job))
        ratio = (memory.total - memory.other) / peaks[name]
        if abs(ratio - 1) > cell.spread:
            wrong[name] = ratio
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "temporaries"),
    [((), 8), (("optimizer.fused=true",), 0), (("parallelism.zero_stage=1",), 0)],
)
def test_a_step_of_adamw_on_a_cpu_has_two_temporaries(
    words: tuple[str, ...], temporaries: int
) -> None:
    """In float32, of the embedding, unless the step is fused; ZeRO 1 steps parts."""
    _, plan = dry(
        *COMMON, *DENSE, *SHORT, *ON_CPU, "parallelism=dp2", "parallelism.zero_stage=0", *words
    )
    job = job_of(plan.run, "fp32", plan.layout, plan.schedule, plan.micro_batch_size)
    bare = replace(
        job, stack=replace(job.stack, footprint=replace(job.stack.footprint, stepping=0.0))
    )
    rank = [RankBytes(one).rank(stages_in_flight(one)[0].stages) for one in (job, bare)]
    assert sum(rank[0]._at_step) - sum(rank[1]._at_step) == temporaries * job.model.embedding


@pytest.mark.slow
def test_peaks_are_those_of_dry_runs(tmp_path: Path) -> None:
    assert_equal(CELLS, tmp_path)


PARTS = 8
"""The other cells are compared in as many tests, each of which takes minutes at most."""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_peaks_are_those_of_dry_runs_everywhere(part: int, tmp_path: Path) -> None:
    assert_equal(dict(list(OTHERS.items())[part::PARTS]), tmp_path)
