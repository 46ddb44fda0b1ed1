"""`report.html` of a run, from the files in its folder: `metrics.csv`, `timeline.json`,
`evaluation.json`, `config.yaml`, `status.json`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.app.runs.evaluation_file import read_evaluation
from lightning_3d.app.runs.folder import read_wandb_file
from lightning_3d.app.runs.metrics_file import column, read_rows
from lightning_3d.app.runs.report.page import show_count, show_percent, show_seconds, write_page
from lightning_3d.app.runs.status import FAILED, FINISHED, INTERRUPTED, RUNNING, read_status
from lightning_3d.errors import ConfigError, Lightning3DError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.schedules import find_schedule, predicted_bubble, stages_of_rank
from lightning_3d.storage.numbers import show_memory
from lightning_3d.tracing.chrome import read_timeline
from lightning_3d.tracing.overlap import summary
from lightning_3d.tracing.trace import (
    FORWARD,
    KINDS,
    TIMELINE_FILE,
    RankTrace,
    StepTrace,
    measured_bubble,
    pipeline_by_pipeline,
)

REPORT_FILE = "report.html"

_WORDS = {
    "receive": "wait for a message",
    "reduce": "reduce gradients",
    "input gradient": "backward: inputs",
}
_WORDS |= {"weight gradient": "backward: weights"}
_MOST_POINTS = 1500
_MOST_IN_ORDER = 16  # with more ranks, run.js shows only so many at first
_MOST_NODES = 16
_MOST_KINDS = 6
_MOST_RANKS_OF_A_NODE = 64


@dataclass(frozen=True)
class About:
    """Facts about a run that are not in its metrics.

    Attributes:
        model: name of the model.
        layout: name of the layout.
        order: order of ranks; None: the default.
        schedule: pipeline schedule.
        nodes: number of machines.
        status: see `runs.status`; None: the status in `status.json`.
        reason: message of the failure, if the run failed.
        memory: bytes of one GPU.
        counted: unit of the loss average and of the throughput: tokens, or rows of batches.
        slow_factor: how many times as long as its peers a rank computes to count as slow.
    """

    model: str = ""
    layout: str = "tp1"
    order: tuple[str, ...] | None = None
    schedule: str = ""
    nodes: int = 1
    status: str | None = None
    reason: str = ""
    memory: float | None = None
    counted: str = "tokens"
    slow_factor: float = 1.25

    @classmethod
    def of_config(cls, config: Mapping[str, Any], reason: str = "") -> About:
        """Read the facts from the configuration of a run; what it lacks is left out."""
        parallelism, cluster, model, trainer = (
            _group(config, name) for name in ("parallelism", "cluster", "model", "trainer")
        )
        factor = trainer.get("slow_rank_factor")
        order = parallelism.get("order")
        return cls(
            model=str(model.get("name") or ""),
            layout=str(parallelism.get("layout") or "tp1"),
            order=tuple(order) if isinstance(order, list) else None,
            schedule=str(parallelism.get("schedule") or ""),
            nodes=int(cluster.get("nodes") or 1),
            reason=reason,
            memory=(
                cluster.get("memory") if isinstance(cluster.get("memory"), (int, float)) else None
            ),
            slow_factor=float(factor) if isinstance(factor, (int, float)) else cls.slow_factor,
        )


def write_report(folder: Path, about: About | None = None, *, reason: str = "") -> Path:
    """Write `report.html` into a run folder, from those of the run's files that exist.

    Args:
        folder: run folder.
        about: facts about the run; None: read from `config.yaml`.
        reason: message of the failure, if the caller knows it.

    Raises:
        ConfigError: the folder does not hold a run, or cannot be written.
    """
    folder = Path(folder)
    text, config = _config_of(folder)
    about = about or About.of_config(config, reason)
    if not (folder / "metrics.csv").is_file() and not text:
        raise ConfigError(
            f"{folder} is not a run folder: it has neither metrics.csv nor config.yaml."
        )
    trace = read_timeline(folder / TIMELINE_FILE)
    layout = _layout(trace, about)
    page = _RunPage(folder, about, read_rows(folder / "metrics.csv"), trace, layout, text)
    try:
        return write_page(
            folder / REPORT_FILE,
            "run.html.j2",
            ["charts.js", "run.js"],
            page.data(),
            run=page.shown(),
        )
    except OSError as error:
        raise ConfigError(f"Cannot write the report into {folder}: {error.strerror}.") from error


def _config_of(folder: Path) -> tuple[str, Mapping[str, Any]]:
    try:
        text = (folder / "config.yaml").read_text("utf-8")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return "", {}
    return text, content if isinstance(content, dict) else {}


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = config.get(name)
    return group if isinstance(group, dict) else {}


def _layout(trace: StepTrace | None, about: About) -> Layout:
    try:
        name, order = (
            (trace.layout, trace.order) if trace is not None else (about.layout, about.order)
        )
        return Layout.parse(name, order=order)
    except Lightning3DError:
        return Layout()


class _RunPage:
    """Contents of the page of one run."""

    def __init__(
        self,
        folder: Path,
        about: About,
        rows: Sequence[Mapping[str, str]],
        trace: StepTrace | None,
        layout: Layout,
        config: str,
    ) -> None:
        self.folder, self.about, self.rows, self.trace, self.layout, self.config = (
            folder,
            about,
            rows,
            trace,
            layout,
            config,
        )
        self.status = read_status(folder)
        self.schedule = trace.schedule if trace is not None else about.schedule

    def data(self) -> dict[str, Any]:
        """Return the numbers to draw."""
        steps, loss, speed = thinned(
            *(_cells(self.rows, name) for name in ("step", "loss", "tokens_per_second"))
        )
        validation = [
            [int(row["step"]), float(row["val_loss"])]
            for row in self.rows
            if _finite(row.get("val_loss"))
        ]
        return {
            "curve": {
                "steps": steps,
                "loss": loss,
                "tokens_per_second": speed,
                "validation": validation,
            },
            "kinds": KINDS,
            "words": {kind: _WORDS.get(kind, kind) for kind in KINDS},
            "timeline": self._timeline(),
            "counted": self.about.counted,
            "memory": self._memory(),
            "activations": "activations and everything else",
        }

    def shown(self) -> dict[str, Any]:
        """Return the words for the template."""
        status = self.about.status or (self.status.status if self.status is not None else "")
        timeline = self._timeline()
        stages = self.layout.pp
        nodes, left_out = self._nodes()
        return {
            "title": self.about.model or self.folder.absolute().name,
            "layout": self.layout.name,
            "status": status or "unknown",
            "facts": self._facts(),
            "failure": self._failure(status),
            "reason": (
                (self.about.reason or (self.status.reason if self.status is not None else ""))[
                    -4000:
                ]
                if status != FINISHED
                else ""
            ),
            "tiles": self._tiles(),
            "steps": len(self.rows),
            "unit": (
                ("nats per target token, " if "vocab_size:" in self.config else "")
                + "mean over the global batch"
            ),
            "counted": f"{'target ' if self.about.counted == 'tokens' else ''}{self.about.counted}",
            "not_finite": self._not_finite(),
            "slow": self._slow(),
            "timeline": (
                timeline
                and timeline
                | {
                    "bubble_text": show_percent(timeline["bubble"]),
                    "predicted_text": (
                        None
                        if timeline["predicted"] is None
                        else show_percent(timeline["predicted"])
                    ),
                    "schedule": self.schedule,
                    "chunks": self.layout.vp,
                    "left_out": len(timeline["ranks"]) < self.layout.world_size,
                    "ranks_shown": len(timeline["ranks"]),
                    "messages": self._messages(),
                }
            ),
            "ranks": self.layout.world_size,
            "memory": bool(self._memory()),
            "memory_note": self._memory_note(),
            "layout_note": self._layout_note(),
            "stages": stages,
            "stage_legend": [
                {"name": f"pp{stage}", "colour": _colour(stage, stages)} for stage in range(stages)
            ][:12],
            "nodes": nodes,
            "nodes_left_out": left_out,
            "evaluation": self._evaluation(),
            "config": self.config,
            "folder": str(self.folder.absolute()),
        }

    def _facts(self) -> list[tuple[str, str]]:
        ranks = self.layout.world_size
        facts = [("layout", self.layout.name), ("ranks", f"{ranks:,}")]
        if self.schedule and self.layout.pp > 1:
            facts.append(("schedule", self.schedule))
        if self.status is not None:
            facts.append(
                ("started", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.status.started)))
            )
            if self.status.seconds is not None:
                facts.append(("took", show_seconds(self.status.seconds)))
            facts.append(
                (
                    "on",
                    (
                        f"{self.status.host}, {self.status.device}"
                        if self.status.device
                        else self.status.host
                    ),
                )
            )
        if run := read_wandb_file(self.folder):
            facts.append(("Weights & Biases", run.get("url") or f"{run.get('id')} (offline)"))
        return facts

    def _failure(self, status: str) -> str:
        after = (
            f"after step {self.rows[-1]['step']}" if self.rows else "before its first step ended"
        )
        if status == FAILED:
            code = self.status.exit_code if self.status is not None else None
            return f"This run failed {after}" + (
                f", with exit code {code}." if code is not None else "."
            )
        if status == INTERRUPTED:
            return f"This run was interrupted {after}."
        return (
            f"This run was still in progress when this report was written, {after}."
            if status == RUNNING
            else ""
        )

    def _tiles(self) -> list[dict[str, str]]:
        rows = self.rows
        loss, validation = column(rows, "loss"), column(rows, "val_loss")
        speed, length = (
            column(rows[1:] or rows, name) for name in ("tokens_per_second", "step_seconds")
        )
        shares = column(rows[1:] or rows, "mfu")
        mfu = f", MFU {show_percent(statistics.median(shares))}" if shares else ""
        tokens = sum(column(rows, "tokens"))
        count = f"{len(rows):,} steps, {show_count(tokens)} {self.about.counted}"
        tiles = [
            (
                "loss",
                "Loss",
                f"{loss[-1]:.4f}" if loss else "–",
                f"validation {validation[-1]:.4f}" if validation else "no validation",
            ),
            (
                "speed",
                f"{self.about.counted.capitalize()}/s",
                show_count(statistics.median(speed)) if speed else "–",
                f"median{mfu}",
            ),
            ("step", "Step", show_seconds(statistics.median(length)) if length else "–", count),
        ]
        timeline, trace = self._timeline(), self.trace
        if timeline is not None and trace is not None:
            predicted = timeline["predicted"]
            more = (
                f"ideal: {show_percent(predicted)}"
                if predicted is not None
                else f"step {trace.step}"
            )
            tiles.append(("bubble", "Bubble", show_percent(trace.bubble), more))
            capacity = self.about.memory
            more = (
                f"{show_percent(trace.peak_memory / capacity)} of {show_memory(capacity)}"
                if capacity
                else "peak of the fullest rank"
            )
            tiles.append(("memory", "Memory", show_memory(trace.peak_memory), more))
        else:
            tiles += [
                ("bubble", "Bubble", "–", "no step was traced"),
                ("memory", "Memory", "–", "no step was traced"),
            ]
        return [dict(zip(("id", "label", "value", "more"), tile, strict=True)) for tile in tiles]

    def _evaluation(self) -> dict[str, Any] | None:
        """Return the losses of the validation sets at the end of the run, and its sample of text;
        None without an evaluation."""
        found = read_evaluation(self.folder)
        if not found:
            return None
        sets = [
            {
                "name": name,
                "loss": f"{entry['loss']:.4f}",
                "perplexity": f"{entry['perplexity']:.4g}",
                "tokens": f"{entry['tokens']:,}",
                "samples": f"{entry['samples']:,}",
            }
            for name, entry in found["sets"].items()
        ]
        return {**found, "sets": sets}

    def _not_finite(self) -> str:
        steps = [row["step"] for row in self.rows if row.get("loss") and not _finite(row["loss"])]
        return (
            f"NaN or infinite in {len(steps)} step{'s' * (len(steps) != 1)}, first in step"
            f" {steps[0]}"
            if steps
            else ""
        )

    def _slow(self) -> str:
        """Name the rank that was slow for most steps."""
        slow: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for row in self.rows:
            if (
                row.get("slow_rank")
                and _finite(row.get("slow_factor"))
                and float(row["slow_factor"]) > self.about.slow_factor
            ):
                place = row["slow_rank"], row.get("slow_host") or ""
                slow.setdefault(place, []).append((row["step"], float(row["slow_factor"])))
        (rank, host), steps = max(slow.items(), key=lambda one: len(one[1]), default=(("", ""), []))
        if not steps:
            return ""
        where = f" ({host})" if host else ""
        times = statistics.median(factor for _, factor in steps)
        count = f"{len(steps)} step{'s' * (len(steps) != 1)}, first in step {steps[0][0]}"
        return (
            f"rank {rank}{where} was slow in {count}: it computed {times:.2f} times as long as its"
            " peers"
        )

    def _timeline(self) -> dict[str, Any] | None:
        trace = self.trace
        if trace is None:
            return None
        kept = self._kept()
        work = {each.rank: each.work for each in trace.ranks}
        ranks = []
        for each in kept:
            pipeline = self.layout.group_of(each.rank, "pp")
            windows = [
                (min(part.first for part in batch), max(part.last for part in batch))
                for batch in zip(*(work[rank] for rank in pipeline), strict=True)
            ]
            busy = sum(part.busy for part in each.work)
            length = sum(end - start for start, end in windows)
            ranks.append(
                {
                    "rank": each.rank,
                    "place": self._place(each.rank),
                    "idle": 1 - busy / length if length > 0 else 0.0,
                    "windows": windows,
                    "events": [
                        [*event[:4], *(round(moment, 7) for moment in event[4:])]
                        for event in each.events or ()
                    ],
                }
            )
        micro_batches = {
            (event.batch, event.micro_batch)
            for each in kept
            for event in each.events or ()
            if event.kind == FORWARD
        }
        batches = max((len(each.work) for each in trace.ranks), default=1)
        return {
            "step": trace.step,
            "bubble": measured_bubble(work, self.layout),
            "predicted": self._predicted(len(micro_batches) // max(1, batches)),
            "seconds": max(
                (event.end for each in kept for event in each.events or ()), default=0.0
            ),
            "batches": batches,
            "ranks": ranks,
        }

    def _messages(self) -> list[str]:
        """Describe the kinds of messages that took longest, and how much of their time was
        hidden."""
        return summary(self.trace.ranks)[:_MOST_KINDS] if self.trace is not None else []

    def _kept(self) -> list[RankTrace]:
        """List the ranks with recorded events; if there are many, pipeline by pipeline, because the
        page shows only the first ones."""
        kept = [each for each in self.trace.ranks if each.events] if self.trace is not None else []
        if len(kept) <= _MOST_IN_ORDER:
            return kept
        place = {rank: index for index, rank in enumerate(pipeline_by_pipeline(self.layout))}
        return sorted(kept, key=lambda each: place[each.rank])

    def _predicted(self, micro_batches: int) -> float | None:
        if self.layout.pp == 1 or not micro_batches:
            return None
        try:
            return predicted_bubble(
                find_schedule(self.schedule), self.layout.pp, self.layout.vp, micro_batches
            )
        except Lightning3DError:
            return None

    def _memory(self) -> list[dict[str, Any]]:
        shown = self._kept() or (list(self.trace.ranks) if self.trace is not None else [])
        return [
            {
                "rank": each.rank,
                "place": self._place(each.rank),
                **each.memory._asdict(),
                "total": each.memory.total,
            }
            for each in shown
        ]

    def _memory_note(self) -> str:
        if self.trace is None:
            return ""
        how = "peak of all tensors in the step"
        if self.trace.device == "cuda":
            how = "peak of the allocator since the run started"
        elif any(each.memory.activations is None for each in self.trace.ranks):
            how = "sizes of the tensors, without the activations of compiled blocks"
        note = f"in step {self.trace.step}: {how}"
        shown = len(self._memory())
        return note + (
            f"; {shown} of {self.layout.world_size} ranks" if shown < self.layout.world_size else ""
        )

    def _layout_note(self) -> str:
        order = " < ".join(axis for axis in self.layout.order if self.layout.size(axis) > 1)
        words = [f"{self.layout.world_size:,} rank{'s' * (self.layout.world_size > 1)}"]
        if order:
            words.append(f"axes from innermost to outermost: {order}")
        if self.layout.vp > 1:
            words.append(f"{self.layout.vp} stages of the model on each pipeline rank")
        if self.layout.ep > 1:
            words.append(f"experts sharded over {self.layout.ep} ranks")
        return "; ".join(words)

    def _nodes(self) -> tuple[list[dict[str, Any]], str]:
        """List machines with their ranks, and say how many are left out."""
        groups = self._ranks_by_node()
        nodes = [
            {
                "name": (
                    name
                    if len(ranks) <= _MOST_RANKS_OF_A_NODE
                    else f"{name}: the first {_MOST_RANKS_OF_A_NODE} of {len(ranks)} ranks"
                ),
                "ranks": [self._rank(rank) for rank in ranks[:_MOST_RANKS_OF_A_NODE]],
            }
            for name, ranks in groups[:_MOST_NODES]
        ]
        left = len(groups) - len(nodes)
        return nodes, f"{left} node{'s' * (left != 1)}" if left else ""

    def _ranks_by_node(self) -> list[tuple[str, list[int]]]:
        if self.trace is not None:
            by_host: dict[str, list[int]] = {}
            for each in self.trace.ranks:
                by_host.setdefault(each.host, []).append(each.rank)
            return [
                (f"node {index}: {host}", ranks)
                for index, (host, ranks) in enumerate(by_host.items())
            ]
        world, nodes = self.layout.world_size, max(1, self.about.nodes)
        size = math.ceil(world / nodes)
        return [
            (f"node {index}", list(range(first, min(first + size, world))))
            for index, first in enumerate(range(0, world, size))
        ]

    def _rank(self, rank: int) -> dict[str, Any]:
        place = self.layout.coordinates(rank)
        stages = _stages(self.schedule, place["pp"], self.layout)
        parts = [f"{axis}{index}" for axis, index in place.items() if self.layout.size(axis) > 1]
        tip = (
            f"rank {rank}\n{' '.join(parts) or 'all of the model'}\nstage{'s' * (len(stages) > 1)}"
            f" {', '.join(map(str, stages))}"
        )
        lines = [" ".join(parts[start : start + 2]) for start in range(0, len(parts), 2)]
        return {
            "rank": rank,
            "parts": lines,
            "tip": tip,
            "colour": _colour(place["pp"], self.layout.pp),
        }

    def _place(self, rank: int) -> str:
        return " ".join(
            f"{axis}{index}"
            for axis, index in self.layout.coordinates(rank).items()
            if self.layout.size(axis) > 1
        )


def _stages(schedule: str, pp_rank: int, layout: Layout) -> tuple[int, ...]:
    try:
        return stages_of_rank(pp_rank, layout.pp, layout.vp, find_schedule(schedule).v_shaped)
    except Lightning3DError:
        return (pp_rank,)


_COLOURS = ("#3b7ddd", "#d9822b", "#1f9e89", "#8e5bd0", "#d6498f", "#8a8f1c", "#0c9bb5", "#b5524a")


def _colour(stage: int, stages: int) -> str:
    """Choose a colour: as different as possible, and light enough for black and dark enough for
    white backgrounds."""
    return (
        _COLOURS[stage]
        if stages <= len(_COLOURS)
        else f"hsl({(212 + 300 * stage // stages) % 360} 62% 52%)"
    )


def _finite(cell: str | None) -> bool:
    try:
        return math.isfinite(float(cell or "nan"))
    except ValueError:
        return False


def _cells(rows: Iterable[Mapping[str, str]], name: str) -> list[float | None]:
    return [float(row[name]) if _finite(row.get(name)) else None for row in rows]


def thinned(steps: list[float | None], *columns: list[float | None]) -> list[list[float | None]]:
    """Thin out columns to about as many points as can be seen: of neighbours, keep the smallest and
    the largest of the first column."""
    count = len(steps)
    if count <= _MOST_POINTS:
        return [steps, *columns]
    kept = {0, count - 1}
    size = 2 * count / _MOST_POINTS
    for bucket in range(math.ceil(count / size)):
        places = range(round(bucket * size), min(count, round((bucket + 1) * size)))
        known = [(value, place) for place in places if (value := columns[0][place]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else set(places[:1])
    return [[column[place] for place in sorted(kept)] for column in (steps, *columns)]
