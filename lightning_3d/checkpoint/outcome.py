"""Result of the saves of a fit: whether the last one failed, and which checkpoint is the newest
complete one."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.checkpoint.rank_agreement import on_rank_zero
from lightning_3d.errors import CheckpointError
from lightning_3d.storage.checkpoint_names import checkpoints_in, steps_of
from lightning_3d.storage.remote_path import Place


class NotSaved(CheckpointError):
    """A fit has ended, but its last checkpoint could not be written. Exit code 1: training itself
    succeeded."""

    exit_code = 1


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written completely, at an optimizer step."""

    path: Place
    step: int


@dataclass(frozen=True)
class Lost:
    """A checkpoint of an optimizer step that could not be written, and why."""

    path: Place
    step: int
    reason: str


@dataclass
class SaveOutcome:
    """The latest good and the latest failed save of a fit. All ranks record the same.

    Attributes:
        step: optimizer step of the save in progress, or of the last one.
        saved: latest complete checkpoint; None if none was written.
        lost: latest save that failed; None if none did.
    """

    step: int = 0
    saved: Saved | None = None
    lost: Lost | None = None

    def has_written(self, path: Place) -> None:
        """Record that the save of `step` is complete."""
        self.saved = Saved(path, self.step)

    def has_lost(self, path: Place, error: BaseException) -> None:
        """Record that the save of `step` failed."""
        self.lost = Lost(path, self.step, str(error))

    @property
    def missing(self) -> Lost | None:
        """The latest failed save; None if no save failed, or if a later save or one of the same
        step is complete."""
        made_up_for = self.lost is None or (
            self.saved is not None and self.saved.step >= self.lost.step
        )
        return None if made_up_for else self.lost

    def require_saved(self) -> None:
        """Raise if the last save failed and no checkpoint as new is complete. Collective if it
        raises.

        Raises:
            NotSaved: on all ranks.
        """
        lost = self.missing
        if lost is None:
            return
        there = f"There is no checkpoint in {lost.path.parent}."
        newest = self.saved or on_rank_zero(lambda: _newest_beside(lost.path))
        if newest is not None:
            there = f"The newest complete checkpoint is {newest.path} (step {newest.step})."
        raise NotSaved(
            f"Training ended at step {lost.step}, but its checkpoint {lost.path} could not be"
            f" written: {lost.reason}\n{there}"
        )


def _newest_beside(path: Place) -> Saved | None:
    """The newest checkpoint in the folder where `path` was to be written; None if there is none, or
    it cannot be read."""
    try:
        newest = next(iter(checkpoints_in(path.parent)), None)
        return None if newest is None else Saved(newest, steps_of(newest))
    except (OSError, ValueError):
        return None
