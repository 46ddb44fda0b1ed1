"""The model of one rank: its parts, and how the whole model is partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.engine.model_size import ModelSize
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.options.model import ModelOptions
from lightning_3d.parallel.blocks import find_blocks
from lightning_3d.parallel.context import ContextParallel, use_context
from lightning_3d.parallel.deferred_logits import defer_heads
from lightning_3d.parallel.expert import Routers
from lightning_3d.parallel.mesh import Mesh, StageMesh
from lightning_3d.parallel.pipeline import PipelineState, StageAssignment
from lightning_3d.parallel.sharding import ShardSpec


@dataclass
class LocalModel:
    """The part of a model that this rank holds.

    Attributes:
        name: name of the pipelined module inside the user's module.
        module: the pipelined module.
        plan: its parallel plan.
        specs: shard of every parameter that this rank holds, by full name in the user's module.
        assignment: all stages of the pipeline.
        parameters: parameters of each of this rank's stages, by stage.
        state: what gates and engine share.
        size: parameters of the whole model.
        routers: of a mixture of experts.
        frozen_blocks: blocks of each frozen model outside the pipelined module, in the order in
            which they are called.
        lost: whether a fit failed while only other ranks had the values of some parameters.
    """

    name: str
    module: nn.Module
    plan: ParallelPlan
    specs: dict[str, ShardSpec]
    assignment: StageAssignment
    parameters: dict[int, list[nn.Parameter]]
    state: PipelineState
    size: ModelSize
    routers: Routers | None = None
    frozen_blocks: Sequence[Sequence[nn.Module]] = ()
    lost: bool = False

    @property
    def module_specs(self) -> dict[str, ShardSpec]:
        """Shards of the pipelined module's parameters, by name inside it."""
        prefix = f"{self.name}." if self.name else ""
        return {
            name.removeprefix(prefix): spec
            for name, spec in self.specs.items()
            if name.startswith(prefix)
        }

    def after_optimizer_step(self) -> None:
        """Update the biases of routers, which change after each optimizer step without a
        gradient."""
        if self.routers is not None:
            self.routers.update_biases()

    def after_skipped_step(self) -> None:
        """Forget the loads of experts by which `after_optimizer_step` would have changed the biases
        of routers."""
        if self.routers is not None:
            self.routers.forget_loads()

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that this rank has, in the order in which they are called."""
        return find_blocks(self.module, self.plan)


@dataclass(frozen=True)
class Partition:
    """The partition of a user's module, with what a second strategy needs to continue with it.

    Attributes:
        parts: parts of this rank.
        mesh: process groups that its layers use.
        options: options that it was built with.
        layers: layers that communicate, by name in the user's module.
    """

    parts: LocalModel
    mesh: Mesh
    options: ModelOptions
    layers: tuple[tuple[str, nn.Module], ...]

    @classmethod
    def of(cls, root: nn.Module) -> Partition | None:
        """Find the partition of `root`; None if `root` is whole or was rebuilt after it was
        partitioned."""
        found = vars(root).get(PARTITION)
        return (
            found
            if found is not None and _submodule(root, found.parts.name) is found.parts.module
            else None
        )

    @staticmethod
    def require_kept(root: nn.Module) -> None:
        """Refuse a module that was partitioned, and in which the pipelined module or a sharded
        layer has been replaced since.

        Raises:
            ConfigError: names what was replaced.
        """
        if PARTITION in vars(root) and Partition.of(root) is None:
            raise ConfigError(
                "The model was replaced after it was sharded for this layout. Did configure_model"
                " build it again? That would discard the trained weights: begin configure_model"
                " with `if self.model is not None: return`. To change the model after a fit (for"
                " example with merge_and_unload), save a checkpoint, load it on one process with"
                " load_full_state_dict, and change it there."
            )
        found = Partition.of(root)
        if found is None:
            return
        for name, layer in found.layers:
            there = _submodule(root, name)
            if there is not layer and not (there is None and found.is_outside(name)):
                raise ConfigError(
                    f"The layer '{name}' was replaced after it was sharded for {found.mesh.layout};"
                    " the new layer does not communicate with other ranks. To change a model after"
                    " a fit (for example with merge_and_unload), save a checkpoint, load it on one"
                    " process with load_full_state_dict, and change it there."
                )

    def is_outside(self, name: str) -> bool:
        """Return whether a layer is of another model than the pipelined one, a frozen one that the
        user may remove."""
        return not f"{name}.".startswith(f"{self.parts.name}." if self.parts.name else "")

    def suits(self, layout: Layout, schedule: str) -> bool:
        """Return whether the module was partitioned for this layout and schedule."""
        return (self.mesh.layout, self.options.schedule) == (layout, schedule)

    def hand_over(self, layout: Layout, options: ModelOptions) -> LocalModel:
        """Pass the parts to another strategy, with its options for routers and attention.

        Raises:
            ConfigError: the other strategy has another layout or schedule, or the weights are lost.
        """
        if self.parts.lost:
            raise ConfigError(
                "A fit of this module with zero_stage=3 failed, and its weights are still sharded"
                " across ranks. Rebuild the module and load the last checkpoint with ckpt_path=, or"
                " keep using the same Trainer."
            )
        if not self.suits(layout, options.schedule):
            raise ConfigError(
                f"An earlier Trainer partitioned this module for {self.mesh.layout} and"
                f" {self.options.schedule}; it cannot be partitioned again for {layout} and"
                f" {options.schedule}. Use the earlier layout and schedule, or save a checkpoint,"
                " rebuild the module and load the checkpoint with ckpt_path=."
            )
        given, stages = options.stages, [len(blocks) for blocks in self.parts.assignment.layers]
        stages[-1] -= self.parts.plan.ahead
        if given is not None and list(given) != stages:
            raise ConfigError(
                f"An earlier Trainer partitioned this module into stages of {stages} blocks; it"
                f" cannot be partitioned again for stages={list(given)}. Use the same stages, or"
                " save a checkpoint, rebuild the module and load it with ckpt_path=."
            )
        if options.experts.moe_node_size != self.options.experts.moe_node_size:
            rank_zero_warn(
                "The experts of this module keep"
                f" moe_node_size={self.options.experts.moe_node_size} of an earlier Trainer."
                " Rebuild the module to change it."
            )
        if differences := self.options.blocks.differences(options.blocks, tp=layout.tp):
            rank_zero_warn(
                "The blocks of this module keep the options of an earlier Trainer"
                f" ({'; '.join(differences)}). Rebuild the module to change them."
            )
        if self.parts.routers is not None:
            self.parts.routers.use(options.experts)
        if (
            not defer_heads(self.parts.module, options.loss_chunks)
            and options.loss_chunks != self.options.loss_chunks
        ):
            rank_zero_warn(
                f"The output head of this module keeps loss_chunks={self.options.loss_chunks} of an"
                " earlier Trainer. Rebuild the module to change it."
            )
        if layout.cp > 1:
            context = context_of(self.mesh, options.cp_kind)
            self.parts.module.context_parallel = context  # type: ignore[assignment]
            use_context(self.parts.module, context)
        return self.parts

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        """Share the partition: a copied module (weight averaging) communicates with the same
        ranks."""
        return self


PARTITION = "_lightning_3d_partition"
COMMUNICATES = {"tp_region", "tp_context", "expert_parallel", "context_split"}
"""Attributes of layers that communicate."""


def _submodule(root: nn.Module, name: str) -> nn.Module | None:
    try:
        return root.get_submodule(name)
    except AttributeError:
        return None


def context_of(mesh: Mesh | StageMesh, cp_kind: str) -> ContextParallel:
    """The ranks that share a sequence with this one."""
    return ContextParallel(mesh.group("cp"), mesh.size("cp"), mesh.index("cp"), cp_kind)
