"""`torch.compile` of blocks: whether the machine can, and what came of it."""

from __future__ import annotations

import importlib.util
import shutil

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d.errors import ConfigError
from lightning_3d.schedules import find_schedule
from lightning_3d.torch_compat import allow_second_backward, graph_breaks


class Compilation:
    """The compilation of the blocks of one model.

    Args:
        device: what they run on. schedule: of the pipeline.

    Raises:
        ConfigError: no C++ compiler (on the CPU) or no Triton (on CUDA).
    """

    def __init__(self, device: torch.device, schedule: str) -> None:
        if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            raise ConfigError("compile=true needs a C++ compiler on the CPU, and there is none. Install g++ or clang++, or leave it out.")
        if device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise ConfigError("compile=true needs Triton on CUDA, which is not installed. pip install triton, or leave compile out.")
        if find_schedule(schedule).split_backward:
            allow_second_backward()
        self._before = graph_breaks()

    @property
    def graph_breaks(self) -> dict[str, int]:
        """Since this was made: how often a graph ended inside a block, by reason; counted in every function around it too."""
        return dict(graph_breaks() - self._before)

    def warn(self) -> None:
        """Tell about graph breaks, which cost speed."""
        found = self.graph_breaks
        if found:
            reasons = "; ".join(f"{reason.strip().splitlines()[0]} ({count} times)" for reason, count in found.items())
            rank_zero_warn(f"compile=true: graphs end inside the compiled blocks, which costs speed: {reasons}.")
