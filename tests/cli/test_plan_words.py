"""The command that `lightning-3d plan` prints: it trains with exactly the layout of the plan."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from typing import Any

import pytest

from lightning_3d.app.cli.plan_words import (
    TrainingWords,
    config_choices,
    introduce,
    missing_keys,
    training_words,
)
from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.machine import choose_precision
from lightning_3d.app.config.plan_run import RunPlan, check_keys, plan_run
from lightning_3d.app.config.run_config import complete_run
from lightning_3d.app.planner.advice import PlannerAdvice, machine_of, plan
from lightning_3d.options.blocks import BlockOptions

ONE_NODE = [
    "model=llama3_1_8b",
    "cluster=h100_1x8",
    "data.global_batch_size=64",
    "data.sequence_length=4096",
]
# recomputes every second block; the planner recomputes nothing
RECIPE = ["recipe=llama3_70b_256xa100"]
FIXED = [
    "parallelism=auto",
    "parallelism.order=[tp,pp,dp,cp]",
    "parallelism.compile=true",
    "++parallelism.zero_stage=2",
]
SLOW_NETWORK = [
    *(
        "model=llama3_1_8b",
        "cluster=h100_4x8",
        "cluster.inter_node.bandwidth=10e9",
        "data.global_batch_size=512",
    ),
    *(
        "data.sequence_length=4096",
        "parallelism=auto",
        "++parallelism.zero_stage=3",
        "++parallelism.micro_batch_size=1",
    ),
    # schedules that split the backward gather once a step, which a slow network allows
    "++parallelism.schedule=1F1B",
]
CASES = {
    "one node": ONE_NODE,
    "a length of the data": [
        "model=llama3_1_8b",
        "cluster=h100_1x8",
        "++data.global_batch_size=64",
    ],
    "some keys fixed": [*ONE_NODE, *FIXED, "trainer.dry=true"],
    "a recipe": RECIPE,
    "a slow network": SLOW_NETWORK,
}


def checked(words: list[str]) -> RunPlan:
    return plan_run(
        compose([*words, "trainer.dry=true", "cluster.accelerator=gpu"]), None, PlannerAdvice()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name == "a recipe" else name for name in CASES],
)
def test_the_command_trains_as_the_planner_chooses(name: str) -> None:
    """With `parallelism=auto`, a run has the layout that the command names."""
    overrides = CASES[name]
    given = [word for word in overrides if word != "trainer.dry=true"]
    run = complete_run(check_keys(compose([*overrides, "trainer.dry=true"])))
    job = plan(run, choose_precision(run, "gpu")).best[0].job
    words = training_words(overrides, job).words
    composed = compose([*overrides, "trainer.dry=true"])
    assert training_words(overrides, job, config_choices(composed)) == TrainingWords(
        words, missing_keys(compose(words))
    )
    said, chosen = checked(words), checked([*given, "parallelism=auto", *_open(overrides)])
    for entry in fields(RunPlan):
        if entry.name not in ("run", "chosen"):
            assert _plain(getattr(said, entry.name)) == _plain(getattr(chosen, entry.name)), (
                entry.name
            )
    assert (
        said.run.data == chosen.run.data
        and said.run.cluster == chosen.run.cluster
        and said.run.model == chosen.run.model
    )
    assert said.zero.shard_size == (8 if overrides is SLOW_NETWORK else None)
    kept = {word for word in given if not word.lstrip("+").startswith("parallelism")} | (
        {FIXED[2]} & set(given)
    )
    assert kept <= set(words) and "trainer.dry=true" not in words
    assert shlex.split(shlex.join(words)) == words


def _plain(value: Any) -> Any:
    """Take out what is left open: a model of Transformers is sequence parallel unless that is
    turned off."""
    return (
        replace(value, sequence_parallel=value.sequence_parallel is not False)
        if isinstance(value, BlockOptions)
        else value
    )


def _open(overrides: list[str]) -> list[str]:
    """Open the keys of a recipe that the planner of `lightning-3d plan` chooses anyway."""
    keys = ("micro_batch_size", "zero_stage", "recompute")
    return [f"parallelism.{key}=null" for key in keys] if overrides is RECIPE else []


def test_the_command_is_complete() -> None:
    """A length that nobody gave is named too, so that another default of the data changes
    nothing."""
    run = complete_run(check_keys(compose(CASES["a length of the data"])))
    words = training_words(CASES["a length of the data"], plan(run, "bf16").best[0].job).words
    assert (
        "data.sequence_length=128" in words
        and sum("global_batch_size" in word for word in words) == 1
    )


def test_a_layout_by_its_key_is_replaced() -> None:
    """The key would win over the layout that is proposed."""
    given = CASES["a length of the data"]
    job = plan(complete_run(check_keys(compose(given))), "bf16").best[0].job
    words = training_words([*given, "parallelism.layout=tp2"], job).words
    assert words == training_words(given, job).words and f"parallelism={job.layout.name}" in words


@pytest.mark.slow
def test_what_has_to_be_added_is_said() -> None:
    one, many = (
        machine_of(check_keys(compose([*words, "trainer.dry=true"])).cluster)
        for words in (ONE_NODE, RECIPE)
    )
    assert one is not None and many is not None
    assert (
        introduce(missing_keys(compose([*ONE_NODE, "parallelism=dp8"])), one)
        == "This command trains with the fastest layout:"
    )
    said = introduce(missing_keys(compose(RECIPE)), many)
    assert "after you add data.train_path=..." in said and "srun" in said and "launch slurm" in said
