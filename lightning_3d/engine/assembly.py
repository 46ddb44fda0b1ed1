"""Turn a whole model, on meta or in memory, into what this rank runs. The phases, in this order:

1. Find the plan, and refuse what cannot work (`_find_plan`, `_check`).
2. Let all ranks start from the same values, and let the self-check look at the whole model.
3. Describe the whole model: regions, specifications, initializers (`_describe`). Every rank sees
   all of it, so that decisions that all ranks must share (stages, process groups) need no
   communication.
4. Wrap the forwards of its blocks: sequence and context parallelism, recomputation
   (`_wrap_blocks`).
5. Partition: remove what other pipeline ranks own (`keep_owned`).
6. Rewrite the layers that are left: this rank's shards of them (`_rewrite_layers`).
7. Materialize: give values to what is still on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.compat.peft_layers import refuse_tuners
from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.engine.declared_sizes import declared_sizes
from lightning_3d.engine.frozen_models import FrozenModel, find_frozen_blocks, find_frozen_models
from lightning_3d.engine.local_model import (
    COMMUNICATES,
    PARTITION,
    LocalModel,
    Partition,
    context_of,
)
from lightning_3d.engine.model_size import ModelSize
from lightning_3d.engine.parameter_specs import (
    Owners,
    all_specs,
    by_stage,
    create_groups,
    local_specs,
)
from lightning_3d.errors import NoPlanError, PlanError, listed
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.model_rules import check_model
from lightning_3d.models.parallel_plan import (
    ParallelPlan,
    declares_blocks,
    find_pipeline_module,
    find_transformers_model,
    is_transformers_model,
    read_plan,
)
from lightning_3d.options.model import ModelOptions
from lightning_3d.parallel.blocks import attention_of, find_blocks, process_blocks
from lightning_3d.parallel.context import SplitBlocks, share_sequences
from lightning_3d.parallel.deferred_logits import defer_heads
from lightning_3d.parallel.expert import (
    ExpertParallel,
    Routers,
    attend_calls,
    choose_products,
    make_routers,
    overlap_exchange,
    shard_experts,
)
from lightning_3d.parallel.mesh import Mesh, StageMesh
from lightning_3d.parallel.pipeline import PipelineState, StageAssignment, assign_stages, keep_owned
from lightning_3d.parallel.random_streams import RandomState
from lightning_3d.parallel.sequence_shards import SequenceShards
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.tensor import (
    SequenceRegions,
    TensorParallel,
    TokenParts,
    cuts_here,
    find_regions,
    fit_styles,
    gather_regions,
    pays_off,
    refuse_computed_weights,
    rewrite,
    shard_sequence,
)
from lightning_3d.weights.blueprint import Blueprint
from lightning_3d.weights.initialize import broadcast_eager, initialize
from lightning_3d.weights.pretrained import Stored, stored_values


@dataclass(frozen=True)
class Part:
    """A rank's part of a model before its parameters have values.

    Attributes:
        specs: shard of every parameter that is here, by full name.
        state: what gates and engine share.
        routers: of a mixture of experts.
        computed_by_all: kinds of modules of the whole model that every context-parallel rank
            computes for the whole sequence.
        blueprint: initializers of the whole model.
        stored: pretrained values of the whole model.
    """

    specs: dict[str, ShardSpec]
    state: PipelineState
    routers: Routers | None
    computed_by_all: list[str]
    blueprint: Blueprint
    stored: dict[str, Stored]


@dataclass(frozen=True)
class _Whole:
    """Facts about the model that only the whole one shows.

    Attributes:
        regions: where sequence parallelism gathers; None without it.
        specs: shard of every parameter of the model, by each of its names.
        blueprint: its initializers.
        stored: its pretrained values.
    """

    regions: SequenceRegions | None
    specs: dict[str, ShardSpec]
    blueprint: Blueprint
    stored: dict[str, Stored]


class Inspect(Protocol):
    """Function that sees the pipelined module while it is whole, its plan, and whether the module
    declares that plan itself."""

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
    inspect_frozen: Callable[[FrozenModel], None] | None = None,
) -> LocalModel:
    """Turn `root`, the user's whole module, into this rank's part of it, in place.

    Args:
        device: device that the model will run on.
        weights_device: device on which weights are made; `device` by default.
        materialize: function that gives values to what is on meta, as `initialize` does.
        user_plan: parallel plan of the user, for a model that declares none.
        pipeline_module: name of the submodule that is parallelized; None where one has a plan.
        inspect: function that is called with the whole model, after all ranks have the same values
            and before anything is partitioned.
        inspect_frozen: function that is called then with each frozen model that is sharded.

    Communicates: values of parameters that are not on meta are sent from rank 0 to all, one tensor
    at a time; groups are created.

    Raises:
        PlanError: no plan, or parameters that no part of the plan covers.
        LayoutError: heads, layers, ... do not fit the layout.
        CheckpointError: pretrained weights that cannot be read or are not the model's.
    """
    size = ModelSize.of(root)
    name, module, plan = _find_plan(root, mesh.layout, user_plan, pipeline_module)
    # The cheap check first: fit_styles runs parts of the model, which sizes that do not divide
    # would break with a worse message.
    _check(module, plan, mesh.layout, options)
    plan = fit_styles(module, plan, mesh.layout.tp)
    frozen = find_frozen_models(root, name, mesh.layout, user_plan, cp_kind=options.cp_kind)
    frozen_blocks = find_frozen_blocks(root, name, user_plan)
    # While every rank still has every parameter: rank 0 sends them all, in one order.
    broadcast_eager(root, mesh)
    if inspect is not None:
        inspect(module, plan, declared=user_plan is None)
    if inspect_frozen is not None:
        for other in frozen:
            inspect_frozen(other)
    assignment = assign_stages(module, plan, mesh.layout, options.schedule, options.stages)
    part = take_part(root, name, plan, mesh, options, assignment, frozen, seed=seed, device=device)
    if kinds := part.computed_by_all:
        rank_zero_warn(
            f"Each of the {mesh.size('cp')} context-parallel ranks computes {listed(kinds)} for the"
            " whole sequence: this mixes tokens in a way that cp cannot split. Other layers are"
            " split."
        )
    # Last: only what is left has to fit in memory, and specs say which slice of each full parameter
    # to make.
    materialize(
        root,
        seed,
        specs=part.specs,
        device=weights_device or device,
        blueprint=part.blueprint,
        stored=part.stored,
    )
    # After materialize: `initialize` keeps the parameters, but that of a dry run replaces them.
    parameters = by_stage(root, Owners(root, name, plan, assignment), mesh.index("pp"))
    parts = LocalModel(
        name,
        module,
        plan,
        part.specs,
        assignment,
        parameters,
        part.state,
        size,
        part.routers,
        frozen_blocks,
    )
    sharded = tuple(
        (found, layer) for found, layer in root.named_modules() if COMMUNICATES & vars(layer).keys()
    )
    object.__setattr__(root, PARTITION, Partition(parts, mesh, options, sharded))
    return parts


def take_part(
    root: nn.Module,
    name: str,
    plan: ParallelPlan,
    mesh: Mesh | StageMesh,
    options: ModelOptions,
    assignment: StageAssignment,
    frozen: Sequence[FrozenModel] = (),
    *,
    seed: int,
    device: torch.device,
) -> Part:
    """Partition and rewrite the whole `root` in place: phases 3 to 6. Parameters that are on meta
    stay there.

    Args:
        name: name of the pipelined module in `root`.
        assignment: all stages; this rank takes those of `mesh.index("pp")`.
        frozen: frozen models in `root` that are sharded, too.

    Communicates: groups are created, except for a `StageMesh`.
    """
    module, tp = root.get_submodule(name), mesh.size("tp")
    # Before anything is removed or wrapped: all of it looks at the whole model, as the user wrote
    # it.
    blocks = find_blocks(module, plan)
    split = (
        share_sequences(module, blocks, plan.layers, context_of(mesh, options.cp_kind))
        if mesh.layout.cp > 1
        else None
    )
    whole = _describe(root, name, plan, mesh, options, assignment, split, frozen)
    # Dropout anywhere in the model gives all ranks random streams, whichever stage it is on.
    random = RandomState.for_model(
        root, seed=seed, tp_rank=mesh.index("tp"), device=device, in_stages=mesh.size("pp") > 1
    )
    state = PipelineState(random, SequenceShards(tp))
    tensor = TensorParallel(
        mesh.group("tp"), tp, mesh.index("tp"), random if random.enabled else None, state.sequence
    )
    tensor.gathers_again = options.blocks.recompute != "full" or options.blocks.recompute_every > 1
    # Before blocks of other stages are removed: blocks are counted, and routers numbered, in the
    # whole model.
    routers = _wrap_blocks(
        module, blocks, plan, mesh, options, whole.regions, split, tensor, device
    )
    random.deals_sequence = whole.regions is not None
    # Before the gates, which must be in front of it.
    if (
        (tp == 1 or plan.head is None)
        and not defer_heads(module, options.loss_chunks)
        and options.loss_chunks != 1
    ):
        rank_zero_warn(
            f"loss_chunks={options.loss_chunks} has no effect: {type(module).__name__} has no"
            " output head that is a plain nn.Linear."
        )
    # After the blocks are wrapped: the gate must be outermost, where it puts the received
    # activation in the place of a block's input.
    keep_owned(root, name, plan, assignment, mesh.index("pp"), state)
    specs = local_specs(root, whole.specs)
    # Last, and only for the layers that are left. Their classes change beneath the wrapped forwards
    # of the blocks around them.
    _rewrite_layers(module, plan, _inside(name, specs), mesh, options, tensor, whole.regions)
    for other in frozen:
        other.shard(root, specs, mesh, random, context_of(mesh, options.cp_kind))
    if tp > 1:
        defer_heads(module, options.loss_chunks)  # those that are sharded by vocabulary now
    if split is not None:
        split.split_head(module)  # in front of the head's shard of the vocabulary
    if routers is not None:
        routers.watch(module)  # after the rewrite: it also sets up the experts that dispatch tokens
        attend_calls(module, routers)
    return Part(
        specs, state, routers, split.computed_by_all if split else [], whole.blueprint, whole.stored
    )


def _describe(
    root: nn.Module,
    name: str,
    plan: ParallelPlan,
    mesh: Mesh | StageMesh,
    options: ModelOptions,
    assignment: StageAssignment,
    split: SplitBlocks | None,
    frozen: Sequence[FrozenModel],
) -> _Whole:
    """Phase 3: collect what is known of the model only while it is whole.

    Communicates: groups are created, except for a `StageMesh`, on which gradients are summed over
    groups that exist.
    """
    module = root.get_submodule(name)
    # Regions before specifications: a parameter inside one has partial gradients on every rank.
    regions = _sequence_regions(
        module, plan, mesh.group("tp"), options.blocks.sequence_parallel, split
    )
    of_frozen = {key: spec for other in frozen for key, spec in other.specs(mesh).items()}
    specs = all_specs(
        root, name, module, plan, mesh, Owners(root, name, plan, assignment), regions, of_frozen
    )
    if isinstance(mesh, Mesh):
        # From the specifications of the whole model, which are the same everywhere: ranks must
        # create groups in the same order.
        create_groups(specs.values(), mesh)
    return _Whole(regions, specs, Blueprint(root), stored_values(root))


def _exchanging(
    module: nn.Module,
    blocks: list[nn.Module],
    plan: ParallelPlan,
    layout: Layout,
    split: SplitBlocks | None,
) -> set[nn.Module]:
    """Return the modules of the whole model that exchange messages of experts or of parts of a
    sequence: mixtures and attentions."""
    found: set[nn.Module] = set()
    if layout.ep > 1:
        names = [
            name
            for name, _ in module.named_modules()
            if (cut := plan.cut_of(name)) and cut.style == "ep_dispatch_experts"
        ]
        found |= {module.get_submodule(name.rpartition(".")[0]) for name in names}
    if layout.cp > 1:
        found |= {*split.mixing, *split.attentions} if split is not None else set()
        for block in blocks:
            found |= set(attention_of(block)) or {block}
    return found


def _wrap_blocks(
    module: nn.Module,
    blocks: list[nn.Module],
    plan: ParallelPlan,
    mesh: Mesh | StageMesh,
    options: ModelOptions,
    regions: SequenceRegions | None,
    split: SplitBlocks | None,
    tensor: TensorParallel,
    device: torch.device,
) -> Routers | None:
    """Phase 4: put what layout and options need around the forwards of the whole module and its
    blocks.

    Each call puts its part in front of the earlier ones: the last one is the outermost. Returns the
    routers, which work on the hidden states that the wrapped blocks give them.
    """
    if mesh.layout.ep > 1:
        overlap_exchange(module, plan)  # innermost: it replaces the forward that the family wrote
    if regions is not None:
        gather_regions(module, regions, tensor)
    if split is not None:
        split.gather_inside()
    sequence = tensor.sequence if regions is not None and mesh.layout.ep > 1 else None
    routers = make_routers(module, plan.experts, options.experts, mesh, device, sequence)
    # Recomputation around the gathers inside a block and within the split of the sequence around
    # it: what is kept for the backward is then this rank's part of a block's input, and a
    # recomputed block gathers again.
    moment = tensor.sequence.moment if regions is not None else None
    # Tensor-parallel ranks draw alike, or not, as the streams in a block say; a compiler would draw
    # as it likes.
    compiler = tensor.random.compile if tensor.random is not None and tensor.size > 1 else None
    process_blocks(
        blocks,
        options.blocks,
        moment,
        compiler,
        _exchanging(module, blocks, plan, mesh.layout, split),
    )
    if regions is not None:
        shard_sequence(module, regions, tensor)
    if split is not None:
        split.split_outside(module)
    return routers


def _inside(name: str, specs: dict[str, ShardSpec]) -> dict[str, ShardSpec]:
    """Specifications by names inside the module `name`; those of parameters outside of it keep
    their names."""
    return {key.removeprefix(f"{name}."): spec for key, spec in specs.items()} if name else specs


def _rewrite_layers(
    module: nn.Module,
    plan: ParallelPlan,
    specs: dict[str, ShardSpec],
    mesh: Mesh | StageMesh,
    options: ModelOptions,
    tensor: TensorParallel,
    regions: SequenceRegions | None,
) -> None:
    """Phase 6: leave this rank's shards of the layers that are here. `specs` are by names in
    `module`."""
    if mesh.layout.ep > 1:
        # Experts are sharded here alone; `rewrite` leaves them as they are. Without sequence
        # parallelism tp ranks have the same tokens, and each dispatches its part of them.
        tokens = TokenParts(tensor) if tensor.size > 1 and regions is None else None
        ranks = ExpertParallel(
            mesh.expert_group, mesh.layout.ep, mesh.expert_index, tokens, mesh.expert_nodes
        )
        shard_experts(module, plan, specs, ranks)
    if tensor.size > 1:
        rewrite(module, plan, specs, tensor, regions)
    choose_products(module, plan)  # after the shards are made, whose widths decide


def _find_plan(
    root: nn.Module, layout: Layout, user_plan: dict | None, pipeline_module: str | None
) -> tuple[str, nn.Module, ParallelPlan]:
    """Find the pipelined module, its name and its plan. Data parallelism needs no plan, context
    parallelism the model alone."""
    try:
        name, module = find_pipeline_module(root, pipeline_module, user_plan)
        plan = read_plan(module, user_plan).for_experts(layout.ep, module)
        refuse_tuners(root, layout.tp, layout.pp)
    except PlanError:
        if (
            layout.tp * layout.pp * layout.ep > 1
            or user_plan is not None
            or pipeline_module is not None
        ):
            raise
        return (*(find_transformers_model(root) if layout.cp > 1 else ("", root)), ParallelPlan({}))
    if layout.pp > 1 and not plan.layers:
        raise NoPlanError(
            f"{type(module).__name__} declares no pipeline plan, but the layout has pp={layout.pp}."
            " Pass plan={'pp': ...} with its list of blocks and the modules before and after"
            f" them, or use pp1, for example {Layout(tp=layout.tp, dp=layout.pp * layout.dp)}."
        )
    return name, module, plan


def _check(module: nn.Module, plan: ParallelPlan, layout: Layout, options: ModelOptions) -> None:
    """Refuse what the model's own layers and numbers show, before anything is allocated."""
    if layout.tp > 1:
        refuse_computed_weights(module, plan)
    sizes = declared_sizes(module, plan, layout)
    check_model(
        layout,
        sizes,
        schedule=options.schedule,
        cp_kind=options.cp_kind,
        stages=options.stages if plan.layers else None,
    )


