"""Private APIs of Lightning's loops and data connector that decide which samples a rank reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import inf
from typing import Any

from lightning_3d.compat.lightning_fetchers import JoinedFetcher, Position, knows_position
from lightning_3d.errors import DataError, plural


def keep_sample_order(trainer: Any, make_sampler: Callable[..., Any]) -> None:
    """Make every data loader keep the order of one process; each data-parallel rank reads its shard
    of it.

    With several ranks Lightning 2.6 injects a `DistributedSampler` into the training loader, which
    shuffles even where the user asked for no shuffling, and with its own seed.
    `_DataConnector._resolve_sampler` is replaced to inject the sampler of `make_sampler`, except
    for prediction, whose samples are not repeated.

    Args:
        make_sampler: called with the loader's own sampler and dataset and, as keywords, the
            arguments that Lightning gives a `DistributedSampler`, `drop_last`, and `training` (True
            for a training loader).
    """
    from lightning.pytorch.trainer.states import RunningStage

    connector = trainer._data_connector
    inject = type(connector)._resolve_sampler

    def resolve(dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        if mode == RunningStage.PREDICTING or not connector._requires_distributed_sampler(
            dataloader
        ):
            return inject(connector, dataloader, shuffle, mode)
        # given by the user, it has the user's sampler, and the loader a sequential one
        batches = dataloader.batch_sampler
        return make_sampler(
            getattr(batches, "sampler", dataloader.sampler),
            dataloader.dataset,
            **trainer.distributed_sampler_kwargs,
            drop_last=bool(getattr(batches, "drop_last", False)),
            training=mode == RunningStage.TRAINING,
        )

    connector._resolve_sampler = resolve


def seed_workers(loader: Any, rank: int) -> None:
    """Seed the workers of a data loader after `seed_everything(workers=True)`, unless it has a
    `worker_init_fn`.

    `lightning.fabric.utilities.data._auto_add_worker_init_fn` (Lightning 2.6; not public) gets the
    global rank from Lightning, by which ranks that must read the same batch would draw different
    samples.

    Args:
        rank: index of the data that this rank reads.
    """
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn

    _auto_add_worker_init_fn(loader, rank)


def evaluation_place(trainer: Any) -> tuple[object, int]:
    """The data loader of the running validation or test batch, and the batch's index in it; (None,
    0) for a batch of several loaders.

    A step need not take `batch_idx`, so this reads the loop: `Trainer._evaluation_loop` and its
    `batch_progress`, which counts over all loaders, `_is_sequential` and `_combined_loader`
    (Lightning 2.6; not public).
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
    """The number of batches of this rank, at the first batch of an epoch or an evaluation (infinity
    if unknown); None later.

    `Trainer._evaluation_loop` and the loops' `batch_progress` are not public (Lightning 2.6).
    """
    if trainer.training:
        return trainer.num_training_batches if trainer.fit_loop.batch_idx == 0 else None
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    return sum(loop.max_batches) if loop.batch_progress.current.ready == 1 else None


def count_epoch_again(trainer: Any, before: int) -> None:
    """Count the batches of the training loaders for the epoch that begins.

    Lightning 2.6 counts them once, in `FitLoop.setup_data`: it would end a longer epoch early, and
    never validate after a shorter one. This sets what that function sets: the `limits` of
    `FitLoop._combined_loader` and of its iterator (by `_parse_num_batches`), `FitLoop.max_batches`,
    the `length` of `_data_fetcher` and `Trainer.val_check_batch`.

    Args:
        before: batches of the epoch that were read in an earlier epoch of Lightning:
            `limit_train_batches` counts them too.
    """
    from lightning.fabric.utilities.data import sized_len
    from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
    from lightning.pytorch.trainer.states import RunningStage

    loop = trainer.fit_loop
    loader = loop._combined_loader
    if loader is None or loop._data_fetcher is None:
        return
    lengths = [length for one in loader.flattened if (length := sized_len(one)) is not None]
    if len(lengths) < len(loader.flattened):
        return
    limits = [
        _parse_num_batches(RunningStage.TRAINING, length + before, trainer.limit_train_batches)
        - before
        for length in lengths
    ]
    # 0 batches would end the fit
    loader.limits = loader._iterator.limits = [max(1, limit) for limit in limits]
    loop.max_batches = loop._data_fetcher.length = len(loader)
    # None: by time
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def trained_batches(trainer: Any) -> tuple[int, int]:
    """Batches that were trained on in the whole run, and in its epoch. `epoch_loop.batch_progress`
    is not public (Lightning 2.6)."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return int(progress.total.processed), int(progress.current.processed)


def has_ended_epoch(trainer: Any) -> bool:
    """Whether the last batch that was trained on ended its epoch. `epoch_loop.batch_progress` is
    not public (Lightning 2.6)."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch and progress.current.processed == progress.current.ready)


