"""`plan.html`: the result of a search as one file without scripts or external resources. Pure
Python."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightning_3d.app.planner.html_parts import card, legend, marks_between, svg
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.memory_risk import largest_share
from lightning_3d.app.planner.scaling import Series
from lightning_3d.app.planner.scaling_figure import scaling_card
from lightning_3d.app.planner.search import Candidate, SearchResult
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.app.planner.tables import (
    COMPARED,
    PARTS,
    compare,
    describe,
    margin,
    share_of_peak,
    tokens_per_second,
)
from lightning_3d.errors import plural
from lightning_3d.storage.numbers import gibibytes

_STAGES = ("#3b7ddd", "#d9822b", "#1f9e89", "#8e5bd0", "#d6498f", "#8a8f1c", "#0c9bb5", "#b5524a")
_PARTS = ("forward", "backward", "send", "receive", "reduce", "optimizer")
"""Colours of `PARTS`, and of what a pipeline does, by their names in the style of reports."""
_ACTIONS = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("input-gradient", "backward: inputs"),
    "W": ("weight-gradient", "backward: weights"),
}
_MOST_NODES = 16
_MOST_ACTIONS = 220
"""Most actions of one rank that are drawn, so that each is visible."""
_STYLE = """
header pre { white-space: pre-wrap; }
.figure { overflow-x: auto; } .figure svg { width: 100%; height: auto; display: block; }
.ranks { grid-template-columns: repeat(4, minmax(0, 1fr)); }
.part { display: grid; grid-template-columns: 210px minmax(0, 1fr) 60px; gap: 2px 12px; align-items: center; font-size: 13px; }
.part { margin-top: 6px; } .stack { display: flex; height: 20px; } .stack i { border-right: 1px solid var(--card); }
.part span:last-child { text-align: right; }
td.layout { white-space: normal; min-width: 210px; } td.layout b { display: block; }
@media (max-width: 760px) { .part { grid-template-columns: minmax(0, 1fr) 60px; } .stack { grid-row: 2; grid-column: span 2; }
  .figure svg text { font-size: 17px; } }
