"""What the planner expects of experts on several nodes, of a shared expert that runs while tokens
travel, and of grouped products."""

from dataclasses import replace
from itertools import combinations

import pytest

from benchmarks.planner_accuracy.software import MEGATRON
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.block_costs import CostPart, nodes_of_a_token, work_of
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Efficiency, Machine, gather
from lightning_3d.app.planner.stack import Overlap, Stack
from lightning_3d.layout import Layout

MODEL = Architecture.plain(
    layers=2,
    hidden=1024,
    heads=8,
    kv_heads=8,
    vocab=1000,
    ffn=512,
    gated=True,
    tied=False,
    experts=16,
    top_k=4,
)
MACHINE = Machine(
    "H100", 4, 4, 80e9, 3.35e12, 989e12, 1979e12, 67e12, 450e9, 25e9, 0.0, 0.0, Efficiency(0.6, 0.4)
)


def block(model: Architecture, layout: str, machine: Machine = MACHINE) -> CostPart:
    [found] = work_of(Job(model, Layout.parse(layout), 4096, 64, 1), machine).blocks
    return found


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_nodes_of_a_token(nodes: int) -> None:
    """Against all choices of experts."""
    chosen = [
        len({expert // (16 // nodes) for expert in experts})
        for experts in combinations(range(16), 4)
    ]
    assert nodes_of_a_token(MODEL, nodes) == pytest.approx(sum(chosen) / len(chosen))


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("groups", "chosen"), [(8, 2), (4, 2), (4, 3)])
def test_nodes_of_a_token_that_chooses_groups(groups: int, chosen: int, nodes: int) -> None:
    """Against all choices of groups, and of experts in them (DeepSeek-V3)."""
    size = 16 // groups
    found = [
        len({expert // (16 // nodes) for expert in experts})
        for picked in combinations(range(groups), chosen)
        for experts in combinations(
            [group * size + place for group in picked for place in range(size)], 4
        )
    ]
    model = replace(MODEL, groups=groups, top_groups=chosen)
    assert nodes_of_a_token(model, nodes) == pytest.approx(sum(found) / len(found))


def test_a_token_crosses_once_to_each_node() -> None:
    """Both ways, forward and backward, and within the node once to each expert."""
    found = block(MODEL, "ep16_dp16")
    row, tokens = 1024 * 2, 4096
    crossing = tokens * nodes_of_a_token(MODEL, 4) * 3 / 4 * row / (25e9 * 0.93)
    inside = tokens * 4 * 3 / 4 * row / (450e9 * 0.8)
    assert found.forward_communication == pytest.approx(2 * (crossing + inside))
    assert found.backward_communication == pytest.approx(found.forward_communication)


def test_one_way_there_is_hidden_behind_the_shared_expert() -> None:
    """As much of it as the shared expert takes; within a node it takes longer than the exchange."""
    for layout, whole in (("ep16_dp16", False), ("ep4_dp16", True)):
        alone, beside = (
            block(MODEL, layout),
            block(replace(MODEL, shared_ffn=64 if not whole else 4096), layout),
        )
        hidden = alone.forward_communication - beside.forward_communication
        if whole:
            assert hidden == pytest.approx(alone.forward_communication / 2)
        else:
            assert (
                hidden == pytest.approx(beside.forward - alone.forward)
                and hidden < alone.forward_communication / 2
            )


def starts(
    layout: str = "dp1",
    gpu: str = "NVIDIA H100 80GB HBM3",
    model: Architecture = MODEL,
    **changes: object,
) -> int:
    """Products of a block's experts that start one after the other: with a start of a second, and
    rates that cost next to nothing."""
    fast = replace(
        MACHINE,
        gpu=gpu,
        bandwidth=1e30,
        peak=1e30,
        peak8=1e30,
        peak32=1e30,
        efficiency=Efficiency(1.0, 1.0, kernel=1.0),
    )
    [found] = work_of(
        replace(Job(model, Layout.parse(layout), 64, 64, 1, stack=OURS), **changes), fast
    ).blocks
    each, rest = divmod(round(found.forward) - len(model.attention), len(model.mlp(1)))
    assert rest == 0 and round(found.backward) == 2 * round(found.forward)
    return each


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        *(
            ("NVIDIA H100 80GB HBM3", 1),
            ("NVIDIA H200", 1),
            ("NVIDIA GB200", 1),
            ("B300", 1),
            ("GH200 480GB", 1),
        ),
        *(
            ("NVIDIA A100-SXM4-80GB", 16),
            ("NVIDIA L40S", 16),
            ("NVIDIA RTX PRO 6000 Blackwell", 16),
            ("AMD EPYC 7B13", 16),
        ),
    ],
)
def test_experts_start_together_where_torch_has_a_kernel_for_it(gpu: str, expected: int) -> None:
    assert starts(gpu=gpu) == expected
    assert starts("ep4_dp4", gpu=gpu) == (1 if expected == 1 else 4)


def test_experts_start_one_by_one_in_float32_and_where_rows_are_narrow() -> None:
    assert starts(precision="fp32", weight_bytes=4.0) == starts(weight_bytes=4.0) == 16
    assert starts(precision="fp8") == 1
    assert starts("tp4", model=replace(MODEL, expert_ffn=544)) == 1
    assert starts("tp4", model=replace(MODEL, expert_ffn=528)) == 16


def test_experts_of_fp8_runs_multiply_in_16_bits_and_those_of_mixed_ones_in_32() -> None:
    """Only linear layers multiply in float8."""

    def experts(precision: str, weight_bytes: float) -> float:
        job = Job(
            MODEL, Layout(), 4096, 64, 1, precision=precision, weight_bytes=weight_bytes, stack=OURS
        )
        whole, half = (
            work_of(replace(job, model=replace(MODEL, expert_ffn=width)), MACHINE).blocks[0].forward
            for width in (512, 256)
        )
        return whole - half

    work = 2 * 4096 * 4 * 3 * 256 * 1024
    assert experts("fp8", 2.0) == pytest.approx(experts("bf16", 2.0), rel=0.1)
    assert work / (989e12 * 0.6) < experts("bf16", 2.0) < 3 * work / (989e12 * 0.6)
    assert experts("bf16", 4.0) == pytest.approx(experts("fp32", 4.0), rel=0.1)
    assert work / (67e12 * 0.6) < experts("bf16", 4.0) < 1.2 * work / (67e12 * 0.6)


def test_experts_are_whole_on_fewer_ranks_than_tensor_parallel_ones() -> None:
    """tp4_ep2: a rank has half of the experts, and reads all of their weights."""
    few = Job(MODEL, Layout.parse("tp4_ep2_dp4"), 4, 64, 1, stack=OURS)
    wider = replace(MODEL, expert_ffn=1024)
    grown = (
        work_of(replace(few, model=wider), MACHINE).blocks[0].forward
        - work_of(few, MACHINE).blocks[0].forward
    )
    assert grown == pytest.approx(8 * 3 * 512 * 1024 * 2 / MACHINE.memory_rate, rel=0.02)


def test_megatrons_experts_start_on_four_streams() -> None:
    for layout, experts in (("dp1", 16), ("ep4_dp4", 4), ("ep8_dp8", 2)):
        assert starts(layout, stack=MEGATRON) == -(-experts // 4)


def test_megatron_sends_each_token_to_each_expert() -> None:
    """Straight to the rank that has it, also where several are on one node."""
    [found] = work_of(
        Job(MODEL, Layout.parse("ep16_dp16"), 4096, 64, 1, stack=MEGATRON), MACHINE
    ).blocks
    assert found.forward_communication == pytest.approx(
        2 * 4096 * 4 * 12 / 16 * 1024 * 2 / (25e9 * 0.93)
    )
    assert found.backward_communication == pytest.approx(found.forward_communication)


def test_experts_that_megatron_shards_over_tp_gather_their_tokens() -> None:
    """tp4 and 4 ranks that share experts: with ETP, a rank sends to 4 nodes, and gathers 4 times as
    many tokens inside its node."""
    job = Job(
        MODEL,
        Layout.parse("tp4_ep16_dp4"),
        4096,
        64,
        1,
        stack=replace(MEGATRON, overlap=Overlap(layers=0.0)),
    )
    [whole] = work_of(job, MACHINE).blocks
    [sharded] = work_of(replace(job, stack=replace(job.stack, shards_experts=True)), MACHINE).blocks
    copies = 1024 * 4 * 1024 * 2
    crossing, gathered = copies * 3 / 4 / (25e9 * 0.93), 4 * copies * 3 / 4 / (450e9 * 0.8)
    assert whole.forward_communication == pytest.approx(2 * crossing)
    assert sharded.forward_communication == pytest.approx(2 * (crossing + gathered))
    assert (
        starts("tp4_ep16_dp4", stack=job.stack)
        == 1
        == starts("tp4_ep16_dp4", stack=replace(job.stack, shards_experts=True))
    )
    assert starts("tp4_ep8_dp4", stack=replace(job.stack, shards_experts=True)) == 2, (
        "8 experts of 16, sharded over 4 ranks"
    )


@pytest.mark.parametrize("stack", [OURS, MEGATRON], ids=["ours", "megatron"])
@pytest.mark.parametrize("sequence", [True, False])
def test_tensor_parallel_ranks_send_no_hidden_states_for_experts_of_other_ranks(
    sequence: bool, stack: Stack
) -> None:
    """Attention has a pair of messages. Ranks that have whole sequences gather what comes back from
    experts, and its gradient."""
    job = Job(
        MODEL, Layout.parse("tp4_ep4_dp4"), 4096, 64, 1, sequence_parallel=sequence, stack=stack
    )
    free = replace(MACHINE, bandwidth=1e30)
    [found] = work_of(job, free).blocks
    once = gather(free, free.group(job.layout, ("tp",)), 4096 * 1024 * 2) * stack.overlap.layers
    exchanged = 2 * 1024 * 4 * 3 / 4 * 1024 * 2 / (450e9 * 0.8)
    assert found.forward_communication == pytest.approx((2 if sequence else 3) * once + exchanged)
    assert found.backward_communication == pytest.approx(3 * once + exchanged)


@pytest.mark.parametrize("sequence", [True, False])
def test_a_shared_expert_that_is_sharded_has_a_pair_of_messages(sequence: bool) -> None:
    """As many as an MLP; none if tensor parallelism leaves it whole."""
    job = Job(
        replace(MODEL, shared_ffn=512),
        Layout.parse("tp4_ep4_dp4"),
        4096,
        64,
        1,
        sequence_parallel=sequence,
        stack=OURS,
    )
    free = replace(MACHINE, bandwidth=1e30, peak=1e30)
    whole = replace(job, model=replace(job.model, whole_shared=True))
    [sharded], [left] = work_of(job, free).blocks, work_of(whole, free).blocks
    once = gather(free, free.group(job.layout, ("tp",)), 4096 * 1024 * 2)
    assert sharded.forward_communication - left.forward_communication == pytest.approx(
        2 * once, rel=1e-6
    )
    assert sharded.backward_communication - left.backward_communication == pytest.approx(
        (3 if sequence else 2) * once, rel=1e-6
    )
