"""Offload of the tensors that a block's backward needs to host memory.

On a GPU, copies run on two streams of their own, one for each direction. The backward of a block
starts the copies of the block that was computed before it, so that they are there when they are
needed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.compat.host_memory import host_memory, may_lock
from lightning_3d.compat.torch import storage_key

MINIMUM_BYTES = 64 * 2**10
"""Smaller tensors stay where they are: a copy would cost more than it frees."""


class SavedOnHost(saved_tensors_hooks):
    """Context in which autograd saves tensors as copies in host memory; the backward copies them
    back.

    On a GPU the memory of a tensor is free for others once its copy is done. Parameters and views
    of them stay: they are there anyway.

    Args:
        module: the block that is computed, whose parameters these are.
    """

    def __init__(self, module: nn.Module) -> None:
        kept = {storage_key(parameter) for parameter in module.parameters()}
        block = _Block(module)
        super().__init__(lambda tensor: _pack(tensor, kept, block), _unpack)


class _Block:
    """What one forward of a block has saved on the host, and the block before it in the same
    forward of the model."""

    def __init__(self, module: nn.Module) -> None:
        self._module = id(module)
        self.name = type(module).__name__
        self._tensors: list[weakref.ref[_OnHost]] = []
        self._used = False
        self._before: _Block | None = _forwards.latest() if _forwards.latest is not None else None
        modules = self._before._modules if self._before is not None else frozenset()
        if self._module in modules:  # another forward of the model has begun
            self._before, modules = None, frozenset()
        self._modules: frozenset[int] = modules | {self._module}
        _forwards.latest = weakref.ref(self)

    def add(self, saved: _OnHost) -> None:
        self._tensors.append(weakref.ref(saved))

    def used(self) -> None:
        """The backward of this block has begun: start to bring back what that of the block before
        needs."""
        before, self._before = None if self._used else self._before, None
        self._used = True
        for tensor in before._tensors if before is not None else ():
            if (saved := tensor()) is not None:
                saved.bring_back()


class _Forwards(threading.local):
    """The block that this thread computed last."""

    latest: Any = None


_forwards = _Forwards()


def _pack(tensor: Tensor, kept: set[int], block: _Block) -> Any:
    bytes_ = tensor.numel() * tensor.element_size()
    if bytes_ < MINIMUM_BYTES or isinstance(tensor, nn.Parameter) or storage_key(tensor) in kept:
        return tensor
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True)
    saved = _OnHost(tensor, block)
    block.add(saved)
    return saved


def _unpack(packed: Any) -> Tensor:
    return packed.on_device() if isinstance(packed, _OnHost) else packed


class _OnHost:
    """A tensor of a GPU, in host memory from its making on, and on the GPU again from `bring_back`
    to the first `on_device`."""

    def __init__(self, tensor: Tensor, block: _Block) -> None:
        self._block = block
        # with the same strides, which compiled backwards rely on
        self._like = torch.empty_like(tensor, device="meta")
        self._device = tensor.device
        # the host would wait for a copy between two layouts
        if tensor.stride() != self._like.stride():
            tensor = torch.empty_like(tensor).copy_(tensor)
        self._copies = _copies(tensor.device)
        self._stream = torch.cuda.current_stream(tensor.device)
        self._buffer = self._copies.take(tensor.numel() * tensor.element_size())
        self._host = torch.empty(0, dtype=tensor.dtype).set_(
            self._buffer.untyped_storage(), 0, self._like.shape, self._like.stride()
        )
        self._brought: tuple[Tensor, Any] | None = None
        stream = self._copies.to_host
        stream.wait_stream(self._stream)
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
            self._last_use = stream.record_event()
        self._copies.leaves(block, tensor, self._last_use)

    def bring_back(self) -> None:
        """Start the copy to the GPU."""
        if self._brought is not None:
            return
        stream = self._copies.to_device
        self._stream = torch.cuda.current_stream(self._device)
        # memory of the computation's stream
        tensor = torch.empty_like(self._like, device=self._device)
        stream.wait_stream(self._stream)
        stream.wait_event(self._last_use)
        with torch.cuda.stream(stream):
            tensor.copy_(self._host, non_blocking=True)
            self._last_use = stream.record_event()
        self._brought = tensor, self._last_use

    def on_device(self) -> Tensor:
        """The tensor on the GPU. What is computed next waits for it."""
        self._copies.all_left()
        self._block.used()
        self.bring_back()
        assert self._brought is not None
        (tensor, done), self._brought = self._brought, None
        torch.cuda.current_stream(self._device).wait_event(done)
        return tensor

    def __del__(self) -> None:
        if hasattr(self, "_last_use"):
            if self._brought is not None:
                # before its memory on the GPU is used again
                self._stream.wait_event(self._last_use)
            self._copies.give(self._buffer, self._last_use)


class _Copies:
    """Streams of the copies of one GPU, and host memory for them.

    Memory is locked slowly, so it is used again for tensors of about the same size: sizes are
    rounded up by at most an eighth. No more is kept than twice what was in use at once, so that two
    shapes of batches that take turns lock memory only once.
    """

    def __init__(self, device: torch.device) -> None:
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: list[tuple[Tensor, Any]] = []  # the one that was given back last is the last
        self._used = self._most = self._held = 0  # bytes
        self._locked: set[int] = set()  # addresses
        self._leaving: deque[_Leaving] = deque()

    def leaves(self, block: _Block, tensor: Tensor, copied: Any) -> None:
        """Keep a tensor whose copy to the host has been queued, until the computation has gone on
        by two blocks.

        The computation then waits for the copy before the memory is used again. (`record_stream`
        would let the allocator find out by itself, but a host that runs ahead would find nothing
        free and take new memory.)
        """
        if not self._leaving or self._leaving[-1].block is not block:
            self._leaving.append(_Leaving(block, torch.cuda.current_stream(tensor.device)))
        last = self._leaving[-1]
        last.tensors.append((tensor, tensor._version))
        last.copied = copied
        while len(self._leaving) > 2:
            self._leaving.popleft().release()

    def all_left(self) -> None:
        """A backward begins: release what is still on its way."""
        while self._leaving:
            self._leaving.popleft().release()

    def take(self, nbytes: int) -> Tensor:
        """Page-locked memory, which may be written when the computation has come here: it has
        waited for the last copy from it."""
        size = _rounded(nbytes)
        taken = self._again(size)
        if taken is None:
            taken = self._new(size)
        self._used += size
        self._most = max(self._most, self._used)
        return taken

    def _again(self, size: int) -> Tensor | None:
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place][0].numel() == size:
                return self._free.pop(place)[0]
        return None

    def _new(self, size: int) -> Tensor:
        if not may_lock():
            return host_memory(size, page_locked=False)
        while self._free and self._held + size > 2 * max(self._most, self._used + size):
            self._free[0][1].synchronize()
            memory = self._free.pop(0)[0]
            self._held -= memory.numel()
            self._locked.remove(memory.data_ptr())
            del memory
        memory = host_memory(size, page_locked=True)
        self._held += size
        self._locked.add(memory.data_ptr())
        return memory

    def give(self, memory: Tensor, last_use: Any) -> None:
        """Take back memory whose last copy ends with an event."""
        self._used -= memory.numel()
        if memory.data_ptr() in self._locked:
            self._free.append((memory, last_use))


class _Leaving:
    """Tensors of one block that are being copied to the host, and the event after the last copy."""

    def __init__(self, block: _Block, stream: torch.cuda.Stream) -> None:
        self.block = block
        self.tensors: list[tuple[Tensor, int]] = []
        self.copied: Any = None
        self._stream = stream

    def release(self) -> None:
        """Let the computation wait for the copies, and give the memory free.

        Raises:
            RuntimeError: a tensor was written to since it was saved, perhaps before it was copied.
        """
        self._stream.wait_event(self.copied)
        for tensor, version in self.tensors:
            if tensor._version != version:
                raise RuntimeError(
                    f"A tensor of shape {tuple(tensor.shape)} that the backward of"
                    f" {self.block.name} needs was changed in place by the forward, while it was"
                    " being copied to the host. Write `x = x + y` instead of `x += y`, or set"
                    " parallelism.offload_activations=false."
                )


def _rounded(nbytes: int) -> int:
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


_COPIES: dict[torch.device, _Copies] = {}


def _copies(device: torch.device) -> _Copies:
    if device not in _COPIES:
        _COPIES[device] = _Copies(device)
    return _COPIES[device]
