"""Stage 3: every data-parallel rank keeps a part of every unit of parameters (`parameter_units`),
and its optimizer trains that part.

DeepSpeed's own stage 3 is not used: it frees a parameter by giving it another storage, but the
views that autograd has saved (such as the transposed weight of every linear layer) keep the old
one. Its hooks also support neither the chunks nor the split backward of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.options.zero import PARAMETERS, STEP, ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import OptimizerShard, ShardSpec
from lightning_3d.parallel.zero.gradient_buffers import Slot
from lightning_3d.parallel.zero.overlapped_reduction import Share
from lightning_3d.parallel.zero.parameter_store import ParameterStore, TrainedTensor
from lightning_3d.parallel.zero.parameter_units import ParameterUnits
from lightning_3d.parallel.zero.trained import TrainedParameters, expert_shard_group


class ShardedParameters(ParameterStore):
    """Parameters are whole only while a batch, or with `gather="micro_batch"` a block, is computed;
    those of frozen models as `gather_frozen` says.

    Args:
        mesh: process groups.
        specs: where each trained parameter lies in the whole model, by its name in the module.
        zero: resolved options.

    Attributes:
        on_block_finished: called with the parameters of a block whose backward is over, at the same
            point on all ranks.
    """

    def __init__(self, mesh: Mesh, specs: Mapping[str, ShardSpec], zero: ZeroOptions) -> None:
        self._mesh, self._specs, self._zero = mesh, specs, zero
        self._units: ParameterUnits | None = None
        self._names: dict[int, str] = {}
        self.on_block_finished: Callable[[list[nn.Parameter]], None] | None = None

    def shard(
        self,
        module: nn.Module,
        models: Sequence[Sequence[nn.Module]],
        device: torch.device,
        is_active: Callable[[nn.Module], bool],
    ) -> None:
        if self._units is not None:  # an earlier fit failed
            self._units.open()
            return
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        experts = {name for name, spec in self._specs.items() if spec.expert}
        self._units = ParameterUnits(
            module,
            models,
            self._mesh.shard_group,
            self._mesh.data_control,
            device,
            whole=self._zero.gather == STEP,
            whole_frozen=(self._zero.gather_frozen or self._zero.gather) == STEP,
            is_active=is_active,
            finished=self._block_finished,
            on_host=self._zero.offload == PARAMETERS,
            apart={
                key: expert_shard_group(self._mesh)
                for key, name in self._names.items()
                if name in experts
            },
        )

    def _block_finished(self, parameters: list[nn.Parameter]) -> None:
        if self.on_block_finished is not None:
            self.on_block_finished(parameters)

    @property
    def units(self) -> ParameterUnits:
        assert self._units is not None, "shard() comes first"
        return self._units

    @contextmanager
    def parameters_in_use(self) -> Iterator[None]:
        with self.units.in_use():
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
                shards.append(
                    OptimizerShard(
                        self._names[id(slot.parameter)],
                        owned.get(id(slot.parameter), 0),
                        {"weight": values},
                    )
                )
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

    def tensors_to_train(self, trained: TrainedParameters) -> list[TrainedTensor]:
        entries = {id(entry.parameter): entry for entry in trained.entries}
        found = []
        for unit in self.units.all:
            for slot, first, _ in unit.owned():
                if id(slot.parameter) in entries:
                    piece = nn.Parameter(unit.pieces[slot.parameter])
                    unit.pieces[slot.parameter] = piece
                    found.append(TrainedTensor(entries[id(slot.parameter)], piece, first))
        return found

    def in_unit_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Some parameters in the order in which the units have them."""
        chosen = {id(parameter) for parameter in parameters}
        return [
            slot.parameter
            for unit in self.units.all
            for slot in unit.slots
            if id(slot.parameter) in chosen
        ]

    def shares(self, slots: Sequence[Slot]) -> list[Share]:
        """Elements that each rank of the shard group keeps of a buffer in which parameters have
        these slots."""
        group = self._mesh.shard_group
        places = {id(slot.parameter): slot for slot in slots}
        return [
            Share(
                rank,
                places[id(slot.parameter)].start + first,
                places[id(slot.parameter)].start + last,
            )
            for rank in range(dist.get_world_size(group))
            for unit in self.units.all
            if unit.group == group
            for slot, first, last in unit.owned(rank)
            if id(slot.parameter) in places
        ]

    def before_gradients_are_taken(self) -> None:
        if self._units is not None:
            self._units.require_gathered_again()

    def after_backward(self) -> None:
        if self._units is not None:
            self._units.after_backward()

    def held(self) -> list[Tensor]:
        return [
            tensor
            for unit in (self._units.all if self._units is not None else ())
            for tensor in unit.kept()
        ]
