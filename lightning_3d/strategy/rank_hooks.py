"""Lightning's hooks about ranks: their number, their place on the mesh, and collectives between
them."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from typing_extensions import override

from lightning_3d.compat.lightning_data import seed_workers
from lightning_3d.engine.local_model import Partition
from lightning_3d.engine.not_ready import ATTACHED, CONNECTED, require
from lightning_3d.health.processes import Process
from lightning_3d.health.time_limits import seconds_allowed
from lightning_3d.health.watchdog import Watchdog
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.micro_batch_rows import MicroBatchRows
from lightning_3d.options.model import ModelOptions
from lightning_3d.options.reliability import Reliability
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.ranks.environment import ranks_with_work
from lightning_3d.ranks.heartbeat import Heartbeat
from lightning_3d.ranks.output import survive_output
from lightning_3d.ranks.process_ties import tie_workers
from lightning_3d.ranks.reporter import FailureReporter
from lightning_3d.strategy.endings import Ending

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch


class RankHooks(ParallelStrategy):
    """A strategy whose ranks have a place on a mesh."""

    layout: Layout | None
    schedule: str
    zero: ZeroOptions
    micro_batch_size: int | None
    _whole_dp: int | None = None
    _mesh: Mesh | None = None
    _failures: FailureReporter | None = None
    _watchdog: Watchdog | None = None
    options: ModelOptions
    reliability: Reliability
    heartbeat: Heartbeat
    _ending: Ending = Ending.NORMAL
    _num_nodes: int = 1

    @property
    def _node_size(self) -> int | None:
        """Ranks of each node, for the exchange of tokens between experts; None for one node."""
        return self.options.experts.moe_node_size or (
            self.num_processes if self.num_nodes > 1 else None
        )

    @property
    def mesh(self) -> Mesh:
        """The process groups. Raises RuntimeError before ranks are connected."""
        return require(self._mesh, "process groups", CONNECTED)

    @property
    def user_module(self) -> pl.LightningModule:
        """The user's module. Raises RuntimeError before a Trainer has passed it."""
        return require(self.lightning_module, "a module", ATTACHED)

    @property
    def is_distributed(self) -> bool:
        """True. Lightning asks for this attribute by name: without it neither samplers nor
        `sync_dist` know of several ranks."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        return require(self.parallel_devices, "devices", ATTACHED)[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different data."""
        return self.layout.dp if self.layout is not None else self.num_nodes * self.num_processes

    @property
    def micro_batch_rows(self) -> MicroBatchRows:
        """How the rows of a global batch are dealt to data-parallel ranks."""
        dp = self.data_parallel_size
        return MicroBatchRows(dp, self._whole_dp or dp, self.micro_batch_size or 1)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a `DistributedSampler` that gives ranks with the same data-parallel index
        the same batches."""
        return {"num_replicas": self.mesh.size("dp"), "rank": self.mesh.index("dp")}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Seed the workers of a data loader as Lightning does, and let them end with this rank,
        however it ends."""
        seed_workers(dataloader, int(self.distributed_sampler_kwargs["rank"]))
        tie_workers(dataloader)
        return dataloader

    def _settle_layout(self) -> None:
        """Choose data parallelism over all ranks where no layout was passed.

        Raises:
            LayoutError: the layout has another number of ranks than the Trainer, or ZeRO's shard
                size does not divide them.
        """
        world_size = ranks_with_work() or self.num_nodes * self.num_processes
        if self.layout is None:
            self.layout = Layout(dp=world_size)
            self.zero = self.zero.over(self.layout)
        self.layout.require_world_size(world_size)

    def _watch_ranks(self) -> None:
        """Report this rank's failure to the others, and end when they report theirs, until
        `teardown`."""
        survive_output()
        if self._failures is None:
            self._failures = FailureReporter.connect(
                self.global_rank, self.world_size, self.reliability.rendezvous_timeout
            )
            children = getattr(self._launcher, "children", None)
            if children is not None:
                children.reporter = self._failures
            self._failures.watch()

    def _watch_progress(self, folder: str, save_seconds: float) -> None:
        """End all ranks when they do not get on any more, until `teardown`. Collective over the
        world.

        Args:
            folder: folder of the run, where the ranks write what they did.
            save_seconds: time limit of a save.
        """
        limit = self.reliability.hang_timeout
        if (
            self._failures is None
            or self.world_size == 1
            or limit is None
            or self._watchdog is not None
        ):
            return
        allowed = partial(seconds_allowed, self.heartbeat, limit, save_seconds)
        processes = self._all_gather_objects(Process.own())
        self._watchdog = Watchdog(
            self.heartbeat,
            allowed,
            self._failures,
            self.global_rank,
            processes,
            Path(folder) / "hang",
        )
        self._watchdog.start()

    def _all_gather_objects(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, by rank."""
        found = [mine] * self.world_size
        dist.all_gather_object(found, mine)
        return found

    def _stop_watching(self) -> None:
        """Stop all watches: a rank that ends from here on is no failure any more."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._failures is not None:
            self._failures.close()
            self._failures = None

    def _connect_mesh(self, timeout: timedelta) -> None:
        """Create the process groups, or take those of an earlier Trainer's strategy, which the
        layers of the module use."""
        if self._mesh is not None:
            return
        layout = require(self.layout, "a layout", ATTACHED)
        earlier = Partition.of(self.lightning_module) if self.lightning_module is not None else None
        kept = (
            earlier.mesh if earlier is not None and earlier.suits(layout, self.schedule) else None
        )
        self._mesh = (
            Mesh(layout, timeout=timeout, node_size=self._node_size) if kept is None else kept
        )
        # else this Trainer is refused, and the earlier one goes on
        if earlier is None or kept is None or not earlier.parts.lost:
            self._mesh.shard_data(self.zero.shard_size)
        if kept is None or self.zero.shard_size is not None:
            self._mesh.warm_up()

    # Collectives

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return (
            super().all_gather(tensor, group, sync_grads)
            if self._may_communicate("all_gather")
            else tensor
        )

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._may_communicate("barrier"):
            dist.barrier(
                device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None
            )

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self._may_communicate("broadcast"):
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks. Tensor, context and pipeline replicas hold equal values, so that a
        mean is the mean over data ranks."""
        if not isinstance(tensor, Tensor) or not self._may_communicate("reduce"):
            return tensor
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = (
            getattr(dist.ReduceOp, reduce_op.upper())
            if isinstance(reduce_op, str) and not mean
            else reduce_op
        )
        if group is None and isinstance(reduce_op, str) and reduce_op.lower() == "sum":
            group = self.mesh.group("dp")  # a sum must count what replicas hold once
        result = tensor.clone()
        dist.all_reduce(result, op=dist.ReduceOp.SUM if mean else op, group=group)
        return result / dist.get_world_size(group) if mean else result

    def _refuse_inside_step(self, what: str) -> None:
        """Refuse a collective inside the user's step, which not all ranks run equally often. Raises
        ConfigError."""
        raise NotImplementedError

    def _may_communicate(self, what: str) -> bool:
        """Return whether the other ranks take part in a collective now.

        Raises:
            ConfigError: the user's step is running, which not all ranks run equally often.
        """
        self._refuse_inside_step(what)
        return dist.is_initialized() and not self._has_failed_alone()

    def _has_failed_alone(self) -> bool:
        """Return whether a callback communicates because of an exception (to save a checkpoint)
        that other ranks do not know of.

        They cannot take part. Lightning calls callbacks before the strategy, so the failure is
        reported here. All ranks see SIGTERM, and a step that is not finite, together.
        """
        error = sys.exception()
        if (
            error is None
            or Ending.by(error) is not Ending.ALONE
            or self.world_size == 1
            or self.lightning_module is None
        ):
            return False
        if self.lightning_module.trainer.state.status != TrainerStatus.INTERRUPTED:
            return False
        self.on_exception(error)
        return True
