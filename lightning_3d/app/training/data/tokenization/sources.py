"""Documents of files and data sets, in batches whose limits depend on the sources alone. pyarrow
and datasets are imported on first use."""

from __future__ import annotations

import glob
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lightning_3d.app.training.data.shard_manifest import ShardPlace
from lightning_3d.errors import DataError, did_you_mean, install, listed

HUB = "hf://"
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 256
_JSON, _PARQUET, _TEXT = (".jsonl", ".json", ".ndjson"), (".parquet",), (".txt",)
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Batch:
    """Records of one source that are tokenized together.

    Attributes:
        place: where the batch begins.
        name: the source, for messages.
        records: lines of JSON (bytes), or texts (bytes in UTF-8, or str).
        json_key: key of the text in each line; None if records are texts.
        names: the source of each record, if they differ.
    """

    place: ShardPlace
    name: str
    records: Sequence[bytes | str | None]
    json_key: str | None = None
    names: Sequence[str] | None = None

    def where(self, index: int) -> str:
        """Describe where a record of the batch is, for messages."""
        if self.names is not None:
            return self.names[index]
        return (
            f"{'line' if self.json_key is not None else 'row'} {self.place.record + index + 1} of"
            f" {self.name}"
        )


class TextSource(Protocol):
    """Documents that are read in order. `number` is its index among all sources."""

    number: int

    def state(self) -> list[Any]:
        """Describe the source, so that a later command finds out whether it is the same: name, size
        and time of each file."""

    def batches(self, start: ShardPlace) -> Iterator[Batch]:
        """Read from a place that a batch of this source had."""


def find_sources(
    words: Sequence[str], *, column: str, split: str, dataset: str | None
) -> list[TextSource]:
    """List the sources that words of the command line name: files, folders, globs and `hf://` data
    sets.

    Args:
        column: key or column of the text.
        split: split of data sets.
        dataset: configuration of data sets, for those that have several.

    Raises:
        DataError: a word names nothing, or a package is missing.
    """
    found: list[Path | HubRows] = []
    for word in words:
        found += (
            [HubRows(word.removeprefix(HUB), column, split, dataset)]
            if word.startswith(HUB)
            else _files(word)
        )
    sources: list[TextSource] = []
    for is_text, group in groupby(
        found, key=lambda one: isinstance(one, Path) and _kind(one) == "text"
    ):
        same = list(group)
        sources += (
            [TextFiles([one for one in same if isinstance(one, Path)])]
            if is_text
            else [_source(one, column) for one in same]
        )
    for number, source in enumerate(sources):
        source.number = number
    return sources


def _source(found: Path | HubRows, column: str) -> TextSource:
    if isinstance(found, HubRows):
        return found
    return ParquetRows(found, column) if _kind(found) == "parquet" else JsonLines(found, column)


def _files(word: str) -> list[Path]:
    place = Path(word).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        files = sorted(
            (path for path in place.rglob("*") if path.is_file()),
            key=lambda path: path.relative_to(place).as_posix(),
        )
        known = [path for path in files if _suffix(path) in _JSON + _PARQUET + _TEXT]
        if not known:
            types = ", ".join(_JSON + _PARQUET + _TEXT)
            raise DataError(
                f"{place} has no file of the types {types}. Name other files by a pattern, for"
                f' example "{place}/**/*.py".'
            )
        return known
    matches = sorted(
        path for path in map(Path, glob.glob(str(place), recursive=True)) if path.is_file()
    )
    if not matches:
        near = (
            did_you_mean(place.name, [path.name for path in place.parent.iterdir()])
            if place.parent.is_dir()
            else ""
        )
        raise DataError(
            f"There is no file or folder {word}.{near} A data set of the datasets package is"
            " hf://NAME."
        )
    return matches


def _suffix(path: Path) -> str:
    """The suffix that tells the format, without that of a compression."""
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix


def _kind(path: Path) -> str:
    suffix = _suffix(path)
    return "json" if suffix in _JSON else "parquet" if suffix in _PARQUET else "text"


def _state_of(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns]


def _reading(path: Path | str, batches: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    """Read batches, and name the file in errors."""
    try:
        yield from batches()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def open_file(path: Path) -> BinaryIO | gzip.GzipFile | io.BufferedReader:
    """Open a file that may be compressed by gzip or Zstandard.

    Raises:
        DataError: pyarrow, which reads Zstandard, is not installed.
    """
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        return io.BufferedReader(
            _import_pyarrow(path).input_stream(str(path), compression="zstd"), _BATCH_BYTES
        )
    return path.open("rb")


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"Reading {path} needs the package pyarrow. {install('data')}.") from None
    return pyarrow


