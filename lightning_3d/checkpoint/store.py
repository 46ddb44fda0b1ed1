"""Checkpoints of a run: save, load and remove them, and lock their folders. The only good
checkpoint is never removed."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_3d.checkpoint import folder
from lightning_3d.checkpoint.background_save import BackgroundSave, in_time
from lightning_3d.checkpoint.hashes import FileSum, find_damage, split_evenly
from lightning_3d.checkpoint.outcome import SaveOutcome
from lightning_3d.checkpoint.rank_agreement import on_rank_zero, through_rank_zero
from lightning_3d.checkpoint.remote_folder import remove_remains
from lightning_3d.checkpoint.resharding import Slices
from lightning_3d.checkpoint.state import CURRENT, CURRENT_STATE, LocalState, OptimizerOwner
from lightning_3d.checkpoint.writing import Notes, Piece, TensorSave
from lightning_3d.errors import CheckpointError, StorageError, StorageHangs, reason
from lightning_3d.options.checkpoints import CheckpointOptions
from lightning_3d.storage.checkpoint_names import MANIFEST, RUN, checkpoints_in
from lightning_3d.storage.lock import FolderLock, Lease, hold
from lightning_3d.storage.remote_path import Place, RemotePath, place

PATH = "lightning_3d_path"
"""Key in Lightning's checkpoint dict: the folder to read its tensors from."""

PART = "lightning_3d_part"
"""Key: prefix of the names in the user's module that are loaded, where a module has only a part of
what is saved."""

BATCHES = "lightning_3d_batches_per_epoch"
"""Key: the number of batches of a training epoch, in which the loop counts its position."""

ORDERS = "lightning_3d_orders"
"""Key: the random state that determined the order of that epoch, for each loader whose sampler is a
`data_order.OneProcessOrder`."""

_NOT_TRAINER_STATE = ("state_dict", CURRENT_STATE, "hparams_type")
"""The ranks write the tensors that they hold; the last entry is the class of omegaconf containers,
which are dicts here."""

_PATIENCE_SECONDS = 600.0
"""Seconds to wait for another run that saves into the same folder, if no run holds the folder."""

_NOTICED_SECONDS = 1.0
"""Seconds that training may wait for a save without a warning."""

_RELEASE_SECONDS = 10.0
"""Seconds to wait for the release of locks: the disk may hang."""

_NO_END = timedelta(days=14)
"""Timeout of the process group for background saves: `timeout_seconds` ends them first, with a
message."""

log = logging.getLogger(__name__)


class SaveMode(Enum):
    """Modes of a save: whether training waits for it, and whether a failure of the storage is
    raised."""

    BACKGROUND = "background"
    """Written while training continues. A failure is a warning, and earlier checkpoints stay."""

    BLOCKING = "blocking"
    """Complete when `save` returns: something needs the folder at once, for example to link to it.
    A failure is a warning."""

    REQUIRED = "required"
    """Complete when `save` returns. A failure is raised."""


class _Raised(Enum):
    """Errors of a save that are raised. The others become a warning."""

    ALL = "all"
    ALL_BUT_STORAGE = "all but storage"
    NONE = "none"

    def covers(self, error: BaseException) -> bool:
        return self is _Raised.ALL or (
            self is _Raised.ALL_BUT_STORAGE and not isinstance(error, StorageError)
        )


