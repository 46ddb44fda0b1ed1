"""Private APIs of Lightning's data fetchers, replaced so that streams end on all ranks together and
resume at the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import _MaxSize
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Reached:
    """The place of one rank in its data.

    Attributes:
        has_batch: whether it has a batch to run now.
        ends: whether it knows that no batch follows.
        loader: index of the data loader of the batch.
        before: batches that it ran before, in this epoch or evaluation.
    """

    has_batch: bool
    ends: bool
    loader: int
    before: int


Agree = Callable[[Reached], bool | None]
"""Compares the places of all ranks. None: they are the same. Else the epoch ends on all ranks:
after the batch of now (True) or before."""

Position = dict[str, Any]
"""The states of the training loaders of a rank, see `position_of`."""


class StatesOfAll(list[Any]):
    """The states of a loader on all data-parallel ranks of a checkpoint, for its
    `load_state_dicts`."""


class JoinedFetcher(_PrefetchDataFetcher):
    """Fetches batches of loaders that may end anywhere, on all ranks equally many.

    `_PrefetchDataFetcher` (Lightning 2.6) fetches one batch ahead of loaders without a length, to
    know the last batch when it runs. Each rank would end by itself, and a saved state would be that
    of the batch after next.

    Args:
        agree: None where nobody else reads.
        resumes: whether to know the position of the loaders before the batch that was fetched
            ahead.
    """

    def __init__(self, agree: Agree | None, *, resumes: bool) -> None:
        super().__init__()
        self._agree = agree
        self._resumes = resumes
        self._before_ahead: Position | None = None
        self._begun = False

    @property
    def position(self) -> Position:
        """The states of the loaders at the batch that runs next."""
        if self.batches and self._before_ahead is not None:
            return self._before_ahead
        return position_of(self.combined_loader)

    def restart(self, position: Position, batches: int) -> None:
        """Begin at a position. Loaders that do not know their own read and drop `batches`
        batches."""
        self.load(position)
        iter(self)
        if batches:
            _skip(self.combined_loader, position, batches)

    def load(self, position: Position) -> None:
        """Give the loaders their states, with which the next iterator begins."""
        for loader, state in zip(self.combined_loader.flattened, position["states"], strict=True):
            if isinstance(state, StatesOfAll):
                loader.load_state_dicts(state)
            elif state is not None:
                loader.load_state_dict(state)

    def __iter__(self) -> JoinedFetcher:
        """Make an iterator. The first batch is fetched when it is asked for: Lightning may set the
        epoch of samplers in between."""
        _DataFetcher.__iter__(self)
        note_ends(self.combined_loader)
        self._begun = False
        return self

    def __next__(self) -> Any:
        if self.length is None and not self._begun:
            self._fetch_ahead()
        found = None
        self._note_position()
        with suppress(StopIteration):
            found = super().__next__()
        if self._agree is not None and not _all_sized(self.combined_loader):
            ran = self.fetched - len(self.batches) - int(found is not None)
            ends_after = self._agree(
                Reached(found is not None, self.done, found[2] if found is not None else 0, ran)
            )
            if ends_after is not None:
                self.batches = []
                self.done = True
                found = found if ends_after else None
        if found is None:
            raise StopIteration
        return found

    def _fetch_ahead(self) -> None:
        self._begun = True
        with suppress(StopIteration):
            self.batches.append(_DataFetcher.__next__(self))

    def _note_position(self) -> None:
        if self._resumes and self.length is None:
            self._before_ahead = deepcopy(position_of(self.combined_loader))


def join_fetchers(trainer: Any, agree: Callable[[Any, Reached], bool | None] | None) -> None:
    """Make this Trainer's loops fetch by a `JoinedFetcher`.

    `_select_data_fetcher` (Lightning 2.6) makes the fetcher of each loop, where the loop's module
    imports it. It is replaced once. A step that takes `dataloader_iter` keeps Lightning's fetcher.

    Args:
        agree: function (Lightning's stage, place) that compares places, see `Agree`.
    """
    from lightning.pytorch.trainer.states import RunningStage

    def join(stage: Any) -> JoinedFetcher:
        compare = None if agree is None else lambda reached: agree(stage, reached)
        return JoinedFetcher(compare, resumes=stage == RunningStage.TRAINING)

    trainer.join_fetcher = join
    for module in (fit_loop, evaluation_loop, prediction_loop):
        select = module._select_data_fetcher
        if not hasattr(select, "joined"):
            module._select_data_fetcher = _joining(select)  # type: ignore[attr-defined]


def _joining(select: Callable[..., Any]) -> Callable[..., Any]:
    def joined(trainer: Any, stage: Any) -> Any:
        fetcher = select(trainer, stage)
        join = getattr(trainer, "join_fetcher", None)
        return (
            join(stage) if join is not None and type(fetcher) is _PrefetchDataFetcher else fetcher
        )

    joined.joined = True  # type: ignore[attr-defined]
    return joined


class _Noted:
    """An iterator that knows whether it has ended."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.has_ended = False

    def __iter__(self) -> _Noted:
        return self

    def __next__(self) -> Any:
        if self.has_ended:
            raise StopIteration
        try:
            return next(self._iterator)
        except StopIteration:
            self.has_ended = True
            raise


def note_ends(combined: Any) -> None:
    """Note which loaders have ended, where shorter ones give None (`_MaxSize`, Lightning 2.6, asks
    them again for every batch)."""
    if isinstance(combined._iterator, _MaxSize):
        combined._iterator.iterators = [
            _Noted(iterator) for iterator in combined._iterator.iterators
        ]


def position_of(combined: Any) -> Position:
    """Read where each loader of a `CombinedLoader` is.

    Returns:
        "states": of each loader; None for one that does not know its position. "ended": whether
            each has ended before, where shorter
        loaders are repeated (`_MaxSizeCycle._consumed`, Lightning 2.6) or give None.
    """
    states = [
        loader.state_dict() if knows_position(loader) else None for loader in combined.flattened
    ]
    iterator = combined._iterator
    if isinstance(iterator, _MaxSize):
        noted: list[Any] = iterator.iterators
        return {"states": states, "ended": [one.has_ended for one in noted]}
    return {"states": states, "ended": list(getattr(iterator, "_consumed", []))}


def knows_position(loader: Any) -> bool:
    """Return whether a loader saves and restores its position.

    torchdata's StatefulDataLoader (0.11) over a data set with indices does not count: after the
    last batch of an epoch, when Lightning asks for no other, its state is that of a pass without
    batches, and to restore a state it may draw the order twice.
    """
    of_torchdata = any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)
    if of_torchdata and not has_iterable_dataset(loader):
        return False
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def _all_sized(combined: Any) -> bool:
    """Return whether no loader can end earlier or later than ranks have agreed: each is a
    DataLoader whose samples are counted."""
    return all(
        isinstance(loader, DataLoader)
        and not has_iterable_dataset(loader)
        and sized_len(loader) is not None
        for loader in combined.flattened
    )


def _skip(combined: Any, position: Position, batches: int) -> None:
    """Read and drop batches of the loaders that do not know their position."""
    iterators: list[Any] = combined._iterator.iterators
    known = {
        index: iterators[index]
        for index, state in enumerate(position["states"])
        if state is not None
    }
    if len(known) < len(iterators):
        for index in known:
            iterators[index] = repeat(None)
        for _ in range(batches):
            next(combined, None)
    for index, iterator in known.items():
        iterators[index] = iterator
        if position["ended"] and isinstance(iterator, _Noted):
            iterator.has_ended = position["ended"][index]
        elif position["ended"]:
            combined._iterator._consumed[index] = position["ended"][index]