class JsonLines:
    """A file with one JSON object a line."""

    number = 0

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        open_file(path).close()

    def state(self) -> list[Any]:
        return [_state_of(self._path)]

    def batches(self, start: ShardPlace) -> Iterator[Batch]:
        return _reading(self._path, lambda: self._read(start))

    def _read(self, start: ShardPlace) -> Iterator[Batch]:
        offset, record = start.offset, start.record
        with open_file(self._path) as file:
            _skip(file, offset)
            while lines := file.readlines(_BATCH_BYTES):
                yield Batch(
                    ShardPlace(self.number, offset, record), str(self._path), lines, self._key
                )
                offset, record = offset + sum(map(len, lines)), record + len(lines)


def _skip(file: BinaryIO | gzip.GzipFile | io.BufferedReader, offset: int) -> None:
    if file.seekable():
        file.seek(offset)
        return
    while offset:
        offset -= len(file.read(min(offset, _BATCH_BYTES)))


class TextFiles:
    """Text files in UTF-8; each is one document."""

    number = 0

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def state(self) -> list[Any]:
        return [_state_of(path) for path in self._paths]

    def batches(self, start: ShardPlace) -> Iterator[Batch]:
        texts: list[bytes] = []
        first = start.offset
        for index in range(first, len(self._paths)):
            texts.append(self._read(self._paths[index]))
            if sum(map(len, texts)) >= _BATCH_BYTES or index == len(self._paths) - 1:
                names = [str(path) for path in self._paths[first : index + 1]]
                yield Batch(ShardPlace(self.number, first, first), names[0], texts, names=names)
                texts, first = [], index + 1

    @staticmethod
    def _read(path: Path) -> bytes:
        try:
            with open_file(path) as file:
                return file.read()
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}") from error


class ParquetRows:
    """The text column of a Parquet file."""

    number = 0

    def __init__(self, path: Path, column: str) -> None:
        self._path, self._column = path, column
        pyarrow = _import_pyarrow(path)
        try:
            names = pyarrow.parquet.read_schema(path).names
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        _require_column(str(path), column, names)

    def state(self) -> list[Any]:
        return [_state_of(self._path)]

    def batches(self, start: ShardPlace) -> Iterator[Batch]:
        return _reading(self._path, lambda: self._read(start))

    def _read(self, start: ShardPlace) -> Iterator[Batch]:
        with _import_pyarrow(self._path).parquet.ParquetFile(self._path) as file:
            row = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start.offset:
                    row += rows
                    continue
                for part in file.iter_batches(
                    _BATCH_ROWS, row_groups=[group], columns=[self._column]
                ):
                    if row >= start.offset:
                        yield Batch(
                            ShardPlace(self.number, row, row),
                            str(self._path),
                            part.column(0).to_pylist(),
                        )
                    row += len(part)


class HubRows:
    """The text column of one split of a data set that the datasets package finds: a name on the
    hub, or a folder."""

    number = 0

    def __init__(self, path: str, column: str, split: str, dataset: str | None) -> None:
        try:
            from lightning_3d.app.training.data.huggingface import load_split

            self._rows = load_split(path, dataset, split)
        except ImportError:
            raise DataError(
                f"Reading {HUB}{path} needs the package datasets. {install('data')}."
            ) from None
        self._name, self._split, self._column = path, split, column
        _require_column(HUB + path, column, self._rows.column_names)

    def state(self) -> list[Any]:
        return [[HUB + self._name, self._split, len(self._rows), self._rows._fingerprint]]

    def batches(self, start: ShardPlace) -> Iterator[Batch]:
        for row in range(start.offset, len(self._rows), _BATCH_ROWS):
            texts = self._rows[row : row + _BATCH_ROWS][self._column]
            yield Batch(ShardPlace(self.number, row, row), HUB + self._name, list(texts))


def _require_column(name: str, column: str, columns: Sequence[str]) -> None:
    if column not in columns:
        near = did_you_mean(column, columns)
        raise DataError(
            f"{name} has no column '{column}'; it has {listed(columns)}.{near} Set --text-column."
        )
