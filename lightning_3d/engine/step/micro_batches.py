"""Splits a rank's batch into micro-batches of equal rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_3d.errors import DataError, listed, plural
from lightning_3d.layout.layout import divisors
from lightning_3d.layout.schedules import ScheduleInfo
from lightning_3d.options.script import SplitBatch
from lightning_3d.parallel.context.full_sequence import WholeSequence
from lightning_3d.parallel.deferred_logits import DeferredLogits
from lightning_3d.parallel.nested import (
    count_rows,
    require_rows_first,
    rows_of,
    same_tensors,
    tensors_of,
)
from lightning_3d.parallel.partial_tensors import whole_arguments
from lightning_3d.parallel.tensor import VocabParallelLogits


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one step on one data-parallel rank.

    Attributes:
        batches: the micro-batches that the schedule runs, all with the same shapes.
        rows: rows of each.
        fillers: number of micro-batches at the end that only fill the schedule and have weight
            zero.
    """

    batches: tuple[Any, ...]
    rows: int
    fillers: int = 0

    def __len__(self) -> int:
        return len(self.batches)

    def is_filler(self, index: int) -> bool:
        """Return whether a micro-batch only fills the schedule."""
        return index >= len(self.batches) - self.fillers

    @property
    def signature(self) -> Hashable:
        """Shapes and types of the tensors of one micro-batch; activations between stages have one
        shape per signature."""
        return tuple((tuple(t.shape), t.dtype) for t in tensors_of(self.batches[0]))


