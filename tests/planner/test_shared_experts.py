"""Gradients of experts that ep distributes over ranks: what the planner says of their messages, by
hand, and of their memory."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from composed_configs import dry, dry_peak
from ranks import run_ranks

from benchmarks.planner_accuracy.software import Published
from lightning_3d.app.planner.advice import job_of
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import ONE, Efficiency, Machine
from lightning_3d.app.planner.memory import memory_of
from lightning_3d.app.planner.stages import Stage, parameters_of
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.layout import Layout

LINK, NETWORK, OPERATIONS = 450e9, 50e9, 1e15
MODEL = Architecture.plain(
    layers=4,
    hidden=1024,
    heads=8,
    kv_heads=8,
    vocab=8,
    ffn=2048,
    gated=False,
    tied=True,
    experts=8,
    top_k=2,
)
EXPERT = 2 * 1024 * 2048
"""Parameters of an expert: two matrices."""


def machine() -> Machine:
    """Two nodes of 4 GPUs on which memory, attention and starts cost nothing."""
    free = Efficiency(matmul=1.0, attention=inf, memory=1.0, link=1.0, network=1.0, kernel=0.0)
    rates = inf, inf, OPERATIONS, OPERATIONS, OPERATIONS, LINK, NETWORK
    return Machine("", 2, 4, *rates, 0.0, 0.0, free, protocols=ONE)


@pytest.mark.parametrize(
    "layout",
    [
        "tp2_cp2_dp4_ep4",
        "tp4_dp4_ep8",
        "cp2_dp8_ep4",
        "tp2_pp2_dp4_ep4",
        "pp2_dp8_ep4",
        "cp4_pp2_dp2_ep2",
    ],
)
@pytest.mark.parametrize(
    "order", [("tp", "cp", "pp", "dp"), ("tp", "cp", "dp", "pp"), ("pp", "tp", "cp", "dp")], ids=str
)
def test_groups_of_experts_are_those_of_the_layout(layout: str, order: tuple[str, ...]) -> None:
    """Ranks that share the experts of a stage, and those that have the same ones: how many, and how
    many of them on a node of 4."""
    ranks = Layout.parse(layout, order=order)
    cluster = replace(machine(), nodes=ranks.world_size // 4)
    found = cluster.expert_groups(ranks, ranks.dp)
    for group, groups in zip(
        found, (ranks.expert_groups(), ranks.expert_data_groups()), strict=True
    ):
        [own] = [each for each in groups if 0 in each]
        assert (group.size, group.local) == (len(own), sum(rank < 4 for rank in own))


def data(layout: Layout, width: int, **changes: Any) -> float:
    """Exposed seconds of reducing gradients and gathering parameters once in a step, with
    micro-batches that hide what they can."""
    schedule = "Interleaved1F1B" if layout.vp > 1 else "1F1B"
    job = Job(
        replace(MODEL, expert_ffn=width),
        layout,
        4096,
        64 * layout.dp,
        32,
        schedule=schedule,
        **{"stack": OURS, **changes},
    )
    return step_of(job, machine()).data


def of_experts(layout: str, **changes: Any) -> tuple[float, float]:
    """(the part of these seconds that experts take, those in which half of their float32 gradients
    pass the network): in both layouts, two GPUs on two nodes have the same experts. The rest is the
    same for experts that are half as wide."""
    ranks = Layout.parse(layout)
    seconds = 2 * (data(ranks, 2048, **changes) - data(ranks, 1024, **changes))
    return seconds, 1 / 2 * 4 * EXPERT * 8 / ranks.ep * 4 / ranks.pp / NETWORK


@pytest.mark.parametrize(("layout", "shown"), [("dp8_ep4", 1.0), ("pp2_dp4_ep2_vp2", 0.5)])
@pytest.mark.parametrize(
    ("changes", "sums", "gathers"),
    [
        ({"zero": 0}, 2, 0),
        ({"zero": 1}, 1, 1),
        ({"zero": 3, "reduce": "step"}, 2, 0),
        ({"zero": 3, "reduce": "micro_batch"}, 2, 0),
    ],
    ids=str,
)
def test_gradients_of_shared_experts_are_sent_after_the_backward(
    layout: str, shown: float, changes: dict[str, Any], sums: int, gathers: int
) -> None:
    """Once in a step, and at stage 3 with an all-reduce. Of two chunks of a rank, the first has
    half of its experts and ends last. Gathers are of 2 bytes, and wait."""
    found, once = of_experts(layout, **changes)
    assert found == pytest.approx(shown * sums * once + gathers * once / 2, rel=1e-3)


def test_shards_of_experts_are_summed_over_replicas_after_the_backward() -> None:
    """A shard group of a node has each expert once, so only the all-reduce over the two nodes
    remains."""
    found, once = of_experts("dp8_ep4", zero=1, shard_size=4)
    assert found == pytest.approx(2 * once, rel=1e-3)


def test_other_software_hides_messages_of_experts_like_all_others() -> None:
    """A tenth of each is shown."""
    found, once = of_experts("dp8_ep4", zero=1, stack=Published())
    assert found == pytest.approx(0.1 * (once + once / 2), rel=1e-3)


def test_a_block_gathers_experts_over_the_ranks_that_have_the_same_ones() -> None:
    """At ZeRO 3, twice for each micro-batch, over one port of the network and not over those of a
    node. All ranks share the rest."""
    model, slow = replace(MODEL, expert_ffn=2048), replace(machine(), network=NETWORK / 100)
    job = Job(model, Layout(dp=8, ep=4), 4096, 8, 1, zero=3, reduce="step", stack=OURS)
    seconds = [
        step_of(replace(job, zero=zero), slow).communication / model.layers for zero in (3, 1)
    ]
    computed = step_of(job, slow).compute / model.layers
    experts, (others, _) = 2 * EXPERT, parameters_of(job, Stage((1,), False, False))
    moved = 1 / 2 * 2 * experts / slow.network + 7 / 8 * 2 * others / (4 * slow.network)
    exchange = seconds[1]
    assert seconds[0] - exchange == pytest.approx(2 * moved - 0.8 * (computed + exchange), rel=1e-3)


WORDS = (
    *(
        "model=mixtral_8x7b",
        "cluster=h100_1x8",
        "data=tokens",
        "data.sequence_length=16",
        "data.global_batch_size=4",
        "precision=bf16",
    ),
    *(
        "parallelism=dp4_ep2",
        "parallelism.micro_batch_size=1",
        "cluster.gpus_per_node=4",
        "model.config.num_hidden_layers=1",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("zero_stage=2",),
        pytest.param(("zero_stage=1",), marks=pytest.mark.full),
        pytest.param(("zero_stage=3",), marks=pytest.mark.full),
        pytest.param(("zero_stage=3", "zero_reduce=step"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_gradients_of_shared_experts_at_their_peak_are_those_of_a_dry_run(
    options: tuple[str, ...],
) -> None:
    """They are whole until the end of the step, and are then copied into one buffer. At stages 2
    and 3, a gradient of another parameter is there too when it is reduced, at most the largest."""
    words = (*WORDS, *(f"parallelism.{option}" for option in options))
    [peak] = run_ranks(dry_peak, 1, *words, process_group=False)
    _, plan = dry(*words, "force=true")
    memory = memory_of(job_of(plan.run, "bf16", plan.layout, plan.schedule, plan.micro_batch_size))
    counted, found = (
        peak["gradients"] + peak["temporary"],
        memory.gradients + memory.activations + memory.loss,
    )
    others = 4 * (32_000 + 4096) * 4096 if options[0] != "zero_stage=1" and len(options) == 1 else 0
    assert counted - others <= 1.001 * found and found <= 1.001 * counted, peak
