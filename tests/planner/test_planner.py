"""What the planner predicts, against published numbers and against a search without shortcuts."""

import csv
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import exp
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import yaml
from command_line import REPOSITORY
from planner_ways import fits

from benchmarks.planner_accuracy import software
from benchmarks.planner_accuracy.allocator import allocated, queue_of
from benchmarks.planner_accuracy.calibration import Attempt, attempts_of, calibration, spread_of
from benchmarks.planner_accuracy.comparison import Comparison, compare, quantile
from benchmarks.planner_accuracy.fit import fit, leave_out, with_values
from benchmarks.planner_accuracy.growth import growth, growth_rows
from benchmarks.planner_accuracy.known_models import named_model
from benchmarks.planner_accuracy.polling import polled_seconds, polling
from benchmarks.planner_accuracy.published_runs import (
    COLUMNS,
    Run,
    architecture_of,
    read_runs,
    run_of,
)
from benchmarks.planner_accuracy.report import contradictions, evaluate
from benchmarks.planner_accuracy.yardstick import judge, yardstick
from lightning_3d.app.planner import constants
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.block_costs import work_of
from lightning_3d.app.planner.block_memory import block_activations
from lightning_3d.app.planner.choices import Fixed, node_shard_size, schedules, shapes
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import ONE, Group, Machine, gather, group, shard_groups
from lightning_3d.app.planner.memory import least_memory, memory_of
from lightning_3d.app.planner.search import Candidate, search
from lightning_3d.app.planner.stack import Footprint, Overlap, Stack
from lightning_3d.app.planner.stages import Stage, parameters_of, shard_ranks, stages_of
from lightning_3d.app.planner.step_time import PredictedStep, least_seconds, stage_seconds, step_of
from lightning_3d.app.planner.tables import data_traffic
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.layout.shard_size import require_possible
from lightning_3d.models.families import read_spec
from lightning_3d.models.spec import ModelSpec

MODELS = sorted(
    path.stem for path in (REPOSITORY / "conf/model").glob("*.yaml") if path.stem != "pretrained"
)


def spec(name: str) -> ModelSpec:
    return read_spec(yaml.safe_load((REPOSITORY / f"conf/model/{name}.yaml").read_text())["config"])


def machine(gpus: int = 64, gpu: str = "H100-80GB") -> Machine:
    found = software.published_machine(gpu, gpus)
    assert found is not None
    return found


def with_one_protocol(gpus: int) -> Machine:
    """A machine whose collectives take as long as a formula by hand says."""
    return replace(machine(gpus), protocols=ONE)


def gpt(**sizes: Any) -> Architecture:
    return Architecture.plain(
        **{
            "kv_heads": sizes["heads"],
            "ffn": 4 * sizes["hidden"],
            "gated": False,
            "tied": True,
            **sizes,
        }
    )


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_parameters_by_name(name: str) -> None:
    by_name = spec(name)
    model = Architecture.from_spec(by_name)
    assert model.parameters == pytest.approx(by_name.parameters, rel=3e-4)
    assert model.model_flops(4096) == pytest.approx(by_name.flops_per_token(4096), rel=4e-3)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_memory_of_zero_is_the_published_one(zero: int, gigabytes: float) -> None:
    # ZeRO (arXiv:1910.02054), figure 1: 7.5 billion parameters on 64 GPUs, gradients in 16 bits
    model = replace(gpt(layers=1, hidden=1024, heads=8, vocab=1000), norms=7_500_000_000)
    stack = Stack(footprint=Footprint(gradient=2.0))
    memory = memory_of(
        Job(
            model,
            Layout(dp=64),
            1,
            64,
            1,
            zero=zero,
            reduce="micro_batch",
            gather="micro_batch",
            stack=stack,
        )
    )
    states = memory.weights + memory.gradients + memory.optimizer
    # the figure leaves out the layers that are whole at a time: here it is the only one
    gathered = 2 * 7.5e9 if zero == 3 else 0
    assert (states - gathered) / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_memory_in_shard_groups_is_that_of_one_group(zero: int) -> None:
    """What 64 ranks hold in groups of 8 is what 8 ranks hold."""
    model = gpt(layers=2, hidden=1024, heads=8, vocab=1024)
    alone = Job(model, Layout(dp=8), 128, 8, 1, zero=zero)
    assert memory_of(
        replace(alone, layout=Layout(dp=64), global_batch=64, shard_size=8)
    ) == memory_of(alone)


@pytest.mark.parametrize(
    ("size", "stage", "message"),
    [
        (0, None, "must be at least 2; got 0"),
        (-2, None, "must be at least 2; got -2"),
        ("2", None, "must be a whole number"),
        (3, None, "3 divides no dp of a layout with 8 ranks. Use 2, 4 or 8"),
        (2, 0, "zero_shard_size=2 needs zero_stage=1, 2 or 3; got 0"),
    ],
)
def test_a_shard_size_that_suits_no_layout_is_refused(
    size: Any, stage: int | None, message: str
) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        require_possible(size, stage, 8)


def test_time_in_shard_groups_is_that_of_two_tiers() -> None:
    """By hand: the links of a node carry 7/8 of all gradients and parameters, and the network 2 *
    7/8 of the eighth that is a shard."""
    stack = replace(constants.OURS, overlap=Overlap(all_reduce=False, data=False, gather=False))
    model, cluster = gpt(layers=2, hidden=1024, heads=8, vocab=1024), with_one_protocol(64)
    job = Job(model, Layout(dp=64), 128, 64, 1, zero=1, shard_size=8, stack=stack)
    size, eighths = model.parameters, 7 / 8
    inside = 2 * 7 * cluster.link_latency + eighths * (4 + 2) * size / (
        cluster.link * cluster.efficiency.link
    )
    across = 2 * (
        7 * cluster.network_latency
        + eighths * 4 * size / 8 / (cluster.network * cluster.efficiency.network)
    )
    assert step_of(job, cluster).data == pytest.approx(inside + across, rel=1e-3)
    assert step_of(replace(job, shard_size=64), cluster) == step_of(
        replace(job, shard_size=None), cluster
    )


