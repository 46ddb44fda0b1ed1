"""What a run does with checkpoints: save, load, remove; it holds the folders that it writes to, and never removes the only good one."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_3d.checkpoint import folder
from lightning_3d.checkpoint.agreement import StorageError, on_rank_zero, through_rank_zero
from lightning_3d.checkpoint.folder import local_path
from lightning_3d.checkpoint.hashes import FileSum, deal, find_damage
from lightning_3d.checkpoint.lock import FolderLock
from lightning_3d.checkpoint.slices import Slices
from lightning_3d.checkpoint.state import CURRENT, CURRENT_STATE, LocalState, OptimizerOwner
from lightning_3d.checkpoint.writing import Notes, Piece, TensorSave
from lightning_3d.checkpoint_names import checkpoints_in
from lightning_3d.errors import CheckpointError

PATH = "lightning_3d_path"
"""Where in Lightning's checkpoint dict the folder stands from which its tensors are to be read."""

BATCHES = "lightning_3d_batches_per_epoch"
"""And the number of batches of a training epoch, in which the loop's position is counted."""

_NOT_TRAINER_STATE = ("state_dict", CURRENT_STATE, "hparams_type")
"""Tensors are written by the ranks that hold them; the other entry is the class of omegaconf containers: dicts here."""

_PATIENCE_SECONDS = 600.0
"""For a save of another run into the same folder, where that is not one run's own."""

log = logging.getLogger(__name__)


