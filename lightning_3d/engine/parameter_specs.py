"""The shard of every parameter that a rank holds, and the groups that share replicated
parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.expert import expert_specs
from lightning_3d.parallel.mesh import Mesh, StageMesh
from lightning_3d.parallel.pipeline import StageAssignment
from lightning_3d.parallel.sharding import ShardSpec, reduction_groups, replicated
from lightning_3d.parallel.tensor import (
    SequenceRegions,
    shard_specs,
)


def by_stage(root: nn.Module, owners: Owners, pp_rank: int) -> dict[int, list[nn.Parameter]]:
    """Collect the parameters that each of this rank's stages uses; one that is tied within the rank
    belongs to both of its stages."""
    parameters: dict[int, list[nn.Parameter]] = {
        chunk.stage: [] for chunk in owners.assignment.chunks_of(pp_rank)
    }
    for name, parameter in root.named_parameters(remove_duplicate=False):
        for stage in owners.stages_of(name):
            if stage in parameters:
                parameters[stage].append(parameter)
    return parameters


@dataclass
class Owners:
    """The stages that use each parameter, by its full name."""

    root: nn.Module
    module_name: str
    plan: ParallelPlan
    assignment: StageAssignment

    def stages_of(self, name: str) -> list[int]:
        """Stages that use the parameter called `name`; the last one for parameters outside the
        pipelined module."""
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
        if any(f"{inner}.".startswith(f"{part}.") for part in self.plan.before):
            return [0]
        if any(f"{inner}.".startswith(f"{part}.") for part in self.plan.after):
            return [last]
        raise PlanError(
            f"The parameter '{name}' is in no module of the pipeline plan (before:"
            f" {', '.join(self.plan.before)}; blocks: {self.plan.layers}; after:"
            f" {', '.join(self.plan.after)}). Add the module that holds it to the plan's 'pp' part,"
            " at the position where it runs."
        )

    def ranks_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """Pipeline ranks that hold a parameter known under these names."""
        return tuple(
            sorted(
                {
                    self.assignment.rank_of_stage[stage]
                    for name in names
                    for stage in self.stages_of(name)
                }
            )
        )


def all_specs(
    root: nn.Module,
    name: str,
    module: nn.Module,
    plan: ParallelPlan,
    mesh: Mesh | StageMesh,
    owners: Owners,
    regions: SequenceRegions | None,
    outside: Mapping[str, ShardSpec],
) -> dict[str, ShardSpec]:
    """Specify the shard of every parameter of the whole model, under each of its names (tied
    parameters have several).

    Args:
        outside: shards of parameters outside the pipelined module that are not replicated, by full
            name.
    """
    prefix = f"{name}." if name else ""
    inner = (
        shard_specs(module, plan, mesh.size("tp"), mesh.index("tp"), regions)
        if mesh.size("tp") > 1
        else {}
    )
    inner |= expert_specs(module, plan, mesh.layout.ep, mesh.expert_index, mesh.index("tp"))
    names_of: dict[int, list[str]] = {}
    for full_name, parameter in root.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(full_name)
    specs = {}
    parameters = dict(root.named_parameters(remove_duplicate=False))
    for aliases in names_of.values():
        canonical = aliases[0]
        spec = (
            inner.get(canonical.removeprefix(prefix))
            if canonical.startswith(prefix)
            else outside.get(canonical)
        )
        if spec is None:
            spec = replicated(canonical, tuple(parameters[canonical].shape), mesh.size("tp"))
        spec = replace(spec, name=canonical, pp_replicas=owners.ranks_of(aliases))
        for alias in aliases:
            specs[alias] = spec if alias == canonical else spec.renamed(alias, tied_to=canonical)
    return specs


def create_groups(specs: Iterable[ShardSpec], mesh: Mesh) -> None:
    """Create the groups for partial gradients within tp and for parameters with copies on two
    stages.

    Collective over the world: all ranks pass the same list, and create the groups in the same
    order.
    """
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
    """Select the specifications of the parameters that are still here after partitioning."""
    return {name: specs[name] for name, _ in root.named_parameters()}