def begin_after_ended_epoch(trainer: Any) -> None:
    """Begin a whole epoch where a fit resumes a checkpoint that was saved after the last batch of
    an epoch.

    Lightning 2.6 with `max_steps` takes the epoch that begins for the ended one. Unless that still
    has a validation to skip, it trains on one more batch in it, then ends it. This tells
    `FitLoop.epoch_loop` that it does not restart (`restarting`, `restarted_mid_epoch`,
    `restarted_on_train_batch_end` and `_should_check_val_fx` are not public).

    Where the checkpoint was saved in `on_train_batch_end`, `epoch_loop.reset` begins an epoch, but
    only if its number of batches is known.
    """
    loop = trainer.fit_loop
    if not loop.restarting or not has_ended_epoch(trainer):
        return
    if loop.epoch_loop.restarted_on_train_batch_end:
        if trainer.num_training_batches == inf:
            _reset_progress(loop.epoch_loop)
        return
    if not (loop.restarted_mid_epoch and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)):
        loop.epoch_loop.restarting = False


def _reset_progress(loop: Any) -> None:
    """Do what `_TrainingEpochLoop.reset` does at the end of an epoch with a known number of batches
    (Lightning 2.6)."""
    loop.batch_progress.reset_on_run()
    loop.batch_progress.current.completed = -1  # it counts the batch that ended the epoch
    loop.scheduler_progress.reset_on_run()
    loop.automatic_optimization.optim_progress.reset_on_run()
    loop.val_loop.batch_progress.total.reset()


