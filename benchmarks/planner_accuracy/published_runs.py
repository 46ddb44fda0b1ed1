"""Published measured runs: rows of a CSV file as jobs. Pure Python."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.planner_accuracy.allocator import software_of
from benchmarks.planner_accuracy.known_models import head_size, named_model, with_windows
from benchmarks.planner_accuracy.software import (
    SOURCES,
    Published,
    published_machine,
    shards_experts,
)
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.errors import ConfigError, listed
from lightning_3d.layout.layout import Layout, divisors
from lightning_3d.layout.schedules import find_schedule

COLUMNS = (
    *(
        "source",
        "table",
        "model",
        "params_b",
        "layers",
        "hidden",
        "ffn_hidden",
        "heads",
        "kv_heads",
        "vocab",
        "gated_mlp",
        "experts",
    ),
    *(
        "topk",
        "seq_len",
        "global_batch_seqs",
        "micro_batch",
        "gpus",
        "gpu_type",
        "tp",
        "pp",
        "vpp",
        "dp",
        "cp",
        "ep",
        "zero_or_fsdp",
    ),
    *(
        "precision",
        "recompute",
        "schedule",
        "mfu_pct",
        "tokens_per_s_per_gpu",
        "step_time_s",
        "peak_mem_gb",
        "notes",
    ),
)
"""Columns that a file of measured runs has. Others are ignored."""

_STATED = (
    "tp",
    "pp",
    "gpus",
    "global_batch_seqs",
    "seq_len",
    "layers",
    "hidden",
    "heads",
    "vocab",
    "ffn_hidden",
)
"""Without one of these a row is not predicted."""

_SURE = 0.15
"""Largest share of a step's FLOPs that a causal mask may save where seconds are derived from FLOPs:
tables do not say whether they count what the mask saves."""

_TYPES = {"fp4": ("nvfp4", "fp4"), "fp8": ("fp8", "float8")}
"""Precisions of matrix products below 16 bits, and the words that name them. MXFP8 differs from FP8
in its scales only."""


@dataclass(frozen=True)
class Run:
    """A measured run. `seconds` of a step and `memory` in GB as printed; None where a run has none.
    `assumed`: its micro-batch is not stated and taken as 1."""

    source: str
    table: str
    gpu: str
    model: str
    job: Job
    machine: Machine
    seconds: float | None
    memory: float | None
    mfu: float | None
    assumed: bool = False

    @property
    def cell(self) -> tuple[str, int]:
        """Model and number of GPUs. Cross-validation leaves out all runs of a cell together."""
        return self.model, self.job.layout.world_size

    @property
    def software(self) -> Published:
        """The software that was measured."""
        return software_of(self.job)

    @property
    def core(self) -> bool:
        """True for a run that is useful in practice: an MFU of at least 20 % where it is stated,
        and tp of at most 8."""
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
    """Return the sizes of a row's model: from its name where the columns do not state all of
    them."""
    known = named_model(row["model"], _whole(row, "layers"), _whole(row, "hidden"))
    if known is not None:
        return known
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
        "head_dim": head_size(row["model"]),
    }
    both = [
        with_windows(row["model"], Architecture.plain(tied=tied, **sizes)) for tied in (False, True)
    ]
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
            raise ConfigError(
                f"{path} has no column {listed(missing)}. It needs {listed(COLUMNS)}."
            )
        explained = _notes(path)
        # a short line has None
        filled = [{name: row[name] or "" for name in COLUMNS} for row in rows]
        runs = [
            run_of({**row, "notes": explained.get(row["notes"], row["notes"])}) for row in filled
        ]
    found = [run for run in runs if run is not None]
    return found, len(runs) - len(found)


def _notes(path: Path) -> dict[str, str]:
    """Read the meaning of codes in the column `notes` from FILE_notes.csv next to FILE.csv, if it
    exists."""
    beside = path.with_name(f"{path.stem}_notes.csv")
    if not beside.is_file():
        return {}
    with beside.open(newline="", encoding="utf-8") as file:
        return {row["note"]: row["text"] for row in csv.DictReader(file)}


def run_of(row: Mapping[str, str]) -> Run | None:
    """Convert a row to a run; None where its layout or batch is not stated."""
    if any((_number(row, name) or 0) < 1 for name in _STATED):
        return None
    gpus, split = _whole(row, "gpus"), _whole(row, "tp") * _whole(row, "pp") * _whole(row, "cp")
    machine = published_machine(row["gpu_type"], gpus, row["table"])
    if machine is None or gpus % split or _whole(row, "global_batch_seqs") % (gpus // split):
        return None
    where = " ".join((row["source"], row["gpu_type"], row["notes"])).lower()
    stack = next(stack for words, stack in SOURCES if all(word in where for word in words))
    stack = replace(stack, shards_experts=shards_experts(row["notes"]))
    machine = stack.on(machine)
    words = (row["zero_or_fsdp"] + " ").upper()
    zero = next(
        (stage for stage in (3, 2, 1) if f"ZERO-{stage}" in words), 3 if "FSDP" in words else 0
    )
    precision = row["precision"].lower()
    layout = Layout(
        tp=_whole(row, "tp"),
        pp=_whole(row, "pp"),
        dp=gpus // split,
        cp=_whole(row, "cp"),
        ep=_whole(row, "ep") * (_whole(row, "tp") if stack.shards_experts else 1),
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
        precision=next(
            (name for name, words in _TYPES.items() if any(word in precision for word in words)),
            "bf16",
        ),
        state_bytes=4.0 if "pure" in precision else 12.0,
        trained=0.02 if "lora" in row["table"].lower() else 1.0,
        recompute=next(
            (word for word in ("full", "selective") if word in row["recompute"]), "none"
        ),
        sequence_parallel=stack.sequence_parallel,
        stack=stack,
    )
    if not row["vpp"] and layout.pp > 1 and row["schedule"].strip() != "1F1B":
        job = _interleaved(job, machine)
    layout = job.layout
    if layout.pp * layout.vp > job.model.layers:
        return None
    if (
        layout.pp > 1
        and not find_schedule(job.schedule).accepts(layout.pp, layout.vp, job.micro_batches)
        and layout.vp > 1
    ):
        return None
    return Run(
        source=row["source"],
        table=row["table"],
        gpu=row["gpu_type"],
        model=row["model"],
        job=job,
        machine=machine,
        seconds=_seconds(row, job, machine),
        memory=_number(row, "peak_mem_gb"),
        mfu=_number(row, "mfu_pct"),
        assumed=_number(row, "micro_batch") is None,
    )


def _interleaved(job: Job, machine: Machine) -> Job:
    """Return a job whose virtual stages are not stated with as many as make it fastest, as its
    authors will have chosen."""
    chunks = [
        vp
        for vp in divisors(job.model.layers // job.layout.pp)
        if job.model.layers % (vp * job.layout.pp) == 0
    ] or [1]
    ways = [
        replace(
            job, layout=replace(job.layout, vp=vp), schedule="Interleaved1F1B" if vp > 1 else "1F1B"
        )
        for vp in chunks
    ]
    able = [
        one
        for one in ways
        if find_schedule(one.schedule).accepts(one.layout.pp, one.layout.vp, one.micro_batches)
    ]
    return min(able or [job], key=lambda one: step_of(one, machine, pipeline="estimate").seconds)


def _seconds(row: Mapping[str, str], job: Job, machine: Machine) -> float | None:
    """Return the seconds of a step: as stated, or from its tokens a second, or from the FLOP/s or
    MFU of a pre-training."""
    stated, speed = _number(row, "step_time_s"), _number(row, "tokens_per_s_per_gpu")
    if stated or speed:
        return stated or job.global_batch * job.seq / (speed or 1.0) / job.layout.world_size
    rate = (_number(row, "tflops_per_gpu") or 0) * 1e12 or (
        _number(row, "mfu_pct") or 0
    ) / 100 * machine.peak
    flops = job.model.model_flops(job.seq)
    saved = 6.0 * job.model.layers * job.model.query_width * job.seq
    if not rate or job.trained < 1 or saved > _SURE * flops:
        return None
    return flops * job.global_batch * job.seq / job.layout.world_size / rate
