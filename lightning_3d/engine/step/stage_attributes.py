"""Attributes of the user's module that steps of an evaluation change after the model's call, where
only the last pipeline stage comes: lists of outputs, counters. The other ranks of the pipeline get
them before a hook at the end of the epoch reads them.

Not in training: there the hooks on gradients of each rank write attributes, too.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.lightning_modules import attributes_of_library
from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.errors import listed
from lightning_3d.models.reachable import home_of
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import PipelineEngine, Unknown

_ENDS = {
    "on_validation_epoch_end": "validation",
    "on_test_epoch_end": "test",
    "on_predict_epoch_end": "predict",
}
"""Hooks at the end of an evaluation, and the steps that they follow."""

_LIBRARIES = ("torch", "lightning", "lightning_3d", "torchmetrics", "transformers")
_DEEPEST, _MOST = 4, 10_000
"""Levels of nested values, and entries of one, in which writes are looked for."""


class StageAttributes:
    """Gives the ranks of a pipeline what the steps of an evaluation have left in attributes on the
    last stage. Does nothing without one.

    Args:
        module: the user's module.
        device: of this rank.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, engine: PipelineEngine, device: torch.device
    ) -> None:
        self._module, self._mesh, self._engine, self._device = module, mesh, engine, device
        self._of_library = attributes_of_library()
        self.begin_fit()

    def begin_fit(self) -> None:
        """Forget an epoch that an earlier fit has not ended."""
        self._before: dict[str, dict[str, Hashable]] = {}

    def begin_batch(self, step: str) -> None:
        """Note the attributes before the first batch of an epoch.

        Args:
            step: "validation", "test" or "predict".
        """
        if self._mesh.size("pp") > 1 and step not in self._before:
            self._before[step] = {name: _print_of(value) for name, value in self._own().items()}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context of a step on an earlier stage of a rank that has the last one, too: there its
        code runs once more."""
        known = self._own()
        undo = [_undo_of(value) for value in known.values()]
        try:
            yield
        finally:
            attributes = vars(self._module)
            for name in self._own().keys() - known.keys():
                del attributes[name]
            attributes.update(known)
            for put_back in undo:
                put_back()

    def share_before(self, hook: str) -> None:
        """Give them to all ranks of the pipeline, before a hook at the end of the epoch; warn of
        what cannot be sent. Over pp."""
        before = self._before.pop(_ENDS.get(hook, ""), None)
        if before is None:
            return
        sent: list[Any] = [None, None]
        if self._engine.owns_last:
            changed = {
                name: value
                for name, value in self._own().items()
                if before.get(name) != _print_of(value)
            }
            sent = list(_packed(changed))
        dist.broadcast_object_list(
            sent, self._mesh.ranks("pp")[self._engine.last_rank], group=self._mesh.control
        )
        packed, left_out = sent
        if left_out:
            rank_zero_warn(
                f"{_ENDS[hook]}_step changes {listed(f'self.{name}' for name in left_out)} after"
                " the model's call, where only the last pipeline stage comes. The other ranks do"
                f" not get it before {hook}, because it cannot be pickled. If the hook reads it,"
                " keep tensors, numbers, lists or dicts there, or use a layout with pp = 1."
            )
        if packed is not None and not self._engine.owns_last:
            for name, value in torch.load(
                io.BytesIO(packed), map_location=self._place, weights_only=False
            ).items():
                vars(self._module)[name] = value

    def _place(self, storage: Any, location: str) -> Any:
        """What was on the device of the last stage comes to that of this rank."""
        return (
            storage
            if location == "cpu"
            else torch.serialization.default_restore_location(storage, str(self._device))
        )

    def _own(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self._module).items()
            if name not in self._of_library and _is_data(value)
        }


def _is_data(value: Any) -> bool:
    """Whether a value is data, or an object of the user's own that may hold some."""
    if value is None or isinstance(
        value, (bool, int, float, complex, str, list, tuple, dict, set, deque, Tensor)
    ):
        return True
    home = home_of(type(value)).partition(".")[0]
    return not isinstance(value, nn.Module) and not callable(value) and home not in _LIBRARIES


def _print_of(value: Any, depth: int = 0) -> Hashable:
    """What changes when somebody writes to a value, without a copy of it."""
    if isinstance(value, Unknown):
        return id(value)
    if isinstance(value, Tensor):
        return id(value), value._version
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if depth == _DEEPEST:
        return id(value)
    if isinstance(value, Mapping):
        return id(value), tuple(
            (repr(key), _print_of(item, depth + 1)) for key, item in value.items()
        )
    if isinstance(value, (list, tuple, deque)):
        if len(value) > _MOST:
            return id(value), len(value), _print_of(value[-1], depth + 1)
        return id(value), tuple(_print_of(item, depth + 1) for item in value)
    if isinstance(value, set):
        return id(value), len(value)
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    return id(value), _print_of(getattr(value, "__dict__", None), depth + 1)


def _undo_of(value: Any, depth: int = 0) -> Callable[[], None]:
    """Return a function that undoes what is written to a value from now on."""
    if isinstance(value, (list, deque)):
        return partial(_shorten, value, len(value))  # what a step leaves in a list, it appends
    if isinstance(value, (dict, set)):
        copied = value.copy()
        inside = (
            [_undo_of(item, depth + 1) for item in copied.values()]
            if isinstance(copied, dict) and depth < _DEEPEST
            else []
        )

        def put_back() -> None:
            value.clear()
            value.update(copied)
            for undo in inside:
                undo()

        return put_back
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy())
    if isinstance(value, Tensor):
        return partial(_copy_back, value, value.detach().clone())
    own = getattr(value, "__dict__", None)
    return _undo_of(own, depth + 1) if isinstance(own, dict) and depth < _DEEPEST else _nothing


def _nothing() -> None:
    """Undo nothing."""


def _shorten(value: list[Any] | deque[Any], length: int) -> None:
    while len(value) > length:
        value.pop()


@torch.no_grad()
def _copy_back(value: Tensor, kept: Tensor) -> None:
    value.copy_(kept)


def _packed(changed: Mapping[str, Any]) -> tuple[bytes | None, list[str]]:
    """The attributes as bytes, and the names of those that cannot be pickled."""
    left_out = [name for name, value in changed.items() if not _can_be_pickled(value)]
    sent = {name: value for name, value in changed.items() if name not in left_out}
    if not sent:
        return None, left_out
    file = io.BytesIO()
    torch.save(sent, file)
    return file.getvalue(), left_out


def _can_be_pickled(value: Any) -> bool:
    try:
        torch.save(value, io.BytesIO())
    except Exception:  # pickle raises what it likes
        return False
    return True
