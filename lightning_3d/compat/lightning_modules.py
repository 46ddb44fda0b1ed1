"""What is a LightningModule, for code that runs without Lightning too: it is asked only about
modules that exist."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_lightning_module(module: nn.Module) -> bool:
    """Return whether `module` is a LightningModule. Does not import Lightning: without it there is
    none."""
    kind = _kind()
    return kind is not None and isinstance(module, kind)


def runs_alone(module: nn.Module) -> bool:
    """Return whether the class of `module` has a `forward` of its own, which neither torch nor
    Lightning wrote."""
    kind = _kind()
    inherited = [nn.Module.forward] if kind is None else [nn.Module.forward, kind.forward]
    return type(module).forward not in inherited


def attributes_of_library() -> frozenset[str]:
    """Return the names of the attributes that every module has, and every LightningModule."""
    kind = _kind()
    return frozenset(vars(nn.Module() if kind is None else kind()))


def _kind() -> Any:
    pytorch = sys.modules.get("lightning.pytorch")
    return getattr(pytorch, "LightningModule", None)
