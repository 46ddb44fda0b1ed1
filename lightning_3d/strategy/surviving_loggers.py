"""Loggers whose disk is full or gone do not end a fit: what they write is not worth a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_WRITES = ("log_metrics", "save", "finalize", "after_save_checkpoint")


def survive_loggers(loggers: Iterable[Logger]) -> None:
    """Turn the first error of the storage of each logger into a warning and ignore its later ones.
    Does nothing the second time."""
    for logger in loggers:
        for name in _WRITES:
            method = getattr(logger, name)
            if not hasattr(method, "survives"):
                setattr(logger, name, _surviving(logger, method))


def _surviving(logger: Logger, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def write(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except OSError as error:
            if not getattr(logger, "_has_warned", False):
                logger._has_warned = True  # type: ignore[attr-defined]
                rank_zero_warn(
                    f"{type(logger).__name__} cannot write; training continues and some numbers"
                    f" will be missing: {error}"
                )
            return None

    write.survives = True  # type: ignore[attr-defined]
    return write
