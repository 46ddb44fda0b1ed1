"""Self-checks of frozen models that tensor- or context-parallel ranks share, apart from that of the
trained model."""

from __future__ import annotations

import torch
from torch import nn

from lightning_3d.engine.frozen_models import FrozenModel
from lightning_3d.engine.self_check.check import SelfCheck
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.options.experts import ExpertOptions
from lightning_3d.options.model import ModelOptions
from lightning_3d.parallel.mesh import Mesh, TensorMesh


class FrozenChecks:
    """Compares each frozen model with its shards at its first call, in the layout that shares it:
    tensor and context parallel alone.

    Args:
        mode: see `SelfCheck`.
        mesh: process groups of the run.
        cp_kind: how context-parallel ranks attend to each other's tokens.
        device: device of this rank.
        drafted: whether the plan of the trained model, which frozen ones of its class share, was
            derived and not declared.
    """

    def __init__(
        self, mode: str, mesh: Mesh, cp_kind: str, device: torch.device, *, drafted: bool
    ) -> None:
        self._mode, self._mesh, self._device, self._drafted = mode, mesh, device, drafted
        self._options = ModelOptions(
            "1F1B", BlockOptions(sequence_parallel=False), ExpertOptions(), cp_kind=cp_kind
        )
        self._checks: list[tuple[nn.Module, SelfCheck]] = []

    def inspect(self, frozen: FrozenModel) -> None:
        """Decide whether to check a model, before it is partitioned. Communicates as
        `SelfCheck.inspect` does."""
        ranks = TensorMesh(self._mesh, tp=frozen.sharded, cp=frozen.split)
        check = SelfCheck(
            self._mode,
            ranks,
            self._options,
            self._device,
            required=self._drafted and not frozen.declared,
        )
        check.inspect(frozen.module, frozen.plan, declared=frozen.declared)
        self._checks.append((frozen.module, check))

    def attach(self) -> None:
        """Check this rank's shards at the first call of each model."""
        for module, check in self._checks:
            check.attach(module)
