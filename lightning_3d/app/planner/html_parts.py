"""Parts of an HTML page of the planner: cards, legends and figures. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, log10


def card(heading: str, note: str, content: str) -> str:
    """Return a part of the page with a heading and a note below it."""
    return (
        f'<section class="card"><h2>{escape(heading)}</h2><p'
        f' class="note">{escape(note)}</p>{content}</section>'
    )


def marks_between(low: float, high: float, count: int) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** int(log10(rough) // 1)
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough)
    return [place * step for place in range(ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Draw a legend of (words, colour); a colour is a value or a name in the style."""
    spans = "".join(
        '<span><i style="background:'
        f' {colour if colour.startswith("#") else f"var(--{colour})"}"></i>{escape(words)}</span>'
        for words, colour in entries
    )
    return f'<div class="legend">{spans}</div>' if spans else ""


def svg(width: float, height: float, marks: Sequence[str], *, least: int) -> str:
    """Draw a figure as wide as the page and at least `least` pixels; a wider figure can be
    scrolled."""
    look = f'style="min-width: {least}px; max-width: {width}px"'
    return (
        f'<div class="figure"><svg viewBox="0 0 {width} {height}" {look}'
        f' role="img">{"".join(marks)}</svg></div>'
    )
