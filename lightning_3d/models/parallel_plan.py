"""Parallel plans: how each module of a model is sharded, and what runs before, in and after its
blocks.

A plan uses the vocabulary of Transformers, so that a model family's own plan
(`config.base_model_tp_plan`, `base_model_pp_plan` and the plans of the class) works unchanged, and
a plain `nn.Module` gives the same kind of dictionary. Reading a plan communicates nothing and
touches no values: the module may be on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from torch import nn

from lightning_3d.compat.peft_layers import own
from lightning_3d.compat.transformers import is_transformers_model, models_in
from lightning_3d.errors import NoPlanError, PlanError, did_you_mean, listed
from lightning_3d.models.mixtures import find_mixtures, without_experts
from lightning_3d.models.plan_pairs import require_pairs

COLUMN_STYLES = frozenset({"colwise", "packed_colwise", "colwise_gather_output"})
ROW_STYLES = frozenset({"rowwise", "packed_rowwise", "rowwise_split_input"})
EMBEDDING_STYLES = frozenset({"embedding_rowwise", "embedding_colwise"})
REPLICATED_STYLES = frozenset(
    {"replicate", "local_params", "replicated_with_grad_allreduce", "mla_kv_a_proj"}
)
SUMMED_STYLE = "all_reduce"
"""Style of a module whose output is a sum over the ranks, because its own parameters, not layers in
it, are sharded."""
DENSE_STYLES = COLUMN_STYLES | ROW_STYLES | EMBEDDING_STYLES | REPLICATED_STYLES | {SUMMED_STYLE}
EXPERT_MODULE_STYLES = frozenset({"moe_tp_experts", "ep_dispatch_experts"})
EXPERT_STYLES = EXPERT_MODULE_STYLES | {"moe_identity_expert", "grouped_gemm", "ep_router"}
AHEAD = "predicts_ahead"
"""Attribute of the class of a block that predicts a further token: it runs behind the model, not in
the row of its blocks."""
OLDER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
OLDER_EP_NAMES = {"moe_tp_experts": "ep_dispatch_experts"}
"""In expert-parallel plans of older Transformers (5.17 still): the same name as in tensor-parallel
plans."""


@dataclass(frozen=True)
class Cut:
    """Rule by which one module or parameter is sharded over the tensor-parallel ranks.

    Attributes:
        style: style of Transformers' plans, see `DENSE_STYLES`.
        units: number of groups of rows that stay together, such as attention heads: one number, or
            one for each of `parts`. None: the number of heads for "colwise" and "rowwise" in an
            attention, otherwise single rows.
        parts: sizes, in rows, of the matrices that are packed along the sharded dimension (q, k, v;
            gate, up). Each is sharded separately. For the packed styles, None means two equal
            halves.
        shared: whether several ranks get the same unit if there are fewer units than ranks. For
            keys and values that several query heads read. Layers with the usual names of keys and
            values need no mark. Only for "colwise".
    """

    style: str
    units: int | tuple[int, ...] | None = None
    parts: tuple[int, ...] | None = None
    shared: bool = False


@dataclass(frozen=True)
class ParallelPlan:
    """A model's parallel plan. Names are relative to the pipelined module; `*` is one component of
    a name.

    Attributes:
        tp: pattern of a module or parameter name -> how it is sharded.
        layers: name of the list of blocks, an `nn.ModuleList` or `nn.Sequential`; empty when the
            plan says nothing about pipelines.
        before: modules that run before the blocks, in order of execution, and parameters that the
            model itself reads there.
        after: the same after the blocks.
        carried: those of `before` whose outputs travel with the hidden states to every stage,
            because blocks read them too.
        sides: places of further values that a block returns behind the hidden states, and that the
            next block reads.
        embedding: name of the token embedding that is sharded by vocabulary, or None.
        head: name of the linear layer that makes the logits and is sharded by vocabulary, or None.
        experts: modules that hold the experts of a mixture, called with (tokens, experts of each
            token, their weights).
        ep: pattern of a module or parameter name -> how it is sharded over expert-parallel ranks,
            instead of `tp`.
        ahead: number of blocks at the end of `layers` that predict further tokens (multi-token
            prediction). They run behind the model, on the last stage, and read the token embedding
            of the first stage, which is one of `carried`.
        resolved: number of tensor-parallel ranks, and for it the cut of each module and parameter
            of the whole module, by each of its names; None until `parallel.tensor.fit_styles`.
    """

    tp: dict[str, Cut]
    layers: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    sides: tuple[int, ...] = ()
    embedding: str | None = None
    head: str | None = None
    experts: tuple[str, ...] = ()
    ep: dict[str, Cut] = field(default_factory=dict)
    ahead: int = 0
    resolved: tuple[int, dict[str, Cut]] | None = field(default=None, repr=False, compare=False)

    def blocks_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks of the whole `module` through which hidden states pass from stage to
        stage: all but those of `ahead`."""
        blocks = list(module.get_submodule(self.layers).children()) if self.layers else []
        return blocks[: len(blocks) - self.ahead]

    def ahead_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks of `ahead`."""
        return (
            list(module.get_submodule(self.layers).children())[len(self.blocks_of(module)) :]
            if self.layers
            else []
        )

    def for_experts(self, ep: int, module: nn.Module) -> ParallelPlan:
        """Return the plan for `ep` expert-parallel ranks: with more than one, each rank holds whole
        experts.

        Args:
            module: the whole module that the plan is for.

        Raises:
            PlanError: the model has no experts, or the plan does not say how they are sharded.
        """
        if ep == 1:
            return self
        if not self.experts and not find_mixtures(module):
            raise PlanError(without_experts(module))
        if not self.ep:
            raise PlanError(
                f"The layout has ep={ep}, but the plan of {type(module).__name__} does not say how"
                " its experts are split. Use ep=1, or pass plan={'ep': {'blocks.*.experts':"
                " 'ep_dispatch_experts', 'blocks.*.experts.up': 'grouped_gemm', ...}}. The"
                " experts of a layer must be one module, with one tensor per matrix."
            )
        require_supported(self.ep)
        return replace(self, tp=self.tp | self.ep, resolved=None)

    def cut_of(self, name: str) -> Cut | None:
        """Return the entry for the module or parameter called `name`; an exact name takes
        precedence over a pattern."""
        if name in self.tp:
            return self.tp[name]
        return next(
            (cut for pattern, cut in self.tp.items() if "*" in pattern and _matches(pattern, name)),
            None,
        )


def read_plan(module: nn.Module, user_plan: Mapping[str, Any] | None = None) -> ParallelPlan:
    """Read the plan of `module`. The user's entries replace the model's own; the others are kept.

    Args:
        module: whole pipelined module, on meta or not.
        user_plan: `{"tp": {pattern: style or Cut}, "pp": {name: (inputs, outputs)}, "ep": {pattern:
            style}}`; any key may be absent. The order of "pp" is the order of execution; the
            `nn.ModuleList` in it (else the `nn.Sequential`) is the blocks. What the blocks' entry
            names among its inputs, and a module before them or a block among its outputs, travels
            with the hidden states.

    Raises:
        PlanError: no plan, an unknown style or name, or blocks that are not one list.
    """
    user_plan = user_plan or {}
    if unknown := set(user_plan) - {"tp", "pp", "ep"}:
        raise PlanError(
            "The keys of a plan must be 'tp', 'pp' or 'ep'; got"
            f" {listed(map(repr, sorted(unknown)))}."
        )
    declared_tp, declared_pp = _declared(module)
    tp = {
        pattern: _as_cut(style) for pattern, style in (user_plan.get("tp") or declared_tp).items()
    }
    ep = {
        pattern: _as_cut(style)
        for pattern, style in (user_plan.get("ep") or _declared_ep(module)).items()
    }
    # A family's own plan may have styles that this layout does not need (see `resolve`).
    require_supported(
        {
            pattern: cut
            for key, cuts in (("tp", tp), ("ep", ep))
            if user_plan.get(key)
            for pattern, cut in cuts.items()
        }
    )
    # Some families declare only the head, which is not a pipeline plan.
    order = user_plan.get("pp") or (declared_pp if _lists(module, declared_pp) else {})
    pp = list(order)
    if not tp and not pp and not ep:
        raise NoPlanError(
            f"{type(module).__name__} declares no parallel plan. Pass one, for example plan={{'tp':"
            " {'blocks.*.attention.q': 'colwise', ...}, 'pp': {'embed': ..., 'blocks': ...,"
            " 'head': ...}}, or give the class the attributes _tp_plan and _pp_plan."
        )
    names = _names(module)
    for key, given in (("tp", tp), ("ep", ep)):
        if user_plan.get(key):
            _require_matches(given, names)
    layers, before, after = _pipeline_order(module, pp)
    if user_plan.get("tp"):
        _require_pairs(module, ParallelPlan(tp), layers)
    modules_before, modules_after = (
        tuple(name for name in part if _is_module(module, name)) for part in (before, after)
    )
    head = _find_head(module, modules_before, modules_after, ParallelPlan(tp))
    embedding = _find_embedding(module, modules_before, head)
    patterns = [
        pattern
        for plan in (tp, ep)
        for pattern, cut in plan.items()
        if cut.style in EXPERT_MODULE_STYLES
    ]
    experts = tuple(name for name in names if any(_matches(pattern, name) for pattern in patterns))
    carried, sides = _travelling(order, before, layers)
    ahead = _count_ahead(module, layers)
    if ahead and embedding in before and embedding not in carried:
        carried = tuple(name for name in before if name in carried or name == embedding)
    plan = ParallelPlan(
        tp, layers, before, after, carried, sides, experts=experts, ep=ep, ahead=ahead
    )
    return _with_vocabulary(module, plan, embedding, head)


def find_pipeline_module(
    root: nn.Module, name: str | None = None, user_plan: Mapping[str, Any] | None = None
) -> tuple[str, nn.Module]:
    """Find the one submodule of `root` that has a plan, the outermost when plans are nested. If
    several have one, find the one that is trained: the others are frozen (a reference, a teacher).

    Args:
        root: module to search.
        name: name of the module to choose if several have a plan.
        user_plan: plan of the user; it applies to the outermost module in which all of its names
            exist.

    Returns:
        (name in `root`, module)

    Raises:
        PlanError: no such module, several, or no module called `name`.
    """
    modules = dict(root.named_modules())
    if name is not None:
        if name not in modules:
            raise PlanError(
                f"pipeline_module='{name}' is not a module of"
                f" {type(root).__name__}.{did_you_mean(name, modules)}"
            )
        return name, modules[name]
    found: list[str] = []
    for candidate, module in modules.items():
        inside = any(outer == "" or candidate.startswith(f"{outer}.") for outer in found)
        if not inside and has_plan(module, user_plan):
            found.append(candidate)
    trained = [
        each
        for each in found
        if any(parameter.requires_grad for parameter in modules[each].parameters())
    ]
    if len(found) == 1 or len(trained) == 1:
        chosen = (found if len(found) == 1 else trained)[0]
        return chosen, modules[chosen]
    if found:
        raise PlanError(
            f"Several modules have a parallel plan: {', '.join(found)}. Name one with"
            f" pipeline_module='{found[0]}'."
        )
    if user_plan:
        raise PlanError(_what_does_not_match(root, user_plan))
    raise NoPlanError(
        f"{_largest_part(root)} declares no parallel plan, which tp, pp and ep need. Data"
        " parallelism needs none, also with zero_stage=3. For the others pass plan={'tp': ...,"
        " 'pp': ...}, with names relative to the model."
    )


def has_plan(module: nn.Module, user_plan: Mapping[str, Any] | None = None) -> bool:
    """Return whether a module has all names of the user's plan; without one, whether it declares a
    plan itself."""
    return (
        _fits(module, user_plan) if user_plan else any((*_declared(module), _declared_ep(module)))
    )


def _largest_part(root: nn.Module) -> str:
    """Name the child with most of the parameters, which is probably the model."""
    kind = type(root).__name__
    sizes = {
        name: sum(parameter.numel() for parameter in child.parameters())
        for name, child in root.named_children()
    }
    name = max(sizes, key=lambda name: sizes[name], default="")
    return f"{type(root.get_submodule(name)).__name__} (the '{name}' of {kind})" if name else kind


def _what_does_not_match(root: nn.Module, user_plan: Mapping[str, Any]) -> str:
    """Explain a plan that fits no submodule, by the submodule that has most of its names, the
    outermost of equals."""
    entries = _entries(user_plan)
    names = {candidate: _names(module) for candidate, module in root.named_modules()}
    missing = {
        name: [entry for entry in entries if not _is_there(entry, inside)]
        for name, inside in names.items()
    }
    nearest = min(missing, key=lambda name: len(missing[name]))
    if len(missing[nearest]) == len(entries):
        return (
            f"No submodule of {type(root).__name__} has any of the names in the plan. Names are"
            " relative to the model that is parallelized."
        )
    known = _wildcards(names[nearest])
    wrong = [
        f"'{entry}' matches no module or parameter.{did_you_mean(entry, known)}"
        for entry in missing[nearest]
    ]
    where = f"'{nearest}'" if nearest else "The module itself"
    return (
        f"No submodule of {type(root).__name__} has all the names in the plan. {where}"
        f" ({type(root.get_submodule(nearest)).__name__}) has {len(entries) - len(wrong)} of the"
        f" {len(entries)}, but {' '.join(wrong)}"
    )


def find_transformers_model(root: nn.Module) -> tuple[str, nn.Module]:
    """Find the one Transformers model in `root`, with or without a plan.

    Returns:
        (name in `root`, model)

    Raises:
        PlanError: no such model, or several.
    """
    found = models_in(root)
    if len(found) != 1:
        there = "none" if not found else f"{len(found)}: {', '.join(found)}"
        raise PlanError(
            "Context parallelism (cp) replaces the attention of one Transformers model, but"
            f" {type(root).__name__} has {there}. Use cp=1."
        )
    return found.popitem()


def tied_names(module: nn.Module) -> dict[str, str]:
    """Map the name of every parameter to the first name of the same Parameter object, its canonical
    name."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _declared(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tp plan, pp plan) of the module, its configuration and its children, in order of
    execution.

    A model built by Transformers merges them on the instance, but puts the head's entry first, so
    the order is rebuilt here.
    """
    if not is_transformers_model(module):
        return _as_dict(own(module, "_tp_plan")), _as_dict(own(module, "_pp_plan"))
    tp: dict[str, Any] = {}
    pp: dict[str, Any] = {}
    if getattr(module, "base_model", module) is module:
        tp.update(_as_dict(getattr(module.config, "base_model_tp_plan", None)))
        pp.update(_as_dict(getattr(module.config, "base_model_pp_plan", None)))
    for name, child in module.named_children():
        if is_transformers_model(child):
            child_tp, child_pp = _declared(child)
            tp.update({f"{name}.{pattern}": style for pattern, style in child_tp.items()})
            pp.update({f"{name}.{key}": value for key, value in child_pp.items()})
    tp.update(_as_dict(getattr(type(module), "_tp_plan", None)))
    pp.update(_as_dict(getattr(type(module), "_pp_plan", None)))
    # The instance's plan is the same unless a user has set another one (model.tp_plan = ...).
    return _as_dict(vars(module).get("_tp_plan")) or tp, pp


def declares_blocks(module: nn.Module) -> bool:
    """Return whether a model declares a tensor-parallel plan for more than its embedding and
    head."""
    try:
        plan = read_plan(module)
    except PlanError:
        return False
    return not set(plan.tp) <= {plan.embedding, plan.head}


def _declared_ep(module: nn.Module) -> dict[str, Any]:
    """Return the expert-parallel plan of the module's configuration and of its children."""
    if not is_transformers_model(module):
        return _as_dict(own(module, "_ep_plan"))
    ep: dict[str, Any] = {}
    if getattr(module, "base_model", module) is module:
        declared = _as_dict(getattr(module.config, "base_model_ep_plan", None))
        ep.update(
            {pattern: OLDER_EP_NAMES.get(style, style) for pattern, style in declared.items()}
        )
    for name, child in module.named_children():
        if is_transformers_model(child):
            ep.update(
                {f"{name}.{pattern}": style for pattern, style in _declared_ep(child).items()}
            )
    return ep


