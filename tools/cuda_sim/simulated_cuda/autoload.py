"""Makes `import torch` load the simulated libraries and register the simulated kernels, in every
process of this environment."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _SimulatedTorch(importlib.abc.MetaPathFinder):
    """Finds torch where it lies, and wraps its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        from simulated_cuda import runtime

        # its thread ends a process that a debugger or this simulation holds up
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        runtime.load()
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from simulated_cuda import kernels

        kernels.register()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


sys.meta_path.insert(0, _SimulatedTorch())
