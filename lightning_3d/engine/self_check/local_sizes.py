"""Finds the sizes that code between column- and row-parallel layers must read on a rank: by trying,
not by names.

An attention that writes `x.view(batch, length, self.nh, -1)` needs the number of heads of one rank.
Running the module on one rank's shards decides which attributes are such numbers: with the right
ones, the input of each row-parallel layer is exactly this rank's columns of the input that it has
in the whole module. This runs in one process, forward only, and does not communicate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.transformers import is_transposed_linear, linear_sizes
from lightning_3d.models.parallel_plan import COLUMN_STYLES, Cut, ParallelPlan
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.tensor import cuts_here, shard_specs
from lightning_3d.parallel.tensor.head_arguments import (
    HeadArgument,
    Place,
    bound,
    part_of_heads,
    set_for_rank,
    take_heads,
)
from lightning_3d.parallel.tensor.heads import (
    belongs_to_transformers,
    divisible_numbers,
    heads_of,
    local_attributes,
)
from lightning_3d.parallel.trials.clone import clone
from lightning_3d.parallel.trials.tolerances import SAME_COLUMNS

LocalSizes = dict[str, int]
"""Full name of an attribute, such as "blocks.0.attention.nh", -> its value on a rank. Or an
argument of a module and its dimension, such as "blocks.0.attention(alibi:0)", -> the number of
heads along it, of which a rank takes its own (see `parallel.tensor.head_arguments`)."""

_OPEN_ROWS = frozenset({"rowwise", "packed_rowwise"})
_OPEN_COLUMNS = frozenset({"colwise", "packed_colwise"})
_SERVED = (
    _OPEN_ROWS | _OPEN_COLUMNS | {"replicate", "local_params", "replicated_with_grad_allreduce"}
)
_MOST_TRIALS = 256
_MOST_ARGUMENTS = 5
_ARGUMENT = re.compile(r"(?P<owner>.*)\((?P<name>\w+):(?P<dim>\d+)\)")


@dataclass
class _Owner:
    """The smallest module around some column- and row-parallel layers.

    Attributes:
        name: name of the module.
        rows: names of its row-parallel layers.
        call: (args, kwargs) of its first call in the whole model.
        seen: (input, output) of each row-parallel layer in that call.
    """

    name: str
    rows: list[str]
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    seen: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)


def find_local_sizes(
    whole: nn.Module,
    plan: ParallelPlan,
    tp: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    drafted: bool = False,
) -> LocalSizes:
    """Find the attributes that must change on a rank, with their values there.

    Looks at modules of the user's own, and with a drafted plan at those of Transformers too.

    A module for which no choice of attributes is right is left as it is: the comparison of the
    ranks with the whole model reports it.

    Args:
        whole: the whole model with values.
        args: positional arguments that it is called with.
        kwargs: keyword arguments that it is called with.
        drafted: whether the plan is not the model's own.
    """
    found: LocalSizes = {}
    for sizes in sizes_by_module(whole, plan, tp, args, kwargs, drafted=drafted).values():
        found |= sizes or {}
    return found


def sizes_by_module(
    whole: nn.Module,
    plan: ParallelPlan,
    tp: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    drafted: bool,
) -> dict[str, LocalSizes | None]:
    """Find the sizes in each module that runs; None for a module for which no choice is right. The
    arguments are those of `find_local_sizes`."""
    cuts = cuts_here(whole, plan, tp)
    owners = list(_owners(whole, cuts, drafted))
    if not owners:
        return {}
    _record(whole, owners, args, kwargs)
    specs = {Place(rank, tp): shard_specs(whole, plan, tp, rank) for rank in (0, tp - 1)}
    return {
        owner.name: _sizes_of(whole, owner, cuts, specs, tp)
        for owner in owners
        if owner.call is not None
    }


def modules_to_try(
    whole: nn.Module, plan: ParallelPlan, tp: int, *, drafted: bool = False
) -> list[str]:
    """List the modules in which attributes may have to change on a rank. The arguments are those of
    `find_local_sizes`."""
    return [owner.name for owner in _owners(whole, cuts_here(whole, plan, tp), drafted)]


def apply_local_sizes(module: nn.Module, sizes: Mapping[str, int], place: Place) -> None:
    """Set the attributes of the modules that this rank has, and let them take its part of arguments
    with an entry for each head."""
    modules = dict(module.named_modules())
    for name, value in sizes.items():
        if found := _ARGUMENT.fullmatch(name):
            if found["owner"] in modules:
                take_heads(
                    modules[found["owner"]],
                    HeadArgument(found["name"], int(found["dim"]), value),
                    place,
                )
            continue
        owner, _, key = name.rpartition(".")
        if owner in modules and isinstance(vars(modules[owner]).get(key), int):
            set_for_rank(modules[owner], key, value)


def _owners(whole: nn.Module, cuts: Mapping[str, Cut], drafted: bool) -> Iterator[_Owner]:
    columns = [name for name, cut in cuts.items() if cut.style in _OPEN_COLUMNS]
    by_name: dict[str, _Owner] = {}
    modules = dict(whole.named_modules())
    for name, cut in cuts.items():
        if cut.style not in _OPEN_ROWS or linear_sizes(modules.get(name)) is None:
            continue
        owner = name.rpartition(".")[0]
        while owner and not any(column.startswith(f"{owner}.") for column in columns):
            owner = owner.rpartition(".")[0]
        inside = [
            cut.style for other, cut in cuts.items() if not owner or other.startswith(f"{owner}.")
        ]
        if (belongs_to_transformers(modules[owner]) and not drafted) or not set(inside) <= _SERVED:
            continue
        by_name.setdefault(owner, _Owner(owner, [])).rows.append(name)
    yield from by_name.values()


def _record(
    whole: nn.Module, owners: list[_Owner], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run the whole model, and record what owners and their row-parallel layers were called
    with."""
    handles = []
    for owner in owners:

        def note_call(module: nn.Module, inputs: Any, named: Any, owner: _Owner = owner) -> None:
            owner.call = owner.call or (inputs, named)

        handles.append(
            whole.get_submodule(owner.name).register_forward_pre_hook(note_call, with_kwargs=True)
        )
        for name in owner.rows:

            def note_row(
                module: nn.Module,
                inputs: Any,
                output: Tensor,
                seen: list = owner.seen.setdefault(name, []),  # noqa: B008
            ) -> None:
                seen.append((inputs[0], output))

            handles.append(whole.get_submodule(name).register_forward_hook(note_row))
    try:
        with torch.no_grad():
            whole(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _sizes_of(
    whole: nn.Module,
    owner: _Owner,
    cuts: Mapping[str, Cut],
    specs: Mapping[Place, dict[str, ShardSpec]],
    tp: int,
) -> LocalSizes | None:
    """Find the first choice of attributes that is right on the first and on the last rank."""
    prefix = f"{owner.name}." if owner.name else ""
    module = whole.get_submodule(owner.name)
    shards = {place: _shard(module, prefix, cuts, of_rank) for place, of_rank in specs.items()}
    candidates = dict(_candidates(module, prefix, cuts, tp))
    likely, arguments = (
        _named_like_heads(whole, owner, cuts, tp),
        _head_arguments(whole, owner, cuts, tp),
    )
    for choice in _choices(candidates, likely, arguments):
        if all(
            _is_right(shard, owner, prefix, specs[place], choice, place)
            for place, shard in shards.items()
        ):
            return {
                (owner.name if name in arguments else prefix) + name: value
                for name, value in choice.items()
            }
    return None


def _shard(
    module: nn.Module, prefix: str, cuts: Mapping[str, Cut], specs: Mapping[str, ShardSpec]
) -> nn.Module:
    """Copy a module with one rank's shard of every parameter, and ordinary layers."""

    def value_of(name: str, parameter: nn.Parameter) -> Tensor | None:
        spec = specs[prefix + name]
        return spec.cut(parameter.detach()) if spec.is_cut else None

    shard: nn.Module = clone(module, value_of)
    for name, child in shard.named_modules():
        if prefix + name in cuts and isinstance(child, nn.Linear):
            child.out_features, child.in_features = child.weight.shape
        elif prefix + name in cuts and is_transposed_linear(child):
            child.nx, child.nf = child.weight.shape
    return shard


def _candidates(
    module: nn.Module, prefix: str, cuts: Mapping[str, Cut], tp: int
) -> Iterator[tuple[str, int]]:
    """Find the whole numbers among the attributes of a module, and of those inside it, that could
    be smaller on a rank."""
    for name, child in module.named_modules():
        if prefix + name in cuts or type(child).__module__.startswith("torch."):
            continue
        for key, value in divisible_numbers(child, tp).items():
            yield (f"{name}.{key}" if name else key), value


def _choices(
    candidates: Mapping[str, int], likely: Mapping[str, int], arguments: Mapping[str, int]
) -> Iterator[LocalSizes]:
    """Choose no attribute, the likely ones, these and arguments, then all subsets, small ones
    first. The order decides only how long the search takes."""
    yield {}
    expected = {name: candidates[name] for name in likely if name in candidates}
    yield expected
    for count in range(1, len(arguments) + 1):
        for chosen in combinations(arguments, count):
            yield expected | {name: arguments[name] for name in chosen}
    tried = 0
    for size in range(1, len(candidates) + 1):
        for names in combinations(candidates, size):
            tried += 1
            if tried > _MOST_TRIALS:
                return
            yield {name: candidates[name] for name in names}


def _named_like_heads(
    whole: nn.Module, owner: _Owner, cuts: Mapping[str, Cut], tp: int
) -> dict[str, int]:
    inside = {
        name: cut
        for name, cut in cuts.items()
        if name.rpartition(".")[0] == owner.name and cut.style in COLUMN_STYLES
    }
    heads = heads_of(whole, owner.name, inside)
    return local_attributes(whole.get_submodule(owner.name), heads, tp) if heads is not None else {}


def _head_arguments(
    whole: nn.Module, owner: _Owner, cuts: Mapping[str, Cut], tp: int
) -> dict[str, int]:
    """Find arguments of a module with an entry for each head, such as the slopes of ALiBi, as keys
    of `LocalSizes` without the owner."""
    inside = {
        name: cut
        for name, cut in cuts.items()
        if name.rpartition(".")[0] == owner.name and cut.style in COLUMN_STYLES
    }
    heads = heads_of(whole, owner.name, inside)
    if heads is None or heads.queries % tp or owner.call is None:
        return {}
    found: dict[str, int] = {}
    for name, value in bound(whole.get_submodule(owner.name), *owner.call).arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            found |= {
                f"({name}:{dim})": heads.queries
                for dim, size in enumerate(value.shape)
                if size % heads.queries == 0
            }
    return dict(list(found.items())[:_MOST_ARGUMENTS])


class _Different(Exception):
    """The input of a row-parallel layer is not this rank's shard."""


def _is_right(
    shard: nn.Module,
    owner: _Owner,
    prefix: str,
    specs: Mapping[str, ShardSpec],
    choice: Mapping[str, int],
    place: Place,
) -> bool:
    """Return whether the module runs on one rank's shards, with its columns as the input of each
    row-parallel layer."""
    assert owner.call is not None
    args, kwargs = owner.call
    for name, heads in choice.items():
        if found := _ARGUMENT.fullmatch(name):
            args, kwargs = part_of_heads(
                shard, args, kwargs, HeadArgument(found["name"], int(found["dim"]), heads), place
            )
    for name in owner.rows:
        columns = _columns(
            specs[f"{name}.weight"],
            transposed=is_transposed_linear(shard.get_submodule(name.removeprefix(prefix))),
        )
        expected = iter(owner.seen[name])

        def compare(
            x: Tensor,
            columns: Tensor = columns,
            expected: Iterator[tuple[Tensor, Tensor]] = expected,
        ) -> Tensor:
            entered, returned = next(expected)
            wanted = entered[..., columns.to(entered.device)]
            if x.shape != wanted.shape or not (x - wanted).norm() <= SAME_COLUMNS * wanted.norm():
                raise _Different
            return returned

        shard.get_submodule(name.removeprefix(prefix)).forward = compare
    with _changed(shard, choice):
        try:
            with torch.no_grad():
                shard(*args, **kwargs)
        except Exception:  # a shape that does not fit, or _Different
            return False
    return True


def _columns(spec: ShardSpec, *, transposed: bool) -> Tensor:
    """Indices of a row-parallel layer's inputs that a rank has, in its order. A transposed weight
    has shape (in, out)."""
    if transposed:
        return spec.cut(torch.arange(spec.global_shape[0])[:, None].expand(spec.global_shape))[:, 0]
    return spec.cut(torch.arange(spec.global_shape[1]).expand(spec.global_shape))[0]


@contextmanager
def _changed(module: nn.Module, choice: Mapping[str, int]) -> Iterator[None]:
    modules = dict(module.named_modules())
    places: Iterable[tuple[nn.Module, str, int]] = [
        (modules[name.rpartition(".")[0]], name.rpartition(".")[2], value)
        for name, value in choice.items()
        if not _ARGUMENT.fullmatch(name)
    ]
    before = [getattr(owner, key) for owner, key, _ in places]
    for owner, key, value in places:
        setattr(owner, key, value)
    try:
        yield
    finally:
        for (owner, key, _), value in zip(places, before, strict=True):
            setattr(owner, key, value)
