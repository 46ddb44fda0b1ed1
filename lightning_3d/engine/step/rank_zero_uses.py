"""Warnings about `self.print` and `self.logger` in a step of a pipeline: both act on rank 0 alone,
which runs a part of the step."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lightning_3d.compat.lightning_modules import is_lightning_module
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import PipelineEngine, Unknown

_INSTEAD = (
    "Use self.log for numbers, which works in every layout. Or return the values from the step, and"
    " use {name} in on_train_batch_end, which every rank runs once per batch."
)
_TOO_OFTEN = (
    "{name} is used before the step calls the model. With pp > 1, this code runs once for each"
    " micro-batch and stage, so rank 0 does it several times in a step. " + _INSTEAD
)
_NEVER = (
    "{name} is used after the step called the model. With pp > 1, only the last stage runs this"
    " code, but {name} does something on rank 0 alone, which has another stage. So it does"
    " nothing. " + _INSTEAD
)


class RankZeroUses:
    """Warns once about each name, on the one rank that knows.

    Args:
        module: the user's module.
        mesh: place of this rank.
        engine: the pipeline.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, engine: PipelineEngine) -> None:
        self._module: Any = module
        self._mesh, self._engine = mesh, engine
        self._warned: set[str] = set()

    def watching(self) -> AbstractContextManager[None]:
        """Context of the user's step on one micro-batch and stage."""
        if self._mesh.size("pp") == 1 or not is_lightning_module(self._module):
            return nullcontext()
        from lightning_3d.compat.lightning_uses import reporting_uses  # imports Lightning

        return reporting_uses(self._module, self._report)

    def _report(self, use: str) -> Unknown | None:
        """Warn about a use. Returns what takes its place where the step runs on without the output
        of the model."""
        if not self._engine.knows_outputs:
            return Unknown(f"self.{use}")
        message = self._message()
        if message is not None and use not in self._warned:
            self._warned.add(use)
            # Two calls above this one is the user's line.
            warnings.warn(message.format(name=f"self.{use}"), stacklevel=3)
        return None

    def _message(self) -> str | None:
        """What is wrong with a use at this point of the step; None on ranks that do not know, and
        where nothing is wrong."""
        if not self._engine.model_called:
            # Every stage comes here. Rank 0 does, with each of its stages.
            return _TOO_OFTEN if self._mesh.rank == 0 else None
        # Only the last stage comes here. With a schedule that is shaped like a V, rank 0 has it,
        # and everything is as it seems.
        same = self._mesh.rank != 0 and all(
            self._mesh.index(axis) == 0 for axis in ("tp", "cp", "dp")
        )
        return _NEVER if same and self._engine.last_rank != 0 else None
