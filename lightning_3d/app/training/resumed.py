"""What a configuration says wins over what a checkpoint restores, where the two differ.

Lightning restores the values of an optimizer, a schedule and callbacks as they were saved. Without
this, a run that resumes a checkpoint with other values would ignore them. Where nothing differs,
everything is restored as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import LambdaLR

from lightning_3d.app.config.scheduler import KEY
from lightning_3d.app.runs.resumed_keys import differences
from lightning_3d.checkpoint import replace_groups
from lightning_3d.errors import ConfigError
from lightning_3d.storage.checkpoint_names import is_of_a_run

if TYPE_CHECKING:
    import lightning.pytorch as pl


def follow_configuration(
    trainer: pl.Trainer,
    checkpoint: dict[str, Any],
    before: Any,
    now: Mapping[str, Any],
    callbacks: Mapping[str, Callback],
) -> None:
    """Change what Lightning is about to restore to what the configuration says.

    Args:
        checkpoint: Lightning's dict, which is changed.
        before: configuration of the run that saved it; None if it has none: then all of the
            optimizer is restored as it was saved.
        now: configuration of this run.
        callbacks: callbacks of the group `callbacks`, by name.
    """
    states = checkpoint.get("callbacks") or {}
    for timer in (callback for callback in trainer.callbacks if isinstance(callback, Timer)):  # type: ignore[attr-defined]
        if timer not in callbacks.values():
            # trainer.max_time is the time of this start, not of all starts together
            states.pop(timer.state_key, None)
    if not is_of_a_run(before):
        rank_zero_warn(
            "The checkpoint has no configuration, so its hyperparameters are used, not those of the"
            " group optimizer."
        )
        return
    if _trains_differently(before, now) and checkpoint.get("optimizer_states"):
        _use_own_optimizer(trainer, checkpoint)
    for name, callback in callbacks.items():
        state = states.get(callback.state_key)
        # which knows another folder by `dirpath`
        if isinstance(state, dict) and not isinstance(callback, Checkpoint):
            _use_own_arguments(
                callback, state, (before.get("callbacks") or {}).get(name), now["callbacks"][name]
            )


def _trains_differently(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether hyperparameters or the schedule differ. A schedule of our own also depends on the
    length of the run."""
    if any(differences(before["optimizer"], now["optimizer"])):
        return True
    return bool(before["trainer"]["max_steps"] != now["trainer"]["max_steps"])


def _use_own_optimizer(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Keep the hyperparameters with which the optimizer was built, and move its schedule to the
    step of the checkpoint."""
    saved = checkpoint.get("lr_schedulers") or []
    steps = int(saved[0]["last_epoch"] if saved else checkpoint["global_step"])
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for scheduler in schedulers:
        _move(scheduler, steps)
    described = trainer.strategy.optimizer_state(trainer.optimizers[0])
    replace_groups(checkpoint, described, [scheduler.state_dict() for scheduler in schedulers])


def _move(scheduler: Any, steps: int) -> None:
    """Move a new scheduler to a step, as if it had been there in all steps before.

    Raises:
        ConfigError: the schedule ends before this step.
    """
    if type(scheduler) is LambdaLR and steps > 0:
        scheduler.last_epoch = steps - 1  # its learning rate depends on nothing else
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while scheduler.last_epoch < steps:
                scheduler.step()
    except ValueError as error:
        raise ConfigError(f"{KEY} cannot be resumed at step {steps}: {error}") from error


def _use_own_arguments(callback: Callback, state: dict[str, Any], before: Any, now: Any) -> None:
    """Leave changed arguments of a callback as they are where its state would restore them, as
    `EarlyStopping` does with its patience."""
    for key, _, value in differences(before, now):
        if key in state:
            state[key] = getattr(callback, key, value)
