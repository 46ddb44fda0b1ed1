"""Memory of gradients and optimizer states that the planner counts, by hand and against a dry
run."""

from __future__ import annotations

import pytest
from composed_configs import dry, dry_peak
from ranks import run_ranks

from lightning_3d.app.planner.advice import job_of
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.memory import memory_of

WORDS = (
    "parallelism=dp4",
    "model=llama3_1_8b",
    "cluster=h100_1x8",
    "data=tokens",
    "data.sequence_length=16",
)
WORDS += (
    "data.global_batch_size=4",
    "parallelism.micro_batch_size=1",
    "cluster.gpus_per_node=4",
    "precision=bf16",
)


def job(*words: str, precision: str = "bf16") -> Job:
    _, plan = dry(*WORDS, *words, f"precision={precision}", "force=true")
    return job_of(plan.run, precision, plan.layout, plan.schedule, plan.micro_batch_size)


def test_the_planner_counts_a_buffer_of_all_gradients_where_they_are_not_scattered() -> None:
    """Without activations to speak of, it is as large as the gradients; scattered, each rank keeps
    its part."""
    found = []
    for scatter in ("true", "false"):
        memory = memory_of(job(f"parallelism.zero_reduce_scatter={scatter}"))
        found.append(memory.gradients + memory.activations + memory.loss)
    whole = 4 * 8_030_261_248
    assert found == pytest.approx([whole + whole / 4, 2 * whole], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), pytest.param(("parallelism=dp2", "cluster.gpus_per_node=2"), marks=pytest.mark.full)],
)
def test_gradients_at_their_peak_are_those_of_a_dry_run(words: tuple[str, ...]) -> None:
    """Of a model with one block. With dp4 the copy of the head's gradient in its bucket is larger
    than what a rank keeps; with dp2 it is smaller."""
    words += ("model.config.num_hidden_layers=1",)
    [peak] = run_ranks(dry_peak, 1, *WORDS, *words, process_group=False)
    memory = memory_of(job(*words))
    counted = peak["gradients"] + peak["temporary"]
    assert memory.gradients + memory.activations + memory.loss == pytest.approx(
        counted, rel=1e-3
    ), peak


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["h100_1x8", pytest.param("local_cpu", marks=pytest.mark.full)])
def test_float32_weights_are_copied_by_zero(cluster: str) -> None:
    """Its optimizer steps a copy of its part of them: 12 bytes of a parameter instead of the 8 of
    stage 0. On CPU ranks, all reduced gradients are in one buffer."""
    words = (
        "model.config.num_hidden_layers=1",
        f"cluster={cluster}",
        "cluster.gpus_per_node=4",
        "parallelism.zero_stage=1",
    )
    [peak] = run_ranks(
        dry_peak, 1, *WORDS, *words, "precision=fp32", "force=true", process_group=False
    )
    memory = memory_of(job(*words, precision="fp32"))
    assert memory.optimizer == pytest.approx(peak["optimizer"], rel=1e-3)
    assert memory.total - memory.other == pytest.approx(sum(peak.values()), rel=2e-3), peak
    whole = memory_of(job(*words, "parallelism.zero_stage=0", precision="fp32"))
    assert whole.optimizer == pytest.approx(4 * 8 / 12 * memory.optimizer, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("AdamW", 8.0),
        ("AdamW8bit", 2 + 8 / 256),
        ("AdamW4bit", 1 + 8 / 128),
        ("AdamWFp8", 2 + 8 / 256),
    ],
)
def test_the_planner_counts_states_of_few_bits(
    name: str, moments: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside float32 master weights: a code of each element and a float32 scale of each block."""
    package = "torch" if name == "AdamW" else "torchao"
    monkeypatch.setenv("LIGHTNING_3D_ALLOW_TARGETS", package)
    chosen = job(
        "parallelism.zero_stage=0", "optimizer=torch", f"optimizer._target_={package}.optim.{name}"
    )
    assert memory_of(chosen).optimizer == pytest.approx((4 + moments) * 8_030_261_248, rel=1e-6)