def _as_dict(plan: Any) -> dict[str, Any]:
    """Return a plan as a dict; some classes declare None, or an exception object, for 'no plan'."""
    return dict(plan) if isinstance(plan, Mapping) else {}


def _as_cut(entry: Any) -> Cut:
    """Read an entry of a plan: a style, a `Cut`, or the fields of one, as configuration files have
    them.

    Raises:
        PlanError: unknown fields, or no style.
    """
    if isinstance(entry, Mapping):
        known = [one.name for one in fields(Cut)]
        wrong = [str(key) for key in entry if key not in known]
        if wrong or "style" not in entry:
            what = f"has no field {wrong[0]!r}" if wrong else "has no style"
            raise PlanError(
                f"An entry of the plan {what}. Fields are {', '.join(known)}; for example {{style:"
                " colwise, units: 8}."
            )
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
        }
        values["style"] = str(entry["style"])
        cut = Cut(**values)
    else:
        cut = entry if isinstance(entry, Cut) else Cut(str(entry))
    return replace(cut, style=OLDER_NAMES.get(cut.style, cut.style))


def require_supported(cuts: Mapping[str, Cut]) -> None:
    """Refuse styles that are unknown here.

    Raises:
        PlanError: names the first entry that has one.
    """
    for pattern, cut in cuts.items():
        if cut.style not in DENSE_STYLES | EXPERT_STYLES:
            raise PlanError(
                f"The plan shards '{pattern}' with the style '{cut.style}', which is not"
                f" supported.{did_you_mean(cut.style, DENSE_STYLES)} Supported are"
                f" {', '.join(sorted(DENSE_STYLES))}."
            )


