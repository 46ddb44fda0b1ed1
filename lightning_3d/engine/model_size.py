"""The number of parameters of the whole model, and of this rank's share of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_3d.parallel.zero import DataParallelBackend


@dataclass(frozen=True)
class Counted:
    """A parameter of the whole model; one that is tied counts once.

    Attributes:
        names: all names of the parameter.
        numel: its elements.
        trained: whether it has a gradient.
    """

    names: tuple[str, ...]
    numel: int
    trained: bool


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a whole model, recorded before a rank drops the parts of other ranks.

    Attributes:
        parameters: all parameters.
        types: class name of each module, by the module's name.
        modes: number of modules in training mode (True) and evaluation mode (False), without the
            root.
    """

    parameters: tuple[Counted, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[bool, int] = field(default_factory=Counter)

    @classmethod
    def of(cls, root: nn.Module) -> ModelSize:
        """Record the sizes of a whole model. Its parameters may be on meta."""
        names: dict[int, list[str]] = {}
        found = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            found[id(parameter)] = parameter
        counted = (
            Counted(tuple(names[key]), one.numel(), one.requires_grad) for key, one in found.items()
        )
        types = {name: type(module).__name__ for name, module in root.named_modules()}
        return cls(
            tuple(counted), types, Counter(module.training for module in list(root.modules())[1:])
        )

    def count(self, module: str = "", *, trained: bool = False) -> int:
        """Count the elements of the parameters of a module, by default of the root; with `trained`,
        only of those that have gradients."""
        prefix = f"{module}." if module else ""
        return sum(
            one.numel
            for one in self.parameters
            if (one.trained or not trained) and any(name.startswith(prefix) for name in one.names)
        )


def share_of_rank(module: nn.Module, backend: DataParallelBackend) -> dict[str, int]:
    """Return the number of elements that this rank keeps of each parameter of its part `module`, by
    the parameter's first name.

    With ZeRO-3, a rank keeps a part of each parameter, and the others only while it computes with
    them.
    """
    sharded = {
        shard.name: part.numel()
        for shard in backend.weight_shards()
        if isinstance(part := shard.values["weight"], Tensor)
    }
    return {
        name: sharded.get(name, parameter.numel()) for name, parameter in module.named_parameters()
    }
