"""The options of the sources of `data=blend`, and their shares. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from lightning_3d.app.config.data_urls import path_list
from lightning_3d.errors import ConfigError, did_you_mean, listed, plural
from lightning_3d.layout.batch_ramp import BatchRamp

LONGEST_CYCLE = 1 << 17
"""Rows of a cycle at most. Weights with a larger common denominator are rounded to multiples of 1 /
LONGEST_CYCLE."""


@dataclass(frozen=True)
class Source:
    """A source of a blend.

    Attributes:
        name: its name in `data.sources`.
        train_path: files to train on, a path or a list of paths; see `corpus.find_corpus`. None: it
            is only validated.
        weight: share of the rows, in any unit; 0 is only validated.
        tokens: tokens to take from it in the whole run, in place of a weight.
        epochs: how often it may be read, such as 1 or 2.5; None: as often as needed.
        val_path: held-out files; None holds out the end of `train_path`.
        val_fraction: fraction of `train_path` that is held out if there is no `val_path`; 0 for no
            validation.
        document_separator: id after each document, for files that do not say it.
    """

    name: str
    train_path: str | Sequence[str] | None = None
    weight: float | None = None
    tokens: float | None = None
    epochs: float | None = 1
    val_path: str | Sequence[str] | None = None
    val_fraction: float = 0.01
    document_separator: int | None = None

    @property
    def share(self) -> Fraction:
        """The weight or the tokens, as the decimal number that was given; 0 without either."""
        return Fraction(str((self.tokens if self.weight is None else self.weight) or 0))


def read_sources(entries: Any, sequence_length: int | None) -> tuple[Source, ...]:
    """Read `data.sources`.

    Args:
        entries: name -> options of `Source`.
        sequence_length: that of the blend.

    Raises:
        ConfigError: an option is unknown, missing, of another type or out of range, or does not fit
            those of the other sources.
    """
    if not isinstance(entries, Mapping) or not entries:
        raise ConfigError(
            "data.sources must name at least one source, for example"
            " data.sources={web:{train_path:/data/web,weight:0.7},code:{train_path:/data/code,weight:0.3}};"  # noqa: E501
            f" got {entries!r}."
        )
    sources = tuple(
        _read_source(str(name), entry, sequence_length) for name, entry in entries.items()
    )
    trained = [source for source in sources if source.train_path is not None]
    if not trained:
        raise ConfigError(
            "No source of data.sources has a train_path, so there is nothing to train on. Give"
            f" one, for example data.sources.{sources[0].name}.train_path=/data/{sources[0].name}."
        )
    kinds = {"tokens" if source.weight is None else "weight" for source in trained}
    if len(kinds) > 1:
        budgets = [source.name for source in trained if source.weight is None]
        raise ConfigError(
            f"data.sources has tokens for {listed(budgets)} and a weight for the others. Give all"
            " sources a weight, or all of them tokens."
        )
    if not any(source.share for source in sources):
        raise ConfigError(
            f"The {'weights' if kinds == {'weight'} else 'tokens'} of data.sources sum to 0. Give a"
            " source more than 0."
        )
    for source, share in zip(
        sources, whole_shares([source.share for source in sources]), strict=True
    ):
        if source.share and not share:
            raise ConfigError(
                f"The share of data.sources.{source.name} is less than one row of {LONGEST_CYCLE}."
                " Give it more, or leave it out."
            )
    return sources


def check_sources(data: Mapping[str, Any], steps: int) -> None:
    """Check what the options of `data=blend` show without the files. Does nothing if the sources
    are not given yet.

    Args:
        data: the group `data`.
        steps: length of the run.

    Raises:
        ConfigError: as `read_sources`, or the sources have fewer tokens than the run takes.
    """
    if data.get("sources") is None:
        return
    length = data["sequence_length"]
    sources = read_sources(data["sources"], length)
    ramp = BatchRamp.read(data.get("batch_ramp"), data["global_batch_size"], length)
    total, taken = sum(source.share for source in sources), ramp.after(steps) * length
    if any(source.tokens for source in sources) and total < taken:
        possible = ramp.count(0, int(total // length))
        fewer = f", or use trainer.max_steps={possible}" if possible else ""
        raise ConfigError(
            f"The tokens of data.sources sum to {float(total):.0f}, but the run takes {taken}"
            f" ({plural(steps, 'step')} of {ramp.described(length)}). Give all sources more"
            f" tokens{fewer}."
        )


def _read_source(name: str, entry: Any, sequence_length: int | None) -> Source:
    key = f"data.sources.{name}"
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{key} must be a group of keys, for example {{train_path:/data/{name},weight:1}}; got"
            f" {entry!r}."
        )
    if not name or "/" in name or name != name.strip():
        raise ConfigError(
            "A source of data.sources must have a name without slashes and outer spaces; got"
            f" {name!r}."
        )
    given = {str(option): value for option, value in entry.items()}
    length = given.pop("sequence_length", sequence_length)
    if length != sequence_length:
        raise ConfigError(
            f"{key}.sequence_length={length} differs from data.sequence_length={sequence_length}."
            " All rows of a blend have the same length: leave it out."
        )
    known = [field.name for field in fields(Source) if field.name != "name"]
    for option in given:
        if option not in known:
            raise ConfigError(
                f"{key} has no option '{option}'. Its options are"
                f" {listed(known)}.{did_you_mean(option, known)}"
            )
    source = Source(name, **given)
    _check_numbers(key, source)
    _check_paths(key, source)
    both = source.weight is not None and source.tokens is not None
    if both or source.train_path is not None and source.weight is source.tokens is None:
        raise ConfigError(f"{key} must have either weight or tokens, for example {key}.weight=0.5.")
    return source


def _check_paths(key: str, source: Source) -> None:
    if source.val_path is not None and not _names_files(source.val_path):
        raise ConfigError(
            f"{key}.val_path must be a string or a list of strings; got {source.val_path!r}."
        )
    if source.train_path is None and source.val_path is not None and not source.share:
        return
    if not _names_files(source.train_path) or source.train_path == "???":
        only = (
            " Without it, a source is only validated, and its weight must be 0."
            if source.val_path is not None
            else ""
        )
        raise ConfigError(
            f"{key}.train_path must be given: a folder, a .bin or .npy file, a pattern, or a list"
            f" of these.{only}"
        )


def _check_numbers(key: str, source: Source) -> None:
    for name, zero in (("weight", True), ("tokens", True), ("epochs", False)):
        value = getattr(source, name)
        number = (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
        if value is not None and (not number or value < 0 or (value == 0 and not zero)):
            raise ConfigError(
                f"{key}.{name} must be {'at least' if zero else 'more than'} 0; got {value!r}."
            )
    fraction, separator = source.val_fraction, source.document_separator
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise ConfigError(
            f"{key}.val_fraction must be at least 0 and less than 1; got {fraction!r}."
        )
    if separator is not None and (isinstance(separator, bool) or not isinstance(separator, int)):
        raise ConfigError(f"{key}.document_separator must be a whole number; got {separator!r}.")


def _names_files(value: Any) -> bool:
    """Check for a string, or a list of strings that is not empty."""
    paths = path_list(value)
    return bool(paths) and all(isinstance(path, str) for path in paths)


def whole_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the rows of each source in a cycle.

    The shortest cycle that has the exact ratios, if it is not longer than `LONGEST_CYCLE`.
    Otherwise a cycle of that length, with the shares rounded by the largest remainders.
    """
    total = sum(weights, Fraction(0))
    exact = [weight / total for weight in weights]
    cycle = math.lcm(*(share.denominator for share in exact))
    if cycle <= LONGEST_CYCLE:
        return tuple(int(share * cycle) for share in exact)
    wanted = [share * LONGEST_CYCLE for share in exact]
    rounded = [int(share) for share in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda number: rounded[number] - wanted[number])
    for number in by_remainder[: LONGEST_CYCLE - sum(rounded)]:
        rounded[number] += 1
    return tuple(rounded)
