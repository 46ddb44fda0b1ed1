"""Numbers that travel from the device to host memory while the host goes on launching work."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor in host memory. On an accelerator it starts at once and waits for
    what was launched before it, not for what is launched later.

    Args:
        tensor: the numbers, which must not change afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._copy = tensor
        if tensor.is_cuda:
            # Into pageable memory the copy would keep the host waiting.
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> Tensor:
        """Return the numbers, in host memory. Waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy
