"""Stage 3: parameters, gradients and the optimizer's state are sharded over the data-parallel ranks.

Each rank keeps a part of every unit of parameters (`units`). The pieces of parameters in it are what the optimizer trains:
DeepSpeed, as at stages 1 and 2 but with one rank only, gives them float32 master weights and steps. DeepSpeed's own stage 3 is
not used: it frees parameters by giving them other storage, which views that autograd has saved do not follow (the transposed
weight of every linear layer), and its hooks see neither the chunks nor the split backward of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.config.options.zero import MICRO_BATCH, PARAMETERS, STEP
from lightning_3d.parallel.sharding import OptimizerShard
from lightning_3d.parallel.zero.deepspeed_backend import DeepSpeedBackend
from lightning_3d.parallel.zero.deepspeed_inputs import Groups
from lightning_3d.parallel.zero.flat_partition import Partition
from lightning_3d.parallel.zero.gradient_buffers import FlatGradients, Slot, end_to_end
from lightning_3d.parallel.zero.overlapped_reduction import Share
from lightning_3d.parallel.zero.parameter_units import ParameterUnits


class ShardedBackend(DeepSpeedBackend):
    """ZeRO 3. Parameters are whole only while a batch, or with `gather="micro_batch"` a block, is worked on."""

    _units: ParameterUnits | None = None
    _names: dict[int, str]
    _pieces: dict[nn.Parameter, tuple[nn.Parameter, int]]  # by parameter: this rank's piece of it and its first element
    _places: dict[int, tuple[Partition, Slot]]  # by piece

    def shard(
        self, module: nn.Module, blocks: Sequence[nn.Module], device: torch.device, is_active: Callable[[nn.Module], bool]
    ) -> None:
        if self._units is not None:  # an earlier fit failed
            self._units.open()
        else:
            self._names = {id(parameter): name for name, parameter in module.named_parameters()}
            dealt = {name for name, spec in self._specs.items() if spec.expert}
            self._units = ParameterUnits(
                module,
                blocks,
                self._group,
                device,
                whole=self._zero.gather == STEP,
                is_active=is_active,
                finished=self._block_finished,
                on_host=self._zero.offload == PARAMETERS,
                apart={key: self._expert_group for key, name in self._names.items() if name in dealt},
            )

    def held(self) -> dict[str, list[Tensor]]:
        held = super().held()
        for unit in self._units.all if self._units is not None else ():
            held["parameters"] += unit.kept()
        return held

    @contextmanager
    def parameters_in_use(self) -> Iterator[None]:
        assert self._units is not None, "shard() comes first"
        with self._units.in_use():
            yield

    def weight_shards(self) -> list[OptimizerShard]:
        if self._units is None:
            return []
        shards = []
        for unit in self._units.all:
            owned = {id(slot.parameter): first for slot, first, _ in unit.owned()}
            for slot in unit.slots:
                piece = unit.pieces.get(slot.parameter)
                values = piece.detach() if piece is not None else slot.parameter.new_zeros(0)
                shards.append(OptimizerShard(self._names[id(slot.parameter)], owned.get(id(slot.parameter), 0), {"weight": values}))
        return shards

    def make_whole(self) -> None:
        if self._units is not None:
            self._units.restore()
            self._units = None

    def abandon(self) -> bool:
        if self._units is None:
            return False
        if all(dist.get_world_size(unit.group) == 1 for unit in self._units.all):
            self.make_whole()
            return False
        self._units.close()
        return True

    def _install(self, optimizer: Optimizer) -> None:
        assert self._units is not None, "shard() comes first"
        self._optimizer = optimizer
        self._partitions, self._pieces, self._entries = [], {}, {}
        trained = {id(entry.parameter): entry for entry in self._trained}
        order: list[nn.Parameter] = []
        for unit in self._units.all:
            for slot, first, _ in unit.owned():
                if id(slot.parameter) in trained:
                    piece = nn.Parameter(unit.pieces[slot.parameter])
                    unit.pieces[slot.parameter] = piece
                    self._pieces[slot.parameter] = (piece, first)
                    self._entries[id(piece)] = trained[id(slot.parameter)]
            order += [slot.parameter for slot in unit.slots if id(slot.parameter) in trained]
        for group in optimizer.param_groups:
            group["params"] = [self._pieces[p][0] for p in group["params"] if p in self._pieces]
        if self._pieces:
            self._start_engine([piece for piece, _ in self._pieces.values()], optimizer, Groups(self._mesh, sharded=False))
        self._places = {id(slot.parameter): (partition, slot) for partition in self._partitions for slot in partition.owned_slots}
        dealt = {id(parameter) for parameter in order if trained[id(parameter)].spec.expert}
        if len(dealt) < len(order):
            self._lay_out_units(end_to_end(parameter for parameter in order if id(parameter) not in dealt))
        if dealt:
            slots = end_to_end(parameter for parameter in order if id(parameter) in dealt)
            self._expert_flat = FlatGradients(slots, slots[-1].stop, bucket_bytes=self._bucket_bytes, waves=self._waves)

    def _lay_out_units(self, slots: Sequence[Slot]) -> None:
        """Trained parameters one behind the other, and which rank keeps which of their elements."""
        assert self._units is not None
        places = {id(slot.parameter): slot for slot in slots}
        shares = [
            Share(rank, places[id(slot.parameter)].start + first, places[id(slot.parameter)].start + last)
            for rank in range(dist.get_world_size(self._group))
            for unit in self._units.all
            if unit.group == self._group
            for slot, first, last in unit.owned(rank)
            if id(slot.parameter) in places
        ]
        # Where blocks are gathered in the backward too, both kinds of messages need one order on all ranks, whatever gradients they
        # have: those of a block are sent when the next one is gathered.
        at_once = self._zero.reduce == MICRO_BATCH and self._zero.gather == STEP
        if not at_once:  # what no block has is sent last
            beside = {id(parameter) for parameter in self._units.beside}
            self._stages = [sorted(stage, key=lambda parameter: id(parameter) not in beside) for stage in self._stages]
        self._eager = self._reduce_eagerly(slots, shares, at_once=at_once)
        self._flat = self._rest(slot.parameter for slot in slots)

    def _begin_step(self) -> None:
        self._sums.clear()
        for flat in (self._flat, self._expert_flat):
            if flat is not None:
                flat.forget()
        for partition in self._partitions:
            partition.new_gradient()
        if self._eager is not None:
            take = None if self._zero.reduce == MICRO_BATCH else self._take_sum
            dense = [parameter for parameter, (piece, _) in self._pieces.items() if not self._entry(piece).spec.expert]
            self._eager.begin([self._target(parameter) for parameter in dense], take)

    def _target(self, parameter: nn.Parameter) -> Tensor:
        """Where the gradient of this rank's piece of a parameter is summed."""
        partition, slot = self._places[id(self._pieces[parameter][0])]
        assert partition.gradient is not None
        return partition.gradient[slot.start : slot.stop]

    def after_backward(self, parameters: Iterable[nn.Parameter], *, stage: int = 0, last: bool = False) -> None:
        if self._units is not None:
            self._units.require_gathered_again()  # before gradients are taken
        super().after_backward(parameters, stage=stage, last=last)
        if self._units is not None:
            self._units.after_backward()

    def _block_finished(self, parameters: list[nn.Parameter]) -> None:
        if self._eager is not None and self._zero.reduce == MICRO_BATCH:
            self._eager.finished(parameters)

    def _reduce_data_parallel(self, scale: float | Tensor) -> None:
        absent: list[nn.Parameter] = []
        if self._eager is not None:
            absent += self._eager.finish(scale, self._take_sum)
        if self._flat is not None:
            self._add_rest(self._flat, self._flat.all_reduce(self._sums, self._group, scale))
            absent += self._flat.nowhere
        if self._expert_flat is not None:
            self._add_rest(self._expert_flat, self._expert_flat.all_reduce(self._sums, self._expert_group, scale))
            absent += self._expert_flat.nowhere
        if self._flat is not None or self._expert_flat is not None:
            self._sums.clear()
        self._untouched = [self._pieces[parameter][0] for parameter in absent if parameter in self._pieces]

    def _add_rest(self, layout: FlatGradients, flat: Tensor) -> None:
        for slot in layout.slots:
            if slot.parameter in self._pieces:
                target, first = self._target(slot.parameter), slot.start + self._pieces[slot.parameter][1]
                target += flat[first : first + target.numel()]

    def _start(self, partition: Partition, slot: Slot) -> int:
        return next(first for piece, first in self._pieces.values() if piece is slot.parameter)

    def _release(self) -> None:
        super()._release()
        self._pieces, self._places = {}, {}
