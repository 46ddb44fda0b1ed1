"""Turns the Trainers of a user's script into those of a run that is compared, in this process."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

from lightning_3d.compat.lightning_trainer import intercept_trainers
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.role import Role
from lightning_3d.strategy.recorded.arguments import trainer_arguments
from lightning_3d.strategy.recorded.attach import attach
from lightning_3d.strategy.strategy import Lightning3DStrategy


def play_role() -> None:
    """Change and record every Trainer that this process makes, if it has a role in a
    verification."""
    role = Role.current()
    if role is not None:
        intercept_trainers(
            lambda given: _before(given, role), lambda trainer, ours: _after(trainer, ours, role)
        )


def _before(given: dict[str, Any], role: Role) -> tuple[dict[str, Any], bool]:
    """Change the arguments of a Trainer that has this strategy."""
    strategy = given.get("strategy", "auto")
    if isinstance(strategy, Lightning3DStrategy):
        return trainer_arguments(given, role, strategy.layout), True
    if isinstance(strategy, str) and strategy == "lightning_3d":
        return trainer_arguments(given, role, None), True
    return given, False


def _after(trainer: pl.Trainer, ours: bool, role: Role) -> None:
    """Record the fit of a Trainer, after which the process ends."""
    fit = trainer.fit

    @wraps(fit)
    def fit_and_end(*args: Any, **kwargs: Any) -> None:
        if not ours:
            name = (
                type(trainer.strategy).__name__
                if isinstance(trainer.strategy, Strategy)
                else "another"
            )
            raise ConfigError(
                f"The first Trainer that fits in this script has no Lightning3DStrategy ({name}),"
                " so there is no layout to verify. Write"
                ' Trainer(strategy=Lightning3DStrategy("tp2_pp2_dp2"), devices=8).'
            )
        kwargs.pop("ckpt_path", None)  # every run starts from the initial weights
        fit(*args[:4], **kwargs)
        sys.stdout.flush()
        raise SystemExit(0)

    trainer.fit = fit_and_end  # type: ignore[method-assign]
    if ours:
        trainer.save_checkpoint = _save_nothing  # type: ignore[method-assign]
        attach(trainer, role)


def _save_nothing(*args: Any, **kwargs: Any) -> None:
    """Take the place of `Trainer.save_checkpoint`: a verification writes nothing of the user's."""
