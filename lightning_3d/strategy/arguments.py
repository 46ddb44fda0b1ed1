"""Arguments of `Lightning3DStrategy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_3d.options.options import Options
from lightning_3d.options.schema import option


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(Options):
    """The options, and what Lightning passes to every strategy."""

    accelerator: pl.accelerators.Accelerator | None = option(
        None, "Lightning's accelerator. null: the Trainer sets it"
    )
    parallel_devices: list[torch.device] | None = option(
        None, "devices of this node. null: the Trainer sets them"
    )
    cluster_environment: ClusterEnvironment | None = option(
        None, "who starts the ranks. null: the Trainer finds out"
    )
    checkpoint_io: Any = option(None, "Lightning's plugin for files of checkpoints")
    precision_plugin: Any = option(
        None, "Lightning's plugin for precisions. null: that of the Trainer"
    )

    @property
    def of_lightning(self) -> tuple[Any, ...]:
        """Arguments of Lightning's own strategies, in their order."""
        return (
            self.accelerator,
            self.parallel_devices,
            self.cluster_environment,
            self.checkpoint_io,
            self.precision_plugin,
        )
