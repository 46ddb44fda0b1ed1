"""The planner counts frozen second models: bytes as dry runs hold them, operations as dry runs
count them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from composed_configs import composed, dry
from ranks import run_ranks

from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.planner.advice import PlannerAdvice, job_of
from lightning_3d.app.planner.block_costs import work_of
from lightning_3d.app.planner.block_memory import block_bytes
from lightning_3d.app.planner.exposed_messages import exposed_in_frozen
from lightning_3d.app.planner.frozen import frozen_weights
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import ONE, Efficiency, Machine
from lightning_3d.app.planner.memory import memory_of, stages_in_flight
from lightning_3d.app.planner.rank_memory import memory_of_rank
from lightning_3d.app.planner.stages import Stage, parameters_of
from lightning_3d.errors import ConfigError, LayoutError

WORDS = (
    "model=llama3_1_8b",
    "model.config.num_hidden_layers=2",
    "data.sequence_length=64",
    "data.global_batch_size=8",
)
WORDS += (
    "parallelism.micro_batch_size=1",
    "cluster=h100_1x8",
    "precision=fp32",
    "force=true",
    "trainer.dry=true",
)
DPO = ("objective.name=dpo", "data=python_pairs", "model.pretrained=required")
TEACHER = {
    "model_type": "qwen2",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 3,
}
TEACHER |= {"num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False}


@pytest.fixture
def distillation(tmp_path: Path) -> tuple[str, ...]:
    """Words of a run whose teacher is larger and of another family; only its configuration is
    there."""
    (tmp_path / "config.json").write_text(json.dumps(TEACHER))
    return "objective.name=distillation", f"objective.teacher={tmp_path}", "data=tokens"


def job(*words: str) -> Job:
    _, plan = dry(*WORDS, *words)
    return job_of(plan.run, "fp32", plan.layout, plan.schedule, plan.micro_batch_size)


def dry_last_rank(*words: str) -> Any:
    from lightning_3d.app.cli.dryrun import job_of
    from lightning_3d.app.dryrun.run import dry_run
    from lightning_3d.app.runs.check import check_shapes

    config, plan = check_shapes(words)
    teacher = plan.run.objective.teacher_fields(plan.model["config"]["vocab_size"])
    return dry_run(job_of(config, plan, teacher), plan.layout.world_size - 1)


_GATHER = ("all_gather_into_tensor", 4)
"""Over the ranks that shard parameters."""
ONLY_LINKS = Machine(
    "none",
    1,
    8,
    1e12,
    bandwidth=1e30,
    peak=1e30,
    peak8=1e30,
    peak32=1e30,
    link=1e9,
    network=1e9,
    link_latency=0.0,
    network_latency=0.0,
    efficiency=Efficiency(matmul=1.0, attention=1.0, link=1.0, network=1.0, kernel=0.0),
    protocols=ONE,
)
"""Computes in no time."""
FULL = pytest.mark.full
LAYOUTS = [
    ("tp2_pp2_dp2", 1),
    pytest.param("tp4_dp2", 0, marks=FULL),
    pytest.param("pp2_dp4", 2, marks=FULL),
]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["distillation", pytest.param("dpo", marks=FULL)])
@pytest.mark.parametrize(("layout", "zero"), LAYOUTS)
def test_bytes_of_a_second_model_are_those_of_a_dry_run(
    objective: str, layout: str, zero: int, distillation: tuple[str, ...]
) -> None:
    """Those of both models, on a rank of the last stage."""
    words = (
        *(distillation if objective == "distillation" else DPO),
        f"parallelism={layout}",
        f"parallelism.zero_stage={zero}",
    )
    one = job(*words)
    [report] = run_ranks(dry_last_rank, 1, *WORDS, *words, process_group=False, timeout=300)
    weights = memory_of_rank(one, stages_in_flight(one)[-1], block_bytes(one)).weights
    assert weights == pytest.approx(report.usage.peak["parameters"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_dp4", pytest.param("tp2_dp2_cp2", marks=FULL)])
def test_zero_3_gathers_two_blocks_of_a_teacher_at_a_time(
    layout: str, distillation: tuple[str, ...]
) -> None:
    """The peak of this run is in the forward of the teacher, whose blocks are larger: there are no
    blocks of the trained model."""
    words = (f"parallelism={layout}", "parallelism.zero_stage=3")
    one = job(*distillation, *words)
    frozen = frozen_weights(one)
    blocks, ends = (
        4 * sum(parameters_of(one, Stage(counts, True, True))) for counts in ((2,), (0,))
    )
    reports = [
        run_ranks(dry_last_rank, 1, *WORDS, *words, *objective, process_group=False, timeout=300)[0]
        for objective in (distillation, ("data=tokens",))
    ]
    assert reports[0].usage.peak["parameters"] == pytest.approx(
        blocks / 4 + ends + frozen.held + frozen.passing, rel=0.01
    )
    gathered, alone = (
        sum(
            4 * count * call.bytes
            for call, count in report.usage.collectives.items()
            if (call.name, len(call.ranks)) == _GATHER
        )
        for report in reports
    )
    assert frozen.gathered == pytest.approx(gathered - alone, rel=0.01)


SPLIT = (
    "parallelism=pp2_dp4",
    "parallelism.zero_stage=3",
    "parallelism.schedule=InterleavedZeroBubble",
    "parallelism.vp=1",
)


def test_a_split_backward_gathers_the_trained_model_whole_and_a_teacher_in_blocks(
    distillation: tuple[str, ...],
) -> None:
    """As with another schedule, 3 of 4 parts of each of the teacher's three blocks arrive in every
    micro-batch."""
    split, plain = (
        job(*distillation, *SPLIT),
        job(*distillation, *SPLIT[:2], "parallelism.schedule=1F1B"),
    )
    assert (split.gathers_often, plain.gathers_often) == (False, True)
    frozen = frozen_weights(split)
    assert frozen == frozen_weights(plain) and frozen.passing > 0
    exposed = exposed_in_frozen(split, ONLY_LINKS).forward_communication
    assert exposed == pytest.approx(3 * frozen.passing / 2 * 3 / 4 / ONLY_LINKS.link, rel=1e-3)


@pytest.mark.full
def test_bytes_of_a_split_backward_with_a_teacher_are_those_of_a_dry_run(
    distillation: tuple[str, ...],
) -> None:
    """On the last of two stages, with one block: its weights, gathered and sharded, next to those
    of the teacher."""
    one = job(*distillation, *SPLIT)
    frozen, trained = frozen_weights(one), 4 * sum(parameters_of(one, Stage((1,), False, True)))
    [report] = run_ranks(
        dry_last_rank, 1, *WORDS, *SPLIT, *distillation, process_group=False, timeout=300
    )
    assert report.usage.peak["parameters"] == pytest.approx(
        trained * 5 / 4 + frozen.held + frozen.passing, rel=0.01
    )


def test_a_whole_teacher_does_not_fit_where_its_blocks_do(distillation: tuple[str, ...]) -> None:
    """`zero_gather=step` gathers all of it: by hand, three blocks and both embeddings."""
    by_block, whole = (
        job(*distillation, "parallelism=dp8", "parallelism.zero_stage=3", *more)
        for more in ((), ("parallelism.zero_gather=step",))
    )
    part, all_of_it = frozen_weights(by_block), frozen_weights(whole)
    hidden, ffn = TEACHER["hidden_size"], TEACHER["intermediate_size"]
    layer, ends = (
        4 * (hidden * hidden * 2 * (1 + 8 / 64) + 3 * hidden * ffn),
        4 * 2 * TEACHER["vocab_size"] * hidden,
    )
    size = TEACHER["num_hidden_layers"] * layer + ends
    assert all_of_it.held == pytest.approx(size * 9 / 8, rel=1e-3) and all_of_it.passing == 0
    assert (part.held, part.passing) == pytest.approx((size / 8 + ends, 2 * layer), rel=1e-3)
    assert memory_of(by_block).total < memory_of(whole).total
    # Nothing hides the messages where computation takes no time: 7 of 8 parts of each block arrive
    # in every micro-batch.
    exposed = exposed_in_frozen(by_block, ONLY_LINKS).forward_communication
    assert exposed == pytest.approx(
        TEACHER["num_hidden_layers"] * layer * 7 / 8 / ONLY_LINKS.link, rel=1e-3
    )
    assert exposed_in_frozen(whole, ONLY_LINKS).forward_communication == 0


def test_weights_are_sharded_where_sizes_divide_and_only_on_the_last_stage(
    distillation: tuple[str, ...],
) -> None:
    """By hand: the teacher has 64 heads, so that tp8 shards it; with 60, tp8 leaves it whole."""
    hidden, ffn = TEACHER["hidden_size"], TEACHER["intermediate_size"]
    layer = hidden * hidden * 2 * (1 + 8 / 64) + 3 * hidden * ffn
    size = 4 * (TEACHER["num_hidden_layers"] * layer + 2 * TEACHER["vocab_size"] * hidden)
    for changes, ranks in (({}, 8), ({"heads": 60, "kv_heads": 60}, 1)):
        one = job(*distillation, "parallelism=tp8", "parallelism.zero_stage=0")
        assert one.frozen is not None
        one = replace(one, frozen=replace(one.frozen, **changes))
        added = memory_of(one).weights - memory_of(replace(one, frozen=None)).weights
        assert added == pytest.approx(size / ranks, rel=1e-3)
    piped = job(*distillation, "parallelism=tp4_pp2", "parallelism.zero_stage=1")
    first, last = (
        memory_of_rank(piped, own, block_bytes(piped)).weights for own in stages_in_flight(piped)
    )
    alone = replace(piped, frozen=None)
    assert first == memory_of_rank(alone, stages_in_flight(alone)[0], block_bytes(alone)).weights
    assert last - memory_of_rank(
        alone, stages_in_flight(alone)[1], block_bytes(alone)
    ).weights == pytest.approx(size / 4, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2_dp4", "dp4_cp2"])
def test_operations_of_a_teacher_are_those_of_a_dry_run(
    layout: str, distillation: tuple[str, ...]
) -> None:
    """On a machine that only matrix products keep busy. Context-parallel ranks split its
    sequences."""
    words = (f"parallelism={layout}", "parallelism.zero_stage=1", "model.attn_implementation=eager")
    rates = dict.fromkeys(("bandwidth", "link", "network"), 1e30)
    efficiency = Efficiency(matmul=1.0, attention=1.0, kernel=0.0)
    machine = Machine(
        "none",
        1,
        8,
        1e12,
        peak=1e15,
        peak8=1e15,
        peak32=1e15,
        link_latency=0.0,
        network_latency=0.0,
        efficiency=efficiency,
        **rates,
    )
    one = job(*distillation, *words)
    one = replace(
        one,
        stack=replace(
            one.stack, host=replace(one.stack.host, block=0.0, collectives=0.0, step=0.0)
        ),
    )
    added = (
        work_of(one, machine).head.forward
        - work_of(replace(one, frozen=None), machine).head.forward
    )
    counted = []
    for objective in (distillation, ("data=tokens",)):
        [report] = run_ranks(
            dry_last_rank, 1, *WORDS, *words, *objective, process_group=False, timeout=300
        )
        counted.append(report.usage.flops)
    assert added * 1e15 * one.micro_batches == pytest.approx(counted[0] - counted[1], rel=0.02)


def test_pairs_are_two_sequences_for_both_models() -> None:
    pairs, text = job(*DPO, "parallelism=dp8"), job("data=tokens", "parallelism=dp8")
    assert (pairs.calls, text.calls) == (2, 1) and pairs.tokens == 2 * text.tokens
    assert pairs.frozen == pairs.model and text.frozen is None


def test_a_teacher_that_does_not_fit_is_refused_before_ranks_start(
    distillation: tuple[str, ...],
) -> None:
    """In fp32, the three layers and both embeddings of the teacher take 20 GB."""
    words = [word for word in WORDS if word != "force=true"] + [
        *distillation,
        "parallelism=dp8",
        "parallelism.zero_stage=1",
    ]
    PlannerAdvice().refuse(
        plan_run(composed(*words)).run, "fp32", plan_run(composed(*words)).layout, "1F1B", 1
    )
    small = [*words, "cluster.memory=20e9"]
    with pytest.raises(LayoutError, match="dp8 needs about .* on its fullest rank"):
        plan_run(composed(*small), None, PlannerAdvice())


def test_a_teacher_of_an_unknown_family_or_without_a_name_gives_a_warning(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TEACHER, "model_type": "apertus"}))
    unknown, unnamed = (
        "does not know the model family 'apertus' of the frozen teacher",
        "no folder on this machine has its sizes",
    )
    for teacher, says in ((str(tmp_path), unknown), ("required", unnamed)):
        words = (
            *WORDS[:-2],
            "trainer.dry=true",
            "objective.name=distillation",
            f"objective.teacher={teacher}",
            "data=tokens",
        )
        plan = plan_run(
            composed(*words, "parallelism=dp8", "cluster=h100_1x8"), None, PlannerAdvice()
        )
        assert any(says in warning for warning in plan.warnings)


def test_a_damaged_teacher_is_refused_before_ranks_start(tmp_path: Path) -> None:
    """Of a run that starts, the weights are looked at, too; their values are not read."""
    words = [word for word in WORDS if "dry" not in word] + [
        "objective.name=distillation",
        f"objective.teacher={tmp_path}",
    ]
    words += [
        "parallelism=dp1",
        "cluster=local_cpu",
        "data=tokens",
        "data.train_path=/there",
        "precision=fp32",
    ]
    (tmp_path / "config.json").write_text(json.dumps({**TEACHER, "vocab_size": 32000}))
    with pytest.raises(
        ConfigError,
        match=r"objective.teacher=.* has a vocabulary of 32000 tokens, but the model has 128256",
    ):
        plan_run(composed(*words))
