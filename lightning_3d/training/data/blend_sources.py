"""The sources of `data=blend`: their options, their files, how many rows each gives, and what is refused. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from lightning_3d.errors import ConfigError, DataError, did_you_mean, listed, plural
from lightning_3d.training.data.concatenation import first_held_out
from lightning_3d.training.data.corpus import Corpus, find_corpora, require_same_tokenizer
from lightning_3d.training.data.interleaving import LONGEST_CYCLE, Interleaving

ENDLESS = 1 << 48
"""Rows of a blend whose sources all repeat without end."""


@dataclass(frozen=True)
class Source:
    """A source of a blend.

    Attributes:
        name: its name in `data.sources`.
        train_path: files to train on; see `corpus.find_corpus`.
        weight: share of the rows, in any unit; 0 is only validated.
        tokens: tokens to take from it in the whole run, in place of a weight.
        epochs: how often it may be read, such as 1 or 2.5; None: as often as needed.
        val_path: held-out files; None holds out the end of `train_path`.
        val_fraction: fraction of `train_path` that is held out if there is no `val_path`; 0 for no validation.
        document_separator: id after each document, for files that do not say it.
    """

    name: str
    train_path: str
    weight: float | None = None
    tokens: float | None = None
    epochs: float | None = 1
    val_path: str | None = None
    val_fraction: float = 0.01
    document_separator: int | None = None

    @property
    def share(self) -> Fraction:
        """The weight or the tokens, as the decimal number that was given."""
        return Fraction(str(self.tokens if self.weight is None else self.weight))


def read_sources(entries: Any, sequence_length: int | None) -> tuple[Source, ...]:
    """Read `data.sources`.

    Args:
        entries: name -> options of `Source`.
        sequence_length: that of the blend.

    Raises:
        ConfigError: an option is unknown, missing, of another type or out of range, or does not fit those of the other sources.
    """
    if not isinstance(entries, Mapping) or not entries:
        raise ConfigError(
            "data.sources must name at least one source, for example data.sources={web:{train_path:/data/web,weight:0.7},"
            f"code:{{train_path:/data/code,weight:0.3}}}}; got {entries!r}."
        )
    sources = tuple(_read_source(str(name), entry, sequence_length) for name, entry in entries.items())
    kinds = {"tokens" if source.weight is None else "weight" for source in sources}
    if len(kinds) > 1:
        budgets = [source.name for source in sources if source.weight is None]
        raise ConfigError(
            f"data.sources has tokens for {listed(budgets)} and a weight for the others. Give all sources a weight, or all of them tokens."
        )
    if not any(source.share for source in sources):
        raise ConfigError(f"The {'weights' if kinds == {'weight'} else 'tokens'} of data.sources sum to 0. Give a source more than 0.")
    return sources


def _read_source(name: str, entry: Any, sequence_length: int | None) -> Source:
    key = f"data.sources.{name}"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key} must be a group of keys, for example {{train_path:/data/{name},weight:1}}; got {entry!r}.")
    if not name or "/" in name or name != name.strip():
        raise ConfigError(f"A source of data.sources must have a name without slashes and outer spaces; got {name!r}.")
    given = {str(option): value for option, value in entry.items()}
    length = given.pop("sequence_length", sequence_length)
    if length != sequence_length:
        raise ConfigError(
            f"{key}.sequence_length={length} differs from data.sequence_length={sequence_length}. All rows of a blend have the same length:"
            " leave it out."
        )
    known = [field.name for field in fields(Source) if field.name != "name"]
    for option in given:
        if option not in known:
            raise ConfigError(f"{key} has no option '{option}'. Its options are {listed(known)}.{did_you_mean(option, known)}")
    if not isinstance(given.get("train_path"), str) or given["train_path"] == "???":
        raise ConfigError(f"{key}.train_path must be given: a folder, a .bin file or a pattern.")
    source = Source(name, **given)
    if (source.weight is None) == (source.tokens is None):
        raise ConfigError(f"{key} must have either weight or tokens, for example {key}.weight=0.5.")
    _check_numbers(key, source)
    return source


def _check_numbers(key: str, source: Source) -> None:
    for name, zero in (("weight", True), ("tokens", True), ("epochs", False)):
        value = getattr(source, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and (not number or value < 0 or (value == 0 and not zero)):
            raise ConfigError(f"{key}.{name} must be {'at least' if zero else 'more than'} 0; got {value!r}.")
    fraction, separator = source.val_fraction, source.document_separator
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise ConfigError(f"{key}.val_fraction must be at least 0 and less than 1; got {fraction!r}.")
    if separator is not None and (isinstance(separator, bool) or not isinstance(separator, int)):
        raise ConfigError(f"{key}.document_separator must be a whole number; got {separator!r}.")
    if source.val_path is not None and not isinstance(source.val_path, str):
        raise ConfigError(f"{key}.val_path must be a string; got {source.val_path!r}.")


@dataclass(frozen=True, eq=False)
class BlendPlan:
    """Which rows a blend has.

    Attributes:
        sources: the sources.
        samples: training samples of each.
        sequence_length: tokens of a sample.
        interleaving: the order of the sources.
    """

    sources: tuple[Source, ...]
    samples: tuple[int, ...]
    sequence_length: int
    interleaving: Interleaving

    @classmethod
    def of(cls, sources: Sequence[Source], samples: Sequence[int], sequence_length: int) -> BlendPlan:
        """Make the plan and check it.

        Raises:
            ConfigError: the share of a source is too small. DataError: a source has no sample, or fewer tokens than it must give.
        """
        interleaving = Interleaving.of([source.share for source in sources])
        for source, share, count in zip(sources, interleaving.shares, samples, strict=True):
            if source.share and not share:
                raise ConfigError(
                    f"The share of data.sources.{source.name} is less than one row of {LONGEST_CYCLE}. Give it more, or leave it out."
                )
            if share and not count:
                raise DataError(
                    f"{source.train_path} (data.sources.{source.name}) has no sample of {sequence_length} tokens to train on. Use more data"
                    " or a shorter data.sequence_length."
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
            least = math.ceil(100 * source.tokens / (self.samples[number] * self.sequence_length)) / 100
            raise DataError(
                f"data.sources.{source.name}.tokens={source.tokens:.0f}, but the source has {there} tokens to train on in"
                f" {_epochs(source.epochs)}. Use at most {there} tokens, or let it repeat with data.sources.{source.name}.epochs={least:g}."
            )

    @property
    def ends(self) -> dict[str, int]:
        """The row of the blend at which each source has given all that it may give; without those that repeat without end."""
        found = {}
        for number, source in enumerate(self.sources):
            limit = None if source.epochs is None else int(Fraction(str(source.epochs)) * self.samples[number])
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
        return "; ".join(f"{source.name}: {share} of {cycle} rows, {plural(count, 'sample')}" for source, share, count in parts)

    def require_steps(self, steps: int, global_batch_size: int) -> None:
        """Refuse a run that is longer than the blend.

        Raises:
            DataError: it names the source that ends first.
        """
        if steps * global_batch_size <= self.rows or not self.ends:
            return
        name, end = min(self.ends.items(), key=lambda entry: entry[1])
        number = [source.name for source in self.sources].index(name)
        source, share = self.sources[number], self.interleaving.shares[number]
        wanted = -(-steps * global_batch_size * share // self.interleaving.cycle)
        possible = f"trainer.max_steps={end // global_batch_size}" if end >= global_batch_size else "more data"
        key = f"data.sources.{name}"
        if source.tokens is not None:
            more = f"more tokens for all sources ({key}.tokens={(wanted + 1) * self.sequence_length})"
        else:
            more = f"{key}.epochs={math.ceil(100 * (wanted + 1) / self.samples[number]) / 100:g}, or a smaller {key}.weight"
        raise DataError(
            f"The blend has {plural(end, 'row')} of {self.sequence_length} tokens, and the run takes {steps * global_batch_size}"
            f" ({plural(steps, 'step')} of {global_batch_size}). Its source {name} ends first: {plural(self.samples[number], 'sample')},"
            f" {_epochs(source.epochs) if source.tokens is None else f'{source.tokens:.0f} tokens'}. Use {possible}, or {more}."
        )


def _epochs(epochs: float | None) -> str:
    return "any number of epochs" if epochs is None else f"{epochs:g} epoch{'s' * (epochs != 1)}"


def find_sources(
    sources: Sequence[Source], tokenizer: str | None = None, check_hashes: bool | None = False
) -> tuple[tuple[Corpus, Corpus | None], ...]:
    """Find and check the files of all sources; see `find_corpora`.

    Raises:
        DataError: a file is missing, truncated or damaged, or the sources are of different tokenizers.
    """
    found = [
        find_corpora(source.train_path, source.val_path, tokenizer, source.document_separator, check_hashes) for source in sources
    ]
    for train, _ in found[1:]:
        require_same_tokenizer(found[0][0], train)
    return tuple(found)


def training_samples(source: Source, train: Corpus, val: Corpus | None, sequence_length: int) -> int:
    """Number of samples of a source to train on."""
    samples = train.tokens // sequence_length
    return samples if val is not None else first_held_out(samples, source.val_fraction)


def check_blend(config: Mapping[str, Any], steps: int | None) -> None:
    """Check the files of a `data=blend` config, and that they are enough for a run of `steps` steps.

    Raises:
        ConfigError, DataError: as the functions above.
    """
    length, batch = config["sequence_length"], config.get("global_batch_size")
    sources = read_sources(config["sources"], length)
    found = find_sources(sources, config.get("tokenizer"), config.get("check_hashes"))
    samples = [training_samples(source, *corpora, length) for source, corpora in zip(sources, found, strict=True)]
    plan = BlendPlan.of(sources, samples, length)
    if steps is not None and batch is not None:
        plan.require_steps(steps, batch)
