"""Rewrite of a whole model into its tensor-parallel shard: first the table of shards, then the
modules, in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_3d.compat.peft_layers import is_adapter
from lightning_3d.compat.torch import put_values
from lightning_3d.compat.transformers import is_transposed_linear
from lightning_3d.errors import NoPlanError, PlanError
from lightning_3d.models.parallel_plan import (
    COLUMN_STYLES,
    EMBEDDING_STYLES,
    ROW_STYLES,
    SUMMED_STYLE,
    Cut,
    ParallelPlan,
    tied_names,
)
from lightning_3d.parallel.sharding import ShardSpec, cut_along, replicated
from lightning_3d.parallel.specialize import combined, specialize
from lightning_3d.parallel.tensor.experts import PartialSum, SilentIdentity
from lightning_3d.parallel.tensor.group import TensorParallel
from lightning_3d.parallel.tensor.heads import belongs_to_transformers, heads_of, local_attributes
from lightning_3d.parallel.tensor.layers import (
    ColumnParallelConv1D,
    ColumnParallelLinear,
    GatheredColumnLinear,
    HiddenParallelEmbedding,
    LatentKeyValueLinear,
    Region,
    RowParallelConv1D,
    RowParallelLinear,
    SplitRowLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from lightning_3d.parallel.tensor.lora import become_lora
from lightning_3d.parallel.tensor.resolve_plan import (
    cut_dimension,
    cuts_here,
    own_forward,
    share,
    width,
)
from lightning_3d.parallel.tensor.sequence_parallel import SequenceRegions

_TRANSPOSED: dict[type[nn.Module], type] = {
    ColumnParallelLinear: ColumnParallelConv1D,
    RowParallelLinear: RowParallelConv1D,
}
"""Sharded layers for Conv1D instead of nn.Linear."""


def shard_specs(
    module: nn.Module,
    plan: ParallelPlan,
    tp_size: int,
    tp_rank: int,
    regions: SequenceRegions | None = None,
) -> dict[str, ShardSpec]:
    """Shards of rank `tp_rank` of every parameter, including aliases of tied ones, by name relative
    to `module`.

    Args:
        module: the whole module, on meta or not.
        regions: where sequence parallelism gathers; None without it.

    Raises:
        PlanError: the plan does not fit the modules, or shards tied parameters differently.
        LayoutError: heads, rows or vocabulary do not fit tp.
    """
    if tp_size > 1 and set(plan.tp) <= {plan.embedding, plan.head}:
        raise NoPlanError(
            f"{type(module).__name__} declares no tensor-parallel plan. Pass plan={{'tp':"
            " {pattern: style}}, or use tp=1."
        )
    cuts = cuts_here(module, plan, tp_size) if tp_size > 1 else {}
    partial = tuple(
        f"{name}." for name, cut in cuts.items() if cut.style == "replicated_with_grad_allreduce"
    )
    specs: dict[str, ShardSpec] = {}
    canonical_names = tied_names(module)
    modules = dict(module.named_modules(remove_duplicate=False))
    adapted = {name for name in cuts if is_adapter(modules.get(name))}

    def is_bare(name: str) -> bool:
        """Return whether a parameter that the plan does not name belongs to a module of several
        layers."""
        owner = name.rpartition(".")[0]
        return name not in cuts and owner not in cuts and bool(modules[owner]._modules)

    for name, parameter in module.named_parameters(remove_duplicate=False):
        shape = tuple(parameter.shape)
        if f"{name}.".startswith(partial):
            specs[name] = replicated(name, shape, tp_size, grad_sum=True)
        elif layer := next((layer for layer in adapted if name.startswith(f"{layer}.")), None):
            specs[name] = _adapted_spec(name, layer, shape, cuts[layer], tp_size, tp_rank)
        else:
            transposed = is_transposed_linear(modules.get(name.rpartition(".")[0]))
            specs[name] = _spec(name, shape, cuts, tp_size, tp_rank, transposed=transposed)
        if (
            regions is not None
            and specs[name].is_replicated(tp_size)
            and regions.has_partial_gradient(name)
        ):
            specs[name] = replicated(name, shape, tp_size, grad_sum=True)
        canonical = canonical_names[name]
        if canonical != name:
            same_layer = modules[name.rpartition(".")[0]] is modules[canonical.rpartition(".")[0]]
            # the bias of BERT's head, which its module has too: the layer decides
            if is_bare(canonical) and not is_bare(name):
                specs[canonical] = specs[name].renamed(canonical)
            elif (
                not same_layer
                and not is_bare(name)
                and replace(specs[name], name=canonical) != specs[canonical]
            ):
                adapter = any(
                    word in f"{name} {canonical}" for word in ("base_layer", "original_module")
                )
                advice = (
                    " If only one has an adapter, it stays unsharded: adapt both, or use tp=1."
                    if adapter
                    else " Use one style."
                )
                raise PlanError(
                    f"'{name}' and '{canonical}' are one tied parameter, but the plan shards them"
                    f" differently.{advice}"
                )
            specs[name] = specs[canonical].renamed(name, tied_to=canonical)
    return specs


def rewrite(
    module: nn.Module,
    plan: ParallelPlan,
    specs: dict[str, ShardSpec],
    context: TensorParallel,
    sequence: SequenceRegions | None = None,
) -> None:
    """Turn `module` into this rank's shard, in place. No communication.

    Every cut layer becomes an instance of a subclass of its class, under the same name; parameters
    become the local shards (on meta they stay there); head counts that an attention of Transformers
    reads become local. Modules that are on other stages are skipped.

    Args:
        specs: of the parameters that are here; of tied ones one name is enough.
        sequence: where sequence parallelism gathers (`gather_regions`); None without it.
    """
    if context.size == 1:
        return
    cuts = cuts_here(module, plan, context.size, whole=False)
    _correct_heads(module, cuts, context.size)
    widths = {
        name: width(module.get_submodule(name), cut.style)
        for name, cut in cuts.items()
        if _is_layer(module, name, cut)
    }
    _shard_parameters(module, specs)
    for name in (
        name
        for name, cut in cuts.items()
        if cut.style == "moe_tp_experts" or _is_sum(module, name, cuts)
    ):
        specialize(module.get_submodule(name), PartialSum, tp_context=context)
    for name in (
        name
        for name, cut in cuts.items()
        if cut.style == "moe_identity_expert" and context.rank > 0
    ):
        specialize(module.get_submodule(name), SilentIdentity)
    gathered = sequence.parents if sequence is not None else frozenset()
    regions = _regions(cuts, context, gathered)
    for name in widths:
        layer = module.get_submodule(name)
        if cuts[name].style == "mla_kv_a_proj":
            if name.rpartition(".")[0] in gathered:  # all gradients in there are partial
                continue
            _become(
                layer,
                LatentKeyValueLinear,
                {"tp_context": context, "tp_rotary": _rotary_size(module, name)},
            )
            continue
        kind, attributes = _sharded_kind(name, cuts[name], widths[name], plan, regions, context)
        if is_transposed_linear(layer):
            specialize(layer, _TRANSPOSED[kind], **attributes)
        elif is_adapter(layer):
            become_lora(layer, name, kind, attributes)
        else:
            _become(layer, kind, attributes)


def _spec(
    name: str,
    shape: tuple[int, ...],
    cuts: dict[str, Cut],
    tp_size: int,
    tp_rank: int,
    *,
    transposed: bool,
) -> ShardSpec:
    owner, _, last = name.rpartition(".")
    cut_name = name if name in cuts else owner
    cut = cuts.get(cut_name, Cut("replicate"))
    dim = cut_dimension(
        cut.style, len(shape), is_bias=last == "bias" and cut_name != name, transposed=transposed
    )
    if dim is None:
        return replicated(name, shape, tp_size)
    return _cut_spec(name, cut_name, shape, dim, cut, tp_size, tp_rank)


def _adapted_spec(
    name: str, layer: str, shape: tuple[int, ...], cut: Cut, tp_size: int, tp_rank: int
) -> ShardSpec:
    """A parameter of the LoRA layer called `layer`: its base layer is sharded by the plan, A and B
    along the same dimension.

    The other one of the two is whole, and each rank sees a part of its gradient: a column-parallel
    layer sees the gradient of its own outputs, and a row-parallel one feeds B with the product of
    its own inputs.
    """
    part = name.removeprefix(f"{layer}.")
    column = cut.style in COLUMN_STYLES
    dim = cut_dimension(cut.style, len(shape), is_bias=part.endswith(".bias"))
    if part.startswith("lora_A." if column else "lora_B.") and dim is not None:
        return replicated(name, shape, tp_size, grad_sum=True)
    return (
        replicated(name, shape, tp_size)
        if dim is None
        else _cut_spec(name, layer, shape, dim, cut, tp_size, tp_rank)
    )


def _cut_spec(
    name: str, cut_name: str, shape: tuple[int, ...], dim: int, cut: Cut, tp_size: int, tp_rank: int
) -> ShardSpec:
    part = share(cut_name, cut, shape[dim], tp_size, tp_rank)
    shared = part.replicas if len(part.replicas) > 1 else ()
    return cut_along(name, shape, dim, part.pieces, tp_replicas=part.replicas, tp_grad_sum=shared)


def _shard_parameters(module: nn.Module, specs: dict[str, ShardSpec]) -> None:
    """Leave each parameter its shard. One on meta only gets its local shape; `initialize` cuts its
    values. A tied one is one object, of which one name may have a specification."""
    known: dict[int, ShardSpec] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in specs:
            known.setdefault(id(parameter), specs[name])
    for parameter in module.parameters():
        spec = known[id(parameter)]
        if spec.is_cut and not spec.expert:  # experts are sharded by expert parallelism
            put_values(parameter, spec.cut(parameter.detach()))


def _is_layer(module: nn.Module, name: str, cut: Cut) -> bool:
    """True if the entry names a layer that changes, not a bare parameter or a replicated module."""
    if cut.style not in COLUMN_STYLES | ROW_STYLES | EMBEDDING_STYLES | {"mla_kv_a_proj"}:
        return False
    owner, _, last = name.rpartition(".")
    return isinstance(getattr(module.get_submodule(owner), last), nn.Module)


def _is_sum(module: nn.Module, name: str, cuts: dict[str, Cut]) -> bool:
    """True for a module of the style "all_reduce" whose own parameters are sharded. Layers in it
    that are sharded sum their outputs."""
    if cuts[name].style != SUMMED_STYLE:
        return False
    own = [f"{name}.{key}" for key, _ in module.get_submodule(name).named_parameters(recurse=False)]
    return any(
        parameter in cuts and cuts[parameter].style in COLUMN_STYLES | ROW_STYLES
        for parameter in own
    )


def _regions(
    cuts: dict[str, Cut], context: TensorParallel, gathered: frozenset[str]
) -> Callable[[str], Region]:
    """One region for each parent of sharded layers."""
    members: dict[str, int] = {}
    for name, cut in cuts.items():
        parent = name.rpartition(".")[0]
        members[parent] = members.get(parent, 0) + (cut.style in COLUMN_STYLES)
    regions = {
        parent: Region(context, count, gathered=parent in gathered)
        for parent, count in members.items()
    }
    return lambda name: regions[name.rpartition(".")[0]]


def _sharded_kind(
    name: str,
    cut: Cut,
    total: int,
    plan: ParallelPlan,
    region_of: Callable[[str], Region],
    context: TensorParallel,
) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class that a layer becomes, and the attributes that this class declares."""
    local = share(name, cut, total, context.size, context.rank)
    sizes = tuple(
        share(name, cut, total, context.size, rank).length for rank in range(context.size)
    )
    # Sizes that the code around a layer may read are those of the tensors it sees: whole at heads
    # and gathers.
    region, random = region_of(name), context.random
    column = {"tp_region": region, "tp_stream": None if random is None else random.inside(name)}
    row = {
        "tp_region": region,
        "tp_stream": None if random is None else random.outside(name, alike=not region.gathered),
    }
    match cut.style:
        case "embedding_rowwise":
            return VocabParallelEmbedding, {"tp_context": context, "tp_start": local.pieces[0][0]}
        case "embedding_colwise":
            return HiddenParallelEmbedding, {"tp_context": context, "tp_sizes": sizes}
        case "colwise" | "colwise_gather_output" if name == plan.head:
            return VocabParallelHead, {**column, "tp_stream": None, "tp_sizes": sizes}
        case "colwise" | "packed_colwise":
            return ColumnParallelLinear, {**column, "out_features": local.length}
        case "colwise_gather_output":
            return GatheredColumnLinear, {**column, "tp_stream": None, "tp_sizes": sizes}
        case "rowwise" | "packed_rowwise":
            return RowParallelLinear, {**row, "in_features": local.length}
        case "rowwise_split_input":
            return SplitRowLinear, {**row, "tp_sizes": sizes}
    raise PlanError(
        f"'{name}' cannot be sharded with the style '{cut.style}'. Use another style, or leave it"
        " out of the plan."
    )