def correct_epoch(checkpoint: dict[str, Any]) -> None:
    """Let a checkpoint say whether its epoch goes on: it does unless its last batch ended it.

    Where `max_steps` or `should_stop` ends a fit inside an epoch, Lightning 2.6 counts that epoch
    as done, and a checkpoint that is saved after it would continue at the same batch of the next
    epoch. A checkpoint of `on_train_epoch_end` has the epoch as processed, but not as completed:
    with `max_steps` the numbers of all epochs that follow would be one less. This sets
    `epoch_progress` in the state of `FitLoop` (not public) to what it is while the epoch runs, and
    after it.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    batches, epochs = loop.get("epoch_loop.batch_progress"), loop.get("epoch_progress")
    if not batches or not epochs or not batches["current"]["ready"]:
        return
    for counts in (epochs["current"], epochs["total"]):
        if not batches["is_last_batch"]:
            counts["processed"] = counts["ready"] - 1
        counts["completed"] = counts["processed"]


def forget_early_loaders(trainer: Any) -> None:
    """Let a fit that resumes make its training loaders again, if they were made before the
    checkpoint was read.

    `Trainer.estimated_stepping_batches`, which `configure_optimizers` may ask for, makes them
    (`FitLoop.setup_data`, Lightning 2.6). They would begin a new epoch.
    """
    loop = trainer.fit_loop
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop._data_fetcher = None


def training_position(trainer: Any) -> Position | None:
    """Read the states of the training loaders at the batch that is trained on next.

    Returns:
        None before they are made, and where their data module saves the position
        (`TrainLoader.data_module`).
    """
    fetcher = trainer.fit_loop._data_fetcher
    if not isinstance(fetcher, JoinedFetcher) or fetcher._combined_loader is None:
        return None
    if all(hasattr(loader, "data_module") for loader in fetcher.combined_loader.flattened):
        return None
    return fetcher.position


def training_loaders(trainer: Any) -> list[Any]:
    """Return the training loaders, from any nesting. `FitLoop._combined_loader` is not public
    (Lightning 2.6)."""
    return list(trainer.fit_loop._combined_loader.flattened)


def remove_loader_states(checkpoint: dict[str, Any]) -> None:
    """Remove the states of this rank's training loaders, which Lightning 2.6 adds to the state of
    `FitLoop`, from a checkpoint."""
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)


def skip_to_next_batch(
    trainer: Any,
    batches_then: float | None,
    restore_generators: Callable[[], None],
    position: Position | None,
) -> None:
    """Restore the position of a resumed fit in its data, and the random number generators.

    The generators get the saved states where an uninterrupted fit would have had them: before a new
    epoch's iterator is made, or after the last batch trained on.

    Lightning 2.6 has made the iterator by then (`FitLoop.setup_data`), before it sets the epoch of
    samplers, and counts the position of the fit (`epoch_loop.batch_progress`;
    `restarted_on_train_batch_end` adds one). It would repeat the first batches of the epoch of a
    loader without `load_state_dict`, with a warning; here those batches are read and dropped.

    Args:
        batches_then: batches of an epoch when the checkpoint was saved.
        position: states of the loaders. None where their data module restores them.

    Raises:
        DataError: an epoch now has a different number of batches, or there are other loaders, so
            the position is meaningless.
    """
    from lightning.fabric.utilities.data import _set_sampler_epoch

    loop = trainer.fit_loop
    fetcher, loaders = loop._data_fetcher, loop._combined_loader.flattened
    restore_generators()
    if position is None and any(knows_position(loader) for loader in loaders):
        return
    if position is None:
        position = {"states": [None] * len(loaders), "ended": []}
    _require_same_loaders(position["states"], loaders)
    begin_after_ended_epoch(trainer)
    done = loop.epoch_loop.batch_progress.current.completed + int(
        loop.epoch_loop.restarted_on_train_batch_end
    )
    now = trainer.num_training_batches
    inside = loop.epoch_loop.restarting and 0 < done < (
        batches_then if batches_then is not None else now
    )
    if inside and None in position["states"] and batches_then is not None and batches_then != now:
        raise DataError(
            f"The checkpoint was saved after {done} of {batches_then} batches of an epoch, but an"
            f" epoch now has {now}, so the next samples are unknown. Use the same data and global"
            " batch size, or a checkpoint from the end of an epoch."
        )
    if (
        loop.epoch_loop.restarting
        and has_ended_epoch(trainer)
        and not loop.epoch_loop.restarted_on_train_batch_end
    ):
        fetcher.load(position)  # the loop ends the epoch first, and makes an iterator after it
        return
    knows = any(state is not None for state in position["states"])
    if not inside and not knows and loop.epoch_progress.current.processed == 0:
        return
    for loader in loaders:
        _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    warnings.filterwarnings(
        "ignore", message="You're resuming from a checkpoint that ended before the epoch ended"
    )
    fetcher.restart(position, done if inside else 0)
    if inside:
        restore_generators()


def _require_same_loaders(states: list[Any], loaders: list[Any]) -> None:
    """Refuse loaders that cannot take the states of a checkpoint. Raises DataError."""
    if len(states) != len(loaders):
        raise DataError(
            f"The checkpoint was saved with {plural(len(states), 'training data loader')}, but"
            f" there {'are' if len(loaders) > 1 else 'is'} now {len(loaders)}. Use the same"
            " loaders, or start a new run from the checkpoint's weights."
        )
    for index, (state, loader) in enumerate(zip(states, loaders, strict=True)):
        if state is not None and not knows_position(loader):
            raise DataError(
                f"The checkpoint has a state of training data loader {index}, but this loader, a"
                f" {type(loader).__name__}, has no load_state_dict. Use the same loader, or start a"
                " new run from the checkpoint's weights."
            )