def split_into_micro_batches(
    batch: Any,
    micro_batch_size: int | None,
    *,
    repeated: Callable[[int], int] | None = None,
    schedule: ScheduleInfo | None = None,
    pp: int = 1,
    vp: int = 1,
    split_batch: SplitBatch | None = None,
    agree: Callable[[int], int] | None = None,
    samples: int | None = None,
    alone: bool = False,
) -> MicroBatches:
    """Split a batch along dimension 0 of its tensors, and lists with one entry for each row.

    Where `micro_batch_size` does not divide the rows of a batch (the last one of an epoch; see
    `require_whole_micro_batches` for the others), micro-batches have the largest smaller size that
    does. A batch that gives the schedule too few micro-batches is filled up with copies of weight
    zero.

    Args:
        batch: tensors in any nesting of dicts, lists, tuples and dataclasses, see `rows_of`. What
            has no rows goes to every micro-batch.
        micro_batch_size: rows of a micro-batch; None takes the largest that gives the schedule
            enough micro-batches.
        repeated: number of rows -> how many of them, at the end, the sampler repeated so that all
            data-parallel ranks have equally many; they are dropped.
        schedule: schedule that runs the micro-batches; None when there is no backward.
        pp: pipeline ranks.
        vp: stages of each.
        split_batch: the user's own split, for batches whose tensors do not all have the rows in
            dimension 0.
        agree: this rank's number of micro-batches -> the number to fill up to, where ranks must
            have equally many.
        samples: number of samples in the batch, as its data loader knows it; None where it does
            not.
        alone: whether no other rank has other rows. A batch that is not split then needs no number
            of rows.

    Raises:
        DataError: no tensor in the batch, or tensors that disagree about the number of rows.
    """
    goes_whole = micro_batch_size is None and (schedule is None or schedule.accepts(pp, vp, 1))
    try:
        rows = _rows(batch, split_batch, samples)
    except DataError:
        if not (alone and goes_whole) or (pp > 1 and not any(True for _ in tensors_of(batch))):
            raise
        return MicroBatches((same_tensors(batch),), 1)
    kept = max(rows - (repeated(rows) if repeated is not None else 0), 0)
    all_repeated = kept == 0
    kept = kept or 1
    size = _equal_size(kept, micro_batch_size, schedule, pp, vp)
    count = kept // size
    if split_batch is not None:
        # the user's split knows nothing of repeated rows, so whole parts of it are dropped
        size = gcd(size, rows)
        count = kept // size
        parts = list(split_batch(batch, rows // size))
        if len(parts) != rows // size:
            raise DataError(
                f"split_batch must return {rows // size} micro-batches, as many as it was asked"
                f" for; got {len(parts)}."
            )
        parts = parts[:count]
    else:
        whole = size == rows
        if not whole and samples is not None:
            require_rows_first(batch, rows, samples)
        parts = (
            [same_tensors(batch)]
            if whole
            else [
                rows_of(batch, slice(start, start + size), rows) for start in range(0, kept, size)
            ]
        )
    fillers = count if all_repeated else 0
    while schedule is not None and not schedule.accepts(pp, vp, len(parts)):
        parts.append(parts[0])
        fillers += 1
    missing = agree(len(parts)) - len(parts) if agree is not None else 0
    parts += [parts[0]] * missing
    fillers += missing
    return MicroBatches(tuple(parts), size, fillers)


def _equal_size(
    rows: int, wanted: int | None, schedule: ScheduleInfo | None, pp: int, vp: int
) -> int:
    """Find the largest size, at most `wanted`, that divides `rows`; for None, the largest that
    gives the schedule enough micro-batches."""
    sizes = [size for size in range(rows, 0, -1) if rows % size == 0]
    if wanted is not None:
        return next(size for size in sizes if size <= wanted)
    return next(
        (size for size in sizes if schedule is None or schedule.accepts(pp, vp, rows // size)), 1
    )


def require_whole_micro_batches(
    batch: Any, loader: object, micro_batch_size: int | None, sharing: int = 1
) -> None:
    """Refuse to train on a full batch that `micro_batch_size` does not divide. Only the last batch
    of an epoch may be shorter.

    Args:
        loader: the data loader that the batch came from. Nothing is checked if it does not tell how
            many rows a full batch has.
        sharing: number of ranks that read the same rows (tp * cp * pp).

    Raises:
        DataError: with the sizes that work.
    """
    rows = getattr(loader, "batch_size", None)
    if (
        micro_batch_size is None
        or not isinstance(rows, int)
        or rows % micro_batch_size == 0
        or count_rows(batch) != rows
    ):
        return
    fitting = [size for size in divisors(rows) if size <= micro_batch_size]
    more = -(-rows // micro_batch_size) * micro_batch_size
    hint = (
        f" If the data module divides by trainer.world_size: {sharing} ranks read the same rows, so"
        " divide by dp."
        if sharing > 1
        else ""
    )
    raise DataError(
        f"micro_batch_size={micro_batch_size} does not divide the {plural(rows, 'row')} of this"
        f" rank's batch. Use micro_batch_size={listed(fitting, last='or')}, or a DataLoader with"
        f" batch_size={more}.{hint}"
    )


def require_token_ids(batch: Any) -> None:
    """Refuse `input_ids` that are not integers; without a look at the model, an embedding would
    fail with a message of its own.

    Raises:
        DataError: with the type that they have.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(ids, Tensor) and (
        ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    ):
        dtype = str(ids.dtype).removeprefix("torch.")
        raise DataError(
            f"The batch's input_ids are {dtype}, but token ids must be integers. Convert them, for"
            " example with ids.long()."
        )


def samples_of(loader: object, batch_index: int) -> int | None:
    """Count the samples that a data loader puts into a batch; None where it does not know."""
    if (
        not isinstance(loader, DataLoader)
        or not loader.batch_size
        or isinstance(loader.dataset, IterableDataset)
    ):
        return None
    left = (
        len(loader.sampler) - batch_index * loader.batch_size
        if isinstance(loader.sampler, Sized)
        else loader.batch_size
    )
    return min(loader.batch_size, left) if left > 0 else None


def repeated_rows(loader: object, batch_index: int, rows: int) -> int:
    """Count the rows at the end of this batch that a DistributedSampler repeated from the beginning
    of the data set.

    Rank r of R reads the samples r, r + R, r + 2R, ... of the shuffled order, which is continued
    from its start until all ranks have equally many. Rows after the end of the order are
    repetitions.
    """
    sampler = getattr(loader, "sampler", None)
    if (
        not isinstance(loader, DataLoader)
        or not isinstance(sampler, DistributedSampler)
        or not loader.batch_size
    ):
        return 0
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    first = batch_index * loader.batch_size
    places = (first + row for row in range(rows))
    return sum(place * sampler.num_replicas + sampler.rank >= samples for place in places)


def _rows(batch: Any, split_batch: SplitBatch | None, samples: int | None) -> int:
    if split_batch is None:
        return count_rows(batch)
    with_rows = [tensor for tensor in tensors_of(batch) if tensor.ndim > 0]
    if (
        samples is not None
        and samples > 1
        and any(samples in tensor.shape[:2] for tensor in with_rows)
    ):
        return samples
    return with_rows[0].shape[0] if with_rows else count_rows(batch)


def merge_outputs(outputs: Sequence[Any], weights: Sequence[Tensor]) -> Any:
    """Join what the user's step returned for each micro-batch.

    Rows are concatenated, numbers averaged (counts, which are whole numbers, summed); of all other
    values only the last one is kept.

    Args:
        weights: weights of the micro-batches, as in their loss; float64 tensors of shape ().
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.ndim > 0:
            return torch.cat(list(outputs))
        stacked = torch.stack(list(outputs))
        return (
            _weighted_mean(stacked, torch.stack(list(weights)))
            if stacked.is_floating_point()
            else stacked.sum(0)
        )
    if isinstance(first, Mapping):
        return {key: merge_outputs([output[key] for output in outputs], weights) for key in first}
    if isinstance(first, list):
        return [_whole(item) for output in outputs for item in output]
    if isinstance(first, tuple):
        return tuple(merge_outputs(items, weights) for items in zip(*outputs, strict=True))
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        kind = torch.float64 if isinstance(first, float) else torch.int64
        return merge_outputs(
            [torch.tensor(output, dtype=kind) for output in outputs], weights
        ).item()
    return outputs[-1]


def _whole(value: Any) -> Any:
    """Gather tensors that report the full shape and hold one shard (of tokens, of the vocabulary),
    while all ranks take part."""
    return whole_arguments(
        whole_arguments(whole_arguments(value, WholeSequence), VocabParallelLogits), DeferredLogits
    )


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the values with a weight above 0; the plain mean where none has one. Shape
    (). The host does not wait."""
    weights = weights.to(values.device)
    counted = weights > 0
    mean = torch.where(counted, values * weights, 0.0).sum(0) / weights.sum()
    return torch.where(counted.any(), mean.to(values.dtype), values.mean(0))
