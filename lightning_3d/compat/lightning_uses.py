"""What a LightningModule uses of itself while a step runs: `print`, `logger` and `loggers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule


@contextmanager
def reporting_uses(module: LightningModule, report: Callable[[str], Any]) -> Iterator[None]:
    """Call `report` with "print" or "logger" before `module` uses them, inside this context. If it
    returns something, that takes their place: nothing is printed, and the logger is what was
    returned.

    Lightning offers no hook for it. Two of the names are properties, which an instance cannot
    replace, so the class is changed as long as the context lasts (Lightning 2.6). Other modules
    use their own.
    """
    shown = LightningModule.print
    read = {name: vars(LightningModule)[name] for name in ("logger", "loggers")}

    def show(self: LightningModule, *args: Any, **kwargs: Any) -> None:
        if self is not module or report("print") is None:
            shown(self, *args, **kwargs)

    LightningModule.print = show  # type: ignore[method-assign]
    for name, known in read.items():
        setattr(LightningModule, name, _reported(known, module, report))
    try:
        yield
    finally:
        LightningModule.print = shown  # type: ignore[method-assign]
        for name, known in read.items():
            setattr(LightningModule, name, known)


def _reported(known: property, module: LightningModule, report: Callable[[str], Any]) -> property:
    read = known.fget
    assert read is not None

    def value(self: LightningModule) -> Any:
        instead = report("logger") if self is module else None
        return read(self) if instead is None else instead

    return property(value, known.fset, known.fdel, known.__doc__)
