"""A data-parallel rank's part of the flat buffer in which DeepSpeed keeps a group of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.compat.deepspeed import DeepSpeedGroup
from lightning_3d.compat.torch import storage_key
from lightning_3d.parallel.zero.gradient_buffers import Slot
from lightning_3d.parallel.zero.outside_writes import follow_writes, with_writes
from lightning_3d.parallel.zero.overlapped_reduction import Share
from lightning_3d.parallel.zero.trained import Trained


class Partition:
    """This rank's part of one parameter group.

    Args:
        group: DeepSpeed's buffers.
        base: where the group begins in the flat buffer of all gradients.
        optimizer: has the state of `group.master`.
        device: of gradients. Master weights, and the parameters of `group` too, may be in host
            memory.
        experts: the parameters are parts of experts, sharded over the ranks that have the same
            ones; `base` counts among those.

    Attributes:
        slots: each parameter's place in the group.
        owned_slots: the pieces of parameters in this rank's part, counted from its start.
        gradient: reduced gradient of the part, float32, between reduction and step.
    """

    def __init__(
        self,
        group: DeepSpeedGroup,
        base: int,
        optimizer: Optimizer,
        device: torch.device,
        *,
        experts: bool = False,
    ) -> None:
        self.group = group
        self.experts = experts
        self.base = base
        self.numel = group.flat.numel()
        self.gradient: Tensor | None = None
        self._optimizer = optimizer
        self._device = device
        self._start = int(group.owned.storage_offset() - group.flat.storage_offset())
        self.slots = [_place(parameter, group.flat) for parameter in group.parameters]
        self.owned_slots = [
            Slot(
                slot.parameter,
                max(slot.start, self._start) - self._start,
                min(slot.stop, self._stop) - self._start,
            )
            for slot in self.slots
            if slot.start < self._stop and slot.stop > self._start
        ]

    @property
    def _stop(self) -> int:
        return self._start + self.group.owned.numel()

    def shares(self, ranks: Iterable[int]) -> list[Share]:
        """Share of each rank in the flat buffer of all gradients."""
        size = self.group.owned.numel()
        return [
            Share(rank, self.base + rank * size, self.base + (rank + 1) * size) for rank in ranks
        ]

    def sum_of_gradients(self) -> Tensor:
        """Return what gradients of this step are added to: zeros at first."""
        if self.gradient is None:
            self.gradient = torch.zeros(
                self.group.owned.numel(), dtype=torch.float32, device=self._device
            )
        return self.gradient

    def owned_part(self, flat: Tensor) -> Tensor:
        """This rank's part of the flat buffer of all gradients."""
        return flat[self.base + self._start : self.base + self._stop]

    @torch.no_grad()
    def follow_writes(self, slot: Slot) -> None:
        """Copy into the master weights what something other than the optimizer wrote into one
        piece."""
        follow_writes(
            self.group.master[slot.start : slot.stop], self.group.owned[slot.start : slot.stop]
        )

    def copy_of(self, slot: Slot) -> dict[str, Tensor]:
        """Master weights and optimizer state of one piece."""
        return {
            name: tensor[slot.start : slot.stop].clone() for name, tensor in self.tensors().items()
        }

    def restore(self, slot: Slot, before: dict[str, Tensor]) -> None:
        """Put `copy_of` back; state that the optimizer has made since then begins at zero."""
        for name, tensor in self.tensors().items():
            piece = tensor[slot.start : slot.stop]
            piece.copy_(before[name]) if name in before else piece.zero_()

    def start_in_parameter(self, owned: Slot) -> int:
        """Index of the first element of an owned piece in the flattened parameter."""
        [whole] = [slot for slot in self.slots if slot.parameter is owned.parameter]
        return owned.start + self._start - whole.start

    def values_of(self, owned: Slot, to_save: bool = False) -> dict[str, Tensor | float]:
        """The optimizer's state of one piece, views where it is per element, and its master weights
        if they differ.

        Args:
            to_save: see `optimizer_shards`.
        """
        per_element = {
            key: tensor[owned.start : owned.stop] for key, tensor in self.tensors().items()
        }
        if self.group.owned.dtype == self.group.master.dtype:
            del per_element["master"]
        elif to_save:
            per_element["master"] = with_writes(
                per_element["master"], self.group.owned[owned.start : owned.stop]
            )
        state = self._optimizer.state.get(self.group.master, {})
        return {**{key: value for key, value in state.items() if value is not None}, **per_element}

    def tensors(self) -> dict[str, Tensor]:
        """Master weights and what the optimizer keeps for each element."""
        master = self.group.master
        state = self._optimizer.state.get(master, {})
        per_element = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == master.shape
        }
        return {**per_element, "master": master.data}


@dataclass(frozen=True)
class OwnedPiece:
    """A piece of a parameter that this rank steps.

    Attributes:
        partition: the optimizer group that it is in.
        slot: its place in this rank's part of the group.
        entry: the parameter.
        first: element of the flattened parameter that the piece begins with.
    """

    partition: Partition
    slot: Slot
    entry: Trained
    first: int

    def sum_of_gradients(self) -> Tensor:
        """Return the part of the partition's that belongs to this piece."""
        return self.partition.sum_of_gradients()[self.slot.start : self.slot.stop]

    @property
    def gradient(self) -> Tensor:
        """View of the reduced gradient, flattened."""
        assert self.partition.gradient is not None
        return self.partition.gradient[self.slot.start : self.slot.stop]


def slots_of(partitions: Iterable[Partition]) -> list[Slot]:
    """All parameters of some partitions, one buffer behind the other."""
    return [
        Slot(slot.parameter, partition.base + slot.start, partition.base + slot.stop)
        for partition in partitions
        for slot in partition.slots
    ]


def _place(parameter: nn.Parameter, flat: Tensor) -> Slot:
    """Slot of a parameter in the buffer that it is a view of."""
    if storage_key(parameter) != storage_key(flat):
        raise RuntimeError(
            "DeepSpeed did not move a parameter into its flat buffer; this version is not"
            " supported."
        )
    start = int(parameter.storage_offset() - flat.storage_offset())
    return Slot(parameter, start, start + parameter.numel())
