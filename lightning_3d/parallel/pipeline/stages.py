"""Assignment of blocks to stages, and removal of everything that this rank does not own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_3d.layout.balance import split_layers
from lightning_3d.layout.given_stages import given_stages
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.schedules import find_schedule, stages_of_rank
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.pipeline.absent_values import AbsentValue
from lightning_3d.parallel.pipeline.boundary import Travels
from lightning_3d.parallel.pipeline.call_order import PlanOrder
from lightning_3d.parallel.pipeline.gates import (
    AbsentInput,
    AbsentLayer,
    AbsentOutput,
    AbsentOutside,
    CountedModel,
    GatedInput,
    GatedLayer,
    GatedOutput,
    refuse_to_generate,
    remove_parameter,
)
from lightning_3d.parallel.pipeline.state import Chunk, PipelineState
from lightning_3d.parallel.pipeline.towers import has_towers
from lightning_3d.parallel.specialize import specialize


@dataclass(frozen=True)
class StageAssignment:
    """The stages of the whole pipeline.

    Attributes:
        layers: the blocks of each stage, as ranges of global indices.
        rank_of_stage: pipeline rank that owns each stage.
    """

    layers: tuple[range, ...]
    rank_of_stage: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.layers)

    def chunks_of(self, pp_rank: int) -> tuple[Chunk, ...]:
        return tuple(
            Chunk(stage, self.stages, self.layers[stage])
            for stage, owner in enumerate(self.rank_of_stage)
            if owner == pp_rank
        )


def assign_stages(
    module: nn.Module,
    plan: ParallelPlan,
    layout: Layout,
    schedule: str,
    given: Sequence[int] | None = None,
) -> StageAssignment:
    """Assign the blocks of `module` (whole, on meta or not) to pp * vp stages, balanced by FLOPs
    and parameters.

    The FLOPs of a forward pass per token are counted as two per matrix element (embeddings none, a
    head like any matrix); the attention core, equal in every block, does not change the balance.

    Args:
        given: number of blocks of each stage; None to balance them.

    Raises:
        LayoutError: fewer blocks than stages, or what is `given` does not fit.
    """
    stages = layout.pp * layout.vp
    blocks = plan.blocks_of(module)
    if stages == 1:
        return StageAssignment((range(len(blocks) + plan.ahead),), (0,))
    ranges = (
        _balanced(module, blocks, plan, stages)
        if given is None
        else given_stages(given, layout, len(blocks))
    )
    ranges[-1] = range(ranges[-1].start, ranges[-1].stop + plan.ahead)
    v_shaped = find_schedule(schedule).v_shaped
    owner = {
        s: rank
        for rank in range(layout.pp)
        for s in stages_of_rank(rank, layout.pp, layout.vp, v_shaped)
    }
    return StageAssignment(tuple(ranges), tuple(owner[stage] for stage in range(stages)))


def _balanced(
    module: nn.Module, blocks: list[nn.Module], plan: ParallelPlan, stages: int
) -> list[range]:
    costs, modules = [_cost([block]) for block in blocks], dict(module.named_modules())
    last = [*(modules[name] for name in plan.after if name in modules), *plan.ahead_of(module)]
    flops, parameters = _cost(last)
    if plan.head is not None:  # it runs once more for each of these blocks
        flops += plan.ahead * _cost([modules[plan.head]])[0]
    return split_layers(
        [flops for flops, _ in costs],
        [parameters for _, parameters in costs],
        stages,
        first_extra=_cost(modules[name] for name in plan.before if name in modules),
        last_extra=(flops, parameters),
    )


def _cost(modules: Iterable[nn.Module]) -> tuple[float, float]:
    """(FLOPs per token, parameters) of some modules."""
    flops = parameters = 0.0
    for module in modules:
        for child in module.modules():
            for parameter in child.parameters(recurse=False):
                parameters += parameter.numel()
                if parameter.ndim > 1 and not isinstance(child, nn.Embedding):
                    flops += 2.0 * parameter.numel() * _used(child, parameter)
    return flops, parameters


def _used(module: nn.Module, parameter: nn.Parameter) -> float:
    """Fraction of a parameter that a token uses: of experts, one matrix each, those that it is sent
    to."""
    experts, config = getattr(module, "num_experts", None), getattr(module, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if parameter.ndim == 3 and isinstance(chosen, int) and parameter.shape[0] == experts:
        return chosen / experts
    return 1.0


def keep_owned(
    root: nn.Module,
    module_name: str,
    plan: ParallelPlan,
    assignment: StageAssignment,
    pp_rank: int,
    state: PipelineState,
) -> tuple[Chunk, ...]:
    """Replace modules of other ranks by stubs and put gates around the rest, in place.

    Args:
        root: the user's LightningModule. Its modules with parameters outside the pipelined one stay
            on the last stage only.
        module_name: name of the pipelined module inside `root`.

    Returns:
        This rank's chunks, by rising stage.
    """
    module = root.get_submodule(module_name)
    chunks = assignment.chunks_of(pp_rank)
    if assignment.stages == 1:
        state.whole = True
        if state.random.enabled and plan.layers:
            _gate_layers(module, plan, chunks, state)
        return chunks
    blocks = len(plan.blocks_of(module))
    state.has_towers = has_towers(module, plan)
    state.plan = PlanOrder(type(module).__name__, plan.before, plan.layers, plan.after, blocks)
    state.travels = Travels(plan.carried, plan.sides)
    state.left.look_around(root, f"{module_name}.{plan.layers}".lstrip("."))
    _gate_layers(module, plan, chunks, state)
    _gate_ends(module, plan, chunks, state)
    if not any(chunk.is_last for chunk in chunks):
        _remove_outside(root, module_name)
    specialize(module, CountedModel, pipeline_state=state)
    if hasattr(module, "generate"):
        object.__setattr__(module, "generate", refuse_to_generate)
    return chunks


def _gate_layers(
    module: nn.Module, plan: ParallelPlan, chunks: tuple[Chunk, ...], state: PipelineState
) -> None:
    layers = module.get_submodule(plan.layers)
    assert isinstance(layers, (nn.ModuleList, nn.Sequential))
    owned = {index for chunk in chunks for index in chunk.layers}
    for index, layer in enumerate(layers):
        if index in owned:
            specialize(layer, GatedLayer, pipeline_state=state, pipeline_index=index)
            state.left.add_block(index, f"{plan.layers}.{index}", layer)
        else:
            layers[index] = AbsentLayer(f"{plan.layers}.{index}", layer, index, state)


def _gate_ends(
    module: nn.Module, plan: ParallelPlan, chunks: tuple[Chunk, ...], state: PipelineState
) -> None:
    """Put gates around modules with parameters before and after the blocks. Modules without compute
    the same on every rank. Parameters that the model reads by itself become NaN where they are
    absent."""
    owns_first = any(chunk.is_first for chunk in chunks)
    owns_last = any(chunk.is_last for chunk in chunks)
    for names, owned, gate, absent in (
        (plan.before, owns_first, GatedInput, AbsentInput),
        (plan.after, owns_last, GatedOutput, AbsentOutput),
    ):
        for name in names:
            owner, _, last = name.rpartition(".")
            if isinstance(getattr(module.get_submodule(owner), last), nn.Parameter):
                if not owned:
                    remove_parameter(module.get_submodule(owner), last, state)
                continue
            child = module.get_submodule(name)
            if owned and _has_parameters(child):
                specialize(child, gate, pipeline_state=state, pipeline_name=name)
            elif _has_parameters(child):
                module.set_submodule(name, absent(name, child, state))


def _remove_outside(root: nn.Module, module_name: str) -> None:
    """Remove parameters that the user's step uses after the pipelined model, except on the last
    stage."""
    path = module_name.split(".") if module_name else []
    parent = root
    for depth, step in enumerate(path):
        prefix = ".".join(path[:depth])
        for name, parameter in list(parent.named_parameters(recurse=False)):
            delattr(parent, name)
            blank = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
            vars(parent)[name] = AbsentValue.of(blank, f"{prefix}.{name}".lstrip("."))
        for name, child in list(parent.named_children()):
            if name != step and _has_parameters(child):
                setattr(parent, name, AbsentOutside(f"{prefix}.{name}".lstrip("."), child))
        parent = getattr(parent, step)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