def _matches(pattern: str, name: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", r"[^.]+")
    return re.fullmatch(expression, name) is not None


def _require_matches(tp: Mapping[str, Cut], names: list[str]) -> None:
    """Refuse a user's pattern that matches nothing. A family's own pattern may belong to a variant
    of the model."""
    for pattern in tp:
        if not any(_matches(pattern, name) for name in names):
            raise PlanError(
                f"The plan's entry '{pattern}' matches no module or"
                f" parameter.{did_you_mean(pattern, _wildcards(names))}"
            )


def _require_pairs(module: nn.Module, plan: ParallelPlan, layers: str) -> None:
    """Refuse a user's plan with half a pair in a block; without a list of blocks, in the smallest
    repeated modules that it names."""
    lists = (
        [layers]
        if layers
        else sorted({pattern.partition(".*.")[0] for pattern in plan.tp if ".*." in pattern})
    )
    modules = dict(module.named_modules())
    blocks = [
        f"{name}.{index}"
        for name in lists
        if name in modules
        for index, _ in modules[name].named_children()
    ]
    require_pairs(
        {name: cut.style for name in modules if (cut := plan.cut_of(name)) is not None}, blocks
    )


def _fits(module: nn.Module, user_plan: Mapping[str, Any]) -> bool:
    """Check whether every name and pattern of a plan exists in the module."""
    names = _names(module)
    return all(_is_there(entry, names) for entry in _entries(user_plan))


def _entries(user_plan: Mapping[str, Any]) -> list[str]:
    """Return the names and patterns that decide which module a plan belongs to, each once."""
    return list(
        dict.fromkeys(entry for part in ("pp", "tp", "ep") for entry in user_plan.get(part) or ())
    )


def _is_there(entry: str, names: Iterable[str]) -> bool:
    return any(_matches(entry, name) for name in names)


def _wildcards(names: Iterable[str]) -> list[str]:
    """Return the names with `*` for numbers, each once."""
    return sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_modules()] + [
        name for name, _ in module.named_parameters()
    ]


