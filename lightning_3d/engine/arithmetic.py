"""Precisions without Lightning: what its precision plugins do for the names that this package
supports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_3d.options.precision import precision_of

_TRUE = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
_MIXED = "bf16-mixed"


@dataclass(frozen=True)
class Arithmetic:
    """The types in which a model is kept and computes.

    Attributes:
        name: Lightning's name of the precision: "32-true", "64-true", "bf16-true" or "bf16-mixed".
        device: device of the model.
    """

    name: str
    device: torch.device

    @classmethod
    def of(cls, name: str | None, model: nn.Module, device: torch.device) -> Arithmetic:
        """Return the arithmetic of a name; None takes the type of the model's parameters.

        Raises:
            ConfigError: an unsupported name.
        """
        if name is None:
            kinds = {
                parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
            }
            name = next((key for key, kind in _TRUE.items() if kinds == {kind}), "32-true")
        precision_of(name)
        return cls(name, device)

    def convert(self, model: nn.Module) -> nn.Module:
        """Convert the parameters of a model, in place."""
        return model.to(_TRUE[self.name]) if self.name in _TRUE else model

    def convert_batch(self, batch: Any) -> Any:
        """Convert the floating-point tensors of a batch."""
        kind = _TRUE.get(self.name)
        if kind is None:
            return batch
        return apply_to_collection(
            batch, Tensor, lambda value: value.to(kind) if value.is_floating_point() else value
        )

    def context(self, hook: str) -> AbstractContextManager[Any]:
        """Make a context for one call of the user's step."""
        if self.name == _MIXED:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        kind = _TRUE.get(self.name)
        return nullcontext() if kind is None else _default_dtype(kind)


@contextmanager
def _default_dtype(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
