"""A checkpoint file of Lightning: of one process, of DDP, and the consolidated one of FSDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_3d.checkpoint.conversion.safe_unpickler import load
from lightning_3d.checkpoint.conversion.source_contents import NOT_CARRIED, Foreign, Later, as_state
from lightning_3d.errors import CheckpointError, did_you_mean, listed

Groups = Sequence[Sequence[str]]


def read_file(
    path: Path, groups: Groups | None = None, *, optimizer: bool = True, plain_only: bool = False
) -> Foreign:
    """Read the contents of a file.

    Args:
        groups: names of the parameters of each group; only needed if shapes do not determine them.
        optimizer: whether to read the optimizer's state too.
        plain_only: see `load`.

    Raises:
        CheckpointError: it is not a Lightning checkpoint, or it is unclear which parameters the
            optimizer's state belongs to.
    """
    contents = load(path, plain_only=plain_only)
    if not isinstance(contents, dict) or not isinstance(contents.get("state_dict"), dict):
        raise CheckpointError(
            f"{path} is not a Lightning checkpoint: it has no state_dict. Choose a file that"
            " Trainer.save_checkpoint wrote."
        )
    found = read_state(
        contents["state_dict"],
        contents.get("optimizer_states") if optimizer else None,
        groups,
        f"{path}",
    )
    found.trainer = {key: value for key, value in contents.items() if key not in NOT_CARRIED}
    return found


def read_state(
    state_dict: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]] | None,
    groups: Groups | None,
    source: str,
) -> Foreign:
    """Convert the state dicts of a module and of its optimizers, as torch makes them."""
    weights, aliases = _untie(
        {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    )
    found = Foreign(
        "a checkpoint file of Lightning",
        {name: Later.of(tensor) for name, tensor in weights.items()},
        aliases=aliases,
    )
    left_out = state_dict.keys() - weights.keys() - aliases.keys()
    found.lost += [
        f"{name} in the module's state is not a tensor, so it is left out." for name in left_out
    ]
    if not optimizers:
        return found
    if len(optimizers) > 1:
        raise CheckpointError(
            f"{source} has the state of {len(optimizers)} optimizers, but only one can be"
            " converted. Use --weights-only."
        )
    state, saved_groups = optimizers[0]["state"], optimizers[0]["param_groups"]
    numbers = [list(group["params"]) for group in saved_groups]
    shapes = [[_shape(state.get(number, {})) for number in group] for group in numbers]
    names = _names(weights, numbers, shapes, groups)
    found.groups = [
        {
            **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            "names": own,
        }
        for group, own in zip(saved_groups, names, strict=True)
    ]
    for group, own in zip(numbers, names, strict=True):
        for number, name in zip(group, own, strict=True):
            states = {key: as_state(key, value) for key, value in state.get(number, {}).items()}
            found.states[name] = {key: value for key, value in states.items() if value is not None}
    drop_copies(found)
    return found


def _untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Merge tensors that share all of their memory."""
    weights: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.dtype,
        )
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            weights[name] = tensor
    return weights, aliases


def drop_copies(found: Foreign) -> None:
    """Drop copies of tied parameters: FSDP writes them under each name, but their optimizer state
    only under the first."""
    trained: dict[Any, list[str]] = {}
    for name, weight in found.weights.items():
        if name in found.states:
            trained.setdefault((weight.shape, weight.dtype), []).append(name)
    for name in [
        name
        for name in found.weights
        if name not in found.states and len(found.weights[name].shape) > 1
    ]:
        weight = found.weights[name]
        others = trained.get((weight.shape, weight.dtype), [])
        values = weight.read() if others else None
        for other in others:
            if values is not None and values.any() and values.equal(found.weights[other].read()):
                found.aliases[name] = other
                del found.weights[name]
                break


def _shape(state: Mapping[str, Any]) -> Shape | None:
    """Shape of the parameter that a state belongs to, if the state has it."""
    shapes = {
        tuple(value.shape)
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim > 0
    }
    return shapes.pop() if len(shapes) == 1 else None


def _names(
    weights: Mapping[str, Tensor],
    numbers: Sequence[Sequence[Any]],
    shapes: Sequence[Sequence[Shape | None]],
    given: Groups | None,
) -> list[list[str]]:
    """Find the names of each group's parameters."""
    if given is not None:
        return _check_given(weights, shapes, given)
    # made of a sharded checkpoint by Lightning's own tool
    if any(isinstance(number, str) for group in numbers for number in group):
        return _check_given(weights, shapes, [[str(name) for name in group] for group in numbers])
    parameters = [
        (name, tuple(tensor.shape))
        for name, tensor in weights.items()
        if _may_be_trained(name, tensor, weights)
    ]
    flat = [number for group in numbers for number in group]
    if flat == list(range(len(flat))):
        return find_names(parameters, shapes)
    # FSDP counts all parameters of the module, frozen ones too
    if flat and max(flat) < len(parameters):
        found = [[parameters[number] for number in group] for group in numbers]
        pairs = [
            pair
            for group, wants in zip(found, shapes, strict=True)
            for pair in zip(group, wants, strict=True)
        ]
        if all(want in (None, shape) for (_, shape), want in pairs):
            return [[name for name, _ in group] for group in found]
    return find_names(parameters, shapes)


