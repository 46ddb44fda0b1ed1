"""A whole model on meta or in memory -> what this rank runs: partitioned, rewritten, materialized.

The order is the one of the design: partition, rewrite, initialize. Every rank sees the whole model first, so that decisions that
all ranks must share (stages, process groups) need no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_3d.adapters import refuse_tuners
from lightning_3d.blocks import find_blocks, process_blocks
from lightning_3d.context_parallel import ContextParallel, share_sequences
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.expert_parallel import (
    ExpertParallel,
    Routers,
    attend_calls,
    choose_products,
    deal_experts,
    expert_specs,
    make_routers,
)
from lightning_3d.initialization import broadcast_eager, initialize
from lightning_3d.initializers import Blueprint
from lightning_3d.layout import Layout
from lightning_3d.layout_rules import check_model
from lightning_3d.mesh import Mesh, StageMesh
from lightning_3d.model_options import ModelOptions
from lightning_3d.model_spec import EXPERT_COUNTS
from lightning_3d.pipeline import PipelineState, StageAssignment, assign_stages, keep_owned
from lightning_3d.plans import ParallelPlan, find_pipeline_module, find_transformers_model, is_transformers_model, read_plan
from lightning_3d.pretrained import Stored, stored_values
from lightning_3d.randomness import RandomState
from lightning_3d.sequence import SequenceShards
from lightning_3d.sharding import ShardSpec, reduction_groups, replicated
from lightning_3d.tensor_parallel import (
    SequenceRegions,
    TensorParallel,
    TokenParts,
    deal_sequence,
    find_regions,
    fit_styles,
    gather_regions,
    resolve,
    rewrite,
    shard_specs,
)


@dataclass
class LocalModel:
    """What this rank holds.

    Attributes:
        name: of the pipelined module inside the user's module.
        module: the pipelined module.
        plan: how it is cut.
        specs: of every parameter that this rank holds, by full name in the user's module.
        assignment: all stages of the pipeline.
        parameters: of each of this rank's stages, by stage.
        state: shared by gates and engine.
        routers: of a mixture of experts.
        lost: a fit failed when other ranks had the values of some parameters.
    """

    name: str
    module: nn.Module
    plan: ParallelPlan
    specs: dict[str, ShardSpec]
    assignment: StageAssignment
    parameters: dict[int, list[nn.Parameter]]
    state: PipelineState
    routers: Routers | None = None
    lost: bool = False

    @property
    def module_specs(self) -> dict[str, ShardSpec]:
        """The specifications of the pipelined module's parameters, by name inside it."""
        prefix = f"{self.name}." if self.name else ""
        return {name.removeprefix(prefix): spec for name, spec in self.specs.items() if name.startswith(prefix)}

    def after_optimizer_step(self) -> None:
        """What of the model changes from step to step without a gradient."""
        if self.routers is not None:
            self.routers.update_biases()

    def after_skipped_step(self) -> None:
        """Forget what `after_optimizer_step` would have changed the model by."""
        if self.routers is not None:
            self.routers.forget_loads()

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that this rank has, in the order in which they are called."""
        return find_blocks(self.module, self.plan)


@dataclass(frozen=True)
class Partition:
    """How a user's module was partitioned: what a second strategy needs to go on with it.

    Attributes:
        parts: of this rank. mesh: whose groups its layers use. options: what was asked of it. layers: those that communicate, by name in
            the pipelined module.
    """

    parts: LocalModel
    mesh: Mesh
    options: ModelOptions
    layers: tuple[tuple[str, nn.Module], ...]

    @classmethod
    def of(cls, root: nn.Module) -> Partition | None:
        """The partition of `root`; None when it is whole, or was built anew since."""
        found = vars(root).get(PARTITION)
        return found if found is not None and _submodule(root, found.parts.name) is found.parts.module else None

    @staticmethod
    def require_kept(root: nn.Module) -> None:
        """Refuse a module that was partitioned once, and in which the pipelined module or a cut layer has been replaced since."""
        if PARTITION in vars(root) and Partition.of(root) is None:
            raise ConfigError(
                "The model was replaced after it was cut for this layout. If configure_model built it a second time, which would throw away"
                " its trained weights, begin it with `if self.model is not None: return`. To change it after a fit (merge_and_unload),"
                " save a checkpoint and do so on one process with load_full_state_dict."
            )
        found = Partition.of(root)
        if found is None:
            return
        for name, layer in found.layers:
            if _submodule(found.parts.module, name) is not layer:
                raise ConfigError(
                    f"The layer '{name}' was replaced after it was cut for {found.mesh.layout}; the new one knows nothing of other ranks."
                    " To change a model after a fit (merge_and_unload), save a checkpoint and do so on one process with"
                    " load_full_state_dict."
                )

    def suits(self, layout: Layout, schedule: str) -> bool:
        return (self.mesh.layout, self.options.schedule) == (layout, schedule)

    def hand_over(self, layout: Layout, options: ModelOptions) -> LocalModel:
        """The parts, to another strategy, with its options for routers and attention.

        Raises:
            ConfigError: it has another layout or schedule, or the weights are lost.
        """
        if self.parts.lost:
            raise ConfigError(
                "A fit with zero_stage=3 of this module failed, and its weights were dealt to several ranks. Build the module anew and"
                " load the last checkpoint with ckpt_path=, or go on with the same Trainer."
            )
        if not self.suits(layout, options.schedule):
            raise ConfigError(
                f"This module was partitioned for {self.mesh.layout} and {self.options.schedule} by an earlier Trainer and cannot be cut"
                f" again for {layout} and {options.schedule}. Use the earlier layout and schedule, or save a checkpoint, build"
                " the module anew and load it with ckpt_path=."
            )
        if differences := self.options.blocks.differences(options.blocks, tp=layout.tp):
            rank_zero_warn(
                f"The blocks of this module stay as an earlier Trainer made them ({'; '.join(differences)}). Build the module anew to"
                " change that."
            )
        if self.parts.routers is not None:
            self.parts.routers.use(options.experts)
        if layout.cp > 1:
            self.parts.module.context_parallel = context_of(self.mesh, options.cp_kind)  # type: ignore[assignment]
        return self.parts

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        """A copied module (weight averaging) talks to the same ranks."""
        return self


PARTITION = "_lightning_3d_partition"
COMMUNICATES = {"tp_region", "tp_context", "expert_parallel"}
"""Attributes of layers that communicate."""


def _submodule(root: nn.Module, name: str) -> nn.Module | None:
    try:
        return root.get_submodule(name)
    except AttributeError:
        return None


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


def context_of(mesh: Mesh | StageMesh, cp_kind: str) -> ContextParallel:
    """The ranks that share a sequence with this one."""
    return ContextParallel(mesh.group("cp"), mesh.size("cp"), mesh.index("cp"), cp_kind)


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


def by_stage(root: nn.Module, owners: Owners, pp_rank: int) -> dict[int, list[nn.Parameter]]:
    """The parameters that each of this rank's stages uses; one that is tied within the rank belongs to both of its stages."""
    parameters: dict[int, list[nn.Parameter]] = {chunk.stage: [] for chunk in owners.assignment.chunks_of(pp_rank)}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        for stage in owners.stages_of(name):
            if stage in parameters:
                parameters[stage].append(parameter)
    return parameters


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

    check_model(
        layout,
        heads=number("num_attention_heads"),
        kv_heads=number("num_key_value_heads"),
        layers=len(list(module.get_submodule(plan.layers).children())) if plan.layers else layout.pp * layout.vp,
        vocab=number("vocab_size"),
        experts=number(*EXPERT_COUNTS),
        schedule=options.schedule,
        cp_kind=options.cp_kind,
    )


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


