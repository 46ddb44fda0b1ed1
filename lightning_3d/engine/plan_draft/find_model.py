"""The parts of a user's module that a plan is about: the model, and its list of blocks."""

from __future__ import annotations

from torch import nn

from lightning_3d.compat.lightning_modules import is_lightning_module, runs_alone
from lightning_3d.engine.holder import ModelHolder
from lightning_3d.errors import PlanError


def find_model(root: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """Find the module that a plan is about: `root`, or inside a LightningModule the child with all
    of its parameters.

    Args:
        name: name of the module in `root`, where the user gives it.
    """
    if name is not None:
        return name, root.get_submodule(name)
    if isinstance(root, ModelHolder) or is_lightning_module(root):
        everything = {id(parameter) for parameter in root.parameters()}
        runs = runs_alone(root)
        sizes = {
            key: sum(p.numel() for p in child.parameters()) for key, child in root.named_children()
        }
        largest = max(sizes, key=lambda key: sizes[key], default="")
        has_list = bool(largest) and not isinstance(
            root.get_submodule(largest), (nn.ModuleList, nn.ModuleDict, nn.Sequential)
        )
        if has_list and (
            not runs or {id(p) for p in root.get_submodule(largest).parameters()} == everything
        ):
            return largest, root.get_submodule(largest)
    return "", root


def find_blocks(model: nn.Module) -> str:
    """Find the list of blocks: the `nn.ModuleList` with the most parameters, else the
    `nn.Sequential` of one class of modules.

    Raises:
        PlanError: the model has no such list.
    """
    named = list(model.named_modules())
    lists = [
        (name, found)
        for name, found in named
        if isinstance(found, nn.ModuleList) and _weight(found)
    ]
    chains = [
        (name, found)
        for name, found in named
        if isinstance(found, nn.Sequential) and _is_chain(found)
    ]
    found = lists or chains
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no list of blocks: no nn.ModuleList, and no nn.Sequential"
            " of modules of one class. Put its blocks into one nn.ModuleList."
        )
    return max(found, key=lambda item: _weight(item[1]))[0]


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_chain(chain: nn.Sequential) -> bool:
    kinds = {type(child) for child in chain}
    return (
        len(chain) > 1
        and len(kinds) == 1
        and all(key.isdigit() for key in chain._modules)
        and _weight(chain) > 0
    )
