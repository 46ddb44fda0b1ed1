"""Reads what wandb wrote to the disk: a log of records, in the format of LevelDB's, each a message
of `wandb.proto`."""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


@dataclass
class WandbRun:
    """What one file says.

    Attributes:
        history: rows in the order in which they were logged.
        drawn_over: by metric what its x axis is.
        exit_code: None where the run has not ended in order.
        resumes: whether an upload appends to the run, if there is one of this id.
    """

    id: str = ""
    name: str = ""
    group: str = ""
    project: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    drawn_over: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    resumes: bool = False


def files_of(folder: Path) -> list[Path]:
    """All runs below a folder, in the order in which they began."""
    return sorted(folder.rglob("*.wandb"), key=lambda path: path.parent.name)


def read(path: Path) -> WandbRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run = WandbRun()
    for content in records(path.read_bytes()):
        record = Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.name = record.run.run_id, record.run.display_name
            run.group, run.project = record.run.run_group, record.run.project
            run.resumes = bool(getattr(record.run, "resume", True))  # wandb 0.31 has it
            run.tags = tuple(record.run.tags) or run.tags
            _update(run.config, record.run.config.update)
        elif kind == "config":
            _update(run.config, record.config.update)
        elif kind == "history":
            run.history.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
        elif kind == "metric" and record.metric.step_metric:
            run.drawn_over[record.metric.name or record.metric.glob_name] = (
                record.metric.step_metric
            )
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def records(content: bytes) -> Iterator[bytes]:
    """The records of a log; of one whose writer was killed those that are whole."""
    assert content[:4] == b":W&B", "the file begins with this"
    place, parts = _HEADER, []
    while place + _HEADER <= len(content):
        if _BLOCK - place % _BLOCK < _HEADER:  # the rest of a block that no header fits into
            place += _BLOCK - place % _BLOCK
            continue
        checksum, length, kind = struct.unpack("<IHB", content[place : place + _HEADER])
        part = content[place + _HEADER : place + _HEADER + length]
        if len(part) < length:
            return
        assert checksum == zlib.crc32(part, zlib.crc32(bytes([kind]))) or length == 0
        place += _HEADER + length
        parts = [part] if kind in (_FULL, _FIRST) else [*parts, part]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)


def _update(config: dict[str, Any], items: Any) -> None:
    for item in items:
        keys = list(item.nested_key) or [item.key]
        inner = config
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = json.loads(item.value_json)
