"""The parameter groups of an optimizer, found on the whole model, so that every rank of every
layout has the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_3d.app.config.optimizer import MUON, adamw_patterns, undecayed_kinds
from lightning_3d.app.config.parameter_groups import (
    ParameterGroup,
    assign,
    matches,
    read_groups,
    require_matches,
    require_pattern_matches,
)
from lightning_3d.models.mixtures import find_mixtures
from lightning_3d.parallel.zero.muon import ADAMW as ADAMW_GROUP
from lightning_3d.parallel.zero.muon import MUON as MUON_GROUP

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class NamedGroup:
    """A parameter group of the optimizer.

    Attributes:
        names: names of its parameters in the whole model. A rank may have only some of them, or
            none.
        options: its learning rate and weight decay, where they differ from the optimizer's, and
            with Muon the algorithm.
    """

    names: frozenset[str]
    options: Mapping[str, Any]


def undecayed_names(model: nn.Module, kinds: Sequence[str]) -> frozenset[str]:
    """Names of the parameters of a whole model that are not decayed.

    Args:
        model: the model as the user built it; tensors may be on meta.
        kinds: any of "norm" (parameters of modules whose class name contains it), "bias", and
            "embedding" (input embeddings, and an output head that is tied to one).
    """
    from torch import nn

    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    names = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            kind = (
                "norm"
                if "norm" in type(module).__name__.lower()
                else "bias"
                if name.endswith("bias")
                else ""
            )
            kind = "embedding" if id(parameter) in embeddings else kind
            if kind in kinds:
                names.add(f"{path}.{name}" if path else name)
    return frozenset(names)


def find_groups(
    model: nn.Module, config: Mapping[str, Any], weight_decay: float
) -> list[NamedGroup]:
    """Divide the trained parameters of a whole model into the optimizer's groups.

    Parameters that match no entry of `optimizer.groups` come first. An entry that sets no weight
    decay is divided in two where some of its parameters are of a kind in `no_decay`. With Muon, its
    matrices are before what AdamW trains.

    Args:
        model: the model as the user built it; tensors may be on meta.
        config: the group `optimizer`.
        weight_decay: weight decay of the optimizer.

    Returns:
        At least one group. Of the others, those that have a parameter.

    Raises:
        ConfigError: a pattern matches no trained parameter, or a group has none.
    """
    entries = read_groups(config.get("groups"))
    parameters = _names_of_trained(model)
    require_matches(entries, parameters)
    undecayed = undecayed_names(model, undecayed_kinds(config)) if weight_decay > 0 else frozenset()
    chosen = assign(entries, parameters)
    algorithms = _algorithms(model, config, parameters)
    groups = []
    for index in (None, *range(len(entries))):
        members = [names for names, group in zip(parameters, chosen, strict=True) if group == index]
        for trained, lr, fixed in algorithms:
            part = [names for names in members if names[0] in trained]
            options = {**fixed, **({} if index is None else _options(entries[index], lr))}
            groups += _by_decay(part, options, undecayed, weight_decay)
    return groups or [NamedGroup(frozenset(), {"weight_decay": weight_decay})]


def _algorithms(
    model: nn.Module, config: Mapping[str, Any], parameters: Sequence[Sequence[str]]
) -> list[tuple[frozenset[str], float, Mapping[str, Any]]]:
    """First names of the parameters that each algorithm of the optimizer trains, its learning rate,
    and the options of its groups."""
    everything, lr = frozenset(names[0] for names in parameters), float(config["lr"])
    if config.get("name") != MUON:
        return [(everything, lr, {})]
    kept = adamw_patterns(config)
    require_pattern_matches("optimizer.adamw", kept, parameters)
    found = matrix_names(model)
    by_muon = {
        names[0]
        for names in parameters
        if names[0] in found and not any(matches(p, name) for p in kept for name in names)
    }
    adamw_lr = float(config["adamw_lr"]) if config.get("adamw_lr") is not None else lr
    others = {"algorithm": ADAMW_GROUP, **({"lr": adamw_lr} if adamw_lr != lr else {})}
    return [
        (frozenset(by_muon), lr, {"algorithm": MUON_GROUP}),
        (everything - by_muon, adamw_lr, others),
    ]


def matrix_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of a whole model that are matrices, or stacks of them in mixtures of
    experts.

    Embeddings, the output head, and parameters of norms are left out. A fused parameter, of query,
    key and value for example, is one matrix.

    Args:
        model: the model as the user built it; tensors may be on meta.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left_out = undecayed_names(model, ("norm", "bias", "embedding"))
    stacks = {
        id(parameter)
        for experts in find_mixtures(model).values()
        for parameter in experts.parameters()
        if parameter.ndim == 3
    }
    names = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_head = head is not None and parameter is getattr(head, "weight", None)
        if (
            name not in left_out
            and not is_head
            and (parameter.ndim == 2 or id(parameter) in stacks)
        ):
            names.add(name)
    return frozenset(names)


def _by_decay(
    members: Sequence[Sequence[str]],
    options: Mapping[str, Any],
    undecayed: frozenset[str],
    weight_decay: float,
) -> list[NamedGroup]:
    """Divide parameters with the same options into those that are decayed and those that are
    not."""
    if "weight_decay" in options:
        parts = [(members, options["weight_decay"])]
    else:
        kept = [names for names in members if not undecayed.isdisjoint(names)]
        decayed = [names for names in members if undecayed.isdisjoint(names)]
        parts = [(decayed, weight_decay), (kept, 0.0)]
    return [
        NamedGroup(
            frozenset(name for names in part for name in names), {**options, "weight_decay": decay}
        )
        for part, decay in parts
        if part
    ]


def _names_of_trained(model: nn.Module) -> list[list[str]]:
    """All names of each trained parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _options(entry: ParameterGroup, lr: float) -> dict[str, float]:
    """Options of an entry for torch."""
    options: dict[str, float] = {}
    if entry.lr is not None or entry.lr_scale is not None:
        options["lr"] = entry.lr if entry.lr is not None else lr * float(entry.lr_scale or 0.0)
    if entry.weight_decay is not None:
        options["weight_decay"] = entry.weight_decay
    return options
