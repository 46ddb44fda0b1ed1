"""Pipeline stages whose numbers of blocks the user gives."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import parity
import pytest
from composed_configs import dry
from omegaconf import OmegaConf
from ranks import run_ranks
from reference import Recipe, data, reference
from sweeps import by_default

from lightning_3d.app.cli.verify import strategy_arguments
from lightning_3d.app.planner.advice import job_of
from lightning_3d.app.planner.stages import parameters_of, stages_of
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.layout.given_stages import given_stages


def test_stages_follow_each_other() -> None:
    assert given_stages([1, 3, 2, 2], Layout(pp=2, vp=2), 8) == [
        range(1),
        range(1, 4),
        range(4, 6),
        range(6, 8),
    ]


@pytest.mark.parametrize(
    ("blocks", "layers", "says"),
    [
        (
            [4, 4, 4],
            12,
            (
                "must have 2 whole numbers, each at least 1: the blocks of each stage of pp2 (pp 2"
                " * vp 1). Use for example "
            ),
        ),
        ([4, 4, 4], 12, "stages=[6, 6], or leave it out"),
        ([0, 5], 5, "Use for example stages=[2, 3], or leave it out"),
        ([True, 5], 6, "Use for example stages=[3, 3]"),
        (
            [2, 4],
            5,
            "stages=[2, 4] has 6 blocks, but the model has 5. Use for example stages=[2, 3]",
        ),
        ([7, 1], 5, "Use for example stages=[2, 3]"),
        ([1, 2, 3], None, "Leave it out to let the stages be balanced."),
    ],
)
def test_what_does_not_fit_is_refused_with_what_works(
    blocks: list[Any], layers: int | None, says: str
) -> None:
    layout = Layout(pp=2)
    with pytest.raises(LayoutError) as refused:
        given_stages(blocks, layout, layers)
    assert says in str(refused.value)
    if works := re.search(r"stages=\[([\d, ]+)\], or", str(refused.value)):
        given_stages([int(count) for count in works[1].split(", ")], layout, layers)


def test_a_configuration_with_stages_that_do_not_fit_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        LayoutError,
        match=r"stages=\[1, 2\] has 3 blocks, but the model has 4. Use for example stages=\[1, 3\]",
    ):
        dry("parallelism=pp2", "parallelism.stages=[1,2]")
    with pytest.raises(
        ConfigError,
        match="here the planner chooses the layout. Name a layout in train or dryrun, omit stages",
    ):
        dry(
            "parallelism=auto",
            "parallelism.stages=[1,2]",
            "cluster=h100_1x8",
            "parallelism.micro_batch_size=1",
        )
    config, plan = dry(
        "parallelism=pp4", "parallelism.stages=[1,1,1,1]", "parallelism.micro_batch_size=1"
    )
    given, dropped = strategy_arguments(OmegaConf.to_container(config), plan, Layout(pp=2))
    assert given["stages"] is None and "parallelism.stages" in dropped, (
        "lightning-3d verify says that it leaves them out"
    )


def test_the_planner_counts_the_stages_that_are_given() -> None:
    """The parameters of the fullest rank, by hand."""
    _, plan = dry(
        "parallelism=pp2_dp4",
        "parallelism.stages=[1,3]",
        "data.global_batch_size=64",
        "model=llama3_70b",
        "model.config.num_hidden_layers=4",
        "cluster=h100_1x8",
    )
    job = job_of(plan.run, "bf16", plan.layout, plan.schedule, plan.micro_batch_size)
    assert [(stage.blocks, stage.embedding, stage.head) for stage in stages_of(job)] == [
        (1, True, False),
        (3, False, True),
    ]
    balanced = replace(job, blocks=None)
    block = 8192 * (8192 + 1024) * 2 + 3 * 8192 * 28672 + 2 * 8192
    whole = [parameters_of(one, stages_of(one)[1])[0] for one in (job, balanced)]
    assert [stage.blocks for stage in stages_of(balanced)] != [1, 3]
    assert whole[0] - whole[1] == (3 - stages_of(balanced)[1].blocks) * block


CASES = [
    ({"layout": "pp2", "stages": [1, 4]}, [{0}, {1, 2, 3, 4}]),
    (
        {"layout": "tp2_pp2", "schedule": "Interleaved1F1B", "vp": 2, "stages": [1, 2, 1, 1]},
        [{0, 3}, {0, 3}, {1, 2, 4}, {1, 2, 4}],
    ),
    (
        {"layout": "pp2_dp2", "schedule": "ZBVZeroBubble", "stages": [2, 1, 1, 1]},
        [{0, 1, 4}, {2, 3}, {0, 1, 4}, {2, 3}],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "owned"), by_default(CASES, 1), ids=str)
def test_ranks_train_the_given_blocks_as_one_process_does(
    options: dict[str, Any], owned: list[set[int]]
) -> None:
    """The self-check splits the model in the same way."""
    recipe = Recipe("llama", layers=5, dtype="float64", steps=3)
    layout = Layout.parse(options["layout"])
    parts = run_ranks(
        parity.train_on_rank,
        layout.world_size,
        recipe,
        micro_batch_size=2,
        self_check="always",
        **options,
    )
    parity.assert_same_run(parts, reference(recipe)[0], "float64")
    blocks = [
        {int(found[1]) for name in part.weights if (found := re.search(r"layers\.(\d+)\.", name))}
        for part in parts
    ]
    assert blocks == owned


def other_stages() -> str:
    recipe = Recipe("llama", steps=1)
    module, rows = parity.Module(recipe), parity.Rows(data(recipe))
    parity.fit_on_rank(recipe, rows, module, layout="pp2", micro_batch_size=2, stages=[1, 3])
    parity.fit_on_rank(recipe, rows, module, layout="pp2", micro_batch_size=2, stages=[1, 3])
    with pytest.raises(ConfigError) as refused:
        parity.fit_on_rank(recipe, rows, module, layout="pp2", micro_batch_size=2, stages=[2, 2])
    return str(refused.value)


@pytest.mark.slow
def test_a_module_keeps_its_stages() -> None:
    assert all(
        "into stages of [1, 3] blocks; it cannot be partitioned again for stages=[2, 2]" in said
        for said in run_ranks(other_stages, 2)
    )


def test_a_strategy_refuses_another_number_of_stages() -> None:
    from lightning_3d import Lightning3DStrategy

    with pytest.raises(LayoutError, match=r"must have 2 whole numbers"):
        Lightning3DStrategy("pp2", stages=[1, 2, 3])
    for wrong in (4, "13"):
        with pytest.raises(
            LayoutError,
            match="must be auto or a list: the number of blocks of each of the 2 stages",
        ):
            Lightning3DStrategy("pp2", stages=wrong)  # type: ignore[arg-type]
