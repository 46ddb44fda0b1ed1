"""The model of one rank: its parts, and how it was partitioned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_3d.config.options.model import ModelOptions
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.blocks import find_blocks
from lightning_3d.parallel.context import ContextParallel
from lightning_3d.parallel.expert import Routers
from lightning_3d.parallel.mesh import Mesh, StageMesh
from lightning_3d.parallel.pipeline import PipelineState, StageAssignment
from lightning_3d.parallel.sharding import ShardSpec


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


def context_of(mesh: Mesh | StageMesh, cp_kind: str) -> ContextParallel:
    """The ranks that share a sequence with this one."""
    return ContextParallel(mesh.group("cp"), mesh.size("cp"), mesh.index("cp"), cp_kind)