@dataclass
class Owners:
    """Which stages use a parameter, by its full name."""

    root: nn.Module
    module_name: str
    plan: ParallelPlan
    assignment: StageAssignment

    def stages_of(self, name: str) -> list[int]:
        """Stages that use the parameter called `name`; the last one for parameters beside the pipelined module."""
        last = self.assignment.stages - 1
        if last == 0:
            return [0]
        prefix = f"{self.module_name}." if self.module_name else ""
        if not name.startswith(prefix):
            return [last]
        inner = name.removeprefix(prefix)
        if inner.startswith(f"{self.plan.layers}."):
            index = int(inner.removeprefix(f"{self.plan.layers}.").split(".")[0])
            return [stage for stage, layers in enumerate(self.assignment.layers) if index in layers]
        if any(inner.startswith(f"{part}.") for part in self.plan.before):
            return [0]
        if any(inner.startswith(f"{part}.") for part in self.plan.after):
            return [last]
        raise PlanError(
            f"The parameter '{name}' is in no module of the pipeline plan (before: {', '.join(self.plan.before)}; blocks:"
            f" {self.plan.layers}; after: {', '.join(self.plan.after)}). Name the module that holds it in the plan's 'pp' part,"
            " in the place where it runs."
        )

    def ranks_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """Pipeline ranks that hold a parameter known under these names."""
        return tuple(sorted({self.assignment.rank_of_stage[stage] for name in names for stage in self.stages_of(name)}))


