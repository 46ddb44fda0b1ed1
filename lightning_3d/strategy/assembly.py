"""A whole model on meta or in memory -> what this rank runs: partitioned, rewritten, materialized.

The order is the one of the design: partition, rewrite, initialize. Every rank sees the whole model first, so that decisions that
all ranks must share (stages, process groups) need no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lightning_3d.compat.peft_layers import refuse_tuners
from lightning_3d.config.options.model import ModelOptions
from lightning_3d.errors import PlanError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.model_rules import ModelSizes, check_model
from lightning_3d.models.parallel_plan import ParallelPlan, find_pipeline_module, find_transformers_model, is_transformers_model, read_plan
from lightning_3d.models.spec import EXPERT_COUNTS
from lightning_3d.parallel.blocks import find_blocks, process_blocks
from lightning_3d.parallel.context import share_sequences
from lightning_3d.parallel.expert import ExpertParallel, Routers, attend_calls, choose_products, deal_experts, make_routers
from lightning_3d.parallel.mesh import Mesh, StageMesh
from lightning_3d.parallel.pipeline import PipelineState, StageAssignment, assign_stages, keep_owned
from lightning_3d.parallel.random_streams import RandomState
from lightning_3d.parallel.sequence_shards import SequenceShards
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.tensor import (
    SequenceRegions,
    TensorParallel,
    TokenParts,
    deal_sequence,
    find_regions,
    fit_styles,
    gather_regions,
    resolve,
    rewrite,
)
from lightning_3d.strategy.local_model import COMMUNICATES, PARTITION, LocalModel, Partition, context_of
from lightning_3d.strategy.parameter_specs import Owners, all_specs, by_stage, create_groups, local_specs
from lightning_3d.weights.blueprint import Blueprint
from lightning_3d.weights.initialize import broadcast_eager, initialize
from lightning_3d.weights.pretrained import Stored, stored_values


@dataclass(frozen=True)
class Part:
    """A rank's part of a model before its parameters have values.

    Attributes:
        specs: of every parameter that is here, by full name.
        parameters: of each of this rank's stages, by stage.
        state: shared by gates and engine. routers: of a mixture of experts.
        blueprint, stored: what gives parameters their values, taken before the model was partitioned.
    """

    specs: dict[str, ShardSpec]
    parameters: dict[int, list[nn.Parameter]]
    state: PipelineState
    routers: Routers | None
    blueprint: Blueprint
    stored: dict[str, Stored]


class Inspect(Protocol):
    """Sees the pipelined module while it is whole, its plan, and whether the module declares that itself."""

    def __call__(self, module: nn.Module, plan: ParallelPlan, *, declared: bool) -> None: ...


def assemble(
    root: nn.Module,
    mesh: Mesh,
    options: ModelOptions,
    *,
    seed: int,
    device: torch.device,
    weights_device: torch.device | None = None,
    materialize: Callable[..., None] = initialize,
    user_plan: dict | None = None,
    pipeline_module: str | None = None,
    inspect: Inspect | None = None,
) -> LocalModel:
    """Turn `root`, the user's whole module, into this rank's part of it, in place.

    Args:
        device: what the model will run on. weights_device: where its weights are made; the same by default.
        materialize: gives what is on meta values, as `initialize` does.
        inspect: called with the whole model, when every rank has the same one and before anything is partitioned.

    Communicates: values of parameters that are not on meta are sent from rank 0 to all, one tensor at a time; groups are created.

    Raises:
        PlanError: no plan, or parameters that no part of the plan covers. LayoutError: heads, layers, ... do not fit the layout.
        CheckpointError: pretrained weights that cannot be read or are not the model's.
    """
    name, module, plan = _find_plan(root, mesh.layout, user_plan, pipeline_module)
    _check(module, plan, mesh.layout, options)
    plan = fit_styles(module, plan, mesh.layout.tp)
    broadcast_eager(root, mesh)
    if inspect is not None:
        inspect(module, plan, declared=user_plan is None)
    assignment = assign_stages(module, plan, mesh.layout, options.schedule)
    part = take_part(root, name, plan, mesh, options, assignment, seed=seed, device=device)
    materialize(
        root, seed, specs=part.specs, device=weights_device or device, blueprint=part.blueprint, stored=part.stored
    )
    parameters = by_stage(root, Owners(root, name, plan, assignment), mesh.index("pp"))  # the ones that have values now
    parts = LocalModel(name, module, plan, part.specs, assignment, parameters, part.state, part.routers)
    cut = tuple((found, layer) for found, layer in module.named_modules() if COMMUNICATES & vars(layer).keys())
    object.__setattr__(root, PARTITION, Partition(parts, mesh, options, cut))
    return parts


def take_part(
    root: nn.Module,
    name: str,
    plan: ParallelPlan,
    mesh: Mesh | StageMesh,
    options: ModelOptions,
    assignment: StageAssignment,
    *,
    seed: int,
    device: torch.device,
) -> Part:
    """Partition and rewrite `root`, whole, in place. Parameters that are on meta stay there.

    The order matters: everything that looks at the whole model (specifications, the blueprint of its initializers, the regions of sequence
    parallelism) comes before blocks of other stages are removed; layers are rewritten last, under the mixins of the blocks around them.

    Args:
        name: of the pipelined module in `root`. assignment: all stages; this rank takes those of `mesh.index("pp")`.

    Communicates: groups are created, but for a `StageMesh`.
    """
    layout, module = mesh.layout, root.get_submodule(name)
    owners = Owners(root, name, plan, assignment)
    regions = _sequence_regions(module, plan, layout.tp, options.blocks.sequence_parallel)
    specs = all_specs(root, name, module, plan, mesh, owners, regions)
    if isinstance(mesh, Mesh):  # who tries a plan on one stage sums gradients over the groups that are there
        create_groups(specs.values(), mesh)

    blueprint, stored = Blueprint(root), stored_values(root)
    random = RandomState.for_model(root, seed=seed, tp_rank=mesh.index("tp"), device=device)
    sequence = SequenceShards(layout.tp)
    state = PipelineState(random, sequence)
    context = TensorParallel(mesh.group("tp"), mesh.size("tp"), mesh.index("tp"), random if random.enabled else None, sequence)
    if regions is not None:
        gather_regions(module, regions, context)
    if layout.cp > 1:
        share_sequences(module, find_blocks(module, plan), context_of(mesh, options.cp_kind))
    shards = sequence if regions is not None and layout.ep > 1 else None
    routers = make_routers(module, plan.experts, options.experts, mesh, device, shards)
    process_blocks(find_blocks(module, plan), options.blocks)
    if regions is not None:
        deal_sequence(module, regions, context)
        random.deals_sequence = True
    keep_owned(root, name, plan, assignment, mesh.index("pp"), state)
    local = local_specs(root, specs)
    inner = {key.removeprefix(f"{name}."): spec for key, spec in local.items()} if name else local
    _cut_layers(module, plan, inner, mesh, context, regions)
    choose_products(module, plan)
    if routers is not None:
        routers.watch(module)
        attend_calls(module, routers)
    return Part(local, by_stage(root, owners, mesh.index("pp")), state, routers, blueprint, stored)


def _cut_layers(
    module: nn.Module,
    plan: ParallelPlan,
    specs: dict[str, ShardSpec],
    mesh: Mesh | StageMesh,
    tensor: TensorParallel,
    regions: SequenceRegions | None,
) -> None:
    """Leave this rank's shards of the layers that are here. `specs` are by names in `module`."""
    if mesh.layout.ep > 1:
        tokens = TokenParts(tensor) if tensor.size > 1 and regions is None else None
        deal_experts(module, plan, specs, ExpertParallel(mesh.expert_group, mesh.layout.ep, mesh.expert_index, tokens))
    if tensor.size > 1:
        rewrite(module, plan, specs, tensor, regions)


