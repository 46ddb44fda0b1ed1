"""Frozen models outside the trained one (the reference of DPO, a teacher): with tensor parallelism, each rank has a shard of them.

Their layers are rewritten like those of the trained model, from their own plans. What they return is what the trained model returns: logits
report the full vocabulary and are gathered when they are read. They are not pipelined (all of it is on the last stage), they run whole
sequences, and experts are sharded over the tensor-parallel ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_3d.compat.transformers import is_transformers_model
from lightning_3d.errors import ConfigError, LayoutError, NoPlanError, PlanError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.model_rules import check_model
from lightning_3d.models.parallel_plan import ParallelPlan, has_plan, read_plan
from lightning_3d.parallel.expert import choose_products
from lightning_3d.parallel.mesh import Mesh, StageMesh
from lightning_3d.parallel.random_streams import ModelStreams, RandomState
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.tensor import TensorParallel, fit_styles, rewrite, shard_specs
from lightning_3d.storage.numbers import show_memory
from lightning_3d.strategy.declared_sizes import declared_sizes

_WORTH_A_LINE = 2**20
"""Parameters of a frozen module without a plan from which a warning says that it is not sharded."""


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model that is sharded over the tensor-parallel ranks.

    Attributes:
        name: name in the user's module.
        module: the model, whole until `shard`.
        plan: its parallel plan.
        declared: whether the model declares the plan itself.
    """

    name: str
    module: nn.Module
    plan: ParallelPlan
    declared: bool

    def specs(self, mesh: Mesh | StageMesh) -> dict[str, ShardSpec]:
        """Specify the shards of the parameters of the whole model, by name in the user's module. Without gradients, none are summed."""
        inner = shard_specs(self.module, self.plan, mesh.size("tp"), mesh.index("tp"))
        return {f"{self.name}.{key}": replace(spec, tp_grad_sum=()) for key, spec in inner.items()}

    def shard(self, root: nn.Module, specs: Mapping[str, ShardSpec], mesh: Mesh | StageMesh, random: RandomState) -> None:
        """Leave this rank's shard of the model, in place; nothing where `root` no longer has it, on earlier stages.

        Args:
            specs: of the parameters that are here, by name in `root`.
            random: streams of dropout, which only a model in training mode draws from.
        """
        if all(module is not self.module for module in root.modules()):
            return
        streams = ModelStreams(random, self.module, self.name) if random.enabled else None
        prefix = f"{self.name}."
        inner = {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
        rewrite(self.module, self.plan, inner, TensorParallel(mesh.group("tp"), mesh.size("tp"), mesh.index("tp"), streams))
        choose_products(self.module, self.plan)


def find_frozen_models(root: nn.Module, trained: str, tp: int, user_plan: Mapping[str, Any] | None = None) -> list[FrozenModel]:
    """Find the frozen models that `tp` ranks can shard. A warning names each one that they cannot shard, why, and what it costs.

    Args:
        root: the user's whole module.
        trained: name of the model that is trained.
        user_plan: the user's plan of that model, which is also that of frozen models of the same class.
    """
    model = root.get_submodule(trained)

    def is_like_it(module: nn.Module) -> bool:
        return user_plan is not None and type(module) is type(model) and has_plan(module, user_plan)

    def is_model(module: nn.Module) -> bool:
        return is_transformers_model(module) or has_plan(module) or is_like_it(module)

    found = []
    for name, module in _frozen_parts(root, "", trained, is_model) if tp > 1 else ():
        given = user_plan if is_like_it(module) else None
        try:
            _refuse_shared(root, name, module)
            found.append(FrozenModel(name, module, _fitting_plan(module, tp, given), given is None))
        except (PlanError, LayoutError, ConfigError) as error:
            rank_zero_warn(_stays_whole(name, module, tp, error))
    return found


def _frozen_parts(
    module: nn.Module, name: str, trained: str, is_model: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost frozen models outside the trained one. A large frozen module without a model in it counts as one."""
    if name == trained:
        return
    around = not name or trained.startswith(f"{name}.")
    frozen = not around and not any(parameter.requires_grad for parameter in module.parameters())
    if frozen and is_model(module):
        yield name, module
        return
    children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
    inner = [part for key, child in children for part in _frozen_parts(child, key, trained, is_model)]
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
    why = "it declares no tensor-parallel plan." if isinstance(error, NoPlanError) else " ".join(str(error).split())
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return (
        f"The frozen model '{name}' ({type(module).__name__}, {_count(module):,} parameters) is not sharded over the {tp}"
        f" tensor-parallel ranks: {why} Each of them holds all of it, {show_memory(size)} instead of about {show_memory(size / tp)}."
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