def _rotary_size(module: nn.Module, name: str) -> int:
    """Columns at the end of a latent projection that go to the heads directly."""
    owner = module.get_submodule(name.rpartition(".")[0])
    for source in (owner, getattr(owner, "config", None), getattr(module, "config", None)):
        if isinstance(size := getattr(source, "qk_rope_head_dim", None), int):
            return size
    raise PlanError(
        f"The plan shards '{name}' with the style 'mla_kv_a_proj', but neither its module nor the"
        " configuration has qk_rope_head_dim. Set it in the model's configuration."
    )


def _become(layer: nn.Module, kind: type[nn.Module], attributes: dict[str, Any]) -> None:
    """Change the class of `layer` so that `kind` comes directly above nn.Linear or nn.Embedding.

    A class on top that scales an embedding's output, or a pipeline gate, calls `super().forward`
    and so reaches it.
    """
    own = type(layer)
    bases = (own, kind) if own_forward(own) is None else (kind, own)
    layer.__class__ = kind if own in kind.__mro__ else combined(own.__name__, *bases)
    for name, value in attributes.items():
        object.__setattr__(layer, name, value)


def _correct_heads(module: nn.Module, cuts: dict[str, Cut], tp_size: int) -> None:
    """Give attention modules of Transformers the head counts of one rank. Those of others: see
    `self_check.local_sizes`."""
    parents = dict.fromkeys(
        name.rpartition(".")[0]
        for name, cut in cuts.items()
        if cut.style in ("colwise", "packed_colwise")
    )
    for parent_name in parents:
        parent = module.get_submodule(parent_name)
        inside = {name: cut for name, cut in cuts.items() if name.rpartition(".")[0] == parent_name}
        heads = heads_of(module, parent_name, inside) if belongs_to_transformers(parent) else None
        if heads is None:
            continue
        for name, value in local_attributes(parent, heads, tp_size).items():
            setattr(parent, name, value)
        if any(cut.style == "packed_colwise" for cut in inside.values()) and hasattr(
            parent, "config"
        ):
            # Code that slices a packed projection reads the number of query heads from the
            # configuration.
            local = heads.on_one_rank(tp_size)
            config: Any = copy.copy(parent.config)
            config.num_attention_heads, config.num_key_value_heads = local.queries, local.keys
            parent.config = config
