"""Pairs of column- and row-parallel layers in the blocks of a model, derived from its data flow and
tried on every rank's shards.

A row-parallel layer reads only what other linear layers of its block computed, and nothing else
reads those: they are its column-parallel layers. Which of their features a rank needs for its
columns of the row-parallel layer's input shows how they are packed (query, key and value in one
layer, gate and up in one), and whether they can be split at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lightning_3d.compat.transformers import is_transformers_model, linear_sizes
from lightning_3d.engine.plan_draft.data_flow import DataFlow
from lightning_3d.engine.plan_draft.inputs import Inputs
from lightning_3d.engine.self_check.local_sizes import LocalSizes, sizes_by_module
from lightning_3d.errors import Lightning3DError, listed, plural
from lightning_3d.models.parallel_plan import Cut, ParallelPlan
from lightning_3d.parallel.tensor import resolve
from lightning_3d.parallel.tensor.resolve_plan import share, width

_PARTIAL = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Region:
    """Column-parallel layers and the row-parallel layers that read them.

    Attributes:
        columns: names of layers.
        rows: names of layers.
        inside: names of other parameters between them.
        cuts: how they are sharded; empty if they cannot be.
        problem: why what is between them cannot be split; empty if it can.
        sizes: attributes of the modules around them that differ on a rank.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    inside: tuple[str, ...] = ()
    cuts: Mapping[str, Cut] | None = None
    problem: str = ""
    sizes: LocalSizes = field(default_factory=dict)


class _Indivisible(Exception):
    """The region cannot be sharded; the text says why."""


def find_regions(
    model: nn.Module, flow: DataFlow, layers: str, inputs: Inputs, tp: int
) -> list[Region]:
    """Find the regions of all blocks, with how they are sharded or why they cannot be.

    A region that cannot be split stays whole between its layers. Its last layers may then be the
    column-parallel ones of another region. In a model of Transformers, whose code nobody changes,
    the other layers of such a region are sharded all the same: each gathers its output or splits
    its input, so that every rank sees whole tensors between them.

    Args:
        model: whole model with values on the CPU.
        flow: data flow between the linear layers of its blocks.
        layers: name of the list of blocks.
        inputs: inputs with which it runs.
    """
    found: dict[tuple[str, ...], Region] = {}
    whole: set[str] = set()
    while True:
        regions = list(_regions(flow, layers, whole))
        fresh = [region for region in regions if region.rows not in found]
        if not fresh:
            break
        for region in fresh:
            found[region.rows] = _settled(model, flow, region, inputs, tp)
            whole |= set(region.rows) if found[region.rows].problem else set()
    sharded = {
        name
        for region in found.values()
        if not region.problem
        for name in (*region.columns, *region.rows)
    }
    left = [
        region for region in found.values() if not region.problem or not set(region.rows) <= sharded
    ]
    if not is_transformers_model(model):
        return left
    return [
        replace(region, cuts=_gathering(model, region, sharded, tp)) if region.problem else region
        for region in left
    ]


def _gathering(model: nn.Module, region: Region, sharded: set[str], tp: int) -> dict[str, Cut]:
    """Shard the layers of a region that cannot be split, where that is possible and no other region
    has them."""
    styles = dict.fromkeys(region.rows, "rowwise_split_input") | dict.fromkeys(
        region.columns, "colwise_gather_output"
    )
    cuts: dict[str, Cut] = {}
    for name, style in styles.items():
        with suppress(Lightning3DError):  # a layer of another kind, or too small
            cut = resolve(model, ParallelPlan({name: Cut(style)}), tp)[name]
            share(name, cut, width(model.get_submodule(name), style), tp, tp - 1)
            cuts |= {name: Cut(style)} if name not in sharded else {}
    return cuts


def _regions(flow: DataFlow, layers: str, whole: set[str]) -> Iterator[Region]:
    """Group column- and row-parallel layers. Those in `whole` have whole inputs."""
    sources = {name: flow.sources(name) for name in flow.order}
    rows: list[str] = []
    for name, source in sources.items():
        outside = any(not parameter.startswith(f"{layers}.") for parameter in source.parameters)
        same_block = {_block(feeder, layers) for feeder in source.linears} == {_block(name, layers)}
        if name not in whole and not outside and same_block and not source.linears & set(rows):
            rows.append(name)
    leaving = flow.sources_of_output.linears
    readers: dict[str, set[str]] = {}
    for name, source in sources.items():
        for feeder in source.linears:
            readers.setdefault(feeder, set()).add(name)
    for members in _connected({row: set(sources[row].linears) for row in rows}):
        columns = sorted(
            {feeder for row in members for feeder in sources[row].linears},
            key=list(flow.calls).index,
        )
        inside = sorted({parameter for row in members for parameter in sources[row].parameters})
        astray = [
            name
            for name in columns
            if name in leaving or readers[name] - set(members) or name not in sources
        ]
        problem = (
            f"the output of '{astray[0]}' is also read outside of these layers" if astray else ""
        )
        yield Region(tuple(columns), tuple(members), tuple(inside), problem=problem)


