"""Mixtures of experts in a model, recognized by how their modules are called and by the shapes of
their parameters, and their plan."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from torch import nn

from lightning_3d.errors import PlanError

_ROUTING = {"top_k_index", "top_k_weights"}
"""Arguments of a module of experts, next to the tokens, in Transformers and in models written like
them."""


def find_mixtures(module: nn.Module) -> dict[str, nn.Module]:
    """Find the modules that hold experts, by name: those that are called with the experts of each
    token, those with one matrix for each expert in one tensor, and lists of experts. A mixture
    inside another one counts once."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        if (
            name
            and not any(name.startswith(f"{outer}.") for outer in found)
            and _holds_experts(name, child)
        ):
            found[name] = child
    return found


def draft_ep(module: nn.Module) -> dict[str, str]:
    """Write the expert-parallel plan of a model that declares none: whole experts on each rank.

    Raises:
        PlanError: the model has no experts, or tokens cannot be sent to them.
    """
    mixtures = find_mixtures(module)
    if not mixtures:
        raise PlanError(without_experts(module))
    for name, child in mixtures.items():
        if not takes_routing(child):
            raise PlanError(
                f"The experts of {type(module).__name__} cannot be split over ranks (ep): '{name}'"
                f" ({type(child).__name__}) is not called with tokens, the experts of each token"
                " and their weights (top_k_index, top_k_weights). So the tokens of an expert"
                " cannot be sent to its rank. Use ep=1."
            )
    entries = dict.fromkeys(mixtures, "ep_dispatch_experts")
    entries |= {
        f"{name}.{key}": "grouped_gemm"
        for name, child in mixtures.items()
        for key, _ in child.named_parameters()
    }
    return {re.sub(r"\.\d+(?=\.)", ".*", name): style for name, style in entries.items()}


def without_experts(module: nn.Module) -> str:
    """The message for a dense model."""
    return (
        f"Expert parallelism (ep) distributes the experts of a mixture, but {type(module).__name__}"
        " is dense: it has no experts. Use ep=1."
    )


def takes_routing(module: nn.Module) -> bool:
    """Return whether a module is called with (tokens, experts of each token, their weights)."""
    return set(inspect.signature(type(module).forward).parameters) >= _ROUTING


def _holds_experts(name: str, module: nn.Module) -> bool:
    if next(module.parameters(), None) is None:
        return False
    listed = name.rpartition(".")[2] == "experts" and isinstance(
        module, (nn.ModuleList, nn.ModuleDict)
    )
    return listed or takes_routing(module) or _stacks_experts(module)


def _stacks_experts(module: nn.Module) -> bool:
    counts = set(_counts(module))
    return any(
        parameter.ndim > 2 and parameter.shape[0] in counts
        for parameter in module.parameters(recurse=False)
    )


def _counts(module: nn.Module) -> Iterator[int]:
    """Numbers of experts among the attributes of a module."""
    for name, value in vars(module).items():
        if "experts" in name and "per_tok" not in name and isinstance(value, int) and value > 1:
            yield value
