"""Random numbers of a step in runs that are compared: equal for each row, whatever part of the
batch is computed together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from lightning_3d.checkpoint.rng_state import read_generators, set_generators
from lightning_3d.engine.self_check.noise import WithoutNoise
from lightning_3d.engine.step.row_random import RowDraws


class _QuietModel(WithoutNoise):
    """Turns off dropout and noise while a model runs, not in the code around it.

    Attributes:
        depth: number of calls of the model that are under way.
    """

    depth = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.depth > 0:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class EqualDraws:
    """Makes the step of a fit draw equal numbers in every layout.

    Args:
        module: the user's module.
        models: names of the submodules in which dropout and noise are off, because they belong to
            layers and not to rows.
        seed: of the numbers of all steps.
    """

    def __init__(
        self, module: nn.Module, models: list[str], seed: int, device: torch.device
    ) -> None:
        self._seed, self._device = seed, device
        self._quiet = _QuietModel()
        self._handles = []
        for name in models:
            model = module.get_submodule(name)
            self._handles.append(model.register_forward_pre_hook(self._enter))
            self._handles.append(model.register_forward_hook(self._leave, always_call=True))

    def _enter(self, *args: Any) -> None:
        self._quiet.depth += 1

    def _leave(self, *args: Any) -> None:
        self._quiet.depth -= 1

    @contextmanager
    def around(self, step: int, rows: slice | None, total: int) -> Iterator[None]:
        """Make a context for one call of the step.

        Args:
            step: number of the batch.
            rows: rows of the global batch that the call computes; None if they are not known.
            total: rows of the global batch.
        """
        before = read_generators(self._device)
        # the call before may have ended inside the model, at the end of a stage
        self._quiet.depth = 0
        number = (self._seed * 1_000_003 + step) % 2**32
        torch.manual_seed(number)
        numpy.random.seed(number)
        random.seed(number)
        mode = (
            RowDraws(rows, total) if rows is not None and len(range(total)[rows]) < total else None
        )
        try:
            with self._quiet:
                if mode is None:
                    yield
                else:
                    with mode:
                        yield
        finally:
            set_generators(before, self._device)


def quiet_names(module: nn.Module, pipelined: str | None) -> list[str]:
    """Names of the submodules in which `EqualDraws` turns noise off: the pipelined module, or all
    children of a module without one."""
    return [pipelined] if pipelined else [name for name, _ in module.named_children()]