def _lists(module: nn.Module, order: Iterable[str]) -> list[str]:
    """Return candidates for the list of blocks: every `nn.ModuleList`, or without one every
    `nn.Sequential` with unnamed entries."""
    modules = dict(module.named_modules())
    named = {name: modules[name] for name in order if name in modules}
    lists = [name for name, found in named.items() if isinstance(found, nn.ModuleList)]
    chains = [name for name, found in named.items() if isinstance(found, nn.Sequential)]
    return lists or [
        name for name in chains if all(child.isdigit() for child, _ in named[name].named_children())
    ]


def _pipeline_order(
    module: nn.Module, order: list[str]
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return (blocks, modules before, modules after) from the names in order of execution."""
    if not order:
        return "", (), ()
    names = _names(module)
    for name in order:
        if name not in names:
            raise PlanError(
                f"The pipeline plan names '{name}', which is not a module or parameter of"
                f" {type(module).__name__}.{did_you_mean(name, names)}"
            )
    lists = _lists(module, order)
    if len(lists) != 1:
        raise PlanError(
            "A pipeline plan must name exactly one list of blocks for the stages: an"
            " nn.ModuleList, or an nn.Sequential if the plan names no nn.ModuleList. This plan"
            f" names {', '.join(lists) or 'none'}. Put the blocks into one nn.ModuleList."
        )
    at = order.index(lists[0])
    return lists[0], tuple(order[:at]), tuple(order[at + 1 :])


def _is_module(module: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return isinstance(getattr(module.get_submodule(owner), last), nn.Module)


def _travelling(
    order: Any, before: tuple[str, ...], layers: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return (modules before the blocks whose outputs travel, places of values of blocks that
    travel) by the names that entries of "pp" give to inputs and outputs. The first name of the
    blocks is the hidden states.
    """
    ends = (
        {name: entry for name, entry in order.items() if _is_entry(entry)}
        if isinstance(order, Mapping)
        else {}
    )
    if layers not in ends:
        return (), ()
    inputs, outputs = (list(names) for names in ends[layers])
    read = set(inputs[1:])
    carried = tuple(name for name in before if name in ends and read & set(ends[name][1]))
    return carried, tuple(place for place, name in enumerate(outputs[1:]) if name in read)


def _count_ahead(module: nn.Module, layers: str) -> int:
    """Count the blocks that say of themselves that they predict further tokens, see
    `PredictsAhead`."""
    blocks = module.get_submodule(layers).children() if layers else ()
    return sum(map(is_ahead, blocks))


def is_ahead(block: nn.Module) -> bool:
    """Return whether a block predicts a further token, behind the model."""
    return bool(getattr(block, AHEAD, False))


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, (list, tuple))
        and len(entry) == 2
        and all(isinstance(names, (list, tuple)) for names in entry)
    )


