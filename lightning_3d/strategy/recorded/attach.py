"""Recorders of a Trainer's fit in a run that is compared."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_3d.ranks.role import NUDGED, Role
from lightning_3d.strategy.recorded.layout_run import LayoutRecorder
from lightning_3d.strategy.recorded.plain_run import LastBits, PlainRecorder


def attach(trainer: pl.Trainer, role: Role) -> None:
    """Record the fit of a Trainer, before all other callbacks."""
    recorders: list[pl.Callback] = (
        [PlainRecorder(role)] if role.is_plain else [LayoutRecorder(role)]
    )
    if role.name == NUDGED:
        recorders.insert(0, LastBits())
    trainer.callbacks[:0] = recorders  # type: ignore[attr-defined]
