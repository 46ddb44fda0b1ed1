"""The state of optimizers in the user's hooks: each rank has that of its own parameters or
shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

_USES = (
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__iter__",
    "get",
    "items",
    "keys",
    "values",
    "pop",
    "clear",
    "update",
    "setdefault",
)


class GuardedState(dict[Any, Any]):
    """Stands for the state of an optimizer while a hook of the user's runs.

    Args:
        state: the optimizer's.
        before_use: called before each use.
    """

    def __init__(self, state: Any, before_use: Callable[[], None]) -> None:
        super().__init__()
        self.own, self._before_use = state, before_use

    def __len__(self) -> int:
        return len(self.own)

    def __contains__(self, key: object) -> bool:
        return key in self.own


def _guarded(name: str) -> Callable[..., Any]:
    def use(state: GuardedState, *args: Any, **kwargs: Any) -> Any:
        state._before_use()
        return getattr(state.own, name)(*args, **kwargs)

    return use


for _name in _USES:
    setattr(GuardedState, _name, _guarded(_name))


@contextmanager
def guarded_states(
    optimizers: Sequence[Optimizer], before_use: Callable[[], None]
) -> Iterator[None]:
    """Context in which the uses of the optimizers' states are reported.

    Args:
        before_use: called before each use, and if a state was replaced.
    """
    guards = [GuardedState(optimizer.state, before_use) for optimizer in optimizers]
    for optimizer, guard in zip(optimizers, guards, strict=True):
        optimizer.state = guard  # type: ignore[assignment]
    try:
        yield
        if any(
            optimizer.state is not guard
            for optimizer, guard in zip(optimizers, guards, strict=True)
        ):
            before_use()
    finally:
        for optimizer, guard in zip(optimizers, guards, strict=True):
            if optimizer.state is guard:
                optimizer.state = guard.own