def _find_head(
    module: nn.Module, before: tuple[str, ...], after: tuple[str, ...], plan: ParallelPlan
) -> str | None:
    """Find the linear layer that makes the logits: a Transformers model names it, otherwise it is
    the last module after the blocks.

    In a plain module the plan must shard it, or it must have as many rows as an embedding before
    the blocks. Any other may compute a single number.
    """
    if is_transformers_model(module):
        head = cast(Any, module).get_output_embeddings()
        return _name_of(module, head) if isinstance(head, nn.Linear) else None
    if not after or not isinstance(module.get_submodule(after[-1]), nn.Linear):
        return None
    known = (
        plan.cut_of(after[-1]) is not None or _find_embedding(module, before, after[-1]) is not None
    )
    return after[-1] if known else None


def _find_embedding(module: nn.Module, before: tuple[str, ...], head: str | None) -> str | None:
    """Find the embedding of token ids: in a plain module the first one before the blocks with as
    many rows as the head."""
    if is_transformers_model(module):
        try:
            embedding = cast(Any, module).get_input_embeddings()
        except NotImplementedError:  # a model of sounds or images
            return None
        return _name_of(module, embedding) if isinstance(embedding, nn.Embedding) else None
    if head is None:
        return None
    rows = dict(module.get_submodule(head).named_parameters())["weight"].shape[0]
    for name in before:
        for inner, child in module.get_submodule(name).named_modules():
            if isinstance(child, nn.Embedding) and child.num_embeddings == rows:
                return f"{name}.{inner}" if inner else name
    return None


def _name_of(module: nn.Module, wanted: nn.Module) -> str | None:
    return next((name for name, child in module.named_modules() if child is wanted), None)


def _with_vocabulary(
    module: nn.Module, plan: ParallelPlan, embedding: str | None, head: str | None
) -> ParallelPlan:
    """Shard the token embedding and the head by vocabulary unless the plan says otherwise; tied
    ones always in the same way."""
    styles = {embedding: "embedding_rowwise", head: "colwise_gather_output"}
    wanted = {name: style for name, style in styles.items() if name is not None}
    entries = {name: plan.cut_of(name) for name in wanted}
    declined = {
        name
        for name, cut in entries.items()
        if cut is not None and cut.style not in (wanted[name], "colwise")
    }
    tied = tied_names(module)
    if declined and len({tied[f"{name}.weight"] for name in wanted}) < len(wanted):
        declined = set(wanted)
        entries = dict.fromkeys(wanted, Cut("replicate"))
    own = {
        name: entries[name] if name in declined else Cut(style) for name, style in wanted.items()
    }
    return replace(
        plan,
        tp=plan.tp | {name: cut for name, cut in own.items() if cut is not None},
        embedding=None if embedding in declined else embedding,
        head=None if head in declined else head,
    )