"""  # noqa: E501

_PARETO_NOTE = (
    "numbers refer to the rows above; a line joins the layouts that no other layout beats in both"
    " speed and memory"
)


def page(
    found: SearchResult,
    machine: Machine,
    title: str,
    style: str = "",
    risk: float = 0.5,
    command: str = "",
    series: Series | None = None,
) -> str:
    """Return the whole page.

    Args:
        found: result of the search; not empty.
        machine: the cluster.
        title: heading of the page.
        style: style sheet of the reports, so that all pages look alike.
        risk: largest probability with which a layout may run out of memory.
        command: command line that trains with the first layout, for the head of the page; its keys
            of `parallelism` if empty.
        series: the fastest layouts on fewer and more GPUs, if they were searched.
    """
    first = found.best[0]
    cards = [
        card("The fastest layouts", "predicted; the first is drawn below", _table(found, machine)),
        card("Memory against speed", _PARETO_NOTE, _pareto(found, machine, risk)),
        card("Where a step's time goes", "on the busiest rank", _bars(found.best)),
        card(f"{first.job.layout.name} on the nodes", _order(first), _nodes(first, machine)),
    ]
    if first.job.layout.pp > 1:
        cards.append(_timeline(first, machine))
    if series is not None:
        cards.append(scaling_card(series, machine.unit))
    counted = (
        f"{found.shapes:,} layouts and micro-batch sizes divide the model and the batch;"
        f" {found.expanded:,}"
    )
    counted += f" could be among the fastest; {plural(len(found.simulated), 'schedule')} simulated"
    body = f"<header><h1>{escape(title)}</h1><pre>{escape(command or describe(first.job))}</pre></header>\n{_tiles(first, machine)}\n"  # noqa: E501
    body += "\n".join(cards) + f"\n<footer>{counted}</footer>"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    head += (
        '<meta name="color-scheme" content="light'
        f' dark"><title>{escape(title)}</title><style>{style}{_STYLE}</style>'
    )
    return (
        "<!doctype html>\n<html"
        f' lang="en"><head>{head}</head>\n<body><main>{body}</main></body></html>\n'
    )


def _tiles(first: Candidate, machine: Machine) -> str:
    step = first.step
    tiles = (
        (
            "Tokens/s",
            f"{tokens_per_second(first):,.0f}",
            f"MFU {share_of_peak(first, machine.gpus, machine):.0%}",
        ),
        (
            "Step",
            f"{step.seconds:.3g} s",
            f"{first.job.global_batch:,} sequences of {first.job.seq:,}",
        ),
        ("Bubble", f"{step.bubble / step.seconds:.1%}", "of the step"),
        ("Memory", gibibytes(first.memory.total), f"{margin(first.memory, machine)}, fullest rank"),
        (
            f"{machine.unit}s",
            f"{machine.gpus:,}",
            f"{machine.nodes} x {machine.gpus_per_node} {machine.gpu}",
        ),
    )
    cells = (
        f'<div class="label">{escape(label)}</div><div class="value">{value}</div><div'
        f' class="more">{escape(more)}</div>'
        for label, value, more in tiles
    )
    content = "".join(f'<div class="tile">{cell}</div>' for cell in cells)
    return f'<div class="tiles">{content}</div>'


def _table(found: SearchResult, machine: Machine) -> str:
    names = (
        "",
        "layout",
        "s / step",
        "tokens/s",
        "MFU",
        "memory",
        f"of {machine.unit}",
        "free",
        COMPARED,
    )
    number = ' class="number"'
    head = "".join(
        f"<th{number if 2 <= place <= 7 else ''}>{name}</th>" for place, name in enumerate(names)
    )
    rows = []
    for place, one in enumerate(found.best, 1):
        name, *keys = (
            describe(one.job).replace("parallelism=", "").replace("parallelism.", "").split()
        )
        cells = (
            f"{one.step.seconds:.3g}",
            f"{tokens_per_second(one):,.0f}",
            f"{share_of_peak(one, machine.gpus, machine):.0%}",
            gibibytes(one.memory.total),
            f"{one.memory.total / machine.memory:.0%}",
            gibibytes(machine.memory - one.memory.total),
        )
        row = (
            f'<td>{place}</td><td class="layout"><b>{escape(name)}</b><span'
            f' class="muted">{escape(" ".join(keys))}</span></td>'
        )
        row += "".join(f"<td{number}>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr>{row}<td class="layout">{escape(compare(one, found.best[0]))}</td></tr>')
    return (
        "<div"
        f' class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'  # noqa: E501
    )


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates for which no other is both faster and smaller, smallest first."""
    front: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.memory.total, one.step.seconds)):
        if not front or one.step.seconds < front[-1].step.seconds:
            front.append(one)
    return front


