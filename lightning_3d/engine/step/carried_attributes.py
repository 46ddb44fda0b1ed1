"""Attributes that a step reads before the model's call and changes after it, which only the last
pipeline stage reaches.

What one call of a step leaves for the next on the same stage is a matter of the proof of the loss:
see `written.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.lightning_modules import attributes_of_library
from lightning_3d.errors import ConfigError, listed, plural
from lightning_3d.layout.layout import Layout

_PLAIN = (int, float, str, type(None), Tensor)


class CarriedAttributes:
    """Looks at the attributes of the user's module in the second call of its step with pp > 1, and
    refuses those that never reach the earlier stages. The first access to a child of the module
    counts as the model's call.

    A value that is set once (a mask that is kept, a flag) is no state: the second call shows that.
    """

    def __init__(self, module: nn.Module, layout: Layout, *, wanted: bool) -> None:
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
        if not self._left or self._layout.pp == 1:
            return nullcontext()
        self._left -= 1
        return self._seen(micro_batches, rows) if self._left == 0 else nullcontext()

    @contextmanager
    def _seen(self, micro_batches: int, rows: int) -> Iterator[None]:
        module, kind = self._module, type(self._module)
        of_library = attributes_of_library()
        before = {
            name: _kept(value)
            for name, value in vars(module).items()
            if name not in of_library and isinstance(value, _PLAIN)
        }
        children = frozenset(name for name, _ in module.named_children())
        called = False
        early: set[str] = set()
        late: set[str] = set()

        class Seen(kind):  # type: ignore[misc,valid-type]
            def __getattribute__(self, name: str) -> Any:
                nonlocal called
                called = called or name in children
                if name in before and not called:
                    early.add(name)
                return super().__getattribute__(name)

            def __setattr__(self, name: str, value: Any) -> None:
                if called:
                    late.add(name)
                super().__setattr__(name, value)

        Seen.__name__, Seen.__qualname__, Seen.__module__ = (
            kind.__name__,
            kind.__qualname__,
            kind.__module__,
        )
        module.__class__ = Seen
        try:
            yield
        finally:
            module.__class__ = kind
        carried = [
            name
            for name in before
            if name in early & late and not _same(before[name], vars(module).get(name))
        ]
        if carried:
            self._refuse(carried, micro_batches, rows)

    def _refuse(self, names: list[str], micro_batches: int, rows: int) -> None:
        them = "them" if len(names) > 1 else "it"
        raise ConfigError(
            f"Each call of training_step reads {listed(f'self.{name}' for name in names)} before"
            f" the model's call and changes {them} after it. With pp = {self._layout.pp}, only the"
            " last pipeline stage runs the code after the model's call, once for each of"
            f" {micro_batches} micro-batches of {plural(rows, 'row')}: the other stages would keep"
            f" old values. Change {them} in on_train_batch_start or on_train_batch_end, which every"
            " rank runs once for each batch, or read self.global_step. If no loss depends on"
            f" {them}, use self_check=never."
        )


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and torch.equal(before, after.detach())
    return type(before) is type(after) and bool(before == after)
