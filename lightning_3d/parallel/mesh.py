"""From a `Layout` to process groups. The only module that creates groups.

All groups are created when the mesh is built, by every rank, in the same order, so that no later
code path can wait for a rank that does not take it. Groups of one rank exist too, so code need not
check whether an axis is in use before it uses the group.

No two groups have the same ranks, but for those of `Mesh.outside_blocks` and the two directions of
a pipeline: each gloo group costs three threads, one of which wakes up a hundred times a second, in
every process. On NCCL a group costs nothing until it is used; then it makes a communicator, which
holds some hundred MB of each GPU (NCCL issue 964), and another one for each pair that sends
messages. So a group of one rank, and what is small and may wait, is gloo's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_3d.compat.torch_fake import FAKE_GLOO
from lightning_3d.layout.layout import AXES, Layout
from lightning_3d.layout.node_ranks import by_node
from lightning_3d.parallel import host_channel

GROUPS: tuple[tuple[str, ...], ...] = (
    *((axis,) for axis in AXES),
    ("tp", "pp"),  # model parallel, for DeepSpeed's mpu
    ("dp", "cp"),  # gradients of replicated weights
    ("tp", "cp"),  # tokens of one micro-batch
    ("tp", "cp", "pp"),  # gradient norm
    ("cp", "pp", "dp"),  # loss and logged values: everything but tensor-parallel replicas
)
"""Combinations of axes that have a process group."""

IN_SCHEDULE: tuple[tuple[str, ...], ...] = (("tp",), ("cp",), ("tp", "cp"), ("dp", "cp"))
"""Those whose collectives run between the actions of a pipeline schedule."""

_HOST_BACKENDS = ("gloo", "mpi", "fake", FAKE_GLOO)
"""Backends whose collectives take tensors in host memory. Those of dry runs take any."""


@dataclass(frozen=True)
class ExpertNodes:
    """Nodes with the ranks that share the experts of a stage, equally many on each. Experts are
    numbered node by node.

    Attributes:
        across: group of one rank of each node, those with this rank's place on their node.
        within: group of the ranks of this rank's node.
        nodes: number of nodes.
        node: number of this rank's node among them.
    """

    across: dist.ProcessGroup
    within: dist.ProcessGroup
    nodes: int
    node: int

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertNodes:
        """A copied model talks to the same ranks."""
        return self


class Mesh:
    """Process groups of one layout and this rank's coordinates.

    The default process group must be initialized. Building a mesh is collective over the world and
    sends nothing yet; `warm_up` connects.

    Args:
        layout: degrees and rank order.
        timeout: of collectives in the groups; None for the default of the backend.
        node_size: ranks of each node, for the exchange of tokens between experts; None for one
            node.

    Raises:
        LayoutError: the world has another number of ranks than the layout.

    Attributes:
        layout: the layout.
        rank: global rank.
        coordinates: index of this rank along each axis.
    """

    def __init__(
        self, layout: Layout, *, timeout: timedelta | None = None, node_size: int | None = None
    ) -> None:
        layout.require_world_size(dist.get_world_size())
        self.layout = layout
        self.rank = dist.get_rank()
        self.coordinates = layout.coordinates(self.rank)
        self._timeout = timeout
        self._created: list[dist.ProcessGroup] = []
        self._known: set[tuple[int, ...]] = set()
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._known.update((rank,) for rank in range(layout.world_size))
        self._known.add(tuple(range(layout.world_size)))
        self._on_host = dist.get_backend() in _HOST_BACKENDS
        # a single rank sends nothing, and has small tensors in host memory
        if self._on_host or layout.world_size > 1:
            self._by_ranks[tuple(range(layout.world_size))] = _world()
        for axes in GROUPS:
            self._create_missing(layout.groups(*axes), "+".join(axes))
        self._experts = _containing(self.rank, layout.expert_groups())
        self._expert_data = _containing(self.rank, layout.expert_data_groups())
        if layout.ep > 1:
            self._create_missing(layout.expert_groups(), "experts")
            self._create_missing(layout.expert_data_groups(), "expert data")
        self._expert_nodes = by_node(self._experts, node_size or layout.world_size)
        for experts in layout.expert_groups():
            nodes = by_node(experts, node_size or layout.world_size)
            self._create_missing([*nodes, *zip(*nodes, strict=True)], "experts of nodes")
        self._by_axes = {frozenset(axes): layout.group_of(self.rank, *axes) for axes in GROUPS}
        self._shard_size = layout.dp
        self._shard_ranks, self._expert_shard_ranks = self.ranks("dp", "cp"), self._expert_data
        self._replica_ranks: tuple[int, ...] = (self.rank,)
        self._outside: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._create_outside_blocks(layout.groups("dp", "cp"))
        self._apart: dict[str, dist.ProcessGroup] = {}
        if not self._on_host and layout.pp > 1:
            self._apart = {
                "up": self._second(("pp",), "pipeline up"),
                "down": self._second(("pp",), "pipeline down"),
                "control": self._second(("pp",), "pipeline control", "gloo"),
            }
        if not self._on_host and layout.dp * layout.cp > 1:
            self._apart["data control"] = self._second(("dp", "cp"), "data control", "gloo")
        # else a group above has all ranks
        if not self._on_host and layout.world_size not in (1, layout.pp, layout.dp * layout.cp):
            self._apart["world control"] = self._second(
                ("tp", "cp", "pp", "dp"), "world control", "gloo"
            )

    @property
    def pipeline_up(self) -> dist.ProcessGroup:
        """Group over the ranks of the pipeline, for messages to a higher pipeline rank.

        On NCCL it is a different group than `pipeline_down`, because the operations of one
        communicator wait for each other.
        """
        return self._apart.get("up") or self.group("pp")

    @property
    def pipeline_down(self) -> dist.ProcessGroup:
        """Group over the ranks of the pipeline, for messages to a lower pipeline rank."""
        return self._apart.get("down") or self.group("pp")

    @property
    def control(self) -> dist.ProcessGroup:
        """Group over the ranks of the pipeline, for small Python objects in host memory (gloo)."""
        return self._apart.get("control") or self.group("pp")

    @property
    def data_control(self) -> dist.ProcessGroup:
        """Group over the ranks of ("dp", "cp"), for small tensors in host memory (gloo), so that
        the host need not wait for the device."""
        return self._apart.get("data control") or self.group("dp", "cp")

    @property
    def world_control(self) -> dist.ProcessGroup:
        """Group over all ranks, for small tensors in host memory (gloo), so that the host need not
        wait for the device."""
        if self._on_host:
            return _world()
        return self._apart.get("world control") or (
            self.control if self.layout.world_size == self.layout.pp else self.data_control
        )

    def shard_data(self, size: int | None) -> None:
        """Let ZeRO shard over groups of neighbouring data-parallel ranks. Collective over the
        world; sends nothing yet.

        Args:
            size: data-parallel indices of a group, a divisor of dp (see `check_shard_size`); None:
                all of them.
        """
        self._shard_size = size or self.layout.dp
        shards, replicas = (
            self.layout.shard_groups(self._shard_size),
            self.layout.replica_groups(self._shard_size),
        )
        self._shard_ranks, self._replica_ranks = (
            _containing(self.rank, shards),
            _containing(self.rank, replicas),
        )
        self._create_missing(shards, "shard")
        self._create_missing(replicas, "replicas")
        self._create_outside_blocks(shards)
        if self.layout.ep > 1:
            expert_shards = self.layout.expert_shard_groups(self._shard_size)
            self._expert_shard_ranks = _containing(self.rank, expert_shards)
            self._create_missing(expert_shards, "expert shard")

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Group of the ranks that ZeRO shards over: this rank's neighbours along ("dp", "cp"), or
        all of them."""
        return self.group_for(self._shard_ranks)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks with the same shard as this one, one of each shard group; None if
        there is only one shard group."""
        return self.group_for(self._replica_ranks) if len(self._replica_ranks) > 1 else None

    @property
    def replica_index(self) -> int:
        """Index of this rank's shard group among those of its stage."""
        return self.coordinates["dp"] // self._shard_size

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """Group of the ranks that share the experts of this stage, in the order of
        `expert_index`."""
        return self.group_for(self._experts)

    @property
    def expert_index(self) -> int:
        """Index of this rank's part among the ep parts of its stage's experts."""
        return self._experts.index(self.rank)

    @property
    def expert_nodes(self) -> ExpertNodes | None:
        """Nodes of the ranks that share the experts of this stage; None if they are on one, or
        unequally many on each."""
        nodes = self._expert_nodes
        if not nodes:
            return None
        within, across = (
            _containing(self.rank, nodes),
            _containing(self.rank, zip(*nodes, strict=True)),
        )
        return ExpertNodes(
            self.group_for(across), self.group_for(within), len(nodes), nodes.index(within)
        )

    @property
    def expert_data_group(self) -> dist.ProcessGroup:
        """Group of the ranks of this stage that have the same experts."""
        return self.group_for(self._expert_data)

    @property
    def expert_shard_group(self) -> dist.ProcessGroup:
        """Group of the ranks that ZeRO shards experts over: those of `expert_data_group` that are
        in one shard group."""
        return self.group_for(self._expert_shard_ranks)

    @property
    def expert_data_ranks(self) -> tuple[int, ...]:
        """Global ranks of `expert_data_group`, rising."""
        return self._expert_data

    def index(self, axis: str) -> int:
        """This rank's index along an axis."""
        return self.coordinates[axis]

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self.layout.size(axis)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Global ranks of this rank's group over these axes, rising; along a single axis in the
        order of its index."""
        return self.layout.group_of(self.rank, *axes)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """This rank's group over these axes, in any order; a member's group rank is its place in
        `ranks(*axes)`.

        Raises:
            LookupError: there is none over this combination (see `GROUPS`): groups are never
                created on first use.
        """
        try:
            ranks = self._by_axes[frozenset(axes)]
        except KeyError:
            known = ", ".join("+".join(axes) for axes in GROUPS)
            raise LookupError(
                f"The mesh has no process group over {'+'.join(axes)}; it has {known}."
            ) from None
        return self.group_for(ranks)

    def create(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Create groups of global ranks. Collective over the world: every rank passes the same
        list.

        A group that exists already is used again. Groups that this rank is not in are created too,
        but not kept.
        """
        self._create_missing(groups, "parameters")

    def group_for(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """The group of exactly these global ranks.

        Raises:
            LookupError: it was not created, or this rank is not in it.
        """
        wanted = _sorted(ranks)
        if wanted == (self.rank,) and wanted not in self._by_ranks:
            self._by_ranks[wanted] = self._alone()
        try:
            return self._by_ranks[wanted]
        except KeyError:
            raise LookupError(
                f"Rank {self.rank} has no process group of the ranks {wanted}: call Mesh.create"
                " first."
            ) from None

    def outside_blocks(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group of the ranks of `group`, which are data-parallel, for messages that start while
        blocks compute.

        If these ranks are those of cp or of the experts, it is another one than theirs. A rank that
        gets a gradient later than the others would start its messages in another order than they
        do.
        """
        return self._outside.get(_sorted(dist.get_process_group_ranks(group))) or group

    def warm_up(self) -> None:
        """Use every group that a pipeline schedule uses, and every pair of pipeline neighbours,
        once, in the same order on all ranks.

        Communicators are made at their first use. When that happens in the middle of a pipeline
        schedule, different ranks wait for different neighbours. One all-reduce of one number for
        each group, two messages for each pair. On gloo, where a group that is not used later costs
        no memory, every group is used. May be called again after `create`.
        """
        for group in (_world(), *self._created) if self._on_host else self._in_schedule():
            if dist.get_world_size(group) > 1:
                dist.all_reduce(torch.ones(1, device=_device(group)), group=group)
        if dist.get_backend() == "gloo":
            host_channel.share([_world(), *self._created], self._timeout or default_pg_timeout)
        pipeline = self.ranks("pp") if self.size("pp") > 1 else ()
        for lower, upper in _neighbours(pipeline):
            self._message(lower, upper, self.pipeline_up)
            self._message(upper, lower, self.pipeline_down)

    def _in_schedule(self) -> list[dist.ProcessGroup]:
        """Groups of this rank whose collectives run inside a schedule, each once, in the same order
        on all ranks."""
        ranks = [
            *(self.ranks(*axes) for axes in IN_SCHEDULE),
            self._shard_ranks,
            self._replica_ranks,
        ]
        if self.layout.ep > 1:
            ranks += [self._experts, self._expert_data, self._expert_shard_ranks]
            ranks += [
                _containing(self.rank, split)
                for split in (self._expert_nodes, [*zip(*self._expert_nodes, strict=True)])
                if split
            ]
        groups = [
            self.group_for(members)
            for members in dict.fromkeys(map(_sorted, ranks))
            if len(members) > 1
        ]
        return [*groups, *(group for group in self._outside.values() if group is not None)]

    def destroy(self) -> None:
        """Destroy the groups of this mesh, the latest first. The default process group stays."""
        host_channel.unshare([_world(), *self._created] if self.layout.world_size > 1 else [])
        while self._created:
            group = self._created.pop()
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._by_ranks.clear()
        self._by_axes.clear()
        self._outside.clear()
        self._known.clear()
        self._apart.clear()

    def _create_missing(self, groups: Iterable[Iterable[int]], description: str) -> None:
        for ranks in map(_sorted, groups):
            if ranks in self._known:
                continue
            self._known.add(ranks)
            group = self._new(ranks, description)
            if group is not None:
                self._by_ranks[ranks] = group

    def _create_outside_blocks(self, groups: Iterable[Iterable[int]]) -> None:
        """Create a second group for each of these whose ranks also send messages inside blocks:
        those of cp, or of the experts."""
        layout = self.layout
        busy = {
            *map(_sorted, layout.groups("cp") if layout.cp > 1 else ()),
            *map(_sorted, layout.expert_groups() if layout.ep > 1 else ()),
        }
        for ranks in map(_sorted, groups):
            if ranks in busy and ranks not in self._outside:
                self._outside[ranks] = self._new(ranks, "outside blocks")

    def _new(
        self, ranks: tuple[int, ...], description: str, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """A new group, None when this rank is not in it. All ranks call this for all groups, in the
        same order."""
        group = dist.new_group(
            list(ranks), timeout=self._timeout, backend=backend, group_desc=description
        )
        if self.rank not in ranks:
            return None
        self._created.append(group)
        return group

    def _alone(self) -> dist.ProcessGroup:
        """A group of this rank only, made when it is asked for: no other rank takes part. On NCCL
        it would cost a communicator."""
        backend = None if self._on_host else "gloo"
        group = dist.new_group(
            [self.rank],
            timeout=self._timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc="alone",
        )
        self._created.append(group)
        return group

    def _second(
        self, axes: tuple[str, ...], description: str, backend: str | None = None
    ) -> dist.ProcessGroup:
        """Create a second group over this rank's ranks along these axes. All ranks create all of
        them."""
        own = [self._new(ranks, description, backend) for ranks in self.layout.groups(*axes)]
        return next(group for group in own if group is not None)

    def _message(self, sender: int, receiver: int, group: dist.ProcessGroup) -> None:
        number = torch.ones(1, device=_device(group))
        if self.rank == sender:
            dist.send(number, receiver, group=group)
        elif self.rank == receiver:
            dist.recv(number, sender, group=group)


class StageMesh:
    """One pipeline stage of a mesh as if no other stages existed: the same groups over tp, cp, dp
    and the experts, and a pipeline of one process. The self-check builds a model over it that runs
    all `stages` of a pipeline one after the other on every rank.

    Args:
        mesh: the run's mesh.
        stage: stage that `index("pp")` returns.
        stages: number of stages.
    """

    layout: Layout

    def __init__(self, mesh: Mesh | TensorMesh, stage: int, stages: int) -> None:
        self._mesh, self._stage, self._stages = mesh, stage, stages
        self.layout = replace(mesh.layout, pp=1, vp=1)

    @property
    def expert_group(self) -> dist.ProcessGroup:
        return self._mesh.expert_group

    @property
    def expert_index(self) -> int:
        return self._mesh.expert_index

    @property
    def expert_nodes(self) -> ExpertNodes | None:
        return self._mesh.expert_nodes

    def index(self, axis: str) -> int:
        return self._stage if axis == "pp" else self._mesh.index(axis)

    def size(self, axis: str) -> int:
        return self._stages if axis == "pp" else self._mesh.size(axis)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group over these axes without the pipeline.

        Raises:
            LookupError: see `Mesh.group`.
        """
        return self._mesh.group(*(axis for axis in axes if axis != "pp"))


class TensorMesh(StageMesh):
    """The tensor-parallel ranks of a mesh, with or without the context-parallel ones, as if there
    were no others: for a model that only they share.

    Args:
        mesh: the run's mesh.
        tp: whether the tensor-parallel ranks shard the model. cp: whether the context-parallel ones
            split its sequences.

    Attributes:
        rank: number among these ranks.
    """

    def __init__(self, mesh: Mesh, *, tp: bool = True, cp: bool = False) -> None:
        super().__init__(mesh, 0, 1)
        self.layout = Layout(tp=mesh.size("tp") if tp else 1, cp=mesh.size("cp") if cp else 1)
        self.rank = self.index("cp") * self.layout.tp + self.index("tp")
        self._alone = mesh.group_for((mesh.rank,))

    @property
    def expert_group(self) -> dist.ProcessGroup:
        return self._alone

    @property
    def expert_data_group(self) -> dist.ProcessGroup:
        return self._alone

    @property
    def expert_index(self) -> int:
        return 0

    @property
    def expert_nodes(self) -> ExpertNodes | None:
        return None

    def index(self, axis: str) -> int:
        return self._mesh.index(axis) if self.size(axis) > 1 else 0

    def size(self, axis: str) -> int:
        return self.layout.size(axis)

    def group(self, *axes: str) -> dist.ProcessGroup:
        there = [axis for axis in ("tp", "cp") if axis in axes and self.size(axis) > 1]
        return self._mesh.group(*there) if there else self._alone


def _world() -> dist.ProcessGroup:
    """The default process group."""
    world = dist.group.WORLD
    assert world is not None
    return world


def _sorted(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))


def _containing(rank: int, groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return next(group for group in groups if rank in group)


def _neighbours(pipeline: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs (lower, upper) of pipeline ranks that exchange messages; looped schedules join the last
    to the first."""
    pairs = list(zip(pipeline, pipeline[1:], strict=False))
    return [*pairs, (pipeline[0], pipeline[-1])] if len(pipeline) > 2 else pairs


def _device(group: dist.ProcessGroup) -> torch.device:
    """Device that tensors of a collective in this group must be on."""
    on_host = dist.get_backend(group) in _HOST_BACKENDS or not torch.cuda.is_available()
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def gathered(value: Any, mesh: Mesh) -> list[Any]:
    """Gather a value of each rank on all of them, in host memory."""
    if mesh.layout.world_size == 1:
        return [value]
    values: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(values, value, group=mesh.world_control)
    return values
