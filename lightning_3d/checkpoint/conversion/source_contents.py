"""Contents of another program's checkpoint, by parameter names. Tensors are read when they are
written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import CheckpointError

NOT_CARRIED = ("state_dict", "optimizer_states")
"""Keys of Lightning's dict that hold tensors, which are converted by name."""


@dataclass(frozen=True)
class Later:
    """A tensor that is read on demand; until then it has a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Later:
        """Wrap a tensor that is in memory or mapped from a file."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def detach(self) -> Tensor:
        """Read the tensor. `lightning_3d.checkpoint.writing` calls this as on a tensor."""
        found = self.read().detach()
        if (tuple(found.shape), found.dtype) != (self.shape, self.dtype):
            raise CheckpointError(
                f"The checkpoint is damaged: a tensor should be {self.dtype} of shape {self.shape},"
                f" but the file contains {found.dtype} of shape {tuple(found.shape)}. Use another"
                " checkpoint."
            )
        return found


@dataclass
class Foreign:
    """Contents to convert.

    Attributes:
        kind: description of the source, for messages.
        weights: parameters and buffers; each tied parameter once.
        states: optimizer state of each parameter, including `master`, the float32 weights of a
            narrower parameter.
        groups: hyperparameters of each parameter group, with "names"; None without an optimizer.
        aliases: other names of tied parameters.
        trainer: the rest of Lightning's dict.
        lost: sentences about what is not converted.
    """

    kind: str
    weights: dict[str, Later]
    states: dict[str, dict[str, Later]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def renamed(self, old: str, new: str) -> Foreign:
        """Return a copy in which the prefix `old` of names is replaced by `new`."""

        def name(given: str) -> str:
            return new + given.removeprefix(old) if given.startswith(old) else given

        def names(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name(key): value for key, value in values.items()}

        groups = (
            None
            if self.groups is None
            else [{**group, "names": list(map(name, group["names"]))} for group in self.groups]
        )
        aliases = {name(alias): name(first) for alias, first in self.aliases.items()}
        return Foreign(
            self.kind,
            names(self.weights),
            names(self.states),
            groups,
            aliases,
            self.trainer,
            self.lost,
        )


def step_count(value: Any) -> Later:
    """Adam's count of steps in the form of torch's optimizers: one float32 number for each
    parameter."""
    return Later.of(torch.as_tensor(value, dtype=torch.float32).reshape(()).clone())


def as_state(key: str, value: Any) -> Later | None:
    """A state of a parameter; None for what is neither a tensor nor a number."""
    if key == "step":
        return step_count(value)
    if isinstance(value, (bool, int, float)):
        return Later.of(torch.tensor(value))
    return Later.of(value) if isinstance(value, Tensor) else None
