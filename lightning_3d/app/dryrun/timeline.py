"""Timeline of a pipeline: the actions of each rank, drawn as text and as SVG. Imports no torch.

The order of actions is the schedule's, simulated as in the planner. Their durations are given:
counted operations, predictions or measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lightning_3d.app.planner.timeline import StageSeconds, play
from lightning_3d.layout.pipeline_orders import Order


@dataclass(frozen=True)
class Bar:
    """An action with its start and end."""

    letter: str
    stage: int
    micro_batch: int
    start: float
    stop: float


def place(order: Order, duration: Mapping[tuple[str, int], float]) -> list[list[Bar]]:
    """Place the actions of each rank in time: each starts when the previous one on its rank and the
    one that it depends on have ended.

    Args:
        order: order of the actions of all ranks.
        duration: duration of an action by (letter, stage), in any unit. Messages take no time.
    """
    stages = [
        _seconds(stage, duration)
        for stage in range(1 + max(stage for actions in order for stage, _, _ in actions))
    ]
    bars: list[list[Bar]] = [[] for _ in order]
    for rank, stage, letter, index, start, stop in play(order, stages, keep=True).events:
        bars[rank].append(Bar(letter, stage, index, start, stop))
    return bars


def _seconds(stage: int, duration: Mapping[tuple[str, int], float]) -> StageSeconds:
    weights = duration.get(("W", stage), 0.0)
    return StageSeconds(
        duration["F", stage],
        duration.get(("B", stage), duration.get(("I", stage), 0.0) + weights),
        weights,
    )


def idle(bars: Sequence[Sequence[Bar]]) -> float:
    """Return the share of the time of all ranks in which they are idle, 0 to 1."""
    end = max(bar.stop for rank in bars for bar in rank)
    return 1 - sum(bar.stop - bar.start for rank in bars for bar in rank) / (end * len(bars))


def as_text(bars: Sequence[Sequence[Bar]], width: int = 100) -> str:
    """Draw one line for each rank: the letter of its action, in capitals for its first stage, and a
    dot while it waits."""
    end = max(bar.stop for rank in bars for bar in rank)
    lines = []
    for number, rank in enumerate(bars):
        first = min((bar.stage for bar in rank), default=0)
        line = ["."] * width
        for bar in rank:
            for cell in range(
                round(bar.start / end * width),
                max(round(bar.stop / end * width), round(bar.start / end * width) + 1),
            ):
                if cell < width:
                    line[cell] = bar.letter if bar.stage == first else bar.letter.lower()
        lines.append(f"  pp {number:<3} {''.join(line)}")
    return "\n".join(lines)


_COLOURS = {"F": "#4c78a8", "B": "#59a14f", "I": "#8cd17d", "W": "#b6992d"}
_WORDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def as_svg(bars: Sequence[Sequence[Bar]], title: str, width: int = 1400, row: int = 28) -> str:
    """Draw a row for each rank and a box for each action, paler for later stages of a rank."""
    end = max(bar.stop for rank in bars for bar in rank)
    scale, left, top = (width - 70) / end, 60, 54
    height = top + row * len(bars) + 10
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="11">'
        ),
        (
            f'<rect width="{width}" height="{height}" fill="white"/><text x="8" y="18"'
            f' font-size="14">{escape(title)}</text>'
        ),
    ]
    for place_, (letter, word) in enumerate(_WORDS.items()):
        parts.append(
            f'<rect x="{left + 150 * place_}" y="28" width="12" height="12"'
            f' fill="{_COLOURS[letter]}"/>'
        )
        parts.append(f'<text x="{left + 150 * place_ + 17}" y="38">{word}</text>')
    for number, rank in enumerate(bars):
        y = top + row * number
        parts.append(f'<text x="8" y="{y + row / 2 + 3:.0f}">pp {number}</text>')
        stages = sorted({bar.stage for bar in rank})
        for bar in rank:
            opacity = 1 - 0.45 * stages.index(bar.stage) / max(1, len(stages))
            x, w = left + bar.start * scale, max((bar.stop - bar.start) * scale, 0.3)
            name = f"{_WORDS[bar.letter]} of micro-batch {bar.micro_batch}, stage {bar.stage}"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{row - 4}"'
                f' fill="{_COLOURS[bar.letter]}" fill-opacity="{opacity:.2f}" stroke="white"'
                f' stroke-width="0.4"><title>{name}</title></rect>'
            )
            if w > 16:
                parts.append(
                    f'<text x="{x + 3:.2f}" y="{y + row / 2 + 2:.0f}"'
                    f' fill="white">{bar.micro_batch}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])
