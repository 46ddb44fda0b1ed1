"""`torch.compile` of blocks: check of the machine, and warnings about graph breaks."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d.compat.torch import (
    allow_graphs,
    allow_notes_in_recomputation,
    allow_second_backward,
    graph_breaks,
    keep_order_in_graphs,
    uncompiled_frames,
)
from lightning_3d.errors import ConfigError
from lightning_3d.layout.schedules import find_schedule


class Compilation:
    """The compilation of the blocks of one model.

    Args:
        device: device that the blocks run on.
        schedule: pipeline schedule.
        blocks: number of blocks in the model.
        in_order: whether operators run in the order of the code, so that work that overlaps with
            messages stays between their start and end, also where another order would need less
            memory.

    Raises:
        ConfigError: no C++ compiler (on the CPU) or no Triton (on CUDA).
    """

    def __init__(
        self, device: torch.device, schedule: str, blocks: int, *, in_order: bool = False
    ) -> None:
        names = (os.environ.get("CXX"), "g++", "clang++", "c++")
        if device.type == "cpu" and not any(shutil.which(name) for name in names if name):
            raise ConfigError(
                "On the CPU, compile=true needs a C++ compiler. Install g++ or clang++, or use"
                " compile=false."
            )
        if device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "compile=true on CUDA needs the package triton. Install it with pip install triton,"
                " or use compile=false."
            )
        if find_schedule(schedule).split_backward:
            allow_second_backward()
        if in_order:
            keep_order_in_graphs()
        allow_notes_in_recomputation()
        # each block may be of a different kind, and the last batch may have another shape
        allow_graphs(2 * blocks)
        self._before = graph_breaks()
        self._uncompiled = uncompiled_frames()

    @property
    def graph_breaks(self) -> dict[str, int]:
        """Number of graph breaks inside blocks since this object was made, by reason; counted in
        every function around them too."""
        return dict(graph_breaks() - self._before)

    def warn(self) -> None:
        """Warn about graph breaks, which cost speed."""
        found = self.graph_breaks
        if found:
            reasons = "; ".join(
                f"{reason.strip().splitlines()[0]} ({count} times)"
                for reason, count in found.items()
            )
            rank_zero_warn(
                "compile=true: the compiled blocks are slower than they could be, because they"
                f" have graph breaks: {reasons}."
            )
        uncompiled = uncompiled_frames() - self._uncompiled
        if uncompiled > 0 and not found:
            blocks = "block" if uncompiled == 1 else "blocks"
            rank_zero_warn(
                f"compile=true: {uncompiled} {blocks} could not be compiled. Training continues"
                " without compiling them. See torch's log for the reason."
            )
