"""Published measured runs: rows of a CSV file as jobs. Pure Python."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner_accuracy.allocator import software_of
from benchmarks.planner_accuracy.software import SOURCES, Published, published_machine
from lightning_3d.errors import ConfigError, listed
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.schedules import find_schedule
from lightning_3d.planner.architecture import Architecture
from lightning_3d.planner.job import Job
from lightning_3d.planner.machine import Machine

COLUMNS = (
    *("source", "table", "model", "params_b", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "gated_mlp", "experts"),
    *("topk", "seq_len", "global_batch_seqs", "micro_batch", "gpus", "gpu_type", "tp", "pp", "vpp", "dp", "cp", "ep", "zero_or_fsdp"),
    *("precision", "recompute", "schedule", "mfu_pct", "tokens_per_s_per_gpu", "step_time_s", "peak_mem_gb", "notes"),
)
"""Columns that a file of measured runs has. Others are ignored."""

_STATED = ("tp", "pp", "dp", "micro_batch", "global_batch_seqs", "seq_len", "layers", "hidden", "heads", "vocab", "ffn_hidden")
"""Without one of these a row is not predicted."""


@dataclass(frozen=True)
class Run:
    """A measured run. `seconds` of a step and `memory` in GB as printed; None where a run has none."""

    source: str
    table: str
    gpu: str
    model: str
    job: Job
    machine: Machine
    seconds: float | None
    memory: float | None
    mfu: float | None

    @property
    def cell(self) -> tuple[str, int]:
        """Model and number of GPUs. Cross-validation leaves out all runs of a cell together."""
        return self.model, self.job.layout.world_size

    @property
    def software(self) -> Published:
        """The software that was measured."""
        return software_of(self.job)

    @property
    def room(self) -> float:
        """Bytes of a GPU that the software's allocator fills before it gives back what it has in reserve."""
        return self.machine.memory * self.software.allocator.filled

    @property
    def core(self) -> bool:
        """True for a run that is useful in practice: an MFU of at least 20 % where it is stated, and tp of at most 8."""
        return self.job.layout.tp <= 8 and (self.mfu is None or self.mfu >= 20)


def _number(row: Mapping[str, str], name: str) -> float | None:
    try:
        return float(row.get(name) or "")
    except ValueError:
        return None


def _whole(row: Mapping[str, str], name: str, default: int = 1) -> int:
    number = _number(row, name)
    return default if number is None else int(number)


def architecture_of(row: Mapping[str, str]) -> Architecture:
    sizes: dict[str, Any] = {
        "layers": _whole(row, "layers"),
        "hidden": _whole(row, "hidden"),
        "heads": _whole(row, "heads"),
        "kv_heads": _whole(row, "kv_heads", _whole(row, "heads")),
        "vocab": _whole(row, "vocab"),
        "ffn": _whole(row, "ffn_hidden"),
        "gated": _whole(row, "gated_mlp", 0) == 1,
        "experts": _whole(row, "experts", 0),
        "top_k": _whole(row, "topk", 2 if row.get("experts") else 0),
    }
    both = [Architecture.plain(tied=tied, **sizes) for tied in (False, True)]
    stated = (_number(row, "params_b") or 0) * 1e9
    return min(both, key=lambda model: abs(model.parameters - stated)) if stated else both[0]


def read_runs(path: Path) -> tuple[list[Run], int]:
    """(runs of a file, number of its rows that do not state enough).

    Raises:
        ConfigError: the file is missing, or lacks columns.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path} with measured runs.")
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise ConfigError(f"{path} has no column {listed(missing)}. It needs {listed(COLUMNS)}.")
        explained = _notes(path)
        filled = [{name: row[name] or "" for name in COLUMNS} for row in rows]  # a short line has None
        runs = [run_of({**row, "notes": explained.get(row["notes"], row["notes"])}) for row in filled]
    found = [run for run in runs if run is not None]
    return found, len(runs) - len(found)


def _notes(path: Path) -> dict[str, str]:
    """Read the meaning of codes in the column `notes` from FILE_notes.csv next to FILE.csv, if it exists."""
    beside = path.with_name(f"{path.stem}_notes.csv")
    if not beside.is_file():
        return {}
    with beside.open(newline="", encoding="utf-8") as file:
        return {row["note"]: row["text"] for row in csv.DictReader(file)}


def run_of(row: Mapping[str, str]) -> Run | None:
    """Convert a row to a run; None where its layout or batch is not stated."""
    if any((_number(row, name) or 0) < 1 for name in _STATED):
        return None
    gpus = _whole(row, "gpus")
    machine = published_machine(row["gpu_type"], gpus, row["table"])
    if machine is None:
        return None
    where = " ".join((row["source"], row["gpu_type"], row["notes"])).lower()
    stack = next(stack for words, stack in SOURCES if all(word in where for word in words))
    words = (row["zero_or_fsdp"] + " ").upper()
    zero = next((stage for stage in (3, 2, 1) if f"ZERO-{stage}" in words), 3 if "FSDP" in words else 0)
    precision = row["precision"].lower()
    layout = Layout(
        tp=_whole(row, "tp"),
        pp=_whole(row, "pp"),
        dp=_whole(row, "dp"),
        cp=_whole(row, "cp"),
        ep=_whole(row, "ep"),
        vp=_whole(row, "vpp"),
        order=stack.order,
    )
    job = Job(
        model=architecture_of(row),
        layout=layout,
        seq=_whole(row, "seq_len"),
        global_batch=_whole(row, "global_batch_seqs"),
        micro_batch=_whole(row, "micro_batch"),
        schedule="Interleaved1F1B" if layout.vp > 1 else "1F1B",
        zero=zero,
        precision="fp8" if "fp8" in precision or "float8" in precision else "bf16",
        state_bytes=4.0 if "pure" in precision else 12.0,
        trained=0.02 if "lora" in row["table"].lower() else 1.0,
        recompute=next((word for word in ("full", "selective") if word in row["recompute"]), "none"),
        sequence_parallel=stack.sequence_parallel,
        stack=stack,
    )
    if layout.pp * layout.vp > job.model.layers:
        return None
    if layout.pp > 1 and not find_schedule(job.schedule).accepts(layout.pp, layout.vp, job.micro_batches) and layout.vp > 1:
        return None
    seconds, speed = _number(row, "step_time_s"), _number(row, "tokens_per_s_per_gpu")
    if seconds is None and speed:
        seconds = job.global_batch * job.seq / (speed * layout.world_size)
    return Run(
        source=row["source"],
        table=row["table"],
        gpu=row["gpu_type"],
        model=row["model"],
        job=job,
        machine=machine,
        seconds=seconds,
        memory=_number(row, "peak_mem_gb"),
        mfu=_number(row, "mfu_pct"),
    )
