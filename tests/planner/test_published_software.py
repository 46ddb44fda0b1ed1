"""What software of others does, and the package does not: its attention, its messages between
stages, and its step at ZeRO 1."""

from dataclasses import replace

import pytest

from benchmarks.planner_accuracy.software import (
    ANY,
    FOUNDRY,
    FOUNDRY_A100,
    MEGATRON,
    MEGATRON_2021,
    NANOTRON,
    any_software,
    unseen_software,
)
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.block_costs import message_seconds, work_of
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import ONE, Efficiency, Machine
from lightning_3d.app.planner.stack import Stack
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.layout import Layout

MODEL = Architecture.plain(
    layers=4, hidden=1024, heads=8, kv_heads=8, vocab=1000, ffn=4096, gated=False, tied=False
)
MACHINE = Machine(
    "A100",
    4,
    4,
    80e9,
    2e12,
    312e12,
    312e12,
    19e12,
    300e9,
    25e9,
    0.0,
    0.0,
    Efficiency(0.8, 0.5, kernel=0.0),
    protocols=ONE,
)
TENSOR = 2048 * 1024 * 2
"""Bytes of the hidden states of a micro-batch."""


def job(layout: str, stack: Stack, **changes: object) -> Job:
    return replace(
        Job(MODEL, Layout.parse(layout), 2048, 64, 1, sequence_parallel=False, stack=stack),
        **changes,
    )


def test_a_fused_softmax_moves_fewer_bytes_of_scores() -> None:
    """Next to a kernel each for mask, softmax and dropout."""
    scores = 2048 * 2048 * 8 / MACHINE.memory_rate
    [fused] = work_of(job("dp1", MEGATRON_2021), MACHINE).blocks
    [apart] = work_of(
        job("dp1", replace(MEGATRON_2021, score_bytes=Stack().score_bytes)), MACHINE
    ).blocks
    assert apart.forward - fused.forward == pytest.approx((16 - 12) * scores)
    assert apart.backward - fused.backward == pytest.approx((32 - 17) * scores)


def test_ranks_that_have_whole_hidden_states_send_a_part_each_to_the_next_stage() -> None:
    """Over their own network ports, and gather them inside the node."""
    network, link = 25e9 * 0.93, 300e9 * 0.8
    assert message_seconds(job("tp4_pp4", MEGATRON_2021), MACHINE) == pytest.approx(
        TENSOR / 4 / network + 3 / 4 * TENSOR / link
    )
    assert message_seconds(job("tp4_pp4", OURS), MACHINE) == pytest.approx(TENSOR / network), (
        "each rank sends all of it"
    )
    parts = job("tp4_pp4", MEGATRON_2021, sequence_parallel=True)
    assert message_seconds(parts, MACHINE) == pytest.approx(TENSOR / 4 / network), (
        "they have no more than a part"
    )


def test_sequence_parallelism_of_others_scatters_the_sum_of_the_embedding() -> None:
    once = 3 / 4 * TENSOR / (300e9 * 0.8)
    ours, others = (
        work_of(job("tp4", stack, sequence_parallel=True), MACHINE).embedding
        for stack in (OURS, MEGATRON)
    )
    assert ours.forward_communication == pytest.approx(2 * once)
    assert others.forward_communication == pytest.approx(once * MEGATRON.overlap.layers)
    alone = work_of(job("tp4", MEGATRON), MACHINE).embedding
    assert alone.forward_communication == pytest.approx(2 * once * MEGATRON.overlap.layers)


def test_nanotron_moves_whole_gradients_and_gathered_parameters_at_zero_1() -> None:
    """ZeRO 1 shards the rest of the optimizer's step; a single rank gathers nothing, and without
    ZeRO no rank does."""
    byte = MODEL.parameters / MACHINE.memory_rate
    whole, sharded, alone = (
        step_of(job(*case), MACHINE).optimizer
        for case in (("dp4", NANOTRON), ("dp4", OURS), ("dp1", NANOTRON))
    )
    assert whole == pytest.approx(byte * (16 + 12 + (118 - 16) / 4), rel=1e-6)
    assert sharded == pytest.approx(byte * OURS.traffic.parameter / 4, rel=1e-6)
    assert alone == pytest.approx(byte * 118, rel=1e-6)
    assert step_of(job("dp4", NANOTRON, zero=0), MACHINE).optimizer == pytest.approx(
        byte * 118, rel=1e-6
    )


def test_unknown_software_keeps_what_its_source_says() -> None:
    """Its counted bytes, not what was fitted to its runs."""
    unknown = any_software(NANOTRON)
    assert replace(unknown.traffic, elementwise=NANOTRON.traffic.elementwise) == NANOTRON.traffic
    assert (unknown.traffic.elementwise, unknown.host, unknown.network) == (
        ANY.traffic.elementwise,
        ANY.host,
        ANY.network,
    )
    assert not unknown.scatters and unknown.host_tensor == 0


def test_software_that_is_judged_keeps_nothing_that_was_fitted_to_its_runs() -> None:
    """Nor the speed of its attention, unless that was published, nor the bandwidth of its
    gathers."""
    assert {unseen_software(one).attention_speed for one in (FOUNDRY, FOUNDRY_A100)} == {
        ANY.attention_speed
    }
    assert unseen_software(MEGATRON).attention_speed == MEGATRON.attention_speed
    fitted, unseen = MEGATRON_2021.separate, unseen_software(MEGATRON_2021).separate
    assert fitted is not None and unseen == replace(fitted, network=ANY.network) != fitted