@pytest.mark.parametrize(
    ("changes", "layout", "shown"),
    [
        ({}, Layout(pp=2, dp=8), 0.1),
        ({}, Layout(pp=2, dp=4, cp=2), 0.1),
        ({"zero": 0}, Layout(pp=2, dp=8), 0.1),
        ({"reduce_scatter": False}, Layout(pp=2, dp=8), 1.0),
        ({"reduce_scatter": False}, Layout(pp=2, dp=8, vp=2), 0.5),
        ({"zero": 3}, Layout(pp=2, dp=8), 1.0),
        ({"zero": 3}, Layout(pp=2, dp=8, vp=2), 0.5),
        ({}, Layout(pp=2, cp=8), 0.1),
        ({"zero": 0}, Layout(pp=2, cp=8), 0.1),
    ],
    ids=str,
)
def test_a_reduction_hides_as_far_as_the_engine_sends_it_inside_a_backward(
    changes: dict[str, Any], layout: Layout, shown: float
) -> None:
    """docs/zero.md: in one tensor and at stage 3, gradients of a stage follow when its last
    backward is over. Of two chunks the first has half of the parameters, and ends last."""
    model, cluster = gpt(layers=8, hidden=4096, heads=32, vocab=64), machine(64)
    schedule = "1F1B" if layout.vp == 1 else "Interleaved1F1B"
    options = {"zero": 1, "stack": constants.OURS, **changes}
    job = Job(model, layout, 4096, 64 * layout.dp, 16, schedule=schedule, **options)
    waiting = replace(
        job,
        stack=replace(constants.OURS, overlap=Overlap(all_reduce=False, data=False, gather=False)),
    )
    exposed = [step_of(one, cluster).data for one in (job, waiting)]
    size = max(
        sum(parameters_of(job, stage))
        for stage in stages_of(replace(job, layout=replace(layout, vp=1)))
    )
    whole = (1 if job.scatters else 2) * gather(cluster, group(layout, ("dp", "cp"), 8), 4 * size)
    assert exposed[1] - exposed[0] == pytest.approx((1 - shown) * whole, rel=0.02, abs=1e-6)


@pytest.mark.parametrize(("scatters", "shown"), [(True, 0.1), (False, 1.0)])
def test_the_sum_over_replicas_hides_behind_the_last_backward(scatters: bool, shown: float) -> None:
    """A tenth of it is never hidden; with an all-reduce in the shard group all of it comes after
    the backward, and so does the reduction in the group: one tensor has all gradients."""
    model, cluster = gpt(layers=8, hidden=4096, heads=32, vocab=1024), with_one_protocol(64)
    stack = replace(constants.OURS, host=replace(constants.OURS.host, step=0.0))
    job = Job(
        model,
        Layout(dp=64),
        4096,
        1024,
        16,
        zero=1,
        shard_size=8,
        reduce_scatter=scatters,
        stack=stack,
    )
    across = 2 * (
        7 * cluster.network_latency
        + 7 / 8 * 4 * model.parameters / 8 / (cluster.network * cluster.efficiency.network)
    )
    alone = replace(job, layout=Layout(dp=8), global_batch=128)  # one shard group
    assert step_of(job, cluster).data - step_of(alone, cluster).data == pytest.approx(
        shown * across, rel=1e-3
    )


def test_an_overlapped_gather_is_hidden_behind_the_next_forward() -> None:
    """A tenth of a gather is never hidden; the forward of this job is long enough for the rest."""
    stack = replace(constants.OURS, overlap=Overlap(all_reduce=False, data=False, gather=False))
    job = Job(
        gpt(layers=8, hidden=4096, heads=32, vocab=1024),
        Layout(dp=8),
        4096,
        64,
        8,
        zero=1,
        stack=stack,
    )
    cluster = with_one_protocol(8)
    gather = 7 * cluster.link_latency + 7 / 8 * 2 * job.model.parameters / (
        cluster.link * cluster.efficiency.link
    )
    plain, overlapped = step_of(job, cluster), step_of(replace(job, overlap_gather=True), cluster)
    assert plain.seconds - overlapped.seconds == pytest.approx(0.9 * gather, rel=1e-3)
    for zero in (0, 3):
        assert step_of(replace(job, zero=zero, overlap_gather=True), cluster) == step_of(
            replace(job, zero=zero), cluster
        )


@pytest.mark.parametrize(
    ("layout", "shards", "inside", "across"),
    [
        (Layout(dp=64), 8, Group(8, 8), Group(8, 1)),
        (Layout(dp=64), 4, Group(4, 4), Group(16, 2)),
        (Layout(tp=4, dp=16), 2, Group(2, 2), Group(8, 1)),
        (Layout(tp=2, cp=2, dp=16), 4, Group(8, 4), Group(4, 1)),
        (Layout(tp=2, pp=4, dp=8, order=("tp", "cp", "dp", "pp")), 4, Group(4, 4), Group(2, 1)),
    ],
    ids=str,
)
def test_shard_groups_are_placed_as_the_ranks_are(
    layout: Layout, shards: int, inside: Group, across: Group
) -> None:
    assert shard_groups(layout, shards, 8) == (inside, across)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_traffic_of_each_tier_is_that_of_a_formula(zero: int) -> None:
    """64 ranks on 8 nodes, 4 micro-batches, 4 bytes of a gradient and 2 of a parameter. In a ring
    over nodes, one of 8 ranks sends on."""
    model, cluster = gpt(layers=2, hidden=1024, heads=8, vocab=1024), machine(64)
    job = Job(model, Layout(dp=64), 128, 256, 1, zero=zero, stack=constants.OURS)
    size = model.parameters
    # stages 2 and 3 reduce in every micro-batch
    reduced = {0: 2 * 4, 1: 4, 2: 4 * 4, 3: 4 * 4}[zero] * size
    # stage 3: before each forward and each backward
    gathered = {0: 0, 1: 2, 2: 2, 3: 4 * 2 * 2}[zero] * size
    whole = 63 / 64 * (reduced + gathered)
    flat = data_traffic(job, cluster)
    assert (flat.inside, flat.between) == pytest.approx((7 / 8 * whole, whole / 8), rel=1e-3)
    if zero > 0:
        grouped = data_traffic(replace(job, shard_size=8), cluster)
        # one all-reduce over 8 nodes of an eighth of the gradients, whatever the number of
        # micro-batches
        shard = 2 * 7 / 8 * 4 * size / 8
        assert (grouped.inside, grouped.between) == pytest.approx(
            (7 / 8 * (reduced + gathered), shard), rel=1e-3
        )


