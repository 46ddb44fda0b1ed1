"""Private parts of Lightning's loops that decide which samples a rank reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_3d.errors import DataError

if TYPE_CHECKING:

    pass


def keep_sample_order(trainer: Any, make_sampler: Callable[..., Any]) -> None:
    """Let every data loader keep the order that it has on one process, of which each data-parallel rank reads its part.

    With several ranks Lightning 2.6 injects a `DistributedSampler` into the training loader, which shuffles whatever the user asked for,
    and by its own seed. Its `_DataConnector._resolve_sampler` is asked here for another one, except for prediction, whose samples are not
    repeated.

    Args:
        make_sampler: called with the loader's own sampler and dataset and, as keywords, the arguments that Lightning gives a
            `DistributedSampler`, `drop_last`, and `training`: whether the loader is one of the training.
    """
    from lightning.pytorch.trainer.states import RunningStage

    connector = trainer._data_connector
    inject = type(connector)._resolve_sampler

    def resolve(dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        if mode == RunningStage.PREDICTING or not connector._requires_distributed_sampler(dataloader):
            return inject(connector, dataloader, shuffle, mode)
        batches = dataloader.batch_sampler  # given by the user, it has the user's sampler, and the loader a sequential one
        return make_sampler(
            getattr(batches, "sampler", dataloader.sampler),
            dataloader.dataset,
            **trainer.distributed_sampler_kwargs,
            drop_last=bool(getattr(batches, "drop_last", False)),
            training=mode == RunningStage.TRAINING,
        )

    connector._resolve_sampler = resolve


def evaluation_place(trainer: Any) -> tuple[object, int]:
    """The data loader of the running validation or test batch, and the batch's index in it; (None, 0) for a batch of several loaders.

    A step need not take `batch_idx`, so the loop is asked: `Trainer._evaluation_loop` and its `batch_progress`, which counts over
    all loaders, `_is_sequential` and `_combined_loader` (Lightning 2.6).
    """
    loop = trainer._evaluation_loop
    if not loop._is_sequential:
        return None, 0
    done = loop.batch_progress.current.ready - 1
    for loader, batches in zip(loop._combined_loader.flattened, loop.max_batches, strict=True):
        if done < batches:
            return loader, int(done)
        done -= batches
    return None, 0


def batches_to_come(trainer: Any) -> float | None:
    """At the first batch of an epoch or an evaluation: how many this rank will have (infinity where nobody knows); None later.

    `Trainer._evaluation_loop` and the loops' `batch_progress` are not public (Lightning 2.6).
    """
    if trainer.training:
        return trainer.num_training_batches if trainer.fit_loop.batch_idx == 0 else None
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    return sum(loop.max_batches) if loop.batch_progress.current.ready == 1 else None


def go_on_in_data(trainer: Any, batches_then: float | None, restore_generators: Callable[[], None]) -> None:
    """At the start of a resumed fit: take its data loader to where it was, and restore the random number generators where an
    uninterrupted fit would have had the saved states: before a new epoch's iterator is made, or after the last batch trained on.

    Lightning 2.6 has made the iterator by then (`FitLoop.setup_data`), before it tells samplers the epoch, and counts where the fit was
    (`epoch_loop.batch_progress`, to which `restarted_on_train_batch_end` adds one). It restores the position of loaders that have
    `load_state_dict`; of others it would take the first batches of the epoch again, and warn. Here the batches of before are read and
    dropped.

    Args:
        batches_then: in an epoch, when the checkpoint was saved.

    Raises:
        DataError: an epoch has another number of batches now, so that the position means nothing.
    """
    from lightning.fabric.utilities.data import _set_sampler_epoch

    loop = trainer.fit_loop
    fetcher, loaders = loop._data_fetcher, loop._combined_loader.flattened
    restore_generators()
    if any(hasattr(loader, "load_state_dict") for loader in loaders):
        return
    done = loop.epoch_loop.batch_progress.current.completed + int(loop.epoch_loop.restarted_on_train_batch_end)
    now = trainer.num_training_batches
    inside = loop.epoch_loop.restarting and 0 < done < (batches_then if batches_then is not None else now)
    if inside and batches_then is not None and batches_then != now:
        raise DataError(
            f"The checkpoint was saved after {done} of the {batches_then} batches of an epoch, which has {now} now: nothing tells which"
            " samples come next. Use the same data and global batch, or a checkpoint from the end of an epoch."
        )
    if not inside and trainer.current_epoch == 0:
        return
    for loader in loaders:
        _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    iter(fetcher)
    if not inside:
        return
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
    for _ in range(done):
        next(fetcher)
    fetcher.fetched -= done
    restore_generators()
