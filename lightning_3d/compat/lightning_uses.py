"""What a LightningModule uses of itself while a step runs: `print`, `logger` and `loggers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

_REPORT = "_lightning_3d_report"


@contextmanager
def reporting_uses(module: LightningModule, report: Callable[[str], Any]) -> Iterator[None]:
    """Call `report` with "print" or "logger" before `module` uses them, inside this context. If it
    returns something, that takes their place: nothing is printed, and the logger is what was
    returned.

    Lightning offers no hook for it. Two of the names are properties, which an instance cannot
    replace, so the class is changed once (Lightning 2.6): without a report its attributes do what
    they did.
    """
    _change_class()
    object.__setattr__(module, _REPORT, report)
    try:
        yield
    finally:
        object.__delattr__(module, _REPORT)


def _change_class() -> None:
    if hasattr(LightningModule.print, "reports"):
        return
    shown = LightningModule.print

    def show(self: LightningModule, *args: Any, **kwargs: Any) -> None:
        if _tell(self, "print") is None:
            shown(self, *args, **kwargs)

    show.reports = True  # type: ignore[attr-defined]
    show.__doc__ = shown.__doc__
    LightningModule.print = show  # type: ignore[method-assign]
    for name in ("logger", "loggers"):
        setattr(LightningModule, name, _reported(vars(LightningModule)[name]))


def _reported(known: property) -> property:
    read = known.fget
    assert read is not None

    def value(self: LightningModule) -> Any:
        instead = _tell(self, "logger")
        return read(self) if instead is None else instead

    return property(value, known.fset, known.fdel, known.__doc__)


def _tell(module: LightningModule, name: str) -> Any:
    report = vars(module).get(_REPORT)
    return report(name) if report is not None else None
