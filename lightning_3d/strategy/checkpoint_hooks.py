"""Lightning's hooks about checkpoints. Each of them delegates to `checkpoint`."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.checkpoint import (
    BATCHES,
    ORDERS,
    CheckpointStore,
    LocalState,
    SaveMode,
    describe_optimizer,
    load_average,
    load_optimizer,
    load_weights,
    local_states,
    saved_generators,
    share_groups,
    take_groups,
)
from lightning_3d.checkpoint.outcome import SaveOutcome
from lightning_3d.compat.lightning import finished_requeue
from lightning_3d.compat.lightning_data import (
    correct_epoch,
    forget_early_loaders,
    remove_loader_states,
    skip_to_next_batch,
    training_loaders,
    training_position,
)
from lightning_3d.compat.lightning_fetchers import Position
from lightning_3d.compat.lightning_signals import name_end
from lightning_3d.compat.transformers import describe_models
from lightning_3d.engine.built_model import BuiltModel
from lightning_3d.engine.data_order import orders_in, resumed_orders
from lightning_3d.engine.nonfinite import StepGuard, require_finite_weights, trained_weights
from lightning_3d.engine.not_ready import BUILT, require
from lightning_3d.engine.replica_check import ReplicaCheck, agrees
from lightning_3d.errors import ConfigError, NonFiniteError
from lightning_3d.options.reliability import IGNORE
from lightning_3d.ranks.failure import ending_signal
from lightning_3d.ranks.heartbeat import SAVING
from lightning_3d.storage.checkpoint_names import AVERAGE_DECAY
from lightning_3d.strategy.checkpoint_space import require_space
from lightning_3d.strategy.exponential_average import average_of
from lightning_3d.strategy.lightning_callbacks import averages, restore_average, without_average
from lightning_3d.strategy.rank_hooks import RankHooks
from lightning_3d.strategy.streams import LOADERS, own_position, share_positions

if TYPE_CHECKING:
    import lightning.pytorch as pl


class CheckpointHooks(RankHooks):
    """A strategy whose checkpoints are folders that every layout can load."""

    _store: CheckpointStore
    _built: BuiltModel | None = None
    _resumed_from: tuple[Tensor | None, float | None, dict[str, Any] | None] | None = None
    _data_at_end: tuple[Position | None, list[dict[str, Any]]] | None = None
    _resumed_orders: Iterator[dict[str, Any] | None] = iter(())
    _at_once: bool = False
    _replicas: ReplicaCheck | None = None
    guard: StepGuard
    _check_space: bool = True

    @property
    def built(self) -> BuiltModel:
        """This rank's part of the model with everything that trains it. Raises RuntimeError before
        it is built."""
        return require(self._built, "a model", BUILT)

    @property
    def zero_stage(self) -> int:
        """ZeRO stage: 1 shards the optimizer's state over data-parallel ranks, 2 gradients too, 3
        parameters too; 0 nothing."""
        raise NotImplementedError

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """True: parameters exist only after setup, and are filled in place."""
        return True

    @property
    def save_outcome(self) -> SaveOutcome:
        """The latest good and the latest failed checkpoint of the latest fit."""
        return self._store.outcome

    def _local_state(self) -> LocalState:
        built = self.built
        return LocalState(
            self.user_module, built.parts.specs, self.mesh, built.backend, self.root_device
        )

    def _hold_checkpoint_folders(self, trainer: pl.Trainer) -> None:
        """Lock the folders of this fit's checkpoint callbacks against other runs, and let callbacks
        see checkpoints still being written."""
        folders = [
            str(folder)
            for folder in (
                getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks
            )
            if folder
        ]
        for folder in folders:
            if "/file:/" in folder:
                raise ConfigError(
                    f"Lightning reads file://... as a relative path ({folder}). Write dirpath"
                    " without file://."
                )
        self._store.hold(self.broadcast(folders))
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback.file_exists = partial(self._exists, callback)  # type: ignore[method-assign]

    def _exists(self, callback: ModelCheckpoint, *args: Any, **kwargs: Any) -> bool:
        """Take the place of `ModelCheckpoint.file_exists`, with which the callback finds a free
        name."""
        self._store.wait()
        return type(callback).file_exists(callback, *args, **kwargs)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Describe the optimizer: class and hyperparameters. Every rank writes the tensors of its
        shard itself."""
        return describe_optimizer(optimizer, self.built.group_names)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint. Where the storage fails during a fit, training warns and continues;
        see `on_train_end`."""
        if self._has_failed_alone():
            why = "because this rank has failed and the other ranks cannot take part in saving one"
            warnings.warn(f"No checkpoint is written, {why}.", stacklevel=2)
            return
        if storage_options is not None:
            raise ConfigError(
                "storage_options is not supported: Lightning3DStrategy writes checkpoint folders"
                " itself, not through a CheckpointIO."
            )
        with self.heartbeat.during(SAVING):
            self._save(checkpoint, filepath)

    def _save(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        module, backend = self.user_module, self.built.backend
        if backend.average is not None:
            # a signal may end the run during a validation, whose last save follows
            backend.average.hide()
        about: dict[str, Any] = {
            "layout": self.mesh.layout.name,
            "schedule": self.schedule,
            "zero_stage": self.zero_stage,
            "precision": str(self.precision_plugin.precision),
            "transformers": describe_models(module),
        }
        if backend.average_decay is not None:
            about[AVERAGE_DECAY] = backend.average_decay
        trainer = module.trainer
        if not self._has_finite_weights(trainer, filepath) or not self._has_equal_replicas(trainer):
            return
        checkpoint = without_average(trainer, checkpoint)
        checkpoint = share_groups(checkpoint, self.mesh)
        checkpoint[BATCHES] = trainer.num_training_batches
        position, checkpoint[ORDERS] = self._data_at_end or self._place_in_data(trainer)
        if position is not None:
            remove_loader_states(checkpoint)
            checkpoint[LOADERS] = share_positions(position, self.mesh)
        # the exit code of SIGTERM stays, even where the save fails
        told_to_end = isinstance(sys.exception(), SIGTERMException)
        training = (
            trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING
        )
        links = any(
            getattr(callback, "save_last", None) == "link"
            for callback in trainer.checkpoint_callbacks
        )
        if not training and not told_to_end:
            mode = SaveMode.REQUIRED
        else:
            mode = SaveMode.BLOCKING if self._at_once or links else SaveMode.BACKGROUND
        self._store.save(
            self.broadcast(str(filepath)), checkpoint, self._local_state(), backend, about, mode
        )

    def _place_in_data(self, trainer: pl.Trainer) -> tuple[Position | None, list[dict[str, Any]]]:
        """Return the states of the training loaders, and those of the samplers that determine their
        order."""
        return training_position(trainer), [
            order.state() for order in orders_in(trainer.train_dataloader)
        ]

    def _has_finite_weights(self, trainer: pl.Trainer, filepath: Any) -> bool:
        """Return whether the weights of a fit may be saved. Weights of a failed fit that are not
        finite are skipped with a warning.

        Raises:
            NonFiniteError: the weights are not finite.
        """
        if self.guard.how == IGNORE or trainer.state.fn != TrainerFn.FITTING or self._built is None:
            return True
        try:
            weights = [
                value for _, value in trained_weights(trainer.lightning_module, self._built.backend)
            ]
            require_finite_weights(weights, self.root_device, filepath)
        except NonFiniteError as error:
            if trainer.state.status != TrainerStatus.INTERRUPTED:
                raise
            rank_zero_warn(str(error))
            return False
        return True

    def _has_equal_replicas(self, trainer: pl.Trainer) -> bool:
        """Return whether ranks hold the same weights where they should. A failed fit whose ranks
        differ is not saved, with a warning.

        Raises:
            ReplicaError: ranks differ.
        """
        check, built = self._replicas, self._built
        if check is None or built is None or trainer.state.fn != TrainerFn.FITTING:
            return True
        interrupted = trainer.state.status == TrainerStatus.INTERRUPTED
        return agrees(
            partial(check.before_checkpoint, built, trainer.global_step, self._store.outcome.saved),
            interrupted=interrupted,
        )

    @contextmanager
    def saving_at_once(self) -> Iterator[None]:
        """Complete saves before they return: the process may end right after."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load Lightning's state; tensors are read later, by slices. `weights_only` has no effect:
        there are no pickles."""
        checkpoint = self._store.load(self.broadcast(finished_requeue(str(checkpoint_path))))
        batches = checkpoint.pop(BATCHES, None)
        orders = checkpoint.pop(ORDERS, None)
        loaders = checkpoint.pop(LOADERS, None)
        if (
            self.lightning_module is None
            or self.lightning_module.trainer.state.fn != TrainerFn.FITTING
        ):
            return checkpoint
        if orders or loaders is not None:  # else a data module knows the position
            correct_epoch(checkpoint)
        forget_early_loaders(self.lightning_module.trainer)
        restore_average(self.lightning_module.trainer, checkpoint)
        self._resumed_from = saved_generators(checkpoint, self._local_state()), batches, loaders
        self._resumed_orders = resumed_orders(orders, int(checkpoint.get("epoch", 0)))
        return take_groups(checkpoint, self.built.group_names)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        trainer = self.user_module.trainer
        evaluates_average = (
            trainer.state.fn != TrainerFn.FITTING and average_of(trainer) is not None
        )
        load_weights(checkpoint, self._local_state(), strict=strict, average=evaluates_average)
        if self.zero_stage < 3 and averages(trainer) and isinstance(checkpoint, dict):
            checkpoint.update(local_states(checkpoint, self._local_state()))
        if self.optimizers:
            self.built.backend.refresh_master_weights()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_optimizer(checkpoint, self._local_state(), self.optimizers[0], self.built.backend)
        if self.built.backend.average is not None:
            load_average(checkpoint, self._local_state(), self.built.backend.average)

    @override
    def on_train_start(self) -> None:
        """Restore the position in the data and the random number generators, when a fit resumes a
        checkpoint."""
        resumed, self._resumed_from = self._resumed_from, None
        self._data_at_end = None
        if self.lightning_module is None:
            return
        trainer = self.lightning_module.trainer
        if resumed is not None:
            self._resume_data(trainer, *resumed)
        # here, because callbacks know by now what an earlier fit has left there
        if self._check_space:
            require_space(
                trainer,
                self.lightning_module,
                self.built.parts.specs,
                self.mesh,
                self.built.backend,
            )

    def _resume_data(
        self,
        trainer: pl.Trainer,
        generators: Tensor | None,
        batches: float | None,
        loaders: dict[str, Any] | None,
    ) -> None:
        """Continue the epoch of a checkpoint at its position."""

        def restore_generators() -> None:
            self._local_state().restore_generators(generators)
            for order in orders_in(trainer.train_dataloader):
                order.restore_own()

        position = (
            own_position(loaders, training_loaders(trainer), self.mesh)
            if loaders is not None
            else None
        )
        skip_to_next_batch(trainer, batches, restore_generators, position)
        for order in orders_in(trainer.train_dataloader):
            order.continue_epoch()
        self._resumed_orders = iter(())  # loaders that are made again later begin a new epoch

    @override
    def on_train_end(self) -> None:
        """Wait for the last save of the fit.

        Raises:
            NotSaved: that save failed, and no other complete checkpoint is as new.
        """
        # after the fit, loaders forget it
        self._data_at_end = self._place_in_data(self.user_module.trainer)
        self._store.wait()
        self._store.outcome.require_saved()

    def _report_end(self, exception: BaseException) -> None:
        """Print at which step a fit stopped early, what is saved, and how to resume it."""
        trainer, outcome = self.user_module.trainer, self._store.outcome
        if isinstance(exception, SIGTERMException):
            name_end(trainer, exception)
        number, missing, saved = ending_signal(exception), outcome.missing, outcome.saved
        if number is None and saved is None:
            return
        lines = [
            f"{signal.Signals(number).name if number else 'Failed'}: the fit stopped after step"
            f" {trainer.global_step}."
        ]
        if missing is not None:
            lines.append(f"The checkpoint {missing.path} could not be written: {missing.reason}")
        if saved is None:
            lines.append("No checkpoint was written.")
        else:
            lines.append(f"The newest checkpoint is {saved.path} (step {saved.step}).")
            lines.append(f'Resume with trainer.fit(..., ckpt_path="{saved.path}").')
        rank_zero_info("\n".join(lines))

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._store.remove(filepath)