def _sequence_regions(
    module: nn.Module,
    plan: ParallelPlan,
    group: dist.ProcessGroup,
    wanted: bool | str | None,
    split: SplitBlocks | None,
) -> SequenceRegions | None:
    """Find where sequence parallelism gathers; None without it, and where context-parallel ranks
    split the sequence between blocks.

    Unless it is asked for, only models of Transformers that declare how they are sharded have it,
    where it pays off. The dimensions of hidden states of other models are unknown.

    Args:
        group: the tensor-parallel ranks.
        wanted: see `BlockOptions.sequence_parallel`.

    Raises:
        PlanError: sequence parallelism is asked for, and the blocks cannot work on parts of
            sequences.
    """
    tp = dist.get_world_size(group)
    if tp == 1 or wanted is False or (wanted is None and not pays_off(group)):
        return None
    if wanted is not True and not (is_transformers_model(module) and declares_blocks(module)):
        return None
    if split is not None:
        if wanted is True:
            raise PlanError(
                f"{type(module).__name__} does not mix tokens by attention alone, so with context"
                " parallelism (cp) its blocks cannot be sequence parallel, too. Use"
                " sequence_parallel=False."
            )
        return None
    try:
        return find_regions(module, plan, cuts_here(module, plan, tp))
    except PlanError as error:
        if wanted is True:
            kind = type(module).__name__
            raise PlanError(
                f"The blocks of {kind} cannot be sequence parallel: {error} Use"
                " sequence_parallel=False."
            ) from error
        return None
