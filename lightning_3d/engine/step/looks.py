"""What the proof of the loss sees of a call of the step, and which random numbers it gives to parts
of a micro-batch."""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.engine.step.metrics import unchanged_metrics
from lightning_3d.engine.step.row_random import DrawnShapes, RowDraws, Shape
from lightning_3d.engine.step.runner import StepRunner
from lightning_3d.parallel.mesh import Mesh, gathered
from lightning_3d.parallel.nested import lists_of_rows, tensors_of
from lightning_3d.parallel.random_streams import Generators
from lightning_3d.parallel.undone import places_of_step

_TOLERANCES = ((1e-12, 1e-9), (1e-6, 1e-4), (1e-3, 3e-3), (1.0, 3e-2))
"""Largest machine epsilon of the arithmetic, and the relative difference that its rounding may make
in a mean over some rows: float64, float32, TF32, and what has fewer bits."""

_TF32 = 2.0**-11


class FirstLook(DrawnShapes):
    """Records of a micro-batch, while it runs, what draws random numbers and how exact its
    arithmetic is.

    Attributes:
        epsilon: largest machine epsilon of any result.
        communicates: whether it sends to other ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 0.0
        self.communicates = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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
        return random.getstate(), tuple(
            part.tobytes() if hasattr(part, "tobytes") else part for part in state
        )


class Start:
    """The state in which a call of the step begins: all that it may change besides parameters.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.places = places_of_step(module)
        self._state, self._generators, self._device = self.places.now(), Generators(device), device

    def written(self) -> dict[str, Any]:
        """Find what has changed since then."""
        return self.places.changed(self._state, self.places.now())

    def restore(self, *, draws_only: bool = False) -> None:
        """Go back to this state.

        Args:
            draws_only: whether only random numbers are drawn as then.
        """
        self.places.restore(self._state, draws_only=draws_only)
        self._generators.restore()

    @contextmanager
    def coming_back(self) -> Iterator[None]:
        """Context that ends in the state in which it begins."""
        now, generators = self.places.now(), Generators(self._device)
        try:
            yield
        finally:
            self.places.restore(now)
            generators.restore()


class DrawsOfPart:
    """The look at a part: it draws the random numbers that its rows have in the whole.

    Args:
        shapes: for each stage, what the whole has drawn; None where that is unknown.
    """

    def __init__(
        self, rows: slice, total: int, shapes: dict[int, list[Shape]] | None, host: HostDraws
    ) -> None:
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
        return self._host.unpaired or any(
            draws.unmatched or (self._shapes is None and draws.drawn) for draws in self._draws
        )


@contextmanager
def aside(
    module: nn.Module, runner: StepRunner, quietly: AbstractContextManager[None], *, eager: bool
) -> Iterator[None]:
    """Context in which nothing of a call of the step reaches the user: no metric, log, print or
    warning.

    Args:
        quietly: context in which loggers get nothing.
        eager: whether to run compiled code as it was written.
    """
    look = runner.look
    stance = torch.compiler.set_stance("force_eager") if eager else nullcontext()
    try:
        with (
            quietly,
            unchanged_metrics(module),
            redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
            stance,
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        runner.look = look


def epsilon_of(precision: str, *, fp8: bool = False) -> float:
    """Return the machine epsilon of the arithmetic of a precision; 0 for one that the results
    themselves show."""
    if fp8:
        return 0.125
    return torch.finfo(torch.bfloat16).eps if precision.startswith("bf16") else 0.0


def tolerance_of(epsilon: float, device: torch.device) -> float:
    """Return the relative difference that rounding may make in a mean over some rows, for a machine
    epsilon of the arithmetic."""
    if (
        epsilon < _TF32
        and device.type == "cuda"
        and epsilon > 1e-12
        and torch.backends.cuda.matmul.allow_tf32
    ):
        epsilon = _TF32
    return next(tolerance for largest, tolerance in _TOLERANCES if epsilon <= largest)


def most_telling(batches: Sequence[Any], rows: int, mesh: Mesh) -> int:
    """Return the index of the micro-batch whose rows differ most in labels, masks, other whole
    numbers and entries of lists. Collective.

    A mean over some rows shows itself only where rows differ in what it counts. Ranks that compute
    the same rows choose the same.
    """
    scores = gathered([_variety(batch, rows) for batch in batches], mesh)
    places = [mesh.layout.coordinates(rank)["dp"] for rank in range(len(scores))]
    of_peers = [
        score for place, score in zip(places, scores, strict=True) if place == mesh.index("dp")
    ]
    sums = [sum(score[index] for score in of_peers) for index in range(len(batches))]
    return sums.index(max(sums))


def _variety(batch: Any, rows: int) -> int:
    """Count how many different rows the labels, masks, whole numbers and lists of a micro-batch
    have: rows with equal sums count once.

    Rows without a label count most: those with another number of negative labels (`ignore_index`),
    and entries of another type (None).
    """
    whole = [
        tensor
        for tensor in tensors_of(batch)
        if not (tensor.is_floating_point() or tensor.is_complex())
    ]
    by_row = [
        tensor.reshape(rows, -1) for tensor in whole if tensor.ndim and tensor.shape[0] == rows
    ]
    found = [(len(one.sum(1).unique()), len((one < 0).sum(1).unique())) for one in by_row]
    found += [
        (len(set(map(_kind, entries))), len(set(map(type, entries))))
        for entries in lists_of_rows(batch, rows)
    ]
    return sum(kinds + rows * (telling - 1) for kinds, telling in found)


def _kind(entry: Any) -> Hashable:
    return (
        entry
        if isinstance(entry, (str, int, float))
        else (type(entry), *(tensor.shape for tensor in tensors_of(entry)))
    )