class CheckpointStore:
    """Checkpoints of one run. `save` and `load` are collective over the world; what goes over the network are descriptions.

    Args:
        verify: compare every file with its hash before anything is loaded; each rank reads a part of the files once.
        fall_back: where a checkpoint is damaged, load the newest good one beside it instead.
        asynchronous: saves that may fail are written in the background, from copies. One at a time: the next one waits.
    """

    def __init__(self, *, verify: bool = True, fall_back: bool = False, asynchronous: bool = True) -> None:
        self._verify = verify
        self._fall_back = fall_back
        self._asynchronous = asynchronous
        self._folders: set[Path] = set()
        self._locks: dict[Path, FolderLock] = {}
        self._turn: FolderLock | None = None
        self._postponed: set[Path] = set()
        self._buffers: dict[Piece, Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._made_for: dist.ProcessGroup | None = None
        self._pending: BackgroundSave | None = None

    def hold(self, folders: Iterable[str | os.PathLike[str]]) -> None:
        """From now on until `close` no other run may write into these folders. Those that are not there yet are held from the first
        save on. Collective.

        Raises:
            CheckpointError: another run holds one.
        """
        self._folders = {Path(path).absolute() for path in folders if "://" not in str(path)}
        on_rank_zero(lambda: self._lock([path for path in self._folders if path.is_dir()]))

    def close(self, *, failed: bool = False) -> None:
        """The run has ended: others may write where it has written. Local, but waits for a save in the background.

        Args:
            failed: other ranks may be gone, so that it will not be finished.
        """
        try:
            if not failed:
                self.wait(must=False)
        finally:
            self._pending = None
            self._folders.clear()
            self._buffers.clear()
            while self._locks:
                self._locks.popitem()[1].release()

    def _lock(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path not in self._locks:
                self._locks[path] = FolderLock(path)

    def save(
        self,
        path: str | os.PathLike[str],
        checkpoint: Mapping[str, Any],
        local: LocalState,
        owner: OptimizerOwner | None,
        about: Mapping[str, Any],
        *,
        must: bool = True,
        now: bool = False,
    ) -> bool:
        """Write a checkpoint folder that appears under its name when it is complete.

        Args:
            path: the folder's final name, the same on all ranks. What is there is replaced.
            checkpoint: Lightning's dict, with the rank's own tensors in "state_dict". Optimizer state and random number generators
                are saved if it has "optimizer_states".
            owner: of the optimizer's state; None if there is none.
            about: goes into the manifest.
            must: raise where the storage fails; otherwise warn, and what is saved already stays.
            now: not in the background: somebody needs the folder at once, to link to it for example.

        Returns:
            Whether it was written, or is being written.

        Raises:
            CheckpointError: on every rank; nothing is left behind, and what was at `path` before is still there.
        """
        self.wait()
        final = local_path(path)
        state = {key: value for key, value in checkpoint.items() if key not in _NOT_TRAINER_STATE}
        with_optimizer = owner is not None and bool(checkpoint.get("optimizer_states"))
        facts = {key: checkpoint[key] for key in ("epoch", "global_step") if key in checkpoint}
        facts = {**about, **facts, "optimizer_state": with_optimizer}
        tensors = TensorSave()
        try:
            temporary, files = on_rank_zero(lambda: self._begin(final, state))
            tensors.plan(_collector(checkpoint, local, owner if with_optimizer else None))

            def commit(sums: dict[str, FileSum]) -> None:
                folder.commit(temporary, final, facts | {"tensor_bytes": tensors.nbytes}, files | sums)

            if must or now or not self._asynchronous:
                tensors.finish(temporary, commit)
            else:
                tensors.stage(self._buffers)
                group = self._own_group()
                self._pending = BackgroundSave(final, lambda: tensors.finish(temporary, commit, group), self._end_turn())
                return True
        except CheckpointError as error:
            on_rank_zero(lambda: _abandon(final))
            if must or not isinstance(error, StorageError):
                raise
            self._say_failed(final, error)
            return False
        finally:
            if self._turn is not None:
                self._end_turn()()
        self._remove_postponed(final)
        return True

    def _own_group(self) -> dist.ProcessGroup | None:
        """For what a save in the background sends, while training uses the other groups."""
        world = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        if self._made_for is not world:
            self._made_for = world
            self._group = dist.new_group(backend="gloo", group_desc="checkpoints") if world is not None else None
        return self._group

    def wait(self, *, must: bool = True) -> None:
        """Until the save in the background is finished, if there is one. Local.

        Args:
            must: raise where it has failed for another reason than the storage.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.join()
        if error is None:
            self._remove_postponed(pending.path)
            return
        if _leads():
            _abandon(pending.path)
        if must and not isinstance(error, StorageError):
            raise error
        self._say_failed(pending.path, error)

    def _say_failed(self, path: Path, error: BaseException) -> None:
        self._say(f"The checkpoint {path} could not be written, and training goes on without it: {error}")

    def _begin(self, final: Path, state: Mapping[str, Any]) -> tuple[Path, folder.Files]:
        """Make the temporary folder, alone in the one that it is in: of a run's own until its end, of others for this save. Names with a
        dot are a program's own, which no other one uses."""
        own = final.parent in self._folders
        shared = not own and not final.name.startswith(".")
        if own:
            self._lock([final.parent])
        elif shared:
            self._turn = FolderLock(final.parent, _PATIENCE_SECONDS)
        return folder.begin(final, state, alone=own or shared)

    def _end_turn(self) -> Callable[[], None]:
        """What lets others write where this save does; it has to be called when that is over."""
        turn, self._turn = self._turn, None
        return turn.release if turn is not None else lambda: None

    def _remove_postponed(self, saved: Path) -> None:
        if _leads():
            for path in self._postponed - {saved}:
                folder.remove(path)
            self._postponed.clear()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, if there is another good one beside it; otherwise after the next save. One rank calls it."""
        where = local_path(path)
        is_checkpoint = where.is_dir() and not where.is_symlink() and not where.name.startswith(".")
        if self._pending is not None and self._pending.path == where:
            self.wait(must=False)
        if is_checkpoint and not folder.others_are_whole(where):
            self._postponed.add(where)
            if self._pending is None:
                self._say(f"{where} is the only complete checkpoint in its folder: it is kept until another one is written.")
        else:
            folder.remove(where)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Lightning's dict, without tensors: `load_weights` and others read those.

        Raises:
            CheckpointError: on every rank, if there is no complete and undamaged checkpoint.
        """
        self.wait()
        wanted = local_path(path)
        try:
            return self._load(wanted)
        except CheckpointError as error:
            others = on_rank_zero(lambda: _others(wanted)) if self._fall_back else []
            for other in others:
                try:
                    loaded = self._load(other)
                except CheckpointError:
                    continue
                self._say(f"{error} Instead of it, {other} at step {loaded['global_step']} is loaded.")
                return loaded
            raise

    def _load(self, path: Path) -> dict[str, Any]:
        manifest = on_rank_zero(lambda: folder.read_manifest(path))
        if self._verify:
            _verify(path, folder.files_of(manifest))
        return {**folder.read_trainer_state(path), PATH: str(path)}

    @staticmethod
    def _say(message: str) -> None:
        if _leads():
            warnings.warn(message, stacklevel=3)


class BackgroundSave:
    """The last part of a save, in a thread of its own.

    Attributes:
        path: of the checkpoint.
    """

    def __init__(self, path: Path, finish: Callable[[], None], ended: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(finish, ended), name=f"save {path.name}", daemon=True)
        self._thread.start()

    def _run(self, finish: Callable[[], None], ended: Callable[[], None]) -> None:
        _give_way()
        try:
            finish()
        except BaseException as error:
            self._error = error
        finally:
            ended()

    def join(self) -> BaseException | None:
        """What went wrong, when it is over."""
        self._thread.join()
        return self._error


def _give_way() -> None:
    """Where no core is free, training goes first: hashing takes a core for a second for each gigabyte. Linux counts this by thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)


def _leads() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _collector(
    checkpoint: Mapping[str, Any], local: LocalState, owner: OptimizerOwner | None
) -> Callable[[], tuple[dict[str, Slices], Notes]]:
    """What collects the slices that this rank holds."""

    def collect() -> tuple[dict[str, Slices], Notes]:
        held = local.weights(checkpoint["state_dict"], offered=True)
        held |= local.weights(checkpoint.get(CURRENT_STATE, {}), offered=True, prefix=CURRENT)
        numbers: set[str] = set()
        if owner is not None:
            state, numbers = local.optimizer(owner.optimizer_shards(to_save=True), offered=True)
            held |= state | local.generators()
        return held, {"aliases": local.aliases, "numbers": dict.fromkeys(numbers, "")}

    return collect


def _abandon(path: Path) -> None:
    """What cannot be removed now, the next save clears away."""
    try:
        folder.abandon(path)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)


def _others(path: Path) -> list[Path]:
    return [other for other in checkpoints_in(path.parent) if other != path]


def _verify(path: Path, files: folder.Files) -> None:
    """Compare every file with its hash, each rank some of them. Collective."""
    began = time.monotonic()
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mine = deal(files, size)[rank]
    found = through_rank_zero(lambda: find_damage(path, files, mine), lambda parts: [sum(parts, [])] * size)
    folder.require_undamaged(path, found)
    seconds, read = time.monotonic() - began, sum(known.bytes for known in files.values())
    if rank == 0:
        log.info("verified %s: %d files, %.1f MB, in %.2f s", path, len(files), read / 1e6, seconds)
