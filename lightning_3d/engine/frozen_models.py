"""Frozen models outside the trained one (the reference of DPO, a teacher): with tensor parallelism,
each rank has a shard of them.

Their layers are rewritten like those of the trained model, from their own plans. What they return
is what the trained model returns: logits report the full vocabulary and are gathered when they are
read. With ZeRO 3, their blocks are gathered one at a time, as are those of the trained model
(`find_frozen_blocks`). With context parallelism, causal language models in which only attention
mixes tokens run on this rank's part of each sequence. They are not pipelined (all of it is on the
last stage), and experts are sharded over the tensor-parallel ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.compat.transformers import is_transformers_model
from lightning_3d.engine.declared_sizes import declared_sizes
from lightning_3d.errors import ConfigError, LayoutError, NoPlanError, PlanError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.model_rules import check_model
from lightning_3d.models.parallel_plan import ParallelPlan, has_plan, read_plan
from lightning_3d.parallel.blocks import find_blocks
from lightning_3d.parallel.context import ContextParallel, mixes_by_attention, share_frozen
from lightning_3d.parallel.expert import choose_products
from lightning_3d.parallel.mesh import Mesh, StageMesh
from lightning_3d.parallel.random_streams import ModelStreams, RandomState
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.tensor import TensorParallel, fit_styles, rewrite, shard_specs
from lightning_3d.storage.numbers import show_memory

_WORTH_A_LINE = 2**20
"""Parameters of a frozen module without a plan from which a warning says that it is not sharded."""


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model that is sharded over the tensor-parallel ranks, or whose sequences the
    context-parallel ranks split.

    Attributes:
        name: name in the user's module.
        module: the model, whole until `shard`.
        plan: its parallel plan.
        declared: whether the model declares the plan itself.
        sharded: whether the tensor-parallel ranks shard it.
        split: whether the context-parallel ranks split its sequences.
    """

    name: str
    module: nn.Module
    plan: ParallelPlan
    declared: bool
    sharded: bool
    split: bool

    def specs(self, mesh: Mesh | StageMesh) -> dict[str, ShardSpec]:
        """Specify the shards of the parameters of the whole model, by name in the user's module.
        Without gradients, none are summed."""
        if not self.sharded:
            return {}
        inner = shard_specs(self.module, self.plan, mesh.size("tp"), mesh.index("tp"))
        return {f"{self.name}.{key}": replace(spec, tp_grad_sum=()) for key, spec in inner.items()}

    def shard(
        self,
        root: nn.Module,
        specs: Mapping[str, ShardSpec],
        mesh: Mesh | StageMesh,
        random: RandomState,
        context: ContextParallel,
    ) -> None:
        """Leave this rank's shard of the model, in place; nothing where `root` no longer has it, on
        earlier stages.

        Args:
            specs: of the parameters that are here, by name in `root`.
            random: streams of dropout, which only a model in training mode draws from.
            context: the ranks that split sequences.
        """
        if all(module is not self.module for module in root.modules()):
            return
        if self.split:
            share_frozen(self.module, context)
        if not self.sharded:
            return
        streams = ModelStreams(random, self.module, self.name) if random.enabled else None
        prefix = f"{self.name}."
        inner = {
            name.removeprefix(prefix): spec
            for name, spec in specs.items()
            if name.startswith(prefix)
        }
        rewrite(
            self.module,
            self.plan,
            inner,
            TensorParallel(mesh.group("tp"), mesh.size("tp"), mesh.index("tp"), streams),
        )
        choose_products(self.module, self.plan)


def find_frozen_models(
    root: nn.Module,
    trained: str,
    layout: Layout,
    user_plan: Mapping[str, Any] | None = None,
    *,
    cp_kind: str = "ring",
) -> list[FrozenModel]:
    """Find the frozen models that tensor-parallel ranks can shard, or whose sequences
    context-parallel ranks can split: those of causal language models in which only attention mixes
    tokens. A warning names each one that is not sharded, why, and what it costs.

    Args:
        root: the user's whole module.
        trained: name of the model that is trained.
        layout: layout of the run.
        user_plan: the user's plan of that model, which is also that of frozen models of the same
            class.
        cp_kind: how context-parallel ranks attend to each other's tokens.
    """
    found = []
    for name, module, given in (
        _frozen_with_plans(root, trained, user_plan) if layout.tp * layout.cp > 1 else ()
    ):
        plan, sharded = _plan_or_none(module, given), False
        try:
            if layout.tp > 1:
                _refuse_shared(root, name, module)
                plan, sharded = _fitting_plan(module, layout.tp, given), True
        except (PlanError, LayoutError, ConfigError) as error:
            rank_zero_warn(_stays_whole(name, module, layout.tp, error))
        split = layout.cp > 1 and _splits(
            module, plan, Layout(tp=layout.tp if sharded else 1, cp=layout.cp), cp_kind
        )
        if sharded or split:
            found.append(FrozenModel(name, module, plan, given is None, sharded, split))
    return found


