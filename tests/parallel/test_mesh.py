"""Process groups of a layout, on four ranks."""

import pytest
import torch
import torch.distributed as dist

from lightning_3d.errors import LayoutError
from lightning_3d.layout import Layout
from lightning_3d.layout.layout import AXES
from lightning_3d.parallel.mesh import GROUPS, Mesh


def sum_over(group: dist.ProcessGroup) -> int:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return int(total.item())


def every_group_connects_its_ranks(name: str, order: tuple[str, ...]) -> None:
    mesh = Mesh(Layout.parse(name, order=order))
    mesh.warm_up()
    assert mesh.rank == dist.get_rank()
    for axes in GROUPS:
        group = mesh.group(*axes)
        assert group is mesh.group(*reversed(axes))
        assert dist.get_process_group_ranks(group) == list(mesh.ranks(*axes))
        assert sum_over(group) == sum(mesh.ranks(*axes))
    for axis in AXES:
        assert mesh.size(axis) == mesh.layout.size(axis) == dist.get_world_size(mesh.group(axis))
        assert mesh.index(axis) == mesh.coordinates[axis] == dist.get_rank(mesh.group(axis))
    mesh.destroy()
    mesh.destroy()
    assert sum_over(dist.group.WORLD) == 6


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("tp2_pp2", AXES),
        ("tp2_dp2", ("dp", "pp", "cp", "tp")),
        ("pp4", AXES),
        ("dp2_cp2", ("tp", "cp", "dp", "pp")),
    ],
)
def test_every_group_connects_its_ranks(ranks, name: str, order: tuple[str, ...]):
    ranks(every_group_connects_its_ranks, 4, name, order)


def pipeline_groups_carry_messages() -> tuple[list[float], list[str]]:
    """A ring upwards and one downwards at the same time, and an object from the last rank."""
    mesh = Mesh(Layout(pp=4))
    mesh.warm_up()
    rank, world = mesh.rank, mesh.ranks("pp")
    assert mesh.pipeline_up is mesh.pipeline_down, (
        "gloo needs no second group for the other direction"
    )
    received = [torch.zeros(1), torch.zeros(1)]
    works = []
    if rank < 3:
        works += [dist.isend(torch.tensor([10.0 + rank]), world[rank + 1], group=mesh.pipeline_up)]
        works += [dist.irecv(received[1], world[rank + 1], group=mesh.pipeline_down)]
    if rank > 0:
        works += [
            dist.isend(torch.tensor([20.0 + rank]), world[rank - 1], group=mesh.pipeline_down)
        ]
        works += [dist.irecv(received[0], world[rank - 1], group=mesh.pipeline_up)]
    for work in works:
        work.wait()
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, world[-1], group=mesh.control)
    mesh.destroy()
    return [tensor.item() for tensor in received], told


def test_pipeline_groups_carry_messages(ranks):
    results = ranks(pipeline_groups_carry_messages, 4)
    assert [values for values, _ in results] == [
        [0.0, 21.0],
        [10.0, 22.0],
        [11.0, 23.0],
        [12.0, 0.0],
    ]
    assert all(told == ["from 3"] for _, told in results)


def created_groups() -> tuple[int, int, bool]:
    mesh = Mesh(Layout(tp=2, dp=2))
    mesh.create([(3, 0), (1, 2)])
    pair = mesh.group_for((0, 3) if mesh.rank in (0, 3) else (2, 1))
    mesh.create([(0, 3), (0, 1)])  # the first exists, the second is the group over tp
    again = mesh.group_for((0, 3) if mesh.rank in (0, 3) else (2, 1))
    mesh.warm_up()
    total, with_axis = sum_over(pair), mesh.group_for(mesh.ranks("tp")) is mesh.group("tp")
    mesh.destroy()
    return total, int(pair is again), with_axis


def test_created_groups_are_kept(ranks):
    assert ranks(created_groups, 4) == [(3, 1, True)] * 4


def what_is_refused() -> tuple[str, str, str, str]:
    mesh = Mesh(Layout(pp=2))
    messages = []
    for wrong in (
        lambda: mesh.group("tp", "dp"),
        lambda: mesh.group("ep"),
        lambda: mesh.group_for((0, 1, 2)),
    ):
        try:
            wrong()
        except LookupError as error:
            messages.append(str(error))
    try:
        Mesh(Layout(tp=2, dp=2))
    except LayoutError as error:
        messages.append(str(error))
    mesh.destroy()
    return tuple(messages)


def test_f01_a_layout_for_another_world_and_groups_that_do_not_exist_are_refused(ranks):
    for no_group, no_axis, not_created, world in ranks(what_is_refused, 2):
        assert "no process group over tp+dp; it has tp, cp, pp, dp, tp+pp" in no_group
        assert "no process group over ep" in no_axis
        assert "no process group of the ranks (0, 1, 2)" in not_created
        assert (
            "needs 4 ranks (tp 2 * dp 2), but 2 ranks were launched. Layouts for 2 ranks: tp2"
            in world
        )


def groups_are_made_by_all_ranks_alike() -> int:
    """Building meshes of different layouts one after another, as tests do, needs no barrier between
    them."""
    for name in ("tp2", "pp2", "dp2", "cp2"):
        mesh = Mesh(Layout.parse(name))
        mesh.warm_up()
        mesh.destroy()
    return sum_over(dist.group.WORLD)


def test_meshes_can_follow_each_other(ranks):
    assert ranks(groups_are_made_by_all_ranks_alike, 2) == [1, 1]
