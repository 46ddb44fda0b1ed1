"""The sources of `data=blend`: their files, how many rows each gives, and what is refused. NumPy
only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from lightning_3d.app.config.blend_sources import Source, read_sources, whole_shares
from lightning_3d.app.training.data.concatenation import first_held_out
from lightning_3d.app.training.data.corpus import (
    Corpus,
    find_corpora,
    find_corpus,
    require_same_tokenizer,
    require_separator,
)
from lightning_3d.app.training.data.remote_corpora import Finder
from lightning_3d.errors import DataError, listed, plural
from lightning_3d.layout.batch_ramp import BatchRamp

ENDLESS = 1 << 48
"""Rows of a blend whose sources all repeat without end."""


@dataclass(frozen=True, eq=False)
class BlendPlan:
    """Which rows a blend has.

    Attributes:
        sources: the sources that have files to train on.
        samples: training samples of each.
        sequence_length: tokens of a sample.
        interleaving: the order of the sources.
    """

    sources: tuple[Source, ...]
    samples: tuple[int, ...]
    sequence_length: int
    interleaving: Interleaving

    @classmethod
    def of(
        cls, sources: Sequence[Source], samples: Sequence[int], sequence_length: int
    ) -> BlendPlan:
        """Make the plan and check it.

        Raises:
            DataError: a source has no sample, or fewer tokens than it must give.
        """
        interleaving = Interleaving.of([source.share for source in sources])
        for source, share, count in zip(sources, interleaving.shares, samples, strict=True):
            if share and not count:
                raise DataError(
                    f"{source.train_path} (data.sources.{source.name}) has no sample of"
                    f" {sequence_length} tokens to train on. Use more data or a shorter"
                    " data.sequence_length."
                )
        plan = cls(tuple(sources), tuple(samples), sequence_length, interleaving)
        for number, source in enumerate(plan.sources):
            plan._require_budget(number, source)
        return plan

    def _require_budget(self, number: int, source: Source) -> None:
        """Refuse a budget of tokens that the source cannot give in its epochs."""
        if source.tokens is None or source.epochs is None:
            return
        there = int(Fraction(str(source.epochs)) * self.samples[number]) * self.sequence_length
        if int(source.tokens) // self.sequence_length * self.sequence_length > there:
            least = _hundredths(source.share / (self.samples[number] * self.sequence_length))
            raise DataError(
                f"data.sources.{source.name}.tokens={source.tokens:.0f}, but the source has {there}"
                f" tokens to train on in {_epochs(source.epochs)}. Use at most {there} tokens, or"
                f" let it repeat with data.sources.{source.name}.epochs={least}."
            )

    @property
    def ends(self) -> dict[str, int]:
        """The row of the blend at which each source has given all that it may give; without those
        that repeat without end."""
        found = {}
        for number, source in enumerate(self.sources):
            limit = (
                None
                if source.epochs is None
                else int(Fraction(str(source.epochs)) * self.samples[number])
            )
            if source.tokens is not None:
                limit = int(source.tokens) // self.sequence_length
            if limit is not None and self.interleaving.shares[number]:
                found[source.name] = self.interleaving.rows_before(number, limit)
        return found

    @property
    def rows(self) -> int:
        """Number of rows of the blend: it ends where its first source does."""
        return min([ENDLESS, *self.ends.values()])

    def describe(self) -> str:
        """Everything that the order of rows depends on, besides the seed."""
        parts = zip(self.sources, self.interleaving.shares, self.samples, strict=True)
        cycle = self.interleaving.cycle
        return "; ".join(
            f"{source.name}: {share} of {cycle} rows, {plural(count, 'sample')}"
            for source, share, count in parts
        )

    def require_steps(self, steps: int, batches: BatchRamp) -> None:
        """Refuse a run that is longer than the blend.

        Args:
            batches: sizes of its global batches.

        Raises:
            DataError: it names the source that ends first, and what would be enough for all sources
                that end too early.
        """
        taken = batches.after(steps)
        if taken <= self.rows or not self.ends:
            return
        name, end = min(self.ends.items(), key=lambda entry: entry[1])
        number = [source.name for source in self.sources].index(name)
        source = self.sources[number]
        enough = batches.count(0, end)
        possible = f"trainer.max_steps={enough}" if enough else "more data"
        more = self._longer(number, taken)
        raise DataError(
            f"The blend has {plural(end, 'row')} of {self.sequence_length} tokens, and the run"
            f" takes {taken} ({plural(steps, 'step')} of {batches.described()}). Its source {name}"
            f" ends first: {plural(self.samples[number], 'sample')},"
            f" {_epochs(source.epochs) if source.tokens is None else f'{source.tokens:.0f} tokens'}."  # noqa: E501
            f" Use {possible}, or {more}."
        )

    def _longer(self, first: int, rows: int) -> str:
        """Return the options that make the blend long enough for this number of rows; `first` is
        the source that ends first."""
        wanted = [
            -(-rows * share // self.interleaving.cycle) + 1 for share in self.interleaving.shares
        ]
        key = f"data.sources.{self.sources[first].name}"
        if self.sources[first].tokens is not None:
            return (
                f"more tokens for all sources ({key}.tokens={wanted[first] * self.sequence_length})"
            )
        ends = self.ends
        short = [
            number
            for number, source in enumerate(self.sources)
            if ends.get(source.name, rows) < rows
        ]
        more = [
            f"data.sources.{self.sources[one].name}.epochs={_hundredths(Fraction(wanted[one], self.samples[one]))}"  # noqa: E501
            for one in short
        ]
        others = sum(share > 0 for share in self.interleaving.shares) > 1
        smaller = f", or a smaller {key}.weight" if others and short == [first] else ""
        return listed(more) + smaller


def _hundredths(epochs: Fraction) -> str:
    """Round a number of epochs up to two decimal places."""
    whole, rest = divmod(math.ceil(100 * epochs), 100)
    return f"{whole}.{rest:02}".rstrip("0").rstrip(".") if rest else str(whole)


def _epochs(epochs: float | None) -> str:
    return "any number of epochs" if epochs is None else f"{epochs:g} epoch{'s' * (epochs != 1)}"


def find_sources(
    sources: Sequence[Source],
    tokenizer: str | None = None,
    check_hashes: bool | None = False,
    find: Callable[..., Corpus] = find_corpus,
) -> tuple[tuple[Corpus | None, Corpus | None], ...]:
    """Find and check the files of all sources; see `find_corpora`. A source that is only validated
    has no files to train on.

    Raises:
        DataError: a file is missing, truncated or damaged, or the sources are of different
            tokenizers.
    """
    found = tuple(_find_source(source, tokenizer, check_hashes, find) for source in sources)
    first, *others = [train or val for train, val in found]
    assert first is not None, "each source has a path"
    for other in others:
        assert other is not None
        require_same_tokenizer(first, other)
    return found


def _find_source(
    source: Source, tokenizer: str | None, check_hashes: bool | None, find: Callable[..., Corpus]
) -> tuple[Corpus | None, Corpus | None]:
    """Find the files of a source to train on and those held out."""
    known = tokenizer, source.document_separator, check_hashes, find
    if source.train_path is None:
        return None, find_corpora(source.val_path, None, *known)[0]
    return find_corpora(source.train_path, source.val_path, *known)


def training_samples(
    source: Source, train: Corpus, val: Corpus | None, sequence_length: int
) -> int:
    """Number of samples of a source to train on."""
    samples = train.tokens // sequence_length
    return samples if val is not None else first_held_out(samples, source.val_fraction)


def check_blend(config: Mapping[str, Any], steps: int | None) -> None:
    """Check the files of a `data=blend` config, and that they are enough for a run of `steps`
    steps.

    Raises:
        ConfigError, DataError: as the functions above.
    """
    length, batch = config["sequence_length"], config.get("global_batch_size")
    sources = read_sources(config["sources"], length)
    found = find_sources(
        sources, config.get("tokenizer"), config.get("check_hashes"), Finder(config, fresh=True)
    )
    for train, val in found:
        require_separator(train or val, config)
    trained = [
        (source, train, val)
        for source, (train, val) in zip(sources, found, strict=True)
        if train is not None
    ]
    samples = [training_samples(source, train, val, length) for source, train, val in trained]
    plan = BlendPlan.of([source for source, *_ in trained], samples, length)
    if steps is not None and batch is not None:
        plan.require_steps(steps, BatchRamp.read(config.get("batch_ramp"), batch, length))


# Which row of a blend comes from which source: a fixed cycle whose shares are exact over any number
# of rows.


@dataclass(frozen=True, eq=False)
class Interleaving:
    """A cycle of rows that repeats forever. After any number of rows k, a source with the share w
    has had more than w k - 1 and fewer than w k + 1 of them.

    Attributes:
        shares: rows of each source in a cycle.
        source: (cycle,); the source of each row of a cycle.
        earlier: (cycle,); rows of the same source before it in the cycle.
    """

    shares: tuple[int, ...]
    source: np.ndarray
    earlier: np.ndarray

    @classmethod
    def of(cls, weights: Sequence[Fraction]) -> Interleaving:
        """Make the cycle of weights, which must be at least 0 and not all 0. Only their ratios
        count."""
        shares = whole_shares(weights)
        order = _earliest_deadline_first(shares)
        earlier = np.empty(len(order), np.int32)
        for number in range(len(shares)):
            mine = order == number
            earlier[mine] = np.arange(mine.sum())
        return cls(shares, order, earlier)

    @property
    def cycle(self) -> int:
        """Number of rows of a cycle."""
        return len(self.source)

    def at(self, row: int) -> tuple[int, int]:
        """Return (source of a row of the blend, number of rows of that source before it)."""
        cycles, place = divmod(row, self.cycle)
        number = int(self.source[place])
        return number, cycles * self.shares[number] + int(self.earlier[place])

    def rows_before(self, number: int, row: int) -> int:
        """Return how many rows of the blend come before this row of a source, whose share must not
        be 0."""
        cycles, place = divmod(row, self.shares[number])
        return cycles * self.cycle + int(np.flatnonzero(self.source == number)[place])


def _earliest_deadline_first(shares: Sequence[int]) -> np.ndarray:
    """Order the rows of a cycle so that no source is a row ahead or behind.

    With the share w, row j of a source may come from place floor(j / w) on and must come before
    place ceil((j + 1) / w). Taking the row with the earliest end meets all of these bounds (Baruah,
    Cohen, Plaxton and Varvel, "Proportionate progress", 1996).
    """
    cycle = sum(shares)
    order = np.empty(cycle, np.uint16)
    ready = [(-(-cycle // share), number, 0) for number, share in enumerate(shares) if share]
    heapify(ready)
    waiting: list[tuple[int, int, int]] = []
    for place in range(cycle):
        while waiting and waiting[0][0] <= place:
            _, number, row = heappop(waiting)
            heappush(ready, (-(-(row + 1) * cycle // shares[number]), number, row))
        _, number, row = heappop(ready)
        order[place] = number
        row += 1
        heappush(waiting, (row * cycle // shares[number], number, row))
    return order
