"""When each rank of a pipeline does what, drawn as text and as SVG. Imports no torch.

The order of actions is the schedule's; how long one takes is a function that is given: of operations counted, of a model, of a
measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol


class Action(Protocol):
    """As in `pipeline.schedule`: the letters of kinds are F, B, I and W."""

    @property
    def kind(self) -> Letter: ...
    @property
    def stage(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...


class Letter(Protocol):
    """A kind of action."""

    @property
    def value(self) -> str: ...


@dataclass(frozen=True)
class Bar:
    """An action in time."""

    letter: str
    stage: int
    micro_batch: int
    start: float
    stop: float


def place(order: Sequence[Sequence[Action]], duration: Callable[[str, int], float]) -> list[list[Bar]]:
    """The actions of each rank in time: each begins when the one before it on its rank, and the one that it waits for, are over.

    Args:
        order: of all ranks. duration: (letter, stage) -> how long an action takes, in any unit. Messages take no time.
    """
    stages = 1 + max(action.stage for actions in order for action in actions)
    done: dict[tuple[str, int, int], float] = {}
    bars: list[list[Bar]] = [[] for _ in order]
    left = sum(map(len, order))
    while left:
        before = left
        for rank, actions in enumerate(order):
            while len(bars[rank]) < len(actions):
                action = actions[len(bars[rank])]
                letter, stage, index = action.kind.value, action.stage, action.micro_batch
                ready = _ready(letter, stage, index, stages, done)
                if ready is None:
                    break
                start = max(ready, bars[rank][-1].stop if bars[rank] else 0.0)
                bar = Bar(letter, stage, index, start, start + duration(letter, stage))
                bars[rank].append(bar)
                done["gradient" if letter in "BI" else letter, stage, index] = bar.stop
                left -= 1
        if left == before:
            raise ValueError("The actions of this order wait for each other.")
    return bars


def _ready(letter: str, stage: int, index: int, stages: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """When what an action waits for is over; None where that is not known yet."""
    if letter == "W":
        return done.get(("gradient", stage, index))
    if letter == "F":
        return 0.0 if stage == 0 else done.get(("F", stage - 1, index))
    own = done.get(("F", stage, index))
    behind = 0.0 if stage == stages - 1 else done.get(("gradient", stage + 1, index))
    return None if own is None or behind is None else max(own, behind)


def idle(bars: Sequence[Sequence[Bar]]) -> float:
    """Share of the time of all ranks in which they do nothing, 0 to 1."""
    end = max(bar.stop for rank in bars for bar in rank)
    return 1 - sum(bar.stop - bar.start for rank in bars for bar in rank) / (end * len(bars))


def as_text(bars: Sequence[Sequence[Bar]], width: int = 100) -> str:
    """One line a rank; `F` and so on while it works, in capitals for its first stage, a dot where it waits."""
    end = max(bar.stop for rank in bars for bar in rank)
    lines = []
    for number, rank in enumerate(bars):
        first = min((bar.stage for bar in rank), default=0)
        line = ["."] * width
        for bar in rank:
            for cell in range(round(bar.start / end * width), max(round(bar.stop / end * width), round(bar.start / end * width) + 1)):
                if cell < width:
                    line[cell] = bar.letter if bar.stage == first else bar.letter.lower()
        lines.append(f"  pp {number:<3} {''.join(line)}")
    return "\n".join(lines)


_COLOURS = {"F": "#4c78a8", "B": "#59a14f", "I": "#8cd17d", "W": "#b6992d"}
_WORDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def as_svg(bars: Sequence[Sequence[Bar]], title: str, width: int = 1400, row: int = 28) -> str:
    """A drawing: a row for each rank, a box for each action, darker for later stages of a rank."""
    end = max(bar.stop for rank in bars for bar in rank)
    scale, left, top = (width - 70) / end, 60, 54
    height = top + row * len(bars) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="8" y="18" font-size="14">{escape(title)}</text>',
    ]
    for place_, (letter, word) in enumerate(_WORDS.items()):
        parts.append(f'<rect x="{left + 150 * place_}" y="28" width="12" height="12" fill="{_COLOURS[letter]}"/>')
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
                f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{row - 4}" fill="{_COLOURS[bar.letter]}" fill-opacity="{opacity:.2f}"'
                f' stroke="white" stroke-width="0.4"><title>{name}</title></rect>'
            )
            if w > 16:
                parts.append(f'<text x="{x + 3:.2f}" y="{y + row / 2 + 2:.0f}" fill="white">{bar.micro_batch}</text>')
    return "\n".join([*parts, "</svg>", ""])
