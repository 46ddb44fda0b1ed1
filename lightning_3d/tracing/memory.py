"""Memory of a rank at the peak of a step, by category, in bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

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


class LiveBytes(TorchDispatchMode):
    """Meter of all tensors in host memory that are alive, each storage once, from its first
    appearance in an operation until it is freed.

    Memory that torch did not allocate does not count: mapped files of data, and the buffers through
    which ranks of one machine send messages (`parallel/host_memory.py`), which several ranks map.

    Attributes:
        peak: largest number of bytes that were alive at an operation.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let what a step compiles run compiled: with other modes, torch 2.11 to 2.13 runs it
        eagerly, or fails with `fullgraph=True`."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resized: list[int] = []  # storages whose size changes without an operation
        self._now = 0
        self.peak = 0

    def hold(self, tensors: Iterable[Tensor], *, resized: bool = False) -> None:
        """Count tensors that were there before.

        Args:
            resized: True if their storages may shrink and grow (`Unit` in
                parallel/zero/parameter_units.py).
        """
        for tensor in tensors:
            self._see_storage(tensor)
            self._resized += [tensor.untyped_storage()._cdata] if resized else []
        self._resized = list(dict.fromkeys(self._resized))
        self.peak = max(self.peak, self._now)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for kind in types:
            if is_traceable_wrapper_subclass_type(kind):
                # the class itself computes with its inner tensors, in operations that arrive here
                return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):  # an operation that writes into a tensor returns it
            self._see_storage(result)
        else:
            self._see_all(result)
            self._see_all(args)  # what a collective, or one operation for many tensors, has written
        if self._now > self.peak:
            for place in self._resized:
                self._measure(place)
            self.peak = max(self.peak, self._now)
        return result

    def _see_all(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._see_storage(value)
        elif isinstance(value, (tuple, list)):
            for part in value:
                self._see_all(part)

    def _see_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        known = self._alive.get(place)
        if known is None:
            # Those of tensors without values, as compilers have, are on the device meta.
            if storage.device.type != "cpu" or not storage.resizable():
                return
            self._alive[place] = weakref.ref(storage, partial(self._free, place)), size
            self._now += size
        elif known[1] != size:
            self._measure(place)

    def _measure(self, place: int) -> None:
        reference, size = self._alive.get(place, (None, 0))
        storage = reference() if reference is not None else None
        if reference is not None and storage is not None:
            self._alive[place] = reference, storage.nbytes()
            self._now += storage.nbytes() - size

    def _free(self, place: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        known = self._alive.get(place)
        if known is not None and known[0] is reference:
            self._now -= self._alive.pop(place)[1]


class MemoryWatch:
    """Meter of the memory of one rank during a step. Activations are all bytes in no other category
    at the peak.

    On a GPU, the peak is that of the allocator since the process began. On a CPU, it is that of all
    tensors during the watched parts of the step.

    Args:
        module: this rank's part of the model.
        device: device of the rank.
        parameters: parameters that the rank holds besides the module's, when the step begins.
        others: other tensors that it holds then.
        operations: True to watch operations on a CPU; compiled blocks would not run compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        parameters: Iterable[Tensor] = (),
        others: Iterable[Tensor] = (),
        *,
        operations: bool = True,
    ) -> None:
        self._module, self._device = module, device
        self._gradients = 0
        self._live = LiveBytes() if operations and device.type != "cuda" else None
        if self._live is not None:
            self._live.hold([*_tensors_of(module), *parameters], resized=True)
            self._live.hold(others)

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context for a part of the step."""
        return self._live if self._live is not None else nullcontext()

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
        of_optimizer = {
            place: size for place, size in self._here(optimizer).items() if place not in held
        }
        sizes = (sum(held.values()), self._gradients, sum(of_optimizer.values()))
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        elif self._live is not None:
            peak = self._live.peak
        else:
            return Memory(*sizes, None)
        return Memory(*sizes, activations=max(0, peak - sum(sizes)))

    def _here(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Bytes of storages on this rank's device, by address."""
        return _storages(tensor for tensor in tensors if tensor.device.type == self._device.type)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages of some tensors, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