def _pareto(found: SearchResult, machine: Machine, risk: float) -> str:
    width, height, left, right, top, bottom = 1100, 340, 76, 24, 28, 44
    sizes = [one.memory.total / 2**30 for one in found.seen]
    speeds = [tokens_per_second(one) for one in found.seen]
    most = max(*sizes, machine.memory / 2**30)
    least, slowest, fastest = min(sizes), min(speeds), max(speeds)
    x_low, x_high = least - 0.08 * (most - least or most), most + 0.04 * (most - least or most)
    y_low, y_high = (
        slowest - 0.15 * (fastest - slowest or fastest),
        fastest + 0.15 * (fastest - slowest or fastest),
    )

    def across(size: float) -> float:
        return left + (size - x_low) / (x_high - x_low) * (width - left - right)

    def up(speed: float) -> float:
        return top + (1 - (speed - y_low) / (y_high - y_low)) * (height - top - bottom)

    marks = []
    for speed in marks_between(y_low, y_high, 5):
        marks.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{up(speed):.1f}"'
            f' y2="{up(speed):.1f}"/>'
        )
        marks.append(
            f'<text x="{left - 8}" y="{up(speed) + 4:.1f}" text-anchor="end">{speed:,.0f}</text>'
        )
    marks.append(
        f'<line class="axis" x1="{left}" x2="{width - right}" y1="{height - bottom}"'
        f' y2="{height - bottom}"/>'
    )
    marks += [
        f'<text x="{across(size):.1f}" y="{height - bottom + 17}"'
        f' text-anchor="middle">{size:g}</text>'
        for size in marks_between(x_low, x_high, 8)
    ]
    full = across(machine.memory / 2**30)
    marks.append(
        f'<line x1="{full:.1f}" x2="{full:.1f}" y1="{top}" y2="{height - bottom}"'
        ' stroke="var(--bad)" stroke-dasharray="5 4"/>'
    )
    marks.append(
        f'<text x="{full - 6:.1f}" y="{top - 8}" text-anchor="end">all of a {machine.unit}:'
        f" {gibibytes(machine.memory)}</text>"
    )
    if risk < 0.5:
        room = across(largest_share(risk) * machine.memory / 2**30)
        ends = f'x1="{room:.1f}" x2="{room:.1f}" y1="{top}" y2="{height - bottom}"'
        marks.append(f'<line {ends} stroke="var(--muted)" stroke-dasharray="2 4"/>')
        marks.append(
            f'<text x="{room - 6:.1f}" y="{top + 8}" text-anchor="end">fits with'
            f" {1 - risk:.0%}</text>"
        )
    front = " ".join(
        f"{across(one.memory.total / 2**30):.1f},{up(tokens_per_second(one)):.1f}"
        for one in pareto(found.seen)
    )
    marks.append(
        f'<polyline points="{front}" fill="none" stroke="var(--accent)" stroke-width="1.5"'
        ' stroke-dasharray="5 4"/>'
    )
    places = {id(one): place for place, one in enumerate(found.best, 1)}
    for one in sorted(found.seen, key=lambda one: id(one) in places):
        x, y, place = (
            across(one.memory.total / 2**30),
            up(tokens_per_second(one)),
            places.get(id(one)),
        )
        look = (
            'r="9" fill="var(--accent)"'
            if place
            else 'r="5" fill="var(--card)" stroke="var(--muted)" stroke-width="2"'
        )
        label = (
            f"{describe(one.job)}: {tokens_per_second(one):,.0f} tokens/s,"
            f" {gibibytes(one.memory.total)}"
        )
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" {look}><title>{escape(label)}</title></circle>'
        )
        marks += (
            [f'<text class="inside" x="{x:.1f}" y="{y + 4:.1f}">{place}</text>'] if place else []
        )
    marks.append(
        f'<text x="{width - right}" y="{height - 6}" text-anchor="end">GiB of the fullest'
        " rank</text>"
    )
    marks.append('<text x="0" y="12">tokens/s</text>')
    return svg(width, height, marks, least=760)


def _bars(best: Sequence[Candidate]) -> str:
    longest = max(one.step.seconds for one in best)
    entries = zip(PARTS, _PARTS, strict=True)
    rows = []
    for place, one in enumerate(best, 1):
        parts = (
            (part, colour, max(0.0, getattr(one.step, part)))
            for part, colour in zip(PARTS, _PARTS, strict=True)
        )
        bars = "".join(
            f'<i style="width: {100 * seconds / longest:.2f}%; background: var(--{colour})"'
            f' title="{part}: {seconds:.3g} s"></i>'
            for part, colour, seconds in parts
            if seconds > 0
        )
        name = f"<span>{place} {escape(one.job.layout.name)}</span>"
        rows.append(
            f'<div class="part">{name}<div class="stack">{bars}</div><span'
            f' class="muted">{one.step.seconds:.3g} s</span></div>'
        )
    return legend(entries) + "".join(rows)


def _order(candidate: Candidate) -> str:
    layout = candidate.job.layout
    axes = " < ".join(axis for axis in layout.order if layout.size(axis) > 1)
    return f"{layout.world_size:,} ranks; axes from innermost to outermost: {axes}"


