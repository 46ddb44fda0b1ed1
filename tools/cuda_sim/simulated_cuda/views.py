"""Tensors of the host on the memory of simulated devices."""

from __future__ import annotations

import ctypes
import os

import torch

from simulated_cuda import runtime

_launched: set[str] = set()

Accesses = list[tuple[int, int, bool]]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as a tensor of the CPU.

    Raises:
        RuntimeError: the memory of the tensor was freed.
    """
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 and tensor.numel():
        raise RuntimeError(
            "CUDA error: an illegal memory access was encountered (simulated: the storage of a"
            " tensor was freed)"
        )
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * size).from_address(runtime.host_view(storage.data_ptr()))
    flat = torch.frombuffer(raw, dtype=torch.uint8, count=size)
    return torch.empty(0, dtype=tensor.dtype).set_(
        flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def on_device(value: torch.Tensor, device: torch.device, name: str) -> torch.Tensor:
    """A new tensor of ``device`` with the elements of ``value``, written by the kernel ``name`` on
    the current stream."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if value.numel():
        launch(device, name, [access(made, write=True)])
        on_host(made).copy_(value)
    return made


def access(tensor: torch.Tensor, *, write: bool) -> tuple[int, int, bool]:
    """(address, bytes, write) of the range in which a tensor's elements lie."""
    if tensor.numel() == 0:
        return 0, 0, write
    elements = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
    return first, elements * tensor.element_size(), write


def launch(device: torch.device, name: str, accesses: Accesses) -> None:
    """Wait until a kernel may run on the current stream of ``device``."""
    first = name not in _launched and bool(os.environ.get("CUDASIM_LAZY"))
    _launched.add(name)
    identity, index, kind = torch._C._cuda_getCurrentStream(device.index)
    stream = torch.cuda.Stream(stream_id=identity, device_index=index, device_type=kind).cuda_stream
    runtime.launch(stream, device.index, lazy=first, name=name, accesses=accesses)