def _connected(columns_of: Mapping[str, set[str]]) -> list[list[str]]:
    """Group row-parallel layers that share column-parallel ones."""
    groups: list[tuple[list[str], set[str]]] = []
    for row, columns in columns_of.items():
        touching = [group for group in groups if group[1] & columns]
        members = [name for group in touching for name in group[0]]
        joined = columns.union(*(group[1] for group in touching))
        groups = [*(group for group in groups if group not in touching), ([*members, row], joined)]
    return [members for members, _ in groups]


def _block(name: str, layers: str) -> str:
    return name.removeprefix(f"{layers}.").split(".")[0]


def _settled(model: nn.Module, flow: DataFlow, region: Region, inputs: Inputs, tp: int) -> Region:
    """Add to a region how it is sharded, or why it cannot be."""
    if region.problem:
        return region
    try:
        cuts = _cuts_of(model, flow, region, tp)
        found = sizes_by_module(
            model, ParallelPlan(cuts), tp, inputs.args, dict(inputs.kwargs), drafted=True
        )
    except (_Indivisible, Lightning3DError) as error:
        return Region(region.columns, region.rows, region.inside, problem=str(error).rstrip("."))
    misfits = [name or type(model).__name__ for name, sizes in found.items() if sizes is None]
    if misfits:
        name = misfits[0]
        problem = (
            f"the code of '{name}' between these layers does not compute a rank's part of the"
            " result from that rank's shards, whichever of its attributes is divided by tp. Does"
            " it use a constant, a tensor with an entry for each head, or the width C of its"
            " input, as in q.view(B, T, self.heads, C // self.heads)? Write q.view(B, T,"
            " self.heads, -1), and y.reshape(B, T, -1) before the last layer (docs/attention.md)"
        )
        return Region(region.columns, region.rows, region.inside, problem=problem)
    sizes = {name: value for sizes in found.values() for name, value in (sizes or {}).items()}
    return Region(region.columns, region.rows, region.inside, cuts, sizes=sizes)


def _cuts_of(model: nn.Module, flow: DataFlow, region: Region, tp: int) -> dict[str, Cut]:
    parts = [{row: _range_of(model, row, tp, rank) for row in region.rows} for rank in range(tp)]
    needs = {name: [flow.features_behind(part, name) for part in parts] for name in region.columns}
    cuts: dict[str, Cut] = {}
    packed = {}
    shared = {name: cut for name, masks in needs.items() if (cut := _shared(name, masks))}
    if len(shared) == len(needs):
        raise _Indivisible(_why_indivisible(model, flow, region, region.columns[0], tp))
    for name, masks in needs.items():
        if name in shared:
            cuts[name] = shared[name]
            continue
        if any(
            bool((one & other).any())
            for place, one in enumerate(masks)
            for other in masks[place + 1 :]
        ):
            raise _Indivisible(_why_indivisible(model, flow, region, name, tp))
        sizes = _packed_sizes(name, masks[0], tp)
        if len(sizes) > 1:
            packed[name] = sizes
        else:
            cuts[name] = Cut("colwise")
    units = _groups(
        model,
        flow,
        region,
        [name for name in region.columns if name not in cuts or cuts[name].units is None],
    )
    for name, sizes in packed.items():
        cuts[name] = Cut(
            "packed_colwise",
            units=units if all(size % (units or 1) == 0 for size in sizes) else None,
            parts=sizes,
        )
    cuts |= dict.fromkeys(region.rows, Cut("rowwise"))
    cuts |= {_owner_if_all(model, name, region.inside): Cut(_PARTIAL) for name in region.inside}
    _require_covered(model, cuts, needs, tp)
    return {
        name: cuts[name]
        for name in (
            *region.columns,
            *region.rows,
            *(key for key in cuts if cuts[key].style == _PARTIAL),
        )
    }


