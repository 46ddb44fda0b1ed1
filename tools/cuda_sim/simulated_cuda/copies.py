"""`copy_` as torch does it: by the real cudaMemcpyAsync between the host and a device, by a kernel
within a device."""

from __future__ import annotations

import torch

from simulated_cuda.views import access, launch, on_host

_KEY = torch._C.DispatchKey.CompositeExplicitAutograd


def _memcpy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    torch.ops.aten.copy_.default._op_dk(_KEY, target, source, non_blocking)


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy ``source`` into ``target``, of which at least one is on a device.

    Raises:
        NotImplementedError: they are on two devices.
    """
    if target.numel() == 0:
        return target
    if target.is_cuda and source.is_cuda:
        if target.device != source.device:
            raise NotImplementedError("copies between simulated devices")
        launch(target.device, "copy_", [access(source, write=False), access(target, write=True)])
        on_host(target).copy_(on_host(source))
        return target
    if _same_bytes(target, source):
        _memcpy(target, source, non_blocking)
        return target
    # as at::native::copy_kernel_cuda: converted where the source is, copied between contiguous
    # tensors, spread where the target is
    converted = source.to(target.dtype).expand(target.shape).contiguous()
    flat = (
        target
        if target.is_contiguous()
        else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    )
    _memcpy(flat, converted, non_blocking)
    if flat is not target:
        target.copy_(flat, non_blocking)
    return target


def _same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    alike = (
        target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
    )
    return alike and target.is_conj() == source.is_conj() and target.is_neg() == source.is_neg()
