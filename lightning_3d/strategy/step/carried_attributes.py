"""Attributes by which one call of the user's step changes what the next one computes: counters, averages, earlier losses.

One process calls the step once for each batch. A layout calls it once for each micro-batch and pipeline stage, and only the last stage runs
what follows the model's call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.errors import ConfigError, listed
from lightning_3d.layout.layout import Layout

_PLAIN = (int, float, str, type(None), Tensor)
_LIGHTNINGS = frozenset(vars(LightningModule()))


class CarriedAttributes:
    """Looks at the attributes of the user's module in the first calls of its step, and refuses those that it carries from call to call.

    A value that is set once (a mask that is kept, a flag) is no state: the second call shows that.
    """

    def __init__(self, module: LightningModule, layout: Layout, *, wanted: bool) -> None:
        self._module, self._layout, self._wanted = module, layout, wanted
        self.begin()

    def begin(self) -> None:
        """Expect the first step of a fit."""
        self._left = 2 if self._wanted else 0

    def watching(self, micro_batches: int, rows: int) -> AbstractContextManager[None]:
        """Context of one call of the training step.

        Args:
            micro_batches: number of micro-batches of the batch.
            rows: rows of each.
        """
        if not self._left or micro_batches * self._layout.pp == 1:
            return nullcontext()
        self._left -= 1
        return self._seen(micro_batches, rows) if self._left == 0 else nullcontext()

    @contextmanager
    def _seen(self, micro_batches: int, rows: int) -> Iterator[None]:
        module, kind = self._module, type(self._module)
        before = {name: _kept(value) for name, value in vars(module).items() if name not in _LIGHTNINGS and isinstance(value, _PLAIN)}
        read: set[str] = set()
        written: set[str] = set()

        class Seen(kind):  # type: ignore[misc,valid-type]
            def __getattribute__(self, name: str) -> Any:
                if name in before and name not in written:
                    read.add(name)
                return super().__getattribute__(name)

            def __setattr__(self, name: str, value: Any) -> None:
                written.add(name)
                super().__setattr__(name, value)

        Seen.__name__, Seen.__qualname__, Seen.__module__ = kind.__name__, kind.__qualname__, kind.__module__
        module.__class__ = Seen
        try:
            yield
        finally:
            module.__class__ = kind
        carried = [name for name in before if name in read & written and not _same(before[name], vars(module).get(name))]
        if carried:
            self._refuse(carried, micro_batches, rows)

    def _refuse(self, names: list[str], micro_batches: int, rows: int) -> None:
        layout = self._layout
        them, others = ("them", "other values") if len(names) > 1 else ("it", "another value")
        alone = " Only the last pipeline stage runs the code after the model's call." if layout.pp > 1 else ""
        whole = f", or use micro_batch_size={rows * micro_batches}" if layout.pp == 1 else ""
        raise ConfigError(
            f"Each call of training_step reads {listed(f'self.{name}' for name in names)} and sets {them} to {others}. Here a batch is"
            f" {micro_batches} micro-batches, and each is a call of its own.{alone} So a call finds other values than on one process."
            f" Change {them} in on_train_batch_start or on_train_batch_end, which every rank runs once for each batch, or read"
            f" self.global_step{whole}. If no loss depends on {them}, use self_check=never."
        )


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and torch.equal(before, after.detach())
    return type(before) is type(after) and bool(before == after)
