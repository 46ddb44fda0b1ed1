"""Memory of a rank at the peak of a step, by category, in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.tracing.trace import Memory


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Counter of the bytes that autograd keeps for the backward, each storage once.

    Recomputed and offloaded blocks have hooks of their own, so only their inputs are counted.

    Args:
        known: addresses of storages that count as something else, such as parameters.

    Attributes:
        peak: largest number of bytes that were kept at a time.
    """

    def __init__(self, known: Iterable[int]) -> None:
        super().__init__(self._pack, _unpack)
        self._known = frozenset(known)
        self._kept: dict[int, tuple[int, int]] = {}  # by address: how often, and bytes
        self._now = 0
        self.peak = 0

    def _pack(self, tensor: Tensor) -> Any:
        place = tensor.untyped_storage().data_ptr()
        return tensor if place in self._known else _Kept(self, tensor, place)

    def add(self, place: int, size: int) -> None:
        times, known = self._kept.get(place, (0, size))
        self._kept[place] = times + 1, known
        if not times:
            self._now += known
            self.peak = max(self.peak, self._now)

    def remove(self, place: int) -> None:
        times, size = self._kept.pop(place)
        if times > 1:
            self._kept[place] = times - 1, size
        else:
            self._now -= size


class _Kept:
    """Object that lives as long as the graph keeps a tensor."""

    def __init__(self, owner: SavedTensors, tensor: Tensor, place: int) -> None:
        self._owner, self.tensor, self._place = owner, tensor, place
        owner.add(place, tensor.untyped_storage().nbytes())

    def __del__(self) -> None:
        self._owner.remove(self._place)


def _unpack(kept: Any) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept


class MemoryWatch:
    """Meter of the memory of one rank during a step.

    On a GPU, the peak is that of the allocator since the process began, and activations are all bytes in no other category. On a CPU,
    tensors are counted, and activations are those that the backward keeps.

    Args:
        module: this rank's part of the model.
        device: device of the rank.
        hooks: True to watch tensors that the backward keeps; compiled blocks would be compiled again.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, hooks: bool = True) -> None:
        self._module, self._device = module, device
        self._gradients = 0
        self._saved = SavedTensors(_storages(_tensors_of(module))) if hooks and device.type != "cuda" else None

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context for the forward and backward of a batch."""
        return self._saved if self._saved is not None else nullcontext()

    def note_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Record the gradients that the rank holds now; the largest amount counts."""
        self._gradients = max(self._gradients, sum(self._here(gradients).values()))

    def measure(self, parameters: Iterable[Tensor], optimizer: Iterable[Tensor]) -> Memory:
        """Compute the categories. Views are counted by their storages, each storage once.

        Args:
            parameters: tensors of parameters that are not in the module.
            optimizer: tensors of the optimizer.
        """
        held = self._here([*_tensors_of(self._module), *parameters])
        state = {place: size for place, size in self._here(optimizer).items() if place not in held}
        sizes = (sum(held.values()), self._gradients, sum(state.values()))
        if self._device.type == "cuda":
            return Memory(*sizes, max(0, torch.cuda.max_memory_allocated(self._device) - sum(sizes)))
        return Memory(*sizes, self._saved.peak if self._saved is not None else None)

    def _here(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Bytes of storages on this rank's device, by address."""
        return _storages(tensor for tensor in tensors if tensor.device.type == self._device.type)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages of some tensors, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
