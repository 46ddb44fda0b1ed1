"""`plan.html`: what the planner found, as one file without scripts or anything from elsewhere. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightning_3d.planner.machine import Machine
from lightning_3d.planner.search import Candidate, Found
from lightning_3d.planner.step import step_of
from lightning_3d.planner.text import PARTS, describe, gigabytes, reason, share_of_peak, tokens_per_second

_COLOURS = ("#4c78a8", "#f58518", "#9d755d", "#e45756", "#72b7b2", "#54a24b", "#b279a2", "#eeca3b")
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;text-align:left;border-bottom:1px solid #ddd}
code{background:#f4f4f4;padding:.1rem .3rem}svg{display:block;margin:1rem 0;max-width:100%}text{font:12px system-ui,sans-serif;fill:#333}"""


def page(found: Found, machine: Machine, title: str) -> str:
    """The whole page."""
    first = found.best[0]
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p><code>{escape(describe(first.job))}</code></p>",
        _table(found, machine),
        "<h2>Memory against speed</h2>",
        _pareto(found.seen, first, machine),
        "<h2>Where a step's time goes</h2>",
        _bars(found.best),
        "<h2>The fastest layout on the nodes</h2>",
        _nodes(first, machine),
    ]
    if first.job.layout.pp > 1:
        sections += ["<h2>Its pipeline</h2>", _timeline(first, machine)]
    counted = f"{found.shapes} shapes divide model and batch, {found.expanded} could be among the fastest"
    counted += f", {len(found.simulated)} schedules were played."
    sections.append(f"<p>{counted}</p>")
    body = "\n".join(sections)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _table(found: Found, machine: Machine) -> str:
    rows = ["<tr><th>layout</th><th>s / step</th><th>tokens/s</th><th>MFU</th><th>memory</th><th>loses by</th></tr>"]
    for one in found.best:
        cells = (
            describe(one.job).removeprefix("parallelism=").replace("parallelism.", ""),
            f"{one.step.seconds:.3g}",
            f"{tokens_per_second(one):,.0f}",
            f"{share_of_peak(one, machine.gpus, machine.peak):.0%}",
            gigabytes(one.memory.total),
            reason(one, found.best[0]),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those than which none is both faster and smaller, the smallest first."""
    front: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.memory.total, one.step.seconds)):
        if not front or one.step.seconds < front[-1].step.seconds:
            front.append(one)
    return front


def _pareto(candidates: Sequence[Candidate], first: Candidate, machine: Machine) -> str:
    width, height, left, bottom = 720, 320, 90, 40
    most = max(machine.memory, max(one.memory.total for one in candidates))
    fastest = max(map(tokens_per_second, candidates)) * 1.05

    def place(one: Candidate) -> tuple[float, float]:
        return left + one.memory.total / most * (width - left - 20), (height - bottom) * (1 - tokens_per_second(one) / fastest) + 5

    marks = [f'<line x1="{left}" y1="{height - bottom}" x2="{width}" y2="{height - bottom}" stroke="#888"/>']
    marks.append(f'<line x1="{left}" y1="0" x2="{left}" y2="{height - bottom}" stroke="#888"/>')
    full = left + machine.memory / most * (width - left - 20)
    marks.append(f'<line x1="{full:.1f}" y1="0" x2="{full:.1f}" y2="{height - bottom}" stroke="#c33" stroke-dasharray="4"/>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, pareto(candidates)))
    marks.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS[1]}"/>')
    for one in candidates:
        x, y = place(one)
        colour, size = (_COLOURS[1], 6) if one is first else (_COLOURS[0], 4)
        told = f"{describe(one.job)}: {tokens_per_second(one):,.0f} tokens/s, {gigabytes(one.memory.total)}"
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}"><title>{escape(told)}</title></circle>')
    marks += [
        f'<text x="{width - 20}" y="{height - 8}" text-anchor="end">memory of the fullest rank, up to {gigabytes(most)}</text>',
        f'<text x="{left - 6}" y="12" text-anchor="end">{fastest:,.0f}</text>',
        f'<text x="{left - 6}" y="{height - bottom}" text-anchor="end">0</text>',
        f'<text x="4" y="{height / 2}">tokens/s</text>',
    ]
    return _svg(width, height, marks)


def _bars(best: Sequence[Candidate]) -> str:
    width, left, row = 900, 240, 26
    longest = max(one.step.seconds for one in best)
    marks = []
    for index, one in enumerate(best):
        x, y = float(left), 24 + index * row
        marks.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(one.job.layout.name)}</text>')
        for part, colour in zip(PARTS, _COLOURS, strict=False):
            seconds = getattr(one.step, part)
            length = seconds / longest * (width - left - 60)
            marks.append(_rectangle(x, y, max(0.0, length), 20, colour, f"{part}: {seconds:.3g} s"))
            x += length
        marks.append(f'<text x="{x + 4:.1f}" y="{y + 15}">{one.step.seconds:.3g} s</text>')
    for index, (part, colour) in enumerate(zip(PARTS, _COLOURS, strict=False)):
        x = left + index * 115
        marks.append(f'<rect x="{x}" y="4" width="10" height="10" fill="{colour}"/><text x="{x + 14}" y="13">{part}</text>')
    return _svg(width, 34 + len(best) * row, marks)


def _nodes(candidate: Candidate, machine: Machine) -> str:
    """GPUs as squares: the colour is the pipeline rank, the letters are the indices along tp, cp, pp, dp."""
    layout = candidate.job.layout
    shown = min(machine.nodes, 16)
    side = 34
    marks = []
    wide = machine.gpus_per_node if machine.gpus_per_node <= 16 else 16
    for node in range(shown):
        for gpu in range(machine.gpus_per_node):
            rank = node * machine.gpus_per_node + gpu
            at = layout.coordinates(rank)
            x, y = 70 + (gpu % wide) * side, 8 + (node * -(-machine.gpus_per_node // wide) + gpu // wide) * side
            told = f"rank {rank}: " + ", ".join(f"{axis} {index}" for axis, index in at.items() if layout.size(axis) > 1)
            marks.append(_rectangle(x, y, side - 4, side - 4, _COLOURS[at["pp"] % len(_COLOURS)], told))
            marks.append(f'<text x="{x + 15}" y="{y + 19}" text-anchor="middle">{at["pp"]}.{at["tp"]}</text>')
        marks.append(f'<text x="4" y="{28 + node * -(-machine.gpus_per_node // wide) * side}">node {node}</text>')
    rest = f"<p>{machine.nodes - shown} more nodes follow in the same order.</p>" if machine.nodes > shown else ""
    rows = shown * -(-machine.gpus_per_node // wide)
    return _svg(90 + wide * side, 16 + rows * side, marks) + f"<p>In a square: pipeline rank . tensor-parallel rank.</p>{rest}"


def _timeline(candidate: Candidate, machine: Machine) -> str:
    """All actions of a step: forward, backward, gradients of weights."""
    timeline = step_of(candidate.job, machine, keep=True).timeline
    assert timeline is not None
    width, left, row = 900, 60, 16
    end = min(timeline.seconds, timeline.events[-1][5]) if len(timeline.events) <= 4000 else timeline.seconds * 4000 / len(timeline.events)
    colours = {"F": _COLOURS[0], "B": _COLOURS[1], "I": _COLOURS[1], "W": _COLOURS[5]}
    marks = [f'<text x="4" y="{13 + rank * row}">rank {rank}</text>' for rank in range(candidate.job.layout.pp)]
    for rank, stage, kind, index, start, stop in timeline.events:
        if stop <= end:
            x, length = left + start / end * (width - left), (stop - start) / end * (width - left)
            marks.append(_rectangle(x, 2 + rank * row, length, row - 3, colours[kind], f"stage {stage}, {kind}, micro-batch {index}"))
    part = "" if end >= timeline.seconds * 0.999 else f" The first {end:.3g} of {timeline.seconds:.3g} s."
    legend = f"<p>Forward blue, backward orange, gradients of weights green.{part}</p>"
    return _svg(width, 8 + candidate.job.layout.pp * row, marks) + legend


def _rectangle(x: float, y: float, width: float, height: float, colour: str, told: str) -> str:
    """What a pointer over it tells is its title."""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{colour}" stroke="#fff" stroke-width="0.3"><title>{escape(told)}</title></rect>'


def _svg(width: float, height: float, marks: Sequence[str]) -> str:
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">{"".join(marks)}</svg>'
