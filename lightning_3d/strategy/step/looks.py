"""What the proof of the loss sees of a call of the step, and which random numbers it gives to parts of a micro-batch."""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_3d.strategy.step.row_random import DrawnShapes, RowDraws, Shape


class FirstLook(DrawnShapes):
    """Records of a micro-batch, while it runs, what draws random numbers and how exact its arithmetic is.

    Attributes:
        epsilon: largest machine epsilon of any result.
        communicates: whether it sends to other ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 0.0
        self.communicates = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.epsilon = max(self.epsilon, torch.finfo(result.dtype).eps)
        self.communicates = self.communicates or getattr(func, "namespace", "") == "c10d"
        return result


class HostDraws:
    """Draws from the generators of Python and numpy in a step, which have no rows."""

    def __init__(self) -> None:
        self._whole: dict[int, tuple[Hashable, Hashable]] = {}
        self.unpaired = False

    @contextmanager
    def of_whole(self, stage: int) -> Iterator[None]:
        """Context of the step on the whole."""
        before = self._state()
        yield
        self._whole[stage] = before, self._state()

    @contextmanager
    def of_part(self, stage: int) -> Iterator[None]:
        """Context of the step on a part."""
        before = self._state()
        yield
        after = self._state()
        if (before != after or self._draws(stage)) and self._whole.get(stage) != (before, after):
            self.unpaired = True

    def _draws(self, stage: int) -> bool:
        before, after = self._whole.get(stage, (None, None))
        return before != after

    def _state(self) -> Hashable:
        numpy = sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy is not None else ()
        return random.getstate(), tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


class DrawsOfPart:
    """The look at a part: it draws the random numbers that its rows have in the whole.

    Args:
        shapes: for each stage, what the whole has drawn; None where that is unknown.
    """

    def __init__(self, rows: slice, total: int, shapes: dict[int, list[Shape]] | None, host: HostDraws) -> None:
        self._rows, self._total, self._shapes, self._host = rows, total, shapes, host
        self._draws: list[RowDraws] = []

    @contextmanager
    def __call__(self, stage: int, index: int) -> Iterator[None]:
        shapes = None if self._shapes is None else self._shapes.get(stage, [])
        draws = RowDraws(self._rows, self._total, shapes)
        self._draws.append(draws)
        with draws, self._host.of_part(stage):
            yield

    def again(self) -> DrawsOfPart:
        """Return a look at a second call for the same rows."""
        return DrawsOfPart(self._rows, self._total, self._shapes, self._host)

    @property
    def unpaired(self) -> bool:
        """Whether some numbers may be others than in the whole."""
        return self._host.unpaired or any(draws.unmatched or (self._shapes is None and draws.drawn) for draws in self._draws)
