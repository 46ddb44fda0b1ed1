"""What a run does with checkpoints: save, load, remove; it holds the folders that it writes to, and never removes the only good one."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_3d.checkpoint import folder
from lightning_3d.checkpoint.agreement import StorageError, on_rank_zero, through_rank_zero
from lightning_3d.checkpoint.folder import local_path
from lightning_3d.checkpoint.hashes import FileSum, deal, find_damage
from lightning_3d.checkpoint.lock import FolderLock
from lightning_3d.checkpoint.slices import Slices
from lightning_3d.checkpoint.state import CURRENT, CURRENT_STATE, LocalState, OptimizerOwner
from lightning_3d.checkpoint.writing import Notes, TensorSave
from lightning_3d.checkpoint_names import checkpoints_in
from lightning_3d.errors import CheckpointError

PATH = "lightning_3d_path"
"""Where in Lightning's checkpoint dict the folder stands from which its tensors are to be read."""

BATCHES = "lightning_3d_batches_per_epoch"
"""And the number of batches of a training epoch, in which the loop's position is counted."""

_NOT_TRAINER_STATE = ("state_dict", CURRENT_STATE, "hparams_type")
"""Tensors are written by the ranks that hold them; the other entry is the class of omegaconf containers: dicts here."""

log = logging.getLogger(__name__)


class CheckpointStore:
    """Checkpoints of one run. `save` and `load` are collective over the world; what goes over the network are descriptions.

    Args:
        verify: compare every file with its hash before anything is loaded; each rank reads a part of the files once.
        fall_back: where a checkpoint is damaged, load the newest good one beside it instead.
    """

    def __init__(self, *, verify: bool = True, fall_back: bool = False) -> None:
        self._verify = verify
        self._fall_back = fall_back
        self._keeps = False
        self._locks: dict[Path, FolderLock] = {}
        self._postponed: set[Path] = set()

    def hold(self, folders: Iterable[str | os.PathLike[str]]) -> None:
        """From now on until `close` no other run may write into these folders. Those that are not there yet are held from the first
        save on. Collective.

        Raises:
            CheckpointError: another run holds one.
        """
        self._keeps = True
        paths = [Path(path).absolute() for path in folders if "://" not in str(path)]

        def lock() -> None:
            for path in paths:
                if path.is_dir():
                    self._lock(path)

        on_rank_zero(lock)

    def close(self) -> None:
        """The run has ended: others may write where it has written. Local."""
        self._keeps = False
        self._release()

    def _lock(self, path: Path) -> None:
        if path not in self._locks:
            self._locks[path] = FolderLock(path)

    def _release(self) -> None:
        while self._locks:
            self._locks.popitem()[1].release()

    def save(
        self,
        path: str | os.PathLike[str],
        checkpoint: Mapping[str, Any],
        local: LocalState,
        owner: OptimizerOwner | None,
        about: Mapping[str, Any],
        *,
        must: bool = True,
    ) -> bool:
        """Write a checkpoint folder that appears under its name when it is complete.

        Args:
            path: the folder's final name, the same on all ranks. What is there is replaced.
            checkpoint: Lightning's dict, with the rank's own tensors in "state_dict". Optimizer state and random number generators
                are saved if it has "optimizer_states".
            owner: of the optimizer's state; None if there is none.
            about: goes into the manifest.
            must: raise where the storage fails; otherwise warn, and what is saved already stays.

        Returns:
            Whether it was written.

        Raises:
            CheckpointError: on every rank; nothing is left behind, and what was at `path` before is still there.
        """
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

            tensors.finish(temporary, lambda: tensors.write(temporary), commit)
        except CheckpointError as error:
            on_rank_zero(lambda: _abandon(final))
            if must or not isinstance(error, StorageError):
                raise
            self._say(f"The checkpoint {final} could not be written, and training goes on without it: {error}")
            return False
        finally:
            if not self._keeps:
                self._release()
        self._remove_postponed(final)
        return True

    def _begin(self, final: Path, state: Mapping[str, Any]) -> tuple[Path, folder.Files]:
        self._lock(final.parent)
        return folder.begin(final, state)

    def _remove_postponed(self, saved: Path) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            for path in self._postponed - {saved}:
                folder.remove(path)
            self._postponed.clear()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, if there is another good one beside it; otherwise after the next save. One rank calls it."""
        where = local_path(path)
        is_checkpoint = where.is_dir() and not where.is_symlink() and not where.name.startswith(".")
        if is_checkpoint and not folder.others_are_whole(where):
            self._postponed.add(where)
            self._say(f"{where} is the only complete checkpoint in its folder: it is kept until another one is written.")
        else:
            folder.remove(where)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Lightning's dict, without tensors: `load_weights` and others read those.

        Raises:
            CheckpointError: on every rank, if there is no complete and undamaged checkpoint.
        """
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
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(message, stacklevel=3)


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
