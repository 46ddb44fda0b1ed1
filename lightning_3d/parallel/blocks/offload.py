"""Offload of the tensors that a block's backward needs to host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.compat.torch import storage_key

MINIMUM_BYTES = 64 * 2**10
"""Smaller tensors stay where they are: a copy would cost more than it frees."""


class SavedOnHost(saved_tensors_hooks):
    """Context in which autograd saves tensors as copies in host memory, pinned on CUDA; the backward copies them back.

    Copies to the host overlap with computation, on a stream of their own; the device memory is free for others once the copy is
    done. Parameters and views of them stay: they are there anyway.

    Args:
        module: whose parameters these are.
    """

    def __init__(self, module: nn.Module) -> None:
        kept = {storage_key(parameter) for parameter in module.parameters()}
        super().__init__(lambda tensor: _pack(tensor, kept), _unpack)


def _pack(tensor: Tensor, kept: set[int]) -> Any:
    bytes_ = tensor.numel() * tensor.element_size()
    if bytes_ < MINIMUM_BYTES or isinstance(tensor, nn.Parameter) or storage_key(tensor) in kept:
        return tensor
    if tensor.device.type != "cuda":
        return tensor.device, tensor.to("cpu", copy=True), None
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # with the same strides, which compiled backwards rely on
    stream = _side_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
        done = stream.record_event()
    tensor.record_stream(stream)
    return tensor.device, host, done


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host, done = packed
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)
    return host.to(device, non_blocking=done is not None) if device.type == "cuda" else host


_STREAMS: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]