def all_specs(
    root: nn.Module,
    name: str,
    module: nn.Module,
    plan: ParallelPlan,
    mesh: Mesh | StageMesh,
    owners: Owners,
    regions: SequenceRegions | None,
) -> dict[str, ShardSpec]:
    """The specification of every parameter of the whole model, aliases of tied ones included."""
    prefix = f"{name}." if name else ""
    inner = shard_specs(module, plan, mesh.size("tp"), mesh.index("tp"), regions) if mesh.size("tp") > 1 else {}
    inner |= expert_specs(module, plan, mesh.layout.ep, mesh.expert_index, mesh.index("tp"))
    names_of: dict[int, list[str]] = {}
    for full_name, parameter in root.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(full_name)
    specs = {}
    parameters = dict(root.named_parameters(remove_duplicate=False))
    for aliases in names_of.values():
        canonical = aliases[0]
        spec = inner.get(canonical.removeprefix(prefix)) if canonical.startswith(prefix) else None
        if spec is None:
            spec = replicated(canonical, tuple(parameters[canonical].shape), mesh.size("tp"))
        spec = replace(spec, name=canonical, pp_replicas=owners.ranks_of(aliases))
        for alias in aliases:
            specs[alias] = spec if alias == canonical else spec.renamed(alias, tied_to=canonical)
    return specs


def create_groups(specs: Iterable[ShardSpec], mesh: Mesh) -> None:
    """Groups for partial gradients inside tp and for copies on two stages; all ranks pass the same list."""
    specs = list(specs)
    layout = mesh.layout
    groups: list[tuple[int, ...]] = []
    blocks = {len(coordinates) for coordinates in reduction_groups(specs)} - {layout.tp}
    for size in sorted(blocks):
        for ranks in layout.groups("tp"):
            groups += [ranks[start : start + size] for start in range(0, layout.tp, size)]
    for pipeline_ranks in sorted({spec.pp_replicas for spec in specs if len(spec.pp_replicas) > 1}):
        groups += [tuple(ranks[pp] for pp in pipeline_ranks) for ranks in layout.groups("pp")]
    mesh.create(groups)
    mesh.warm_up()


def local_specs(root: nn.Module, specs: dict[str, ShardSpec]) -> dict[str, ShardSpec]:
    """The specifications of the parameters that are still here after partitioning."""
    return {name: specs[name] for name, _ in root.named_parameters()}
