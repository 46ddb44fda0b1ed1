"""ZeRO in two levels (HSDP): groups of neighbouring data-parallel ranks shard, and hold replicas of
each other."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import parity
import pytest
import torch.distributed as dist
from counting import Call, arriving_at_once, recording
from handmade_gradients import LAYERS, MODES, Run, check, full_shapes, train
from ranks import run_ranks
from reference import Recipe
from sweeps import by_default
from traced import fit

from lightning_3d.errors import LayoutError
from lightning_3d.layout import Layout
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.zero import make_backend
from lightning_3d.tracing.trace import BACKWARD, FORWARD, Event

SHARDED = [mode for mode in MODES if mode != "0"]
RUNS = [(layout, shard) for layout in ("dp4", "pp2_dp4", "tp2_dp4") for shard in (2,)] + [
    ("dp8", 2),
    ("dp8", 4),
]
BY_HAND = [(layout, shard, mode) for layout, shard in RUNS for mode in SHARDED]
QUICK = (
    ("pp2_dp4", 2, "1 scattered"),
    ("dp4", 2, "2 eager to owners"),
    ("tp2_dp4", 2, "3"),
    ("dp4", 2, "3 eager on host"),
)


@pytest.mark.parametrize(
    ("layout", "shard", "mode"), by_default(BY_HAND, *map(BY_HAND.index, QUICK))
)
def test_every_mode_equals_one_process(layout: str, shard: int, mode: str) -> None:
    """Also where copies of a tied parameter, or of one that tensor-parallel ranks do not share
    evenly, must stay equal."""
    check(Run(layout, mode=mode, shard=shard), weights=5e-5, norm=1e-5)


@pytest.mark.parametrize("mode", by_default(["1", "1 scattered", "2 eager", "3", "3 eager"], 1, 3))
@pytest.mark.parametrize(
    "change",
    [
        {"late": True},
        {
            "optimizer": "SGD",
            "options": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
            "wakes": 5,
        },
    ],
    ids=str,
)
def test_gradients_that_only_some_replicas_have(mode: str, change: dict[str, Any]) -> None:
    """One shard group has a gradient and the other none; and a parameter without gradients is not
    decayed."""
    check(Run("dp4", mode=mode, shard=2, **change), weights=5e-5, norm=1e-5)


CELLS: list[tuple[str, int, str, dict[str, Any]]] = [
    ("dp4", 1, "1F1B", {}),
    ("dp4", 1, "1F1B", {"zero_reduce_scatter": True}),
    ("dp4", 2, "1F1B", {}),
    ("dp4", 3, "1F1B", {}),
    ("pp2_dp4", 1, "1F1B", {"zero_reduce_scatter": True}),
    ("pp2_dp4", 2, "ZBVZeroBubble", {}),
    ("pp2_dp4", 3, "Interleaved1F1B", {}),
    ("tp2_dp4", 1, "1F1B", {}),
    ("tp2_dp4", 2, "1F1B", {"zero_reduce_scatter": True}),
    ("tp2_dp4", 3, "1F1B", {}),
    ("cp2_dp4", 1, "1F1B", {}),
    ("cp2_dp4", 3, "1F1B", {}),
    ("dp4", 1, "1F1B", {"zero_offload": "optimizer"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stage", "schedule", "options"), by_default(CELLS, 3, 4), ids=str
)
def test_training_equals_one_process(
    layout: str, stage: int, schedule: str, options: dict[str, Any]
) -> None:
    """Through a Trainer. Ranks that hold the same elements have the same bits at the end."""
    parity.assert_same_training("qwen2", layout, schedule, zero=stage, zero_shard_size=2, **options)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_mixtures_without_expert_parallelism(stage: int) -> None:
    parity.assert_same_training("mixtral", "tp2_dp4", zero=stage, zero_shard_size=2)


WITH_EXPERTS: list[tuple[str, int, dict[str, Any]]] = [
    ("ep2_dp4", 1, {}),
    ("ep2_dp4", 1, {"zero_reduce_scatter": True}),
    ("ep2_dp4", 2, {}),
    ("ep2_dp4", 3, {}),
    # each shard group has two copies of an expert
    ("cp2_ep2_dp4", 1, {"zero_reduce_scatter": True}),
    ("cp2_ep2_dp4", 2, {}),
    ("cp2_ep2_dp4", 3, {}),
    # tp does not divide the vocabulary, so that all gradients are summed at once
    ("tp2_ep2_dp4", 1, {"zero_reduce_scatter": True}),
    ("tp2_ep2_dp4", 2, {}),
    ("tp2_ep2_dp4", 3, {}),
    ("tp2_ep4_dp4", 2, {"zero_reduce": "step"}),
    ("pp2_ep2_dp4", 1, {}),
    ("tp2_ep2_dp4", 1, {"zero_overlap_gather": True}),
    ("tp2_ep2_dp4", 2, {"zero_offload": "optimizer"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "stage", "options"), by_default(WITH_EXPERTS, 2), ids=str)
def test_experts_that_ranks_share_out(layout: str, stage: int, options: dict[str, Any]) -> None:
    """Experts are sharded over the ranks of the shard group that have the same ones."""
    parity.assert_same_training("mixtral", layout, zero=stage, zero_shard_size=2, **options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "stage"), [("tp2_ep2_dp4", 1), ("tp2_ep4_dp4", 2), ("tp2_ep2_dp4", 3)]
)
def test_experts_with_tensor_parallelism(layout: str, stage: int) -> None:
    """The vocabulary of this model is divided by tp, so that gradients are summed in two levels."""
    parity.assert_same_training("qwen3_moe", layout, zero=stage, zero_shard_size=2)


def test_shard_groups_of_experts() -> None:
    """They are the ranks of an expert that are in one shard group, and replicas are the same ranks
    as those of everything else."""
    for name, size in (
        ("dp8_ep2", 4),
        ("tp2_dp4_ep2", 2),
        ("tp2_dp4_ep4", 2),
        ("cp2_dp4_ep2", 2),
        ("tp2_cp2_pp2_dp4_ep4", 2),
    ):
        for order in (("tp", "cp", "pp", "dp"), ("tp", "cp", "dp", "pp")):
            layout = Layout.parse(name, order=order)
            groups, owners = layout.expert_shard_groups(size), layout.expert_data_groups()
            assert sorted(rank for group in groups for rank in group) == list(
                range(layout.world_size)
            )
            for group in groups:
                [same] = [owner for owner in owners if group[0] in owner]
                block = {
                    rank
                    for rank in same
                    if layout.coordinates(rank)["dp"] // size
                    == layout.coordinates(group[0])["dp"] // size
                }
                assert set(group) == block
                assert len(group) == layout.tp * layout.cp * size // layout.ep
            for replicas in layout.replica_groups(size):
                places = {
                    next(group.index(rank) for group in groups if rank in group)
                    for rank in replicas
                }
                holders = {
                    next(index for index, owner in enumerate(owners) if rank in owner)
                    for rank in replicas
                }
                assert len(places) == len(holders) == 1
    assert (
        Layout.parse("dp8_ep2").expert_shard_groups(8)
        == Layout.parse("dp8_ep2").expert_data_groups()
    )


def test_shard_groups_are_neighbours_and_replica_groups_cross_them() -> None:
    layout = Layout.parse("tp2_cp2_dp4")
    assert layout.shard_groups(2)[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert layout.replica_groups(2)[:2] == [(0, 8), (1, 9)]
    assert layout.shard_groups(4) == layout.groups("dp", "cp")
    assert Layout.parse("pp2_dp4").shard_groups(2) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert Layout.parse("pp2_dp4", order=("tp", "cp", "dp", "pp")).shard_groups(2) == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]


def groups_of_a_rank(size: int | None) -> tuple[tuple[int, ...], tuple[int, ...] | None, int]:
    mesh = Mesh(Layout(dp=4))
    mesh.shard_data(2)
    mesh.shard_data(size)  # a later fit may shard otherwise
    replicas = mesh.replica_group
    found = (
        tuple(dist.get_process_group_ranks(mesh.shard_group)),
        replicas and tuple(dist.get_process_group_ranks(replicas)),
    )
    mesh.warm_up()
    return *found, mesh.replica_index


def test_a_mesh_has_the_groups_of_a_rank() -> None:
    assert run_ranks(groups_of_a_rank, 4, 2) == [
        ((0, 1), (0, 2), 0),
        ((0, 1), (1, 3), 0),
        ((2, 3), (0, 2), 1),
        ((2, 3), (1, 3), 1),
    ]
    assert set(run_ranks(groups_of_a_rank, 4, None)) == {((0, 1, 2, 3), None, 0)}


# Traffic


def traffic(run: Run) -> list[Call]:
    """The calls of one rank in one step, with those of DeepSpeed."""
    with recording() as recorder:
        train(run)
    return recorder.calls


def handed_over(calls: list[Call], rank: int, *names: str) -> tuple[int, int, int]:
    """Bytes that a rank of dp4 hands over inside its shard group, to the other one, and to all,
    without flags and norms of 8 bytes."""
    first = rank // 2 * 2
    groups = ((first, first + 1), (rank % 2, rank % 2 + 2), (0, 1, 2, 3))
    inside, across, everywhere = (
        sum(
            call.bytes
            for call in calls
            if call.ranks == group and call.name in names and call.bytes > 8
        )
        for group in groups
    )
    return inside, across, everywhere


ELEMENTS = sum(prod(shape) for name, shape in full_shapes().items() if not name.endswith("frozen"))
TRAINED = 4 * ELEMENTS  # bytes
PADDING = 4 * 8  # what fills up the last part
COUNTS = 2 * 4 * len(full_shapes())  # which parameters have gradients


@pytest.mark.parametrize(
    "mode", by_default(["1", "1 scattered", "2 scattered", "2 eager", "3", "3 to owners"], 1, 5)
)
def test_gradients_stay_in_the_shard_group_and_one_shard_crosses(mode: str) -> None:
    """All bytes of gradients are handed over inside; half of them, the shard, across, in one
    all-reduce; to all, only counts."""
    once = {"steps": 1, "max_norm": None, "bucket_bytes": 2**20}
    for rank, calls in enumerate(run_ranks(traffic, 4, Run("dp4", mode=mode, shard=2, **once))):
        inside, across, everywhere = handed_over(
            calls, rank, "all_reduce", "reduce", "reduce_scatter_tensor"
        )
        passes = 2 if MODES[mode].reduces_every_micro_batch else 1
        assert passes * TRAINED <= inside <= passes * TRAINED + PADDING
        assert TRAINED / 2 - PADDING <= across <= TRAINED / 2 + PADDING
        assert everywhere <= COUNTS
    for rank, calls in enumerate(run_ranks(traffic, 4, Run("dp4", mode=mode, **once))):
        inside, across, everywhere = handed_over(
            calls, rank, "all_reduce", "reduce", "reduce_scatter_tensor"
        )
        assert inside == across == 0
        assert everywhere >= TRAINED


@pytest.mark.parametrize(
    ("mode", "gathers"), by_default([("1", 1), ("2 scattered", 1), ("3", 2)], 1, 2)
)
def test_parameters_are_gathered_in_the_shard_group(mode: str, gathers: int) -> None:
    """Half of them by each rank: after the step; at stage 3 before it, and once more when they are
    made whole at the end."""
    run = Run("dp4", mode=mode, shard=2, steps=1, max_norm=None)
    # frozen parameters are sharded too
    everything = TRAINED + (4 * 3 * LAYERS if MODES[mode].stage == 3 else 0)
    for rank, calls in enumerate(run_ranks(traffic, 4, run)):
        inside, across, everywhere = handed_over(
            calls, rank, "all_gather", "all_gather_into_tensor"
        )
        assert gathers * everything / 2 <= inside <= gathers * (everything / 2 + PADDING)
        assert across == everywhere == 0


def traffic_of_experts(stage: int) -> tuple[list[Call], int, int]:
    """The calls of one rank of dp8_ep2 in a step, and its bytes of parameters without experts and
    of experts."""
    with recording() as recorder:
        options = {
            "micro_batch_size": 1,
            "zero_stage": stage,
            "zero_reduce": "step",
            "zero_shard_size": 4,
        }
        part = parity.train_on_rank(Recipe("mixtral", steps=1), layout="dp8_ep2", **options)
    sizes = Counter[bool]()
    for name, weight in part.weights.items():
        sizes[part.specs[name].expert] += 4 * weight.numel()
    return recorder.calls, sizes[False], sizes[True]


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_experts_stay_in_their_part_of_the_shard_group(stage: int) -> None:
    """Two of the four ranks of a shard group have an expert. Across, each rank sends a quarter of
    the rest and half of its experts."""
    for rank, (calls, dense, experts) in enumerate(run_ranks(traffic_of_experts, 8, stage)):
        first, same = rank // 4 * 4, rank % 2
        groups = {
            "inside": tuple(range(first, first + 4)),
            "experts": (first + same, first + same + 2),
            "across": (rank % 4, rank % 4 + 4),
            "owners": tuple(range(same, 8, 2)),
        }
        sent = {
            name: sum(
                call.bytes
                for call in calls
                if call.ranks == group and call.name == "all_reduce" and call.bytes > 8
            )
            for name, group in groups.items()
        }
        assert sent["inside"] == pytest.approx(dense, rel=0.01)
        assert sent["experts"] == pytest.approx(experts, rel=0.01)
        # pieces of units are uneven
        assert sent["across"] == pytest.approx(
            dense / 4 + experts / 2, rel=0.2 if stage == 3 else 0.01
        )
        assert sent["owners"] < 0.01 * experts, "counts"


# Overlap, in a recorded trace


def messages_of_a_traced_step(folder: str, **strategy: Any) -> tuple[list[Event], list[Call]]:
    """What this rank did in the last of four steps (rank 0 only), and its messages in it."""
    with arriving_at_once(), recording() as recorder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_backend.__kwdefaults__, "bucket_bytes", 4096)
        traces, _, _ = fit(folder, "dp4", 1, **strategy)
    last = traces[-1]
    assert last is not None
    events = list(last.ranks[0].events or ())
    begin, end = (events[0].start, events[-1].end) if events else (0.0, 0.0)
    return events, [call for call in recorder.calls if begin <= call.at <= end]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    by_default(
        [
            {"zero_stage": 3},
            {"zero_stage": 2, "zero_reduce_scatter": True},
            {"zero_stage": 1, "zero_reduce_scatter": True},
        ],
        0,
    ),
    ids=str,
)
def test_messages_of_a_shard_group_start_while_the_step_computes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Gradients leave inside of the last backward, first to the shard group and then to the
    replicas; the next block is gathered while one runs."""
    events, calls = run_ranks(
        messages_of_a_traced_step, 4, str(tmp_path), zero_shard_size=2, **options
    )[0]
    backwards = [event for event in events if event.kind == BACKWARD]
    forwards = [event for event in events if event.kind == FORWARD]
    over = backwards[-1].end
    reduced = [
        call
        for call in calls
        if call.ranks == (0, 1) and call.name in ("all_reduce", "reduce") and call.bytes > 8
    ]
    early = [call for call in reduced if backwards[-1].start < call.at < over]
    assert len(early) >= 2 and sum(call.bytes for call in early) > sum(
        call.bytes for call in reduced if call.at > over
    )
    across = [call for call in calls if call.ranks == (0, 2) and call.bytes > 8]
    inside = [call for call in across if backwards[-1].start < call.at < over]
    assert len(inside) >= 2, [(call.bytes, call.at - over) for call in across]
    assert all(call.at > early[0].at for call in across), "the shard group comes first"
    gathers = [
        call.at for call in calls if call.ranks == (0, 1) and call.name == "all_gather_into_tensor"
    ]
    for passes in (forwards, backwards) if options["zero_stage"] == 3 else ():
        assert all(any(event.start < at < event.end for at in gathers) for event in passes)