def test_experts_are_sharded_over_their_part_of_a_shard_group() -> None:
    job = Job(
        Architecture.from_spec(spec("mixtral_8x7b")),
        Layout(tp=2, dp=32, ep=4),
        4096,
        512,
        1,
        zero=3,
        stack=constants.OURS,
    )
    assert shard_ranks(job) == (32, 16)
    assert shard_ranks(replace(job, shard_size=4)) == (4, 2)
    alone = replace(job, layout=Layout(tp=2, dp=4, ep=4), global_batch=64)
    assert memory_of(replace(job, shard_size=4)) == memory_of(alone)


@pytest.mark.parametrize(
    ("layout", "per_node", "size"),
    [
        (Layout(dp=64), 8, 8),
        (Layout(dp=48), 8, 8),
        # groups of 6 would begin inside of a node
        (Layout(pp=8, dp=12, order=("tp", "cp", "dp", "pp")), 8, 4),
        (Layout(tp=3, dp=24), 6, 2),
        (Layout(dp=16, cp=4, order=("tp", "dp", "cp", "pp")), 8, None),
        (Layout(tp=4, dp=16), 8, 2),
        (Layout(tp=8, dp=8), 8, None),  # each rank of a shard group is on another node
        (Layout(pp=8, dp=8), 8, None),
        (Layout(pp=8, dp=8, order=("tp", "cp", "dp", "pp")), 8, None),  # they are all on one
        (Layout(pp=4, dp=16, order=("tp", "cp", "dp", "pp")), 8, 8),
        (Layout(cp=2, dp=32), 8, 4),
        (Layout(dp=64, ep=8), 8, 8),
        (Layout(dp=64, ep=16), 8, None),  # experts span nodes
        (Layout(tp=2, dp=32, ep=8), 8, 4),
    ],
    ids=str,
)
def test_shard_groups_fill_a_node(layout: Layout, per_node: int, size: int | None) -> None:
    job = Job(gpt(layers=8, hidden=1024, heads=8, vocab=1024), layout, 128, 64, 1, zero=1)
    where = replace(machine(64), gpus_per_node=per_node, nodes=layout.world_size // per_node)
    assert node_shard_size(job, where) == size
    on_a_node = [
        n
        for n in range(2, layout.dp + 1)
        if layout.dp % n == 0 and n * layout.tp * layout.cp % layout.ep == 0
        if all(len({rank // per_node for rank in group}) == 1 for group in layout.shard_groups(n))
    ]
    assert size == (None if layout.dp in on_a_node else max(on_a_node, default=None)), (
        "by trying all"
    )
    assert node_shard_size(replace(job, zero=0), where) is None
    assert node_shard_size(replace(job, shard_size=layout.dp), where) is None


def test_shard_groups_are_proposed_where_gathering_between_nodes_takes_long() -> None:
    """With many micro-batches, stage 3 gathers all parameters often. A fast network hides it, and
    so does a user's choice."""
    job = Job(
        Architecture.from_spec(spec("llama3_1_8b")), Layout(), 4096, 512, 1, stack=constants.OURS
    )
    fixed = Fixed(layout=Layout(dp=64), micro_batch=1, zero=3, recompute="full")
    slow = replace(machine(64), network=10e9)
    [flat] = search(replace(job, shard_size=64), slow, fixed=fixed).best
    [found] = search(job, slow, fixed=fixed).best
    assert (flat.job.shard_size, found.job.shard_size) == (64, 8)
    assert found.step.seconds < 0.99 * flat.step.seconds and found.memory.total > flat.memory.total
    assert found.step == step_of(found.job, slow) and found.memory == memory_of(found.job)
    assert data_traffic(found.job, slow).between < 0.12 * data_traffic(flat.job, slow).between
    assert search(job, machine(64), fixed=fixed).best[0].job.shard_size is None
    room = (flat.memory.total + found.memory.total) / 2
    assert search(job, slow, fixed=fixed, room=room).best[0].job.shard_size is None


def test_only_layouts_with_whole_shard_groups_are_searched() -> None:
    job = Job(
        Architecture.from_spec(spec("llama3_1_8b")),
        Layout(),
        4096,
        64,
        1,
        stack=constants.OURS,
        shard_size=8,
    )
    found = {shape.layout.dp for shape in shapes(job, machine(64), Fixed())}
    assert found == {8, 16, 32, 64}


def test_activations_of_a_gpt_block_are_the_published_ones() -> None:
    # arXiv:2205.05198, equation 1: s b h (34 + 5 a s / h) bytes, of which 3 s b h are masks and
    # copies of dropout and 2 s b h GeLU's extra input; without the scores' 5 a s / h
    model = gpt(layers=1, hidden=12288, heads=96, vocab=1000)
    job = Job(model, Layout(), 2048, 1, 1, sequence_parallel=False, stack=Stack(flash=False))
    published = 2048 * 12288 * (34 - 2 + 5 * 96 * 2048 / 12288)
    assert block_activations(job, model.kinds[0]) == pytest.approx(published, rel=0.02)
    cut = replace(job, layout=Layout(tp=8), sequence_parallel=True)
    assert block_activations(cut, model.kinds[0]) == pytest.approx(
        block_activations(job, model.kinds[0]) / 8
    ), "equation 4"


def test_reserves_are_given_back_before_memory_is_short() -> None:
    footprint = software.NANOTRON.footprint
    job = replace(
        published(PUBLISHED[4]).job,
        stack=replace(software.NANOTRON, footprint=replace(footprint, spare_gradient=3.0)),
    )
    bare = replace(
        software.NANOTRON,
        footprint=replace(footprint, allocator=1.0),
        allocator=software.Allocator(),
    )
    needed = memory_of(replace(job, stack=bare))
    roomy = allocated(job)
    assert needed.total < 0.9 * roomy.total
    assert allocated(job, room=roomy.total) == roomy
    between = (needed.total + roomy.total) / 2
    tight = allocated(job, room=between)
    assert (
        tight.total == pytest.approx(between)
        and tight.weights == roomy.weights
        and tight.gradients < roomy.gradients
    )
    assert allocated(job, room=needed.total / 2).total == pytest.approx(needed.total), (
        "what is needed is not given back"
    )


def test_an_eager_block_keeps_what_its_tensors_are() -> None:
    """Counted in nanotron's models/llama.py, tensor by tensor, in bytes of a token."""
    hidden, inner, heads = 2048, 8192, 32
    norms = 2 * 2 * hidden + 2 * 2 * hidden  # inputs and outputs of two norms
    # q, k, v in one; k and v again, rotated; output; log-sum-exp
    attention = 2 * 3 * hidden + 2 * 2 * hidden + 2 * hidden + 4 * heads
    # gate and up in one; the gate's activation; the product
    mlp = 2 * 2 * inner + 2 * inner + 2 * inner
    model = Architecture.plain(
        layers=4,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        vocab=1000,
        ffn=inner,
        gated=True,
        tied=True,
    )
    job = Job(model, Layout(), 4096, 1, 1, stack=software.NANOTRON)
    assert block_activations(job, model.kinds[0]) == 4096 * (norms + attention + mlp)


def test_copies_that_fit_in_no_block_come_on_top() -> None:
    """ZeRO-1 of nanotron joins parameters for each rank, and these once more. What fits in the
    logits' block is not counted."""
    model = gpt(layers=8, hidden=1024, heads=8, vocab=1024)
    stack = software.Published(allocator=software.Allocator(gathered_copies=2))

    def copies(tokens: int, ranks: int) -> float:
        job = Job(model, Layout(dp=ranks), tokens, ranks, 1, zero=1, stack=stack)
        return allocated(job).total - allocated(replace(job, stack=software.Published())).total

    held = sum(parameters_of(Job(model, Layout(), 1, 1, 1), Stage((8,), True, True)))
    # of a token: 16-bit inputs of the MLP's second product; float32 logits are half of it
    largest = 2 * 4 * 1024
    assert largest * 512 < 2 * held / 2 and copies(512, 2) == pytest.approx(2 * 2 * held), (
        "neither a rank's share nor all of them"
    )
    assert 2 * held / 64 < largest * 512 < 2 * held and copies(512, 64) == pytest.approx(
        2 * held
    ), "shares do"
    assert 2 * held < largest * 65536 and copies(65536, 64) == 0.0
    assert copies(512, 1) == 0.0, "nothing is gathered"


@pytest.mark.parametrize(("waits", "ahead"), [(0.0, 1.0), (1.0, 0.5), (99.0, 0.01)])
def test_a_host_runs_ahead_as_far_as_the_gpu_does_not_wait_for_it(
    waits: float, ahead: float
) -> None:
    """`waits`: seconds that the GPU waits for kernels, of which it computes and communicates one
    second."""
    run = published(PUBLISHED[4])
    host = waits + run.job.stack.host.step
    step = PredictedStep(
        seconds=2.0,
        compute=0.75,
        communication=0.25,
        host=host,
        bubble=0.0,
        data=0.0,
        optimizer=0.0,
    )
    assert queue_of(step, run.job) == pytest.approx(ahead)


def test_pipelines_that_sleep_between_messages() -> None:
    run = published(SLEEPING)
    assert run.seconds is not None
    assert compare(run).seconds < run.seconds / 10
    assert polled_seconds(run) == pytest.approx(run.seconds, rel=0.10)
    (row,) = polling([compare(run), compare(published(PUBLISHED[4]))])[1:]
    assert row[:3] == ["512", "1", "1"]


def test_runs_that_contradict_each_other_are_counted() -> None:
    """The 3.57 billion parameters of one run in the place of another's 8.86 billion: the smaller
    model was measured slower."""
    large = published(PUBLISHED[4])
    small = replace(
        large,
        model="small",
        seconds=20.0,
        job=replace(large.job, model=published(PUBLISHED[5]).job.model),
    )
    (row,) = contradictions([compare(large), compare(small)])
    predicted = compare(large).seconds / compare(small).seconds
    assert row[:4] == ["nanotron", "8", "1", "1"] and float(row[4]) == pytest.approx(
        17.4686 / 20, abs=0.01
    )
    assert (
        float(row[5]) == pytest.approx(predicted, abs=0.01) and predicted > 1.5 and row[6] == "50%"
    )
    faster = replace(small, seconds=6.0)
    assert contradictions([compare(large), compare(faster)])[0][3] == "0"


def test_groups_know_their_nodes() -> None:
    inner_pipeline = Layout(tp=4, pp=4, dp=4)
    assert group(inner_pipeline, ("tp",), 8).nodes == 1
    assert group(inner_pipeline, ("pp",), 8).local == 2
    assert group(inner_pipeline, ("dp",), 8).nodes == 4
    assert group(replace(inner_pipeline, order=("tp", "cp", "dp", "pp")), ("dp",), 8).local == 2


# A few rows of tables that anybody can look up, with what was measured: seconds of a step.
PUBLISHED = [
    # Narayanan et al., SC21 (arXiv:2104.04473), table 1, seconds by the formula of its section 5.1
    (
        "Narayanan,Table"
        " 1,GPT-39.1B,39.1,48,8192,32768,64,64,51200,0,,,2048,1536,4,512,A100-80GB,8,2,1,32,1,1,none,fp16,full,1F1B,,,14.453,,"  # noqa: E501
    ),
    "Narayanan,,GPT-145.6B,145.6,80,12288,49152,96,96,51200,0,,,2048,2304,2,1536,A100-80GB,8,8,2,24,1,1,none,fp16,full,interleaved,,,24.817,,",
    # MosaicML llm-foundry, scripts/train/benchmarking/README.md
    "llm-foundry,,7b,6.65,32,4096,16384,32,32,50368,0,,,2048,48,6,8,h100_80gb,1,1,1,8,1,1,ZeRO-3,amp_bf16,none,,46.44,,1.1546,,",
    "llm-foundry,,1b,1.3,24,2048,8192,16,16,50368,0,,,2048,448,14,8,a100_80gb,1,1,1,8,1,1,ZeRO-3,amp_bf16,none,,59.86,,5.5908,,",
    # The Ultra-Scale Playbook (Hugging Face), benchmarks of nanotron, with GiB
    (
        "Ultra-Scale,,8.86B,8.86,32,4096,14336,32,32,131072,1,,,4096,256,1,8,H100-80GB"
        " SXM,1,4,1,2,1,1,ZeRO-1,bf16,,1F1B,45.2,,17.4686,63.07,"
    ),
    (
        "Ultra-Scale,,3.57B,3.57,28,3072,8192,32,32,131072,1,,,4096,256,8,16,H100-80GB"
        " SXM,4,1,1,4,1,1,ZeRO-1,bf16,,none,37.5,,4.5361,58.48,"
    ),
    (
        "Ultra-Scale,,80B,80,80,8192,28672,64,64,131072,1,,,4096,256,1,256,H100-80GB"
        " SXM,4,16,1,4,1,1,ZeRO-1,bf16,,1F1B,30.75,,6.8988,64.21,"
    ),
]

# A run of the same on 512 GPUs, with the version that sleeps
SLEEPING = (
    "Ultra-Scale,,8.86B,8.86,32,4096,14336,32,32,131072,1,,,4096,256,1,512,H100-80GB"
    " SXM,8,16,1,4,1,1,ZeRO-1,bf16,,1F1B,,,84.7331,,"
)


def published(line: str) -> Run:
    run = run_of(dict(zip(COLUMNS, line.split(","), strict=True)))
    assert run is not None
    return run


def test_zero_3_of_2021_loses_to_pipelines_as_published() -> None:
    """Narayanan et al., table 2: 174.6 billion parameters on 384, 768 and 1536 GPUs, ZeRO 3 beside
    tp8_pp12."""
    sizes = "Narayanan,Table 2,GPT-174.6B,174.6,96,12288,49152,96,96,51200,0,,,2048,1536"
    for gpus, batch, alone, cut in [
        (384, 4, 81.579, 76.78),
        (768, 2, 66.746, 39.421),
        (1536, 1, 66.746, 20.829),
    ]:
        zero = published(
            f"{sizes},{batch},{gpus},A100-80GB,1,1,1,{gpus},1,1,ZeRO-3,fp16,full,,,,{alone},,"
        )
        pipeline = published(
            f"{sizes},1,{gpus},A100-80GB,8,12,1,{gpus // 96},1,1,none,fp16,full,1F1B,,,{cut},,"
        )
        assert compare(zero).time_error == pytest.approx(0, abs=0.15) and compare(
            pipeline
        ).time_error == pytest.approx(0, abs=0.15)
        assert compare(zero).seconds > compare(pipeline).seconds


@pytest.mark.parametrize("line", PUBLISHED, ids=lambda line: "-".join(line.split(",")[0:3:2]))
def test_published_runs_are_predicted(line: str) -> None:
    compared = compare(published(line))
    assert compared.time_error is not None
    assert abs(compared.time_error) < 0.12
    if compared.memory_error is not None:
        assert abs(compared.memory_error) < 0.10


def test_a_report_on_a_file(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    odd = PUBLISHED[4].replace(",256,1,8,H100-80GB SXM,", ",256,1,8,abacus,")
    file.write_text("\n".join([",".join(COLUMNS), *PUBLISHED, odd]) + "\n")
    assert len(read_runs(file)[0]) == len(PUBLISHED)
    report = evaluate(file)
    assert f"\n{len(PUBLISHED)} runs are predicted; 1 are not" in report
    usual = [
        one
        for one in map(compare, map(published, PUBLISHED))
        if one.run.core and one.run.mfu is not None
    ]
    known = [one.time_error for one in usual if one.time_error is not None]
    assert (
        known
        and f"\n- The median error of the predicted step time is {quantile(known, 0.5):.1%}, "
        in report
    )
    assert f"({len(known)} runs)" in report.partition("runs are predicted")[0], (
        "in front of the tables"
    )
    errors = sorted(abs(compare(published(line)).time_error or 0) for line in PUBLISHED[4:])
    assert (
        f"| Ultra-Scale       | H100-80GB SXM | 3    | 3               | {errors[1]:.1%} " in report
    )


def test_loss_of_speed_with_more_data_parallel_ranks() -> None:
    """Per GPU; with the same global batch and with one that grows; of runs with the same settings
    the fastest."""
    base = published(PUBLISHED[0])

    def one(dp: int, batch: int, measured: float, predicted: float) -> Comparison:
        job = replace(base.job, layout=Layout(tp=4, dp=dp), global_batch=batch, zero=1)
        return Comparison(replace(base, job=job, seconds=measured), predicted, 0.0, 0.0, 0.25)

    same = [
        one(16, 512, 4.0, 4.0),
        one(16, 512, 5.0, 9.0),
        one(64, 512, 2.0, 1.25),
        one(128, 512, 1.0, 0.8),
    ]
    grows = [one(32, 320, 1.0, 1.0), one(128, 1280, 1.25, 1.0)]
    rows = growth_rows([*same, *grows, one(2, 8, 1.0, 1.0)])
    assert [row[2:] for row in rows] == [
        ["tp4", "1", "same", "64 to 256", "50%", "20%", "25%"],
        ["tp4", "1", "same", "64 to 512", "50%", "38%", "25%"],
        ["tp4", "1", "grows", "128 to 512", "20%", "0%", "25%"],
    ]
    assert growth([]) == []


@pytest.mark.parametrize(
    "change",
    [
        ("8,1,4,1,2", "8,1,40,1,2"),
        (",8,H100", ",,H100"),
        ("4096,14336", "x,14336"),
        ("8,1,4,1", "8,0,4,1"),
    ],
)
def test_rows_that_cannot_be_are_left_out(change: tuple[str, str]) -> None:
    line = PUBLISHED[4].replace("SXM,1,4", "SXM 8,1,4")
    assert run_of(dict(zip(COLUMNS, line.split(","), strict=True))) is not None
    odd = line.replace(*change, 1)
    assert odd != line
    assert run_of(dict(zip(COLUMNS, odd.split(","), strict=True))) is None


def row(line: str, **changes: str) -> dict[str, str]:
    return {**dict(zip(COLUMNS, line.split(","), strict=True)), **changes}


def test_a_row_without_a_micro_batch_takes_1_and_seconds_come_from_flops() -> None:
    run = run_of(
        row(
            PUBLISHED[5],
            micro_batch="",
            step_time_s="",
            tokens_per_s_per_gpu="",
            tflops_per_gpu="400",
        )
    )
    assert run is not None and run.assumed and run.job.micro_batch == 1 and run.seconds is not None
    assert run.job.model.model_flops(4096) * 256 * 4096 / 16 / run.seconds == pytest.approx(400e12)
    longest = row(
        PUBLISHED[5], seq_len="65536", step_time_s="", tokens_per_s_per_gpu="", tflops_per_gpu="400"
    )
    unsure = run_of(longest)
    assert unsure is not None and unsure.seconds is None, (
        "tables do not say whether they count what a causal mask saves"
    )


def test_virtual_stages_that_are_not_stated_are_those_that_are_fastest() -> None:
    run = run_of(row(PUBLISHED[6], vpp="", schedule=""))
    assert run is not None and run.job.layout.vp == 5 and run.job.schedule == "Interleaved1F1B", (
        "80 blocks on 16 stages"
    )
    stated = run_of(row(PUBLISHED[6], vpp="", schedule="1F1B"))
    assert stated is not None and stated.job.layout.vp == 1


@pytest.mark.parametrize(
    ("precision", "kind"), [("NVFP4", "fp4"), ("MXFP8", "fp8"), ("FP8-CS", "fp8"), ("bf16", "bf16")]
)
def test_precisions_below_16_bits_are_read(precision: str, kind: str) -> None:
    run = run_of(row(PUBLISHED[5], precision=precision, gpu_type="DGX-GB200"))
    assert run is not None and run.job.precision == kind


def test_nvfp4_is_faster_only_where_the_gpu_has_it() -> None:
    new, old = machine(72, "GB200"), machine(8)
    assert new.matmul_rate("fp4") == pytest.approx(2 * new.matmul_rate("fp8"))
    assert old.matmul_rate("fp4") == old.matmul_rate("fp8")


@pytest.mark.parametrize(
    ("gpu", "together", "network"),
    [
        ("GB200 NVL72", 72, 50e9),
        ("DGX-B200", 8, 50e9),
        ("DGX-GB300", 72, 100e9),
        ("A100-80GB 4x100Gb", 8, 6.25e9),
        ("A100 (1600 Gbps)", 8, 25e9),
        ("H100-80GB SXM (NVLink4 450GB/s, IB 400Gbps)", 8, 50e9),
    ],
)
def test_groups_of_fast_links_and_networks_are_read(
    gpu: str, together: int, network: float
) -> None:
    found = machine(144, gpu)
    assert (found.gpus_per_node, found.network) == (together, network)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "billions"),
    [
        ("DeepSeek-V3", 61, 7168, 671.0),
        ("Qwen2-57B-A14B", 28, 3584, 57.4),
        ("Qwen3_235B_a22B", 94, 4096, 235.1),
        ("Kimi K2", 61, 7168, 1026.4),
    ],
)
def test_models_that_columns_do_not_describe_are_known_by_name(
    name: str, layers: int, hidden: int, billions: float
) -> None:
    model = named_model(name, layers, hidden)
    assert model is not None and model.parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert named_model(name, layers + 1, hidden) is None, "another size of that name"


def test_gpt_oss_has_heads_of_64_and_windows() -> None:
    line = row(
        PUBLISHED[5],
        model="GPT OSS 120B",
        params_b="117",
        layers="36",
        hidden="2880",
        ffn_hidden="2880",
        heads="64",
        kv_heads="8",
    )
    model = architecture_of({**line, "vocab": "201088", "experts": "128", "topk": "4"})
    assert model.parameters / 1e9 == pytest.approx(117, rel=0.01) and model.query_width == 4096
    assert model.windows[:2] == (128, None)


def test_the_plain_tables_have_all_runs_and_both_baselines() -> None:
    sizes = [replace(published(PUBLISHED[6]), seconds=seconds) for seconds in (6.9, 8.0)]
    slower = replace(
        sizes[1], job=replace(sizes[1].job, layout=replace(sizes[1].job.layout, tp=8, pp=8))
    )
    wide = replace(sizes[0], job=replace(sizes[0].job, layout=Layout(tp=16, pp=4, dp=4)))
    runs = [published(line) for line in PUBLISHED[:6]] + [sizes[0], slower, wide]
    compared = [compare(run) for run in runs]
    lines = yardstick(judge(compared, compared))
    whole, choices = [
        line for line in lines if line.startswith("| all") and line.count(" all ") >= 3
    ]
    assert whole.split("|")[4].strip() == "8", "tp=16 is not inside a node"
    errors = [abs(one.time_error or 0) for one in compared[:-1]]
    assert (
        whole.split("|")[5].strip() == whole.split("|")[8].strip() == f"{quantile(errors, 0.5):.1%}"
    )
    best = max(compared[6:8], key=lambda one: one.predicted_rate)
    assert (
        choices.split("|")[5].strip() == f"{6.9 / (best.run.seconds or 1):.3f}"
        and choices.split("|")[4].strip() == "1"
    )


def test_unknown_software_takes_no_constant_of_its_own() -> None:
    runs = [published(line) for line in PUBLISHED]
    slow = [
        replace(
            run,
            job=replace(
                run.job, stack=replace(run.software, host=replace(run.job.stack.host, block=1.0))
            ),
        )
        for run in runs
    ]
    found = [[one.seconds for one in leave_out(group, compare)] for group in (runs, slow)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0][4] != pytest.approx(compare(runs[4]).seconds, rel=1e-3)


def test_the_spread_of_memory_is_found_and_shown() -> None:
    run = published(PUBLISHED[4])
    shares = [0.3 + 0.005 * step for step in range(240)]
    made = [
        Attempt(
            replace(run, job=replace(run.job, micro_batch=1 + index)),
            needed * share <= 1,
            1.0 + share,
            share,
        )
        for share in shares
        for index, needed in enumerate(
            exp(0.1 * NormalDist().inv_cdf((step + 0.5) / 20)) for step in range(20)
        )
    ]
    assert spread_of(made) == pytest.approx(0.1, abs=0.015)
    text = "\n".join(calibration(made))
    spreads = re.search(r"Spreads of the two halves:\s([0-9.]+) and ([0-9.]+)\.", text)
    assert spreads and [float(spread) for spread in spreads.groups()] == pytest.approx(
        [0.1, 0.1], abs=0.04
    )
    assert re.search(r"proposed first, \d of \d+ failed", text)
    failing = [one for one in attempts_of([run], [replace(run, seconds=None)]) if not one.ran]
    assert len(failing) == 1 and failing[0].share == pytest.approx(0.8, abs=0.15)


def test_files_that_are_no_tables_of_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file"):
        evaluate(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="has no column source"):
        evaluate(tmp_path / "other.csv")


def test_calibration_finds_constants_that_it_does_not_know() -> None:
    """Runs whose seconds were made with other constants than those that the search starts from."""
    made = []
    for line, (tp, dp, size) in product(
        PUBLISHED[4:6], [(1, 8, 1), (2, 4, 2), (4, 2, 4), (8, 1, 8)]
    ):
        run = published(line)
        job = replace(
            run.job, layout=Layout(tp=tp, dp=dp, order=run.job.layout.order), micro_batch=size
        )
        truth = replace(run.machine, efficiency=replace(run.machine.efficiency, matmul=0.62))
        made.append(replace(run, job=job, seconds=step_of(job, truth).seconds, memory=None))
    values = fit(made, rounds=8)
    again = [compare(with_values(run, values)) for run in made]
    assert quantile([one.time_error or 0 for one in again], 1.0) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "batch", "change"),
    [
        ("llama3_1_8b", 8, 32, {}),
        pytest.param("llama2_13b", 16, 32, {"memory": 30.0e9}, marks=pytest.mark.full),
        ("llama2_13b", 16, 32, {"network": 12.5e9, "memory": 40.0e9}),
        pytest.param("qwen3_30b_a3b", 16, 16, {}, marks=pytest.mark.full),
        pytest.param("llama2_13b", 32, 64, {}, marks=pytest.mark.full),
    ],
)
def test_the_search_finds_what_trying_everything_finds(
    model: str, gpus: int, batch: int, change: dict[str, float]
) -> None:
    job = Job(Architecture.from_spec(spec(model)), Layout(), 4096, batch, 1, stack=constants.OURS)
    where = replace(machine(gpus), **change)
    found = search(job, where, most=3)
    assert len(found.simulated) <= 30
    best: dict[tuple[int, ...], float] = {}
    for shape in shapes(job, where, Fixed()):
        for scheduled in schedules(shape, Fixed()):
            for candidate, _ in fits(scheduled, where.memory, Fixed()):
                layout = candidate.layout
                degrees = (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep)
                seconds = step_of(candidate, where).seconds
                grouped = replace(candidate, shard_size=node_shard_size(candidate, where))
                if grouped != candidate and memory_of(grouped).total <= where.memory:
                    fewer = step_of(grouped, where).seconds
                    seconds = fewer if fewer < 0.99 * seconds else seconds
                best[degrees] = min(best.get(degrees, float("inf")), seconds)
    expected = sorted(best.values())[:3]
    assert [one.step.seconds for one in found.best] == pytest.approx(expected)
    assert len(best) > 3


@pytest.mark.slow
def test_bounds_are_below_what_is_simulated() -> None:
    job = Job(
        Architecture.from_spec(spec("llama3_1_8b")), Layout(), 4096, 64, 1, stack=constants.OURS
    )
    where = machine(16)
    tried = 0
    for shape in shapes(job, where, Fixed(micro_batch=1, order=("tp", "cp", "pp", "dp"))):
        for scheduled in schedules(shape, Fixed()):
            tried += 1
            assert (
                next(least_memory(scheduled, [scheduled.recompute]))[1]
                <= memory_of(scheduled).total
            )
            assert least_seconds(shape, where) <= step_of(scheduled, where).seconds
            assert step_of(scheduled, where, pipeline="bound").seconds <= step_of(
                scheduled, where
            ).seconds * (1 + 1e-9)
    assert tried > 50


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_blocks_that_are_not_recomputed_cost_no_time(recompute: str) -> None:
    """One block in four is recomputed, so a step takes a quarter of what all of them add."""
    job = Job(
        Architecture.from_spec(spec("llama3_1_8b")), Layout(dp=8), 4096, 64, 1, stack=constants.OURS
    )
    none, all_of_them, quarter = (
        step_of(replace(job, recompute=level, recompute_every=every), machine(8)).compute
        for level, every in (("none", 1), (recompute, 1), (recompute, 4))
    )
    assert quarter - none == pytest.approx((all_of_them - none) / 4) and all_of_them > none


@pytest.mark.parametrize("every", [1, 2])
def test_both_passes_of_a_split_backward_recompute(every: int) -> None:
    """Of four stages with two blocks each, the first has one pass, which recomputes once; the
    others recompute in two."""
    model = replace(Architecture.from_spec(spec("llama3_1_8b")), layers=8)
    job = Job(model, Layout(pp=2, vp=2), 4096, 8, 1, blocks=(2, 2, 2, 2), stack=constants.OURS)
    where, seconds = machine(2), {}
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        for level in ("none", "full"):
            one = job.but(schedule=schedule, recompute=level, recompute_every=every)
            stages = stage_seconds(one, where, replace(work_of(one, where), host_block=0.0))
            seconds[schedule, level] = (
                [stage.backward for stage in stages],
                [stage.weights for stage in stages],
            )
    forward = 2 * work_of(job, where).blocks[0].forward / every
    for schedule, times in (("Interleaved1F1B", [1, 1, 1, 1]), ("ZBVZeroBubble", [1, 2, 2, 2])):
        more = [
            b - a
            for a, b in zip(seconds[schedule, "none"][0], seconds[schedule, "full"][0], strict=True)
        ]
        assert more == pytest.approx([count * forward for count in times])
    later = [
        b - a
        for a, b in zip(
            *(seconds["ZBVZeroBubble", level][1] for level in ("none", "full")), strict=True
        )
    ]
    assert later == pytest.approx([0.0, forward, forward, forward])


def test_a_search_below_a_time_finds_the_same_layout_or_none() -> None:
    job = Job(
        Architecture.from_spec(spec("llama3_1_8b")), Layout(), 4096, 64, 1, stack=constants.OURS
    )
    everything = search(job, machine(8), most=1)
    seconds = everything.best[0].step.seconds
    assert search(job, machine(8), most=1, below=1.001 * seconds).best == everything.best
    recomputing = replace(job, recompute="full")  # as a recipe sets it, for its own layout
    assert search(recomputing, machine(8), most=1, below=1.001 * seconds).best == everything.best
    nothing = search(job, machine(8), most=1, below=seconds)
    assert nothing.best == () and nothing.expanded <= everything.expanded


def test_what_is_set_is_not_searched() -> None:
    job = Job(
        Architecture.from_spec(spec("llama3_1_8b")), Layout(), 4096, 64, 1, stack=constants.OURS
    )
    fixed = Fixed(schedule="GPipe", micro_batch=2, zero=1, recompute="full", sequence_parallel=True)
    for one in search(job, machine(8), fixed=fixed).best:
        assert isinstance(one, Candidate)
        assert (one.job.micro_batch, one.job.zero, one.job.recompute) == (2, 1, "full")
        assert one.job.schedule == "GPipe" or one.job.layout.pp == 1


def test_pipelines_whose_ranks_wait_longer_than_they_may_are_not_searched() -> None:
    job = Job(
        Architecture.from_spec(spec("llama2_13b")),
        Layout(pp=4, dp=2),
        4096,
        16,
        1,
        schedule="",
        stack=constants.OURS,
    )
    free, strict = list(schedules(job, Fixed())), list(schedules(job, Fixed(max_bubble=0.1)))
    assert {one.schedule for one in free} > {one.schedule for one in strict} and strict
    assert "1F1B" not in {one.schedule for one in strict}, "3 of 11"


def test_no_pipeline_is_proposed_whose_ranks_wait_for_a_larger_stage() -> None:
    """40 blocks on 8 ranks, and an output head that takes as long as some of them."""
    job, where = (
        Job(
            Architecture.from_spec(spec("llama2_13b")), Layout(), 4096, 512, 1, stack=constants.OURS
        ),
        machine(16),
    )
    fixed = Fixed(layout=Layout(pp=8, dp=2), max_bubble=0.05)
    free = search(job, where, fixed=replace(fixed, max_bubble=1.0)).best
    assert free and free[0].step.timeline is not None
    assert (
        free[0].step.waiting == pytest.approx(free[0].step.timeline.bubble)
        and free[0].step.waiting > 0.05
    )
    for share in (0.05, 0.15):
        found = search(job, where, fixed=replace(fixed, max_bubble=share))
        assert all(one.step.waiting <= share for one in (*found.best, *found.simulated))
    assert found.best


def test_virtual_stages_that_make_stages_equal_are_searched() -> None:
    job = Job(
        Architecture.from_spec(spec("llama2_13b")),
        Layout(pp=4),
        4096,
        16,
        1,
        schedule="",
        stack=constants.OURS,
    )
    found = {one.layout.vp for one in schedules(job, Fixed(schedule="Interleaved1F1B"))}
    assert found == {2, 4, 5, 8, 10}, "40 blocks on 4 ranks; 4 and 8 make unequal stages"


def test_importing_the_planner_imports_no_torch() -> None:
    modules = (
        "lightning_3d.app.cli.plan, lightning_3d.app.planner.advice,"
        " lightning_3d.app.planner.html_page, benchmarks.planner_accuracy.fit"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=REPOSITORY).returncode == 0


def test_columns_are_those_of_a_table() -> None:
    assert len(next(csv.reader([PUBLISHED[0]]))) == len(COLUMNS)
