"""Samplers and the loader of packed text: the rows of a run in one order, on any number of
data-parallel ranks."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate
from typing_extensions import override

from lightning_3d.app.training.data.packing import Samples
from lightning_3d.errors import Lightning3DError
from lightning_3d.layout.micro_batch_rows import MicroBatchRows
from lightning_3d.storage.piece_cache import THREADS, Piece, PieceCache


class GlobalOrderSampler(DistributedSampler[Any]):
    """Order of samples that depends only on the seed and the epoch, not on the number of
    data-parallel ranks.

    The samples of a step are the next global batch of one shuffled order; this rank reads every
    `num_replicas`-th of them. A resumed epoch skips the samples that were already used. Memory and
    the time to the first sample do not depend on the number of samples.

    Args:
        dataset: the samples.
        begin: function (Lightning's number of the epoch) -> (epoch of the order, samples of it that
            were already used); called when reading begins.
        order: function (epoch of the order, places in it) -> indices of samples; called when
            reading begins.
        rows: how the rows of a global batch are dealt to ranks.
        on_epoch: function of Lightning's number of an epoch, which is called when that begins.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        begin: Callable[[int], tuple[int, int]],
        order: Callable[[int, Iterator[int]], Iterator[int]],
        rows: MicroBatchRows,
        *,
        rank: int,
        on_epoch: Callable[[int], None],
    ) -> None:
        super().__init__(dataset, rows.dp, rank, shuffle=True, drop_last=True)
        self._begin = begin
        self._order = order
        self._rows = rows
        self._on_epoch = on_epoch

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._on_epoch(epoch)

    @override
    def __iter__(self) -> Iterator[Any]:
        epoch, used = self._begin(self.epoch)
        return self._order(
            epoch, self._rows.of_rank(self.rank, range(self.total_size), used // self.num_replicas)
        )


class GlobalBatchSampler(GlobalOrderSampler):
    """The same order in batches of different sizes: yields the samples of one step of this rank as
    a list.

    Args:
        batches: function (epoch of the order, samples already used) -> places of each following
            global batch in the order of that epoch, a multiple of the ranks.
        **kwargs: see `GlobalOrderSampler`.
    """

    def __init__(self, batches: Callable[[int, int], Iterator[range]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._batches = batches

    @override
    def __iter__(self) -> Iterator[list[int]]:
        epoch, used = self._begin(self.epoch)
        of_rank = (self._rows.of_rank(self.rank, places) for places in self._batches(epoch, used))
        order = self._order(epoch, chain.from_iterable(of_rank))
        return (
            list(islice(order, len(places) // self.num_replicas))
            for places in self._batches(epoch, used)
        )


class SampleBatches(Dataset[dict[str, Tensor]]):
    """Batches of samples: an index is the list of the samples of a batch."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @override
    def __getitem__(self, indices: list[int]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = default_collate(self._samples.__getitems__(indices))
        return batch


class HasPosition(Protocol):
    """A data module that knows the position in its data; see `PackedDataModule`."""

    def batches_in(self, number: int) -> int: ...

    def position_state(self) -> dict[str, Any]: ...

    def resume_from(self, state: dict[str, Any]) -> None: ...


class Loader(DataLoader[dict[str, Tensor]]):
    """A loader that reports an error of a worker process as that process raised it."""

    @override
    def __iter__(self) -> Any:
        """Start to read when the first batch is asked for. Lightning makes the iterator of a
        resumed epoch before it says which epoch it is, and worker processes would read ahead in
        another one."""
        try:
            yield from super().__iter__()
        except Lightning3DError as error:
            if not str(error).startswith("Caught "):
                raise
            # torch has put the traceback of the worker into the message
            raise type(error)(
                str(error).rstrip().rpartition(f"{type(error).__name__}: ")[2]
            ) from None


class TrainLoader(Loader):
    """A loader of which Lightning knows that it has a position. `PackedDataModule` saves and
    restores it, so the strategy does not; checkpoints of earlier versions have it in the loader
    only.

    Attributes:
        data_module: knows the position; None in the copy with a sampler of its own that Lightning
            makes for `overfit_batches`.
    """

    data_module: HasPosition | None = None

    @override
    def __len__(self) -> int:
        """Number of batches that Lightning is to count in the epoch that its sampler is in."""
        if self.data_module is None:
            return super().__len__()
        return self.data_module.batches_in(self.sampler.epoch)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return {} if self.data_module is None else self.data_module.position_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.data_module is not None:
            self.data_module.resume_from(state_dict)


# Fetching what will be read next: the order of samples is known, so their pieces are fetched before
# a loader asks for them.


def read_ahead(samples: Samples, order: Iterator[int], rows: int) -> Iterator[int]:
    """Yield the samples of an order, and fetch the pieces of the next ones in threads meanwhile.

    Errors are left to the reader, which meets them again. The threads end with the iterator.

    Args:
        rows: samples by which the threads are ahead.
    """
    coming: deque[int] = deque()
    pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
    stopped = threading.Event()
    threads = [
        threading.Thread(target=_fetch, args=(pieces, stopped), name="read ahead", daemon=True)
        for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        for index in order:
            coming.append(index)
            for piece in samples.pieces(index):
                pieces.put(piece)
            if len(coming) > rows:
                yield coming.popleft()
        yield from coming
    finally:
        stopped.set()
        for _ in threads:
            pieces.put(None)


def _fetch(pieces: queue.SimpleQueue[Piece | None], stopped: threading.Event) -> None:
    while (piece := pieces.get()) is not None and not stopped.is_set():
        file, number = piece
        with suppress(Lightning3DError, OSError):
            file.fetch(number)


def rows_ahead(cache: PieceCache, batch: int, ranks: int) -> int:
    """Choose by how many samples to fetch ahead.

    Four batches of a rank, but not more than half of the cache holds for the ranks of a node, so
    that nothing is removed before it is read. A sample may be in two pieces.

    Args:
        batch: samples of a rank per step.
        ranks: ranks of this node.
    """
    return max(1, min(4 * batch, cache.limit // (4 * cache.piece * ranks)))
