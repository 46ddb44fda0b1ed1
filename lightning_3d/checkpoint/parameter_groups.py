"""Hyperparameters and learning-rate schedulers in any layout.

They belong to parameter groups, and pipeline stages may have different groups, for example if the
learning rate depends on the layer. So every group is saved with the names of its parameters; if the
stages differ, the groups of all stages are saved. When a run resumes, each of its groups takes the
hyperparameters of the saved group that had the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import CheckpointError, listed
from lightning_3d.parallel.mesh import Mesh

Names = list[list[str]]
"""Names of the parameters of each parameter group."""

_KEY = "lightning_3d_pipeline_ranks"
_NAMES, _UNFIT = "names", "unfit"
_OPTIMIZERS, _SCHEDULERS = "optimizer_states", "lr_schedulers"
_SWITCHES = ("fused", "foreach", "capturable")
"""Keys of a group that choose how its kernels run on a device, not what they compute. A checkpoint
may come from another device."""


def name_groups(module: nn.Module, optimizer: Optimizer) -> Names:
    """List the names of each group's parameters. Parameters that are not in the module, such as a
    backend's own, are skipped."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [names[id(p)] for p in group["params"] if id(p) in names]
        for group in optimizer.param_groups
    ]


def describe_optimizer(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Describe an optimizer by its class and hyperparameters, without tensors. Groups added after
    `names` was made have no names."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    for group, own in zip(groups, names, strict=False):
        group[_NAMES] = own
    return {"class": type(optimizer).__name__, "param_groups": groups}


def restore_hyper_parameters(optimizer: Optimizer, described: Mapping[str, Any]) -> None:
    """Restore the values of the parameter groups of `optimizer`, except how its kernels run
    (`fused`, for example).

    Raises:
        CheckpointError: the optimizer has another class or number of groups than the saved one, or
            groups do not fit (`take_groups`).
    """
    if _UNFIT in described:
        raise described[_UNFIT]
    own = type(optimizer).__name__
    groups = described["param_groups"]
    if described["class"] is None:  # torch does not say which class a state is of
        _require_same_settings(own, optimizer.param_groups, groups)
    elif described["class"] != own:
        raise CheckpointError(
            f"The checkpoint has the state of {described['class']}, but configure_optimizers"
            f" returned {own}. To resume, return {described['class']}."
        )
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"The checkpoint's {own} has {len(groups)} parameter groups, but configure_optimizers"
            f" returned {len(optimizer.param_groups)}. To resume, return the same groups."
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            current = group.get(key)
            if key != _NAMES and not (key in _SWITCHES and key in group):
                group[key] = (
                    value.to(current.device)
                    if isinstance(value, Tensor) and isinstance(current, Tensor)
                    else value
                )


def _require_same_settings(
    own: str, groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> None:
    for group, settings in zip(groups, saved, strict=False):
        # switches come with releases
        numbers = {
            key for key, value in group.items() if value is not None and not isinstance(value, bool)
        }
        missing = sorted(numbers - settings.keys() - {"params", _NAMES, "initial_lr"})
        if missing:
            raise CheckpointError(
                f"configure_optimizers returned {own}, but the checkpoint was converted from"
                f" another optimizer: its parameter groups have no {listed(missing)}. Use the"
                " optimizer of the checkpoint, or convert with --weights-only."
            )


def share_groups(checkpoint: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Add every stage's optimizer description and schedulers to the checkpoint if they differ. All
    pipeline ranks must call it."""
    if mesh.size("pp") == 1 or not checkpoint.get(_OPTIMIZERS):
        return checkpoint
    gathered: list[Any] = [None] * mesh.size("pp")
    dist.all_gather_object(
        gathered,
        {key: checkpoint[key] for key in (_OPTIMIZERS, _SCHEDULERS) if key in checkpoint},
        group=mesh.control,
    )
    if any(_plain(state) != _plain(gathered[0]) for state in gathered):
        return checkpoint | {_KEY: gathered}
    for index, group in enumerate(_groups(checkpoint)):
        group[_NAMES] = sorted(
            {name for state in gathered for name in _groups(state)[index].get(_NAMES, [])}
        )
    return checkpoint


def take_groups(checkpoint: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the checkpoint with the optimizer description and schedulers that fit the parameter
    groups of this rank.

    If parameters that are now in one group had different hyperparameters when it was saved,
    `restore_hyper_parameters` says so later: until then, a hook may replace what does not fit
    (`replace_groups`).
    """
    try:
        return _taken(checkpoint, names)
    except CheckpointError as error:
        return {**checkpoint, _OPTIMIZERS: [{**checkpoint[_OPTIMIZERS][0], _UNFIT: error}]}


def replace_groups(
    checkpoint: dict[str, Any], optimizer: Mapping[str, Any], schedulers: list[Any]
) -> None:
    """Put the hyperparameters of this rank's own optimizer, and the states of its schedulers, in
    place of those that were saved."""
    checkpoint.pop(_KEY, None)
    saved = checkpoint[_OPTIMIZERS][0]
    checkpoint[_OPTIMIZERS] = [{**optimizer, "class": saved["class"]}]
    checkpoint[_SCHEDULERS] = schedulers


def _taken(checkpoint: Mapping[str, Any], names: Names) -> dict[str, Any]:
    own = dict(checkpoint)
    states = own.pop(_KEY, None) or [checkpoint]  # not `own`, which changes below
    if not own.get(_OPTIMIZERS) or not names:
        return own
    chosen = [_source(states, index, group) for index, group in enumerate(names)]
    if None in chosen or (
        len(states) == 1 and chosen == [(0, index) for index in range(len(_groups(own)))]
    ):
        return own
    pairs = [pair for pair in chosen if pair is not None]
    groups = [_groups(states[stage])[index] for stage, index in pairs]
    own[_OPTIMIZERS] = [{**states[0][_OPTIMIZERS][0], "param_groups": groups}]
    versions = zip(*(state.get(_SCHEDULERS, []) for state in states), strict=True)
    own[_SCHEDULERS] = [
        _pick(scheduler, [len(_groups(state)) for state in states], pairs) for scheduler in versions
    ]
    return own


def _groups(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return state[_OPTIMIZERS][0]["param_groups"]


def _plain(state: Mapping[str, Any]) -> str:
    """Return everything except the names as text, to compare two stages."""
    groups = [
        {key: value for key, value in group.items() if key != _NAMES} for group in _groups(state)
    ]
    return repr((groups, state.get(_SCHEDULERS)))


def _source(
    states: Sequence[Mapping[str, Any]], index: int, names: Sequence[str]
) -> tuple[int, int] | None:
    """Find (stage, index) of the saved group that a group of this rank resumes from; None if
    unknown."""
    wanted = set(names)
    found = [
        (stage, place)
        for stage, state in enumerate(states)
        for place, group in enumerate(_groups(state))
        if not wanted.isdisjoint(group.get(_NAMES, ()))
    ]
    if not found:
        last = len(_groups(states[0])) - 1
        if names and index > last:  # none of them was trained then
            return None
        return (0, min(index, last))  # a group without parameters on this stage may have any values
    values = {
        repr({k: v for k, v in _groups(states[stage])[place].items() if k != _NAMES})
        for stage, place in found
    }
    if len(values) > 1:
        raise CheckpointError(
            f"Parameter group {index} has parameters that were in {len(values)} groups with"
            f" different hyperparameters when the checkpoint was saved, for example {names[0]}. To"
            " resume, return the same groups from configure_optimizers."
        )
    return found[0]


def _pick(
    versions: Sequence[Mapping[str, Any]], counts: Sequence[int], chosen: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Build the state of one scheduler for the chosen groups, from the states that all stages
    saved.

    A list with one entry for each group gets the entries of the chosen groups; other values are
    those of the first chosen stage.
    """
    state = dict(versions[chosen[0][0]])
    for key, value in state.items():
        if key == "_schedulers":  # of SequentialLR and ChainedScheduler
            state[key] = [
                _pick([version[key][i] for version in versions], counts, chosen)
                for i in range(len(value))
            ]
        elif isinstance(value, (list, tuple)) and all(
            len(v[key]) == count for v, count in zip(versions, counts, strict=True)
        ):
            state[key] = [versions[stage][key][index] for stage, index in chosen]
    return state