def _range_of(model: nn.Module, row: str, tp: int, rank: int) -> Tensor:
    """Columns of a row-parallel layer's input that a rank has."""
    total = _inputs_of(model, row)
    if total % tp:
        raise _Indivisible(f"'{row}' has {total} inputs, which tp={tp} does not divide")
    return torch.arange(rank * total // tp, (rank + 1) * total // tp)


def _shared(name: str, masks: list[Tensor]) -> Cut | None:
    """Cut for a layer whose features several ranks need, each as a whole: keys and values of fewer
    heads than ranks."""
    kinds = [
        mask
        for place, mask in enumerate(masks)
        if not any(bool((mask == other).all()) for other in masks[:place])
    ]
    total = len(masks[0])
    even = (
        [torch.arange(total) // (total // len(kinds)) == place for place in range(len(kinds))]
        if total % len(kinds) == 0
        else []
    )
    order = [place * len(kinds) // len(masks) for place in range(len(masks))]
    if (
        len(kinds) == len(masks)
        or not even
        or any(bool((masks[r] != even[k]).any()) for r, k in enumerate(order))
    ):
        return None
    return Cut("colwise", units=len(kinds), shared=True)


def _packed_sizes(name: str, mask: Tensor, tp: int) -> tuple[int, ...]:
    """Sizes of the matrices that are packed in a layer, of which the first rank needs the first
    part each."""
    indices = mask.nonzero().flatten().tolist()
    starts = [
        index
        for place, index in enumerate(indices)
        if place == 0 or indices[place - 1] != index - 1
    ]
    lengths = [
        sum(1 for index in indices if start <= index < end)
        for start, end in zip(starts, [*starts[1:], len(mask)], strict=True)
    ]
    sizes = tuple(length * tp for length in lengths)
    if starts != [sum(sizes[:place]) for place in range(len(sizes))] or sum(sizes) != len(mask):
        raise _Indivisible(
            f"the first of {tp} ranks does not need the first 1/{tp} of the features of '{name}',"
            " or of each matrix that is packed in it"
        )
    return sizes


def _groups(model: nn.Module, flow: DataFlow, region: Region, names: list[str]) -> int | None:
    """Number of groups, such as heads, whose features and columns depend on each other only within
    a group; None for single columns."""
    row = region.rows[0]
    total = _inputs_of(model, row)
    columns = torch.arange(total) == 0
    while True:
        features = {
            name: flow.features_behind({row: columns.nonzero().flatten()}, name) for name in names
        }
        after = flow.columns_after(features, row) | columns
        if bool((after == columns).all()):
            break
        columns = after
    size = int(columns.sum())
    return total // size if size > 1 and total % size == 0 and bool(columns[:size].all()) else None


def _why_indivisible(model: nn.Module, flow: DataFlow, region: Region, name: str, tp: int) -> str:
    groups = _groups(model, flow, region, list(region.columns))
    if groups is not None and groups > 1:
        nearest = max(size for size in range(1, tp) if groups % size == 0)
        return (
            f"'{region.rows[0]}' reads {plural(groups, 'group')} of features (heads), which tp={tp}"
            f" does not divide; {f'tp={nearest} works' if nearest > 1 else 'only tp=1 works'}"
        )
    return (
        f"several ranks need the same features of '{name}' (does a norm read all of them, or does"
        " one layer make both the queries and a key that all heads share?)"
    )


def _owner_if_all(model: nn.Module, name: str, inside: tuple[str, ...]) -> str:
    """Name of the module that owns a parameter if all of its parameters are inside the region, else
    the parameter's."""
    owner = name.rpartition(".")[0]
    return (
        owner
        if owner
        and all(
            f"{owner}.{key}" in inside for key, _ in model.get_submodule(owner).named_parameters()
        )
        else name
    )


def _require_covered(
    model: nn.Module, cuts: dict[str, Cut], needs: Mapping[str, list[Tensor]], tp: int
) -> None:
    """Check with the arithmetic of training that each rank's shards hold all the features that it
    needs."""
    resolved = resolve(model, ParallelPlan(cuts), tp)
    for name, masks in needs.items():
        cut = resolved[name]
        for rank, mask in enumerate(masks):
            held = torch.zeros(len(mask), dtype=torch.bool)
            for start, length in share(
                name, cut, width(model.get_submodule(name), cut.style), tp, rank
            ).pieces:
                held[start : start + length] = True
            if bool((mask & ~held).any()):
                raise _Indivisible(
                    f"rank {rank} of {tp} would need features of '{name}' that are on another rank"
                )


def _inputs_of(model: nn.Module, name: str) -> int:
    sizes = linear_sizes(model.get_submodule(name))
    assert sizes is not None
    return sizes[0]


def described(region: Region) -> str:
    """Say which layers a region that cannot be split has, what becomes of them, and why."""
    fate = (
        "work on whole tensors, which costs communication" if region.cuts else "cannot be sharded"
    )
    return f"{listed(map(repr, (*region.columns, *region.rows)))} {fate}: {region.problem}"
