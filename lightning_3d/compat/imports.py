"""Imports of the libraries of a rank, without work that no fit needs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


@contextmanager
def without_collector() -> Iterator[None]:
    """Run what makes many objects and little garbage, inside this context, without the garbage
    collector, which would visit all of them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def light_imports() -> Iterator[None]:
    """Import the libraries of a rank, inside this context, in less CPU time.

    The garbage collector is off until the end. The imports of a rank create about a million objects
    that live as long as the process, and next to no garbage. `gc.freeze` then exempts them from
    later collections too.
    """
    with without_collector():
        try:
            import_torchmetrics()
            yield
        finally:
            gc.freeze()


def import_numpy() -> None:
    """Import NumPy without the threads of its OpenBLAS: no rank can be forked from a process with
    threads (`ranks.supervisor.can_fork`).

    Products of NumPy then use one thread; torch has a library of its own. A value of the user's in
    OPENBLAS_NUM_THREADS counts.
    """
    name = "OPENBLAS_NUM_THREADS"
    if "numpy" in sys.modules or name in os.environ:
        return
    os.environ[name] = "1"  # read once, by the import
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[name]


def import_torchmetrics() -> None:
    """Import torchmetrics, which Lightning needs, without `scipy.signal`: 0.6 s of CPU less on
    every rank.

    Wherever SciPy is installed, torchmetrics 1.x imports `scipy.signal`, only to define
    `scipy.signal.hamming` if it is missing: SciPy removed that name, and the package SRMRpy uses it
    for a metric of speech. Here a placeholder that has the name stands in `sys.modules` until
    torchmetrics is imported. Nothing changes where gammatone is installed, which that metric
    requires.
    """
    name = "scipy.signal"
    if (
        not {name, "torchmetrics"}.isdisjoint(sys.modules)
        or find_spec("scipy") is None
        or find_spec("gammatone") is not None
    ):
        return
    placeholder = _ScipySignal(name)
    sys.modules[name] = placeholder
    try:
        import torchmetrics  # noqa: F401
    finally:
        if sys.modules.get(name) is placeholder:
            del sys.modules[name]


class _ScipySignal(ModuleType):
    """A placeholder for `scipy.signal` that has one name; whoever reads another one gets the real
    module's."""

    hamming = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # the import statement reads it

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), attribute)