def _splits(module: nn.Module, plan: ParallelPlan, layout: Layout, cp_kind: str) -> bool:
    """Return whether the context-parallel ranks of a layout can split the sequences of a model."""
    try:
        check_model(layout, declared_sizes(module, plan, layout), cp_kind=cp_kind)
    except LayoutError:
        return False
    return mixes_by_attention(module, find_blocks(module, plan))


def find_frozen_blocks(
    root: nn.Module, trained: str, user_plan: Mapping[str, Any] | None = None
) -> list[list[nn.Module]]:
    """Find the blocks of each frozen model, in the order in which they are called; see
    `find_frozen_models` for the arguments."""
    models = _frozen_with_plans(root, trained, user_plan)
    found = (find_blocks(module, _plan_or_none(module, given)) for _, module, given in models)
    return [blocks for blocks in found if blocks]


def _plan_or_none(module: nn.Module, given: Mapping[str, Any] | None) -> ParallelPlan:
    """Return the plan of a model; an empty one if it has none."""
    try:
        return read_plan(module, given)
    except PlanError:
        return ParallelPlan({})


def _frozen_with_plans(
    root: nn.Module, trained: str, user_plan: Mapping[str, Any] | None
) -> Iterator[tuple[str, nn.Module, Mapping[str, Any] | None]]:
    """Yield name, module and plan of the user of each frozen model outside the trained one."""
    model = root.get_submodule(trained)

    def is_like_it(module: nn.Module) -> bool:
        return user_plan is not None and type(module) is type(model) and has_plan(module, user_plan)

    def is_model(module: nn.Module) -> bool:
        return is_transformers_model(module) or has_plan(module) or is_like_it(module)

    for name, module in _frozen_parts(root, "", trained, is_model):
        yield name, module, user_plan if is_like_it(module) else None


def _frozen_parts(
    module: nn.Module, name: str, trained: str, is_model: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost frozen models outside the trained one. A large frozen module without a
    model in it counts as one."""
    if name == trained:
        return
    around = not name or trained.startswith(f"{name}.")
    frozen = not around and not any(parameter.requires_grad for parameter in module.parameters())
    if frozen and is_model(module):
        yield name, module
        return
    children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
    inner = [
        part for key, child in children for part in _frozen_parts(child, key, trained, is_model)
    ]
    yield from inner
    if frozen and not inner and _count(module) >= _WORTH_A_LINE and "." not in name:
        yield name, module


def _fitting_plan(module: nn.Module, tp: int, given: Mapping[str, Any] | None) -> ParallelPlan:
    """Return the plan by which `tp` ranks shard a model.

    Raises:
        PlanError: it has none, or not a complete one. LayoutError: its sizes do not fit.
    """
    plan, layout = read_plan(module, given), Layout(tp=tp)
    check_model(layout, declared_sizes(module, plan, layout))
    plan = fit_styles(module, plan, tp)
    shard_specs(module, plan, tp, 0)
    return plan


def _refuse_shared(root: nn.Module, name: str, module: nn.Module) -> None:
    """Raise PlanError for a model that has a parameter which is also elsewhere in `root`."""
    own = {id(parameter) for parameter in module.parameters()}
    for other, parameter in root.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not other.startswith(f"{name}."):
            raise PlanError(f"A parameter of it is also '{other}'.")


def _stays_whole(name: str, module: nn.Module, tp: int, error: Exception) -> str:
    why = (
        "it declares no tensor-parallel plan."
        if isinstance(error, NoPlanError)
        else " ".join(str(error).split())
    )
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return (
        f"The frozen model '{name}' ({type(module).__name__}, {_count(module):,} parameters) is not"
        f" sharded over the {tp} tensor-parallel ranks: {why} Each of them holds all of it,"
        f" {show_memory(size)} instead of about {show_memory(size / tp)}."
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