def _nodes(candidate: Candidate, machine: Machine) -> str:
    """Draw the ranks of each node, as in reports; the colour is the pipeline rank."""
    layout = candidate.job.layout
    shown = min(machine.nodes, _MOST_NODES)
    nodes = []
    for node in range(shown):
        first = node * machine.gpus_per_node
        ranks = "".join(
            _rank(candidate, rank) for rank in range(first, first + machine.gpus_per_node)
        )
        nodes.append(f'<div class="node"><p>node {node}</p><div class="ranks">{ranks}</div></div>')
    rest = (
        f'<p class="note" style="margin-top: 12px">and {machine.nodes - shown} more nodes</p>'
        if machine.nodes > shown
        else ""
    )
    stages = (
        (f"pp{stage}", _stage(stage))
        for stage in range(min(layout.pp, len(_STAGES)) if layout.pp > 1 else 0)
    )
    return f'{legend(stages)}<div class="nodes">{"".join(nodes)}</div>{rest}'


def _rank(candidate: Candidate, rank: int) -> str:
    layout = candidate.job.layout
    at = layout.coordinates(rank)
    parts = [f"{axis}{index}" for axis, index in at.items() if layout.size(axis) > 1]
    lines = "".join(
        f"<small>{' '.join(pair)}</small>"
        for pair in (parts[place : place + 2] for place in range(0, len(parts), 2))
    )
    return f'<div class="rank" style="--stage: {_stage(at["pp"])}"><b>{rank}</b>{lines}</div>'


def _stage(index: int) -> str:
    return _STAGES[index % len(_STAGES)]


def _timeline(candidate: Candidate, machine: Machine) -> str:
    """Draw the actions of a step, as many from its start as stay visible."""
    timeline = step_of(candidate.job, machine, keep=True).timeline
    assert timeline is not None
    ranks = candidate.job.layout.pp
    width, left, row, top = 1100, 60, 24, 22
    starts = sorted(event[4] for event in timeline.events if event[0] == 0)
    end = (
        starts[_MOST_ACTIONS]
        if len(starts) > _MOST_ACTIONS
        else max(event[5] for event in timeline.events)
    )
    scale = (width - left - 20) / end
    marks = []
    for moment in marks_between(0, end, 8):
        x = left + moment * scale
        marks.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}"'
            f' y2="{top + ranks * row}"/>'
        )
        marks.append(f'<text x="{x:.1f}" y="12" text-anchor="middle">{moment:.3g} s</text>')
    for rank in range(ranks):
        marks.append(f'<text x="0" y="{top + rank * row + 15}">rank {rank}</text>')
        marks.append(
            f'<rect class="idle" x="{left}" y="{top + rank * row + 2}" width="{end * scale:.1f}"'
            f' height="{row - 6}"/>'
        )
    seen = {}
    for rank, stage, kind, index, start, stop in timeline.events:
        if stop <= end:
            name, words = seen[kind] = _ACTIONS[kind]
            place = (
                f'x="{left + start * scale:.2f}" y="{top + rank * row + 2}"'
                f' width="{(stop - start) * scale:.2f}" height="{row - 6}"'
            )
            label = f"<title>stage {stage}, {words}, micro-batch {index}</title>"
            marks.append(
                f'<rect class="{name}" {place} stroke="var(--card)"'
                f' stroke-width="0.5">{label}</rect>'
            )
    part = (
        f"the first {end:.3g} of {timeline.seconds:.3g} s"
        if end < timeline.seconds * 0.99
        else "all of a step"
    )
    entries = [(words, name) for name, words in (seen[kind] for kind in _ACTIONS if kind in seen)]
    content = legend([*entries, ("bubble", "idle")]) + svg(
        width, top + ranks * row + 6, marks, least=900
    )
    return card("Its pipeline", f"{candidate.job.schedule}: {part}, as predicted", content)
