"""The card of `plan.html` that shows the efficiency on fewer and more GPUs. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log2

from lightning_3d.app.planner.html_parts import card, legend, marks_between, svg
from lightning_3d.app.planner.scaling import SERIES, Point, Series, efficiencies
from lightning_3d.app.planner.tables import describe, tokens_per_second

_COLOURS = {"fixed": "accent", "proportional": "second"}
_WIDTH, _HEIGHT = 1100, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 40, 24, 44
_NOTE = (
    "tokens/s of one {unit} with the fastest layout, compared with the fewest {unit}s on which a"
    " layout fits; predicted"
)


def scaling_card(series: Series, unit: str = "GPU") -> str:
    """Draw efficiency against the number of GPUs, one line for each series.

    Args:
        unit: word for a GPU, as in `Machine`.
    """
    note = _NOTE.format(unit=unit)
    values = [
        value for points in series.values() for value in efficiencies(points) if value is not None
    ]
    if not values:
        return card("Scaling", note, "<p>No layout fits.</p>")
    axes = _Axes(
        [point.gpus for points in series.values() for point in points], [0.0, 1.0, *values], unit
    )
    marks = axes.marks()
    for name, points in series.items():
        marks += _line(axes, points, _COLOURS[name], unit)
    entries = [
        (SERIES[name].format(unit=unit), _COLOURS[name])
        for name, points in series.items()
        if points
    ]
    return card("Scaling", note, legend(entries) + svg(_WIDTH, _HEIGHT, marks, least=760))


class _Axes:
    """Places of numbers of GPUs, which grow by factors, and of efficiencies."""

    def __init__(self, gpus: Sequence[int], values: Sequence[float], unit: str) -> None:
        self._unit = unit
        self._gpus = sorted(set(gpus))
        self._values = min(values), 1.05 * max(values)

    def across(self, gpus: int) -> float:
        first, last = log2(self._gpus[0]), log2(self._gpus[-1])
        share = (log2(gpus) - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def up(self, value: float) -> float:
        low, high = self._values
        return _TOP + (1 - (value - low) / (high - low)) * (_HEIGHT - _TOP - _BOTTOM)

    def marks(self) -> list[str]:
        """Draw the grid with its numbers."""
        low, high = self._values
        marks = ['<text x="0" y="12">efficiency</text>']
        for value in marks_between(low, high, 5):
            y = self.up(value)
            marks.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}"'
                f' y2="{y:.1f}"/>'
            )
            marks.append(
                f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.0%}</text>'
            )
        floor = _HEIGHT - _BOTTOM
        marks.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>'
        )
        marks += [
            f'<text x="{self.across(gpus):.1f}" y="{floor + 17}"'
            f' text-anchor="middle">{gpus:,}</text>'
            for gpus in self._gpus
        ]
        return [
            *marks,
            f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{self._unit}s</text>',
        ]


def _line(axes: _Axes, points: Sequence[Point], colour: str, unit: str) -> list[str]:
    marks, path = [], []
    for point, value in zip(points, efficiencies(points), strict=True):
        if point.best is None or value is None:
            continue
        x, y = axes.across(point.gpus), axes.up(value)
        path.append(f"{x:.1f},{y:.1f}")
        label = (
            f"{point.gpus:,} {unit}s, global batch {point.global_batch:,},"
            f" {describe(point.best.job)}: {value:.0%},"
        )
        label += f" {tokens_per_second(point.best):,.0f} tokens/s"
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"'
            f' fill="var(--{colour})"><title>{escape(label)}</title></circle>'
        )
    return [
        (
            f'<polyline points="{" ".join(path)}" fill="none" stroke="var(--{colour})"'
            ' stroke-width="2"/>'
        ),
        *marks,
    ]