def _may_be_trained(name: str, tensor: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """Return whether this looks like a parameter: integer tensors and running statistics of batch
    norms are buffers."""
    owner, _, last = name.rpartition(".")
    running = last in ("running_mean", "running_var") and f"{owner}.num_batches_tracked" in weights
    return tensor.is_floating_point() and not running


def _check_given(
    weights: Mapping[str, Tensor], shapes: Sequence[Sequence[Shape | None]], given: Groups
) -> list[list[str]]:
    counts, wanted = [len(group) for group in given], [len(group) for group in shapes]
    if counts != wanted:
        raise CheckpointError(
            f"The lists in --groups have {listed(counts)} names, but the optimizer's groups have"
            f" {listed(wanted)} parameters. Write one list for each group of configure_optimizers,"
            " in the same order."
        )
    for names, group in zip(given, shapes, strict=True):
        for name, shape in zip(names, group, strict=True):
            if name not in weights:
                raise CheckpointError(
                    f"--groups contains {name}, which is not in the"
                    f" checkpoint.{did_you_mean(name, weights)}"
                )
            if shape not in (None, tuple(weights[name].shape)):
                raise CheckpointError(
                    f"--groups gives {name} an optimizer state of shape {shape}, but the parameter"
                    f" has shape {tuple(weights[name].shape)}. Put the names in the order of"
                    " configure_optimizers."
                )
    return [list(group) for group in given]


# Find the parameter of each entry of a plain optimizer state, which has numbers instead of names.
# `torch.optim` numbers the parameters of all groups one after the other, and users make groups of
# `module.parameters()`, so each group has its parameters in the order of the module. Shapes then
# nearly always identify each parameter. If they allow two answers, neither is used.

Shape = tuple[int, ...]
_PATHS = 20_000
"""Number of partial answers above which the order counts as undecidable."""


def find_names(
    parameters: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]]
) -> list[list[str]]:
    """Find the names of each group's parameters.

    Args:
        parameters: names and shapes of the module's parameters, in its order. Frozen ones may be in
            no group.
        groups: shapes of each group's parameters, in order; None where the state does not contain a
            shape.

    Raises:
        CheckpointError: no order fits the shapes, or several do.
    """
    wanted = sum(map(len, groups))
    spare = len(parameters) - wanted
    # How far each group is -> in how many ways one gets there (2 is many), and the last step of one
    # of them.
    ways: dict[tuple[int, ...], int] = {(0,) * len(groups): 1}
    steps: list[dict[tuple[int, ...], int | None]] = []
    for index, (_, shape) in enumerate(parameters):
        following: dict[tuple[int, ...], int] = {}
        taken: dict[tuple[int, ...], int | None] = {}
        for done, count in ways.items():
            choices: list[tuple[tuple[int, ...], int | None]] = (
                [(done, None)] if index - sum(done) < spare else []
            )
            for group, shapes in enumerate(groups):
                if done[group] < len(shapes) and shapes[done[group]] in (None, shape):
                    choices.append(((*done[:group], done[group] + 1, *done[group + 1 :]), group))
            for reached, group_taken in choices:
                following[reached] = min(2, following.get(reached, 0) + count)
                taken[reached] = group_taken
        ways = following
        steps.append(taken)
        if len(ways) > _PATHS:
            raise CheckpointError(_undecided(groups, "too many assignments fit"))
    end = tuple(map(len, groups))
    if ways.get(end) != 1:
        why = (
            "several assignments fit"
            if end in ways
            else f"the {len(parameters)} parameters, in their order, do not fit"
        )
        raise CheckpointError(_undecided(groups, why))
    names: list[list[str]] = [[] for _ in groups]
    for (name, _), taken in zip(reversed(parameters), reversed(steps), strict=True):
        group_taken = taken[end]
        if group_taken is not None:
            names[group_taken].insert(0, name)
            end = (*end[:group_taken], end[group_taken] - 1, *end[group_taken + 1 :])
    return names


def _undecided(groups: Sequence[Sequence[Shape | None]], why: str) -> str:
    count = (
        f"{len(groups)} parameter groups with {', '.join(str(len(shapes)) for shapes in groups)}"
        " parameters"
    )
    return (
        f"It is unknown which parameters the optimizer's state belongs to ({count}): {why}. Pass"
        " their names with --groups FILE, a JSON file with a list for each group of"
        " configure_optimizers; or leave out the optimizer with --weights-only."
    )
