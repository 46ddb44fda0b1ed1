"""Moments in the work of a rank: CUDA events on a GPU, the clock elsewhere."""

from __future__ import annotations

import time
from typing import Any

import torch


class Marks:
    """Marks moments without waiting for the device, and converts them to seconds later.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.on_gpu = device is not None and device.type == "cuda"
        self._origin: tuple[float, Any] = (0.0, None)
        self._stream: Any = None

    def begin(self) -> None:
        """Relate the clock of the GPU to that of the host, which waits for the GPU here."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            self._stream = torch.cuda.current_stream(self.device)
            event = self.mark()
            event.synchronize()
            self._origin = (time.perf_counter(), event)

    def settle(self) -> None:
        """Wait until everything that was marked has happened."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """Return a mark of this moment; on a GPU, of the moment when the current stream gets
        here."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def is_in_main_stream(self) -> bool:
        """Return whether the current stream is the one that computes: a wait in another one holds
        nothing up."""
        return not self.on_gpu or torch.cuda.current_stream(self.device) == self._stream

    def seconds(self, mark: Any) -> float:
        """Convert a mark to seconds of this machine's `perf_counter`."""
        return (
            mark
            if isinstance(mark, float)
            else self._origin[0] + self._origin[1].elapsed_time(mark) / 1000
        )