def _find_plan(
    root: nn.Module, layout: Layout, user_plan: dict | None, pipeline_module: str | None
) -> tuple[str, nn.Module, ParallelPlan]:
    """The pipelined module with its name and plan. Data parallelism needs none, context parallelism the model alone."""
    try:
        name, module = find_pipeline_module(root, pipeline_module, user_plan)
        plan = read_plan(module, user_plan).for_experts(layout.ep)
        refuse_tuners(root, layout.tp, layout.pp)
    except PlanError:
        if layout.tp * layout.pp * layout.ep > 1 or user_plan is not None or pipeline_module is not None:
            raise
        return (*(find_transformers_model(root) if layout.cp > 1 else ("", root)), ParallelPlan({}))
    if layout.pp > 1 and not plan.layers:
        raise PlanError(
            f"{type(module).__name__} declares no pipeline plan, but the layout has pp={layout.pp}. Pass plan={{'pp': ...}} that"
            f" names what runs before, in and after its blocks, or use pp1, for example {Layout(tp=layout.tp, dp=layout.pp * layout.dp)}."
        )
    return name, module, plan


def _check(module: nn.Module, plan: ParallelPlan, layout: Layout, options: ModelOptions) -> None:
    """Refuse what the model's own numbers show, before anything is allocated."""
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def number(*names: str) -> int | None:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if isinstance(value, int)), None)

    sizes = ModelSizes(
        heads=number("num_attention_heads"),
        kv_heads=number("num_key_value_heads"),
        layers=len(list(module.get_submodule(plan.layers).children())) if plan.layers else layout.pp * layout.vp,
        vocab=number("vocab_size"),
        experts=number(*EXPERT_COUNTS),
    )
    check_model(layout, sizes, schedule=options.schedule, cp_kind=options.cp_kind)


def _sequence_regions(module: nn.Module, plan: ParallelPlan, tp: int, wanted: bool | None) -> SequenceRegions | None:
    """Where sequence parallelism gathers; None without it. Unless it is asked for, only models of Transformers have it: what the
    dimensions of hidden states are is not known of others.

    Raises:
        PlanError: it is asked for, and the blocks cannot.
    """
    if tp == 1 or wanted is False or (wanted is None and not is_transformers_model(module)):
        return None
    try:
        return find_regions(module, plan, resolve(module, plan, tp))
    except PlanError as error:
        if wanted:
            kind = type(module).__name__
            raise PlanError(f"The blocks of {kind} cannot be sequence parallel: {error} Use sequence_parallel=False.") from error
        return None
