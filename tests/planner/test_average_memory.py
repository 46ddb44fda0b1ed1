"""The bytes of an average of the weights: what the planner and a dry run count is what a rank of a
real fit holds."""

from __future__ import annotations

from typing import Any

import pytest
from composed_configs import dry
from ranks import run_ranks

from lightning_3d.app.cli.dryrun import job_of as dry_job_of
from lightning_3d.app.planner.advice import job_of
from lightning_3d.app.planner.memory import memory_of
from lightning_3d.options.precision import PRECISIONS

WORDS = (
    "model=llama_tiny",
    "data=tokens",
    "data.sequence_length=32",
    "data.global_batch_size=4",
    "parallelism.micro_batch_size=1",
)
AVERAGE = "trainer.average_decay=0.9"


def words_of(layout: str, zero: int, precision: str) -> tuple[str, ...]:
    return (
        *WORDS,
        f"parallelism={layout}",
        f"parallelism.zero_stage={zero}",
        f"precision={precision}",
    )


def held_in_a_dry_run(words: tuple[str, ...]) -> int:
    """Bytes of optimizer state on rank 0 between two steps."""
    from lightning_3d.app.dryrun.run import dry_run

    return dry_run(dry_job_of(*dry(*words)), 0).kept["optimizer"]


def held_in_a_fit(words: tuple[str, ...]) -> int:
    """Bytes of the average on this rank."""
    import torch
    from parity import quiet_trainer
    from torch.utils.data import DataLoader

    from lightning_3d import ExponentialAverage, Lightning3DStrategy
    from lightning_3d.app.training.module import CausalLM

    config, plan = dry(*words)
    strategy = Lightning3DStrategy(
        plan.layout.name, micro_batch_size=1, zero_stage=config["parallelism"]["zero_stage"]
    )
    precision: Any = PRECISIONS[plan.precision]
    average = ExponentialAverage(0.9)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=plan.layout.world_size,
        max_steps=1,
        precision=precision,
        callbacks=[average],
    )
    held: list[int] = []
    average.on_train_end = lambda *_: held.append(
        sum(tensor.nbytes for tensor in strategy.built.backend.average.held())
    )  # type: ignore
    rows = [{key: torch.ones(32, dtype=torch.int64) for key in ("input_ids", "labels")}] * 4
    trainer.fit(CausalLM(config["model"], config["optimizer"]), DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return held[0]


def counted_by_the_planner(words: tuple[str, ...]) -> float:
    """Bytes of optimizer state on the fullest rank."""
    _, plan = dry(*words)
    return memory_of(
        job_of(plan.run, plan.precision, plan.layout, plan.schedule, plan.micro_batch_size)
    ).optimizer


def more(count: Any, words: tuple[str, ...]) -> float:
    return count((*words, AVERAGE)) - count(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "zero", "precision"),
    [
        ("dp2", 3, "bf16"),
        pytest.param("dp2", 0, "fp32", marks=pytest.mark.full),
        pytest.param("tp2", 0, "bf16", marks=pytest.mark.full),
    ],
)
def test_what_is_counted_is_what_a_rank_holds(layout: str, zero: int, precision: str) -> None:
    words = words_of(layout, zero, precision)
    real = run_ranks(held_in_a_fit, 2, words)[0]
    [dried] = run_ranks(dried_more, 1, words, process_group=False)
    assert real > 2**20 and dried == real
    assert more(counted_by_the_planner, words) == pytest.approx(real, rel=0.01)


def dried_more(words: tuple[str, ...]) -> float:
    return more(held_in_a_dry_run, words)
