"""Memory of gradients and optimizer states that the planner counts, by hand."""

from __future__ import annotations

import pytest
from composed_configs import dry

from lightning_3d.planner.advice import job_of
from lightning_3d.planner.memory import memory_of


def test_the_planner_counts_a_buffer_of_all_gradients_where_they_are_not_scattered() -> None:
    """Without activations to speak of, it is as large as the gradients; scattered, each rank keeps its part, and the largest bucket."""
    words = ("parallelism=dp4", "model=llama3_1_8b", "cluster=h100_1x8", "data=tokens", "data.sequence_length=16")
    words += ("data.global_batch_size=4", "parallelism.micro_batch_size=1", "cluster.gpus_per_node=4", "force=true")
    found = []
    for scatter in ("true", "false"):
        _, plan = dry(*words, f"parallelism.zero_reduce_scatter={scatter}")
        job = job_of(plan.run, "bf16", plan.layout, plan.schedule, plan.micro_batch_size)
        memory = memory_of(job)
        found.append(memory.gradients + memory.activations + memory.loss)
    whole = 4 * 8_030_261_248
    assert found == pytest.approx([whole + whole / 4 + 4 * 128_256 * 4096, 2 * whole], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "moments"), [("AdamW", 8.0), ("AdamW8bit", 2 + 8 / 256), ("AdamW4bit", 1 + 8 / 128), ("AdamWFp8", 2 + 8 / 256)]
)
def test_the_planner_counts_states_of_few_bits(name: str, moments: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside float32 master weights: a code of each element and a float32 scale of each block."""
    package = "torch" if name == "AdamW" else "torchao"
    monkeypatch.setenv("LIGHTNING_3D_ALLOW_TARGETS", package)
    words = ("parallelism=dp4", "model=llama3_1_8b", "cluster=h100_1x8", "data=tokens", "data.sequence_length=16", "optimizer=torch")
    words += ("data.global_batch_size=4", "parallelism.micro_batch_size=1", "cluster.gpus_per_node=4", "force=true")
    _, plan = dry(*words, "parallelism.zero_stage=0", f"optimizer._target_={package}.optim.{name}")
    job = job_of(plan.run, "bf16", plan.layout, plan.schedule, plan.micro_batch_size)
    assert memory_of(job).optimizer == pytest.approx((4 + moments) * 8_030_261_248, rel=1e-6)