class CheckpointStore:
    """Checkpoints of one run. `save` and `load` are collective over the world; only descriptions
    are sent between ranks.

    At most one save is in progress: the next one waits for it.

    Attributes:
        outcome: result of the saves of the latest fit.
    """

    def __init__(self, options: CheckpointOptions | None = None) -> None:
        self._options = options or CheckpointOptions()
        self._has_waited = False
        self._folders: set[Place] = set()
        self._locks: dict[Place, FolderLock | Lease] = {}
        self._turn: FolderLock | Lease | None = None
        self._postponed: set[Place] = set()
        self._buffers: dict[Piece, Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._made_for: dist.ProcessGroup | None = None
        self._pending: BackgroundSave | None = None
        self.outcome = SaveOutcome()

    def hold(self, folders: Iterable[str | os.PathLike[str]]) -> None:
        """Lock these folders against other runs until `close`. Missing folders are locked at the
        first save. Collective.

        Raises:
            CheckpointError: another run holds one of them.
            StorageError: one of them is not writable.
        """
        self._folders = {place(path) for path in folders}
        self.outcome = SaveOutcome()

        def hold_all() -> None:
            self._lock([path for path in self._folders if path.is_dir()])
            for path in self._folders:
                folder.require_writable(path)

        on_rank_zero(hold_all)

    def close(self, *, failed: bool = False) -> None:
        """End the run and release its folders. Local, but waits for a save in the background.

        Args:
            failed: whether the run failed. If True, other ranks may be gone and the save in the
                background may never finish, so it is not waited for.

        Raises:
            StorageHangs: the save does not finish.
        """
        try:
            if not failed:
                self.finish()
        finally:
            self._pending = None
            self._folders.clear()
            self._buffers.clear()
            with suppress(StorageHangs):  # the end of this process releases them anyway
                in_time(self._release, _RELEASE_SECONDS, "Releasing the locks")

    def _release(self) -> None:
        while self._locks:
            self._locks.popitem()[1].release()

    def _lock(self, paths: Iterable[Place]) -> None:
        for path in paths:
            if path not in self._locks:
                self._locks[path] = hold(path)
                if isinstance(path, RemotePath):
                    remove_remains(path.iterdir())
            self._locks[path].check()

    def save(
        self,
        path: str | os.PathLike[str],
        checkpoint: Mapping[str, Any],
        local: LocalState,
        owner: OptimizerOwner | None,
        about: Mapping[str, Any],
        mode: SaveMode = SaveMode.REQUIRED,
    ) -> bool:
        """Write a checkpoint folder that appears under its name when it is complete. Collective.

        Args:
            path: final name of the folder, the same on all ranks. An earlier checkpoint there is
                replaced.
            checkpoint: Lightning's dict, with the rank's own tensors in "state_dict". Optimizer
                state and random number generators are saved if it has "optimizer_states".
            owner: owner of the optimizer's state and of the average of weights; None if there is
                neither.
            about: facts for the manifest.
            mode: when the save is finished, and what a failure does.

        Returns:
            True if it was written or is being written, False if it failed with a warning.

        Raises:
            CheckpointError: on every rank; nothing is left behind, and what was at `path` before is
                still there.
            StorageHangs: this save, or the one before, does not finish.
        """
        self.wait()
        final = place(path)
        state = {key: value for key, value in checkpoint.items() if key not in _NOT_TRAINER_STATE}
        with_optimizer = owner is not None and bool(checkpoint.get("optimizer_states"))
        facts = {key: checkpoint[key] for key in ("epoch", "global_step", RUN) if key in checkpoint}
        facts = {**about, **facts, "optimizer_state": with_optimizer}
        tensors = TensorSave()
        self.outcome.step = int(checkpoint.get("global_step", 0))
        later = self._options.checkpoint_asynchronous and mode is SaveMode.BACKGROUND
        raised = _Raised.ALL if mode is SaveMode.REQUIRED else _Raised.ALL_BUT_STORAGE
        try:
            temporary, files = on_rank_zero(lambda: self._begin_in_time(final, state))
            tensors.plan(_collector(checkpoint, local, owner, with_optimizer))

            def commit(sums: dict[str, FileSum]) -> None:
                folder.commit(
                    temporary, final, facts | {"tensor_bytes": tensors.nbytes}, files | sums
                )

            if later:
                tensors.stage(self._buffers)
            finish = partial(tensors.finish, temporary, commit, self._own_group())
            self._pending = BackgroundSave(final, tensors, finish, self._end_turn())
        except CheckpointError as error:
            return self._give_up(final, error, raised)
        finally:
            self._end_turn()()
        return later or self._wait(raised)

    def _own_group(self) -> dist.ProcessGroup | None:
        """The process group of background saves, because training uses the others at the same
        time."""
        world = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        if self._made_for is not world:
            self._made_for = world
            self._group = (
                dist.new_group(backend="gloo", timeout=_NO_END, group_desc="checkpoints")
                if world is not None
                else None
            )
        return self._group

    def wait(self) -> None:
        """Wait until the save in the background is finished, if there is one. Collective.

        Raises:
            CheckpointError: it failed, not because of the storage.
            StorageHangs: it does not finish; the message says what each rank is doing.
        """
        began, pending = time.monotonic(), self._pending
        self._wait()
        seconds = time.monotonic() - began
        if pending is not None and seconds > _NOTICED_SECONDS and not self._has_waited:
            self._has_waited = True
            self._say(
                f"Training waited {seconds:.1f} s for checkpoint {pending.path}: saves come faster"
                " than the disk can write them. Save less often or use a faster disk. (Shown"
                " once.)"
            )

    def _wait(self, raised: _Raised = _Raised.ALL_BUT_STORAGE) -> bool:
        pending = self._pending
        if pending is None:
            return True
        if pending.ends_within(self._options.checkpoint_timeout_seconds):
            pending.require_peers()
        through_rank_zero(
            lambda: pending.join(self._options.checkpoint_timeout_seconds), lambda parts: parts
        )
        self._pending = None
        return self._settle(pending, raised)

    def finish(self) -> None:
        """Wait like `wait`, without communication. Local; a failure is a warning, only StorageHangs
        is raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.join(self._options.checkpoint_timeout_seconds)
            self._settle(pending, _Raised.NONE)

    def _settle(self, pending: BackgroundSave, raised: _Raised) -> bool:
        """Record the end of a save. Returns whether the checkpoint is complete."""
        if pending.error is not None:
            return self._give_up(pending.path, pending.error, raised)
        self.outcome.has_written(pending.path)
        self._remove_postponed(pending.path)
        return True

    def _give_up(self, path: Place, error: BaseException, raised: _Raised) -> bool:
        """Remove what was written, then raise the error or warn. Returns False."""
        if _leads() and not isinstance(error, StorageHangs):
            _abandon(path)
        if raised.covers(error):
            raise error
        self.outcome.has_lost(path, error)
        self._say(f"Checkpoint {path} could not be written; training continues without it: {error}")
        return False

    def _begin_in_time(self, final: Place, state: Mapping[str, Any]) -> tuple[Place, folder.Files]:
        return in_time(
            lambda: self._begin(final, state),
            self._options.checkpoint_timeout_seconds,
            f"Starting checkpoint {final}",
        )

    def _begin(self, final: Place, state: Mapping[str, Any]) -> tuple[Place, folder.Files]:
        """Make the temporary folder, with its parent locked: a folder of this run until the run
        ends, any other for this save.

        Names that start with a dot are private to a program, so their parent needs no lock.
        """
        own = final.parent in self._folders
        shared = not own and not final.name.startswith(".")
        if own:
            self._lock([final.parent])
        elif shared:
            self._turn = hold(final.parent, _PATIENCE_SECONDS)
        return folder.begin(final, state, alone=own or shared)

    def _end_turn(self) -> Callable[[], None]:
        """Return the function that releases the lock of this save; call it when the save is
        over."""
        turn, self._turn = self._turn, None
        return turn.release if turn is not None else lambda: None

    def _remove_postponed(self, saved: Place) -> None:
        if _leads():
            for path in self._postponed - {saved}:
                self._remove(path)
            self._postponed.clear()

    def _remove(self, path: Place) -> None:
        try:
            folder.remove(path)
        except OSError as error:
            self._say(
                f"Checkpoint {path} could not be removed; training continues: {reason(error)}"
            )

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint now if its folder has another complete one of the same or a later
        step, otherwise after the next save. Call on one rank."""
        where = place(path)
        is_checkpoint = where.is_dir() and not where.is_symlink() and not where.name.startswith(".")
        if self._pending is not None and self._pending.path == where:
            self._pending.join(self._options.checkpoint_timeout_seconds)
        if is_checkpoint and not folder.another_is_as_new(where):
            self._postponed.add(where)
            if self._pending is None:
                self._say(
                    f"{where} is kept until another checkpoint is written: it is the newest"
                    " complete checkpoint in its folder."
                )
        else:
            self._remove(where)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load Lightning's dict, without tensors, which `load_weights` and others read. Collective.

        Raises:
            CheckpointError: on every rank: there is no complete and undamaged checkpoint.
        """
        self.wait()
        wanted = place(path)
        if wanted.name == MANIFEST:
            wanted = wanted.parent
        try:
            return self._load(wanted)
        except CheckpointError as error:
            others = (
                on_rank_zero(lambda: _others(wanted)) if self._options.checkpoint_fall_back else []
            )
            for other in others:
                try:
                    loaded = self._load(other)
                except CheckpointError:
                    continue
                self._say(f"{error} Loading {other} (step {loaded['global_step']}) instead.")
                return loaded
            raise

    def _load(self, path: Place) -> dict[str, Any]:
        manifest = on_rank_zero(lambda: folder.read_manifest(path))
        if self._options.checkpoint_verify:
            _verify(path, folder.files_of(manifest))
        return {
            **folder.read_trainer_state(path, manifest),
            PATH: str(folder.contents(path, manifest)),
        }

    @staticmethod
    def _say(message: str) -> None:
        if _leads():
            warnings.warn(message, stacklevel=3)


def _leads() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _collector(
    checkpoint: Mapping[str, Any],
    local: LocalState,
    owner: OptimizerOwner | None,
    with_optimizer: bool,
) -> Callable[[], tuple[dict[str, Slices], Notes]]:
    """Make the function that collects the slices of this rank."""

    def collect() -> tuple[dict[str, Slices], Notes]:
        held = local.weights(checkpoint["state_dict"], offered=True)
        held |= local.weights(checkpoint.get(CURRENT_STATE, {}), offered=True, prefix=CURRENT)
        numbers: set[str] = set()
        if owner is not None:
            held |= local.average(owner.average_shards(), owner.average_buffers(), offered=True)
        if owner is not None and with_optimizer:
            state, numbers = local.optimizer(owner.optimizer_shards(to_save=True))
            held |= state | local.generators()
        return held, {"aliases": local.aliases, "numbers": dict.fromkeys(numbers, "")}

    return collect


def _abandon(path: Place) -> None:
    """Remove an unfinished save. What cannot be removed now, the next save removes."""
    try:
        folder.abandon(path)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)


def _others(path: Place) -> Sequence[Place]:
    return [other for other in checkpoints_in(path.parent) if other != path]


def _verify(path: Place, files: folder.Files) -> None:
    """Compare every file with its hash; each rank reads some of them. Collective."""
    began = time.monotonic()
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mine = split_evenly(files, size)[rank]
    found = through_rank_zero(
        lambda: find_damage(path, files, mine), lambda parts: [sum(parts, [])] * size
    )
    folder.require_undamaged(path, found)
    seconds, read = time.monotonic() - began, sum(known.bytes for known in files.values())
    if rank == 0:
        log.info("verified %s: %d files, %.1f MB, in %.2f s", path, len(files), read / 1e6, seconds)