# Refusals


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (
            "dp6",
            {"shard_size": 4},
            (
                "zero_shard_size must divide dp, which is 6; got 4. Use 3 or null; null shards over"
                " all 6 data-"
            ),
        ),
        ("dp8", {"shard_size": 3}, "got 3. Use 2, 4 or null; null shards"),
        (
            "dp4",
            {"shard_size": 8},
            "zero_shard_size must divide dp, which is 4; got 8. Use 2 or null",
        ),
        (
            "dp3",
            {"shard_size": 2},
            "zero_shard_size must divide dp, which is 3; got 2. Use null; null shards over all 3",
        ),
        (
            "dp4",
            {"shard_size": -2},
            "zero_shard_size must divide dp, which is 4; got -2. Use 2 or null",
        ),
        (
            "dp4",
            {"shard_size": 1},
            (
                "=1 would shard nothing over the data-parallel ranks. Use 2 or null; .*"
                " zero_stage=0 replicates"
            ),
        ),
        (
            "tp2",
            {"shard_size": 2},
            "zero_shard_size=2 needs several data-parallel ranks, but dp is 1. Omit",
        ),
        (
            "dp4",
            {"shard_size": 2, "stage": 0},
            "zero_shard_size=2 needs zero_stage=1, 2 or 3; got 0",
        ),
        ("dp4", {"shard_size": True}, "must be a whole number"),
        (
            "dp4",
            {"shard_size": 0},
            "zero_shard_size must divide dp, which is 4; got 0. Use 2 or null",
        ),
        (
            "dp8_ep4",
            {"shard_size": 2},
            (
                r"=2 makes groups of 2 \* tp \* cp = 2 ranks, .* of dp8_ep4 are shared by 4 ranks.*"
                r" Use 4 or null"
            ),
        ),
        ("dp8_ep4", {"shard_size": 3}, "must divide dp, which is 8; got 3. Use 4 or null"),
        (
            "tp2_dp8_ep8",
            {"shard_size": 2},
            "shared by 8 ranks, which must be in one group. Use 4 or null",
        ),
    ],
)
def test_what_is_refused(layout: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ZeroOptions(**{"stage": 1, **options}).over(Layout.parse(layout))


@pytest.mark.parametrize("size", [None, 4])
def test_one_group_of_all_ranks_is_the_default(size: int | None) -> None:
    assert ZeroOptions(1, shard_size=size).over(Layout(dp=4)) == ZeroOptions(1)
    assert ZeroOptions(3, shard_size=4).over(Layout(dp=4, tp=2, ep=2)).shard_size is None
    assert ZeroOptions(3, shard_size=2).over(Layout(dp=4, tp=2, ep=4)).shard_size == 2
