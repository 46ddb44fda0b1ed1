"""From patterns to numbers: how every module of a model is sharded, and which rows each rank gets.

Pure arithmetic on shapes; the modules may be on meta, and some of them may be gone to other stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from lightning_3d.compat.peft_layers import (
    base_layer,
    is_adapter,
    is_lora_linear,
    lora_variant,
    refuse_adapted_experts,
)
from lightning_3d.compat.transformers import is_transposed_linear
from lightning_3d.errors import LayoutError, PlanError
from lightning_3d.models.parallel_plan import (
    COLUMN_STYLES,
    EMBEDDING_STYLES,
    ROW_STYLES,
    Cut,
    ParallelPlan,
    require_supported,
)
from lightning_3d.parallel.sharding import even_range
from lightning_3d.parallel.tensor.heads import Heads, heads_of, is_key_or_value
from lightning_3d.parallel.trials.products import is_product


@dataclass(frozen=True)
class Share:
    """One rank's share of a dimension.

    Attributes:
        pieces: (start, length) ranges, in the order in which the rank stores them.
        replicas: ranks that get the same.
    """

    pieces: tuple[tuple[int, int], ...]
    replicas: tuple[int, ...]

    @property
    def length(self) -> int:
        return sum(length for _, length in self.pieces)


def resolve(
    module: nn.Module, plan: ParallelPlan, tp_size: int, *, whole: bool = True
) -> dict[str, Cut]:
    """Find the cut of every module and parameter that the plan names and that is on this rank, with
    heads filled in.

    Args:
        whole: whether no module was moved to another stage yet. Then a named module without
            parameters is not a stub.

    Raises:
        PlanError: a style that is unknown, or that its module cannot have.
    """
    require_supported(plan.tp)
    cuts = dict(_named(module, plan, whole))
    _require_routed(module, cuts)
    for parent, names in _by_parent(cuts).items():
        heads = heads_of(module, parent, {name: cuts[name] for name in names})
        if heads is not None:
            _refuse_values_of_heads(module, parent, names, cuts, heads)
            cuts.update({name: _with_units(module, name, cuts[name], heads) for name in names})
            cuts.update(_per_head_parameters(module, parent, heads, cuts))
        cuts.update(_activation_parameters(module, parent, cuts))
        cuts.update(_packed_pair(module, parent, cuts, tp_size))
    return cuts


def with_cuts(
    module: nn.Module, plan: ParallelPlan, tp_size: int, cuts: dict[str, Cut]
) -> ParallelPlan:
    """Let a plan remember what `resolve` has found for the whole `module`, by each name of a module
    that has several."""
    names: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        names.setdefault(id(child), []).append(name)
    modules = dict(module.named_modules())
    by_all_names = dict(cuts)
    for name, cut in cuts.items():
        owner, _, last = name.rpartition(".")
        if name in modules:
            by_all_names |= dict.fromkeys(names[id(modules[name])], cut)
        elif owner in modules:
            by_all_names |= {f"{other}.{last}": cut for other in names[id(modules[owner])]}
    return replace(plan, resolved=(tp_size, by_all_names))


def cuts_here(
    module: nn.Module, plan: ParallelPlan, tp_size: int, *, whole: bool = True
) -> dict[str, Cut]:
    """Return the cuts of what is in `module` and on this rank. A plan that remembers those of the
    whole module is not resolved again.

    Args:
        module: the whole module, a copy of it or what this rank has of it.
        whole: as in `resolve`.

    Raises:
        PlanError: as `resolve`, of a plan that was not resolved before.
    """
    if plan.resolved is None or plan.resolved[0] != tp_size:
        return resolve(module, plan, tp_size, whole=whole)
    known = plan.resolved[1]
    found: dict[str, Cut] = {}
    for name, child in module.named_modules():
        if name in known and _is_here(module, name, child, known[name].style, plan, whole):
            found[name] = known[name]
        for key, _ in child.named_parameters(recurse=False):
            full_name = f"{name}.{key}" if name else key
            if full_name in known:
                found[full_name] = known[full_name]
    return found


def _require_routed(module: nn.Module, cuts: dict[str, Cut]) -> None:
    """Refuse experts with adapters, and those whose forward takes tokens and one thing more."""
    experts = [name for name, cut in cuts.items() if cut.style == "moe_tp_experts"]
    refuse_adapted_experts(module, experts, "tp")
    for name in experts:
        if len(inspect.signature(module.get_submodule(name).forward).parameters) == 2:
            raise PlanError(
                f"The forward of the experts '{name}' must take tokens, or (tokens, experts of each"
                " token, their weights), or tp cannot shard them. Use tp=1."
            )


def _refuse_values_of_heads(
    module: nn.Module, parent: str, names: list[str], cuts: dict[str, Cut], heads: Heads
) -> None:
    """Refuse an attention with a row-parallel layer on the way that makes a number for each head
    (Doge's dynamic mask): it makes those of all heads, where the code around it has this rank's."""
    rows = {
        name: layer.out_features
        for name in names
        if cuts[name].style == "rowwise"
        and isinstance(layer := base_layer(module.get_submodule(name)), nn.Linear)
    }
    for name, size in rows.items():
        if len(rows) > 1 and size in (heads.queries, heads.keys):
            raise PlanError(
                f"'{name}' is row-parallel, so its output has all {size} values, one for each head,"
                f" on every rank. But each rank holds only some of the heads of '{parent}', so the"
                " sizes do not match. Leave the attention out of the plan, or use tp=1."
            )


def cut_dimension(style: str, ndim: int, *, is_bias: bool, transposed: bool = False) -> int | None:
    """The dimension that a style shards; None if every rank holds the whole parameter.

    Args:
        ndim: dimensions of the parameter.
        transposed: whether a weight has shape (in, out).
    """
    outputs, inputs = (ndim - 1, max(ndim - 2, 0)) if transposed else (max(ndim - 2, 0), ndim - 1)
    if style in COLUMN_STYLES:
        return outputs
    if style in ROW_STYLES:
        return None if is_bias else inputs
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


def share(name: str, cut: Cut, total: int, tp_size: int, tp_rank: int) -> Share:
    """The part of a dimension of `total` rows that rank `tp_rank` gets.

    Whole units are split evenly. If there are fewer key and value heads than ranks, each head is
    replicated on tp / heads neighbouring ranks. Rows without units are split into runs of
    ceil(total / tp), the last ones shorter.

    Raises LayoutError when heads do not fit tp, or when a rank would get nothing.
    """
    packed = cut.style.startswith("packed")
    parts = cut.parts or ((total // 2, total - total // 2) if packed else (total,))
    units = cut.units if isinstance(cut.units, tuple) else (cut.units,) * len(parts)
    if sum(parts) != total or len(units) != len(parts):
        raise PlanError(
            f"The parts {parts} of '{name}' in the plan, with units {units}, do not fit its {total}"
            f" rows. The parts must add up to {total}, and units must have one entry for each part."
        )
    may_replicate = (
        cut.style == "colwise" and len(parts) == 1 and (cut.shared or is_key_or_value(name))
    )
    pieces = []
    replicas: tuple[int, ...] = (tp_rank,)
    start = 0
    for size, groups in zip(parts, units, strict=True):
        offset, length, replicas = _split(name, size, groups, tp_size, tp_rank, may_replicate)
        pieces.append((start + offset, length))
        start += size
    return Share(tuple(pieces), replicas)


def width(layer: nn.Module, style: str) -> int:
    """Size of the dimension of a layer's weight that `style` shards."""
    weight: Any = layer.weight
    reads_inputs = style in ROW_STYLES or style == "embedding_colwise"
    return int(weight.shape[-1] if reads_inputs != is_transposed_linear(layer) else weight.shape[0])


def _split(
    name: str, size: int, units: int | None, tp_size: int, tp_rank: int, may_replicate: bool
) -> tuple[int, int, tuple[int, ...]]:
    """(start, length, ranks that hold the same) of one part."""
    if units is None:
        if even_range(size, tp_size, tp_size - 1)[1] == 0:
            raise LayoutError(
                f"tp={tp_size} is too many for the {size} rows of '{name}': some ranks would get"
                " none. Use a smaller tp."
            )
        return *even_range(size, tp_size, tp_rank), (tp_rank,)
    if size % units:
        raise PlanError(
            f"'{name}' has {size} rows, which cannot be split into {units} equal groups. Correct"
            " its units in the plan."
        )
    if units % tp_size == 0:
        length = size // tp_size
        return tp_rank * length, length, (tp_rank,)
    if may_replicate and tp_size % units == 0:
        copies = tp_size // units
        first = tp_rank // copies * copies
        return (
            tp_rank // copies * (size // units),
            size // units,
            tuple(range(first, first + copies)),
        )
    nearest = max(
        tp for tp in range(1, tp_size) if units % tp == 0 or (may_replicate and tp % units == 0)
    )
    rule = "a divisor or a multiple" if may_replicate else "a divisor"
    raise LayoutError(
        f"tp={tp_size} does not fit '{name}', which has {units} heads: tp must be {rule} of"
        f" {units}. The nearest tp that works is {nearest}."
    )


def _named(module: nn.Module, plan: ParallelPlan, whole: bool) -> Iterable[tuple[str, Cut]]:
    for name, child in module.named_modules():
        cut = plan.cut_of(name)
        if (
            cut is not None
            and _is_here(module, name, child, cut.style, plan, whole)
            and not _stays_whole(child, cut.style)
        ):
            _check_adapter(name, child, cut.style)
            _check_kind(name, cast(nn.Module, base_layer(child)), cut.style)
            yield name, cut
        for parameter_name, _ in child.named_parameters(recurse=False):
            full_name = f"{name}.{parameter_name}" if name else parameter_name
            if (cut := plan.cut_of(full_name)) is not None:
                yield full_name, cut


def _is_here(
    module: nn.Module, name: str, child: nn.Module, style: str, plan: ParallelPlan, whole: bool
) -> bool:
    """True if an entry of the plan applies to this rank's module.

    A module without parameters is a stub of another stage's, or one of the model's own. Of the
    latter, an expert that returns its tokens unchanged counts if the experts around it are sharded;
    a norm that is switched off has nothing to replicate.
    """
    if style == "moe_identity_expert":
        around = plan.cut_of(name.rpartition(".")[0])
        return around is not None and around.style == "moe_tp_experts"
    if next(child.parameters(), None) is not None:
        return True
    return whole and style in COLUMN_STYLES | ROW_STYLES | EMBEDDING_STYLES | {"mla_kv_a_proj"}


def _stays_whole(child: nn.Module, style: str) -> bool:
    """True for an adapter that cannot be sharded, where the code around it sees whole tensors
    anyway: a head, an embedding."""
    closed = style in EMBEDDING_STYLES | {"colwise_gather_output", "rowwise_split_input"}
    return closed and is_adapter(child) and _unsupported_adapter(child) is not None


def _unsupported_adapter(child: nn.Module) -> str | None:
    """Kind of an adapter that cannot be sharded; None for plain LoRA on `nn.Linear`."""
    if not is_lora_linear(child):
        return f"PEFT's {type(child).__module__.removeprefix('peft.')}.{type(child).__name__}"
    variant = lora_variant(child)
    biased = any(layer.bias is not None for layer in cast(Any, child).lora_B.values())
    return (
        f"LoRA with {variant}"
        if variant is not None
        else "LoRA with lora_bias=True"
        if biased
        else None
    )


def _check_adapter(name: str, child: nn.Module, style: str) -> None:
    """Refuse adapters of PEFT on a sharded layer, except for plain LoRA."""
    if not is_adapter(child) or style not in COLUMN_STYLES | ROW_STYLES | {"mla_kv_a_proj"}:
        return
    what = (
        "LoRA on a projection whose output is partly replicated"
        if style == "mla_kv_a_proj"
        else _unsupported_adapter(child)
    )
    if what is None:
        return
    raise PlanError(
        f"'{name}' is sharded over the tensor-parallel ranks ('{style}'), but its adapter cannot be"
        f" sharded: {what}. Use plain LoRA on nn.Linear, leave this layer out of target_modules and"
        " modules_to_save, or use tp=1, with pp or dp instead."
    )


def _by_parent(cuts: Iterable[str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name in cuts:
        grouped.setdefault(name.rpartition(".")[0], []).append(name)
    return grouped


def _with_units(module: nn.Module, name: str, cut: Cut, heads: Heads) -> Cut:
    """Fill in the heads where the plan leaves them open. Around the gathering styles the code sees
    whole tensors, so heads may be split; packed layers declare their parts."""
    if cut.units is not None or cut.style not in ("colwise", "rowwise"):
        return cut
    units = heads.keys if is_key_or_value(name) else heads.queries
    parent, _, last = name.rpartition(".")
    parameter = dict(module.get_submodule(parent).named_parameters(recurse=False)).get(last)
    total = (
        parameter.shape[0]
        if parameter is not None
        else width(module.get_submodule(name), cut.style)
    )
    return replace(cut, units=units) if total % units == 0 else cut


def _per_head_parameters(
    module: nn.Module, parent: str, heads: Heads, cuts: dict[str, Cut]
) -> dict[str, Cut]:
    """Norms with one row of weights per head (Cohere's) that no plan names: they are sharded with
    the heads."""
    found = {}
    for child_name, child in module.get_submodule(parent).named_children():
        weight = getattr(child, "weight", None)
        name = f"{parent}.{child_name}" if parent else child_name
        if weight is None or name in cuts or "norm" not in child_name or weight.ndim != 2:
            continue
        units = heads.keys if is_key_or_value(f"{name}.weight") else heads.queries
        if weight.shape[0] == units:
            found[f"{name}.weight"] = Cut("colwise", units)
    return found


def _activation_parameters(module: nn.Module, parent: str, cuts: dict[str, Cut]) -> dict[str, Cut]:
    """Trained numbers of an activation function between column- and row-parallel layers (Apertus'
    xIELU), which plans leave out: each rank sees the gradient of its own columns."""
    found = {}
    styles = {cut.style for name, cut in cuts.items() if name.rpartition(".")[0] == parent}
    for child_name, child in module.get_submodule(parent).named_children():
        name = f"{parent}.{child_name}" if parent else child_name
        scalars = [parameter for parameter in child.parameters() if parameter.numel() == 1]
        if (
            scalars
            and "act" in child_name
            and name not in cuts
            and styles >= {"colwise", "rowwise"}
        ):
            found[name] = Cut("replicated_with_grad_allreduce")
    return found


def _check_kind(name: str, child: nn.Module, style: str) -> None:
    """Refuse styles on other kinds of layers, and subclasses that do not call its forward, where
    the collective goes."""
    if style == "moe_identity_expert" and next(child.parameters(), None) is not None:
        raise PlanError(
            f"The style {style} of '{name}' is for experts without weights, but '{name}' has"
            " parameters. Remove it from the plan."
        )
    if style not in COLUMN_STYLES | ROW_STYLES | EMBEDDING_STYLES | {"mla_kv_a_proj"}:
        return
    wanted = nn.Embedding if style in EMBEDDING_STYLES else nn.Linear
    if is_transposed_linear(child) and style in (
        "colwise",
        "packed_colwise",
        "rowwise",
        "packed_rowwise",
    ):
        return
    if not isinstance(child, wanted):
        raise PlanError(
            f"The plan shards '{name}' with the style '{style}', which is for nn.{wanted.__name__},"
            f" but it is a {type(child).__name__}. Name the nn.{wanted.__name__} layers inside it."
        )
    if isinstance(child, nn.Embedding) and (
        child.max_norm is not None or child.sparse or child.scale_grad_by_freq
    ):
        raise PlanError(
            f"'{name}' cannot be sharded: max_norm, sparse and scale_grad_by_freq need the whole"
            " embedding. Remove these options, or leave it out of the plan."
        )
    kind = own_forward(type(child))
    if kind is not None and not (wanted is nn.Linear and is_product(child)):
        raise PlanError(
            f"The plan shards '{name}', but {kind.__name__}.forward does not call super().forward,"
            f" so its layer cannot be replaced. Let it call super().forward(...), or leave '{name}'"
            " out of the plan."
        )


def own_forward(layer: type[nn.Module]) -> type | None:
    """Find the class among those of a layer whose forward does not call that of nn.Linear or
    nn.Embedding; None if all do."""
    for kind in layer.__mro__:
        if kind in (nn.Linear, nn.Embedding):
            break
        forward = vars(kind).get("forward")
        code = getattr(forward, "__code__", None)
        if forward is not None and (
            code is None or "__class__" not in code.co_freevars or "forward" not in code.co_names
        ):
            return kind
    return None


# Families that declare a gather pair for packed layers, and whose code is known to slice
# `gate_up_proj` into halves.
_PACKED_MLP_FAMILIES = frozenset(
    {
        "phi3",
        "phi4_multimodal",
        "glm",
        "glm4",
        "glm4v",
        "glm4v_text",
        "glm_image_text",
        "glm_ocr_text",
    }
)
# The same for `qkv_proj`, sliced by config.num_attention_heads and self.num_key_value_heads.
_PACKED_ATTENTION_FAMILIES = frozenset({"phi3", "phi4_multimodal"})


def _packed_pair(
    module: nn.Module, parent: str, cuts: dict[str, Cut], tp_size: int
) -> dict[str, Cut]:
    """`packed_colwise` + `rowwise` for a declared gather pair whose packing is known, which saves
    its gathers."""
    prefix = f"{parent}." if parent else ""
    for packed, out, finder in (
        ("gate_up_proj", "down_proj", _packed_mlp),
        ("qkv_proj", "o_proj", _packed_attention),
    ):
        styles = [
            cut.style if (cut := cuts.get(prefix + name)) is not None else ""
            for name in (packed, out)
        ]
        if styles == ["colwise_gather_output", "rowwise_split_input"]:
            pair = finder(module.get_submodule(parent), tp_size)
            return (
                dict(zip((prefix + packed, prefix + out), pair, strict=True))
                if pair is not None
                else {}
            )
    return {}


def _packed_mlp(owner: Any, tp_size: int) -> tuple[Cut, Cut] | None:
    size = owner.down_proj.in_features
    known = _family(owner) in _PACKED_MLP_FAMILIES and owner.gate_up_proj.out_features == 2 * size
    if not known or even_range(size, tp_size, tp_size - 1)[1] == 0:
        return None
    return Cut("packed_colwise", parts=(size, size)), Cut("rowwise")


def _packed_attention(owner: Any, tp_size: int) -> tuple[Cut, Cut] | None:
    """None with fewer key heads than ranks: a part of the matrix would be replicated and a part
    not."""
    if _family(owner) not in _PACKED_ATTENTION_FAMILIES:
        return None
    queries, keys = owner.config.num_attention_heads, owner.num_key_value_heads
    parts = tuple(heads * owner.head_dim for heads in (queries, keys, keys))
    if queries % tp_size or keys % tp_size or sum(parts) != owner.qkv_proj.out_features:
        return None
    return Cut("packed_colwise", (queries, keys, keys), parts), Cut("rowwise", queries)


def _family(owner: Any) -> str:
    return getattr(getattr(owner, "config", None), "model_type", "")
