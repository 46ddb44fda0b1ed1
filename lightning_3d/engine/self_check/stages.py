"""A copy of a model as the ranks run it, with all stages of the pipeline one after the other on
each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.engine.assembly import take_part
from lightning_3d.engine.self_check.model_copy import fill
from lightning_3d.layout.layout import Layout
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.options.model import ModelOptions
from lightning_3d.parallel.mesh import Mesh, StageMesh, TensorMesh
from lightning_3d.parallel.pipeline import PipelineState, StageAssignment, StageBoundary
from lightning_3d.parallel.pipeline.state import Chunk
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.trials.clone import deep_copy


@dataclass(frozen=True)
class _Stage:
    module: nn.Module
    specs: dict[str, ShardSpec]
    state: PipelineState
    chunk: Chunk

    def run(
        self,
        received: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        turned: bool = False,
    ) -> Any:
        """Run the stage. Returns what the last stage returns.

        Args:
            received: what the stage before sent; None for the first stage.
            turned: whether to reorder the rows of `received`.

        Raises:
            StageBoundary: this is not the last stage.
        """
        received = _turned(received) if turned else received
        with self.state.random.isolated(), self.state.running(self.chunk, received, forward=True):
            self.state.random.begin(0, 0)
            return self.module(*args, **kwargs)


def _turned(value: Any) -> Any:
    """Copy a container with the rows of every tensor in another order; with a single row, its
    second dimension."""
    if isinstance(value, Tensor):
        return (
            value.flip(0 if value.shape[0] > 1 or value.ndim == 1 else 1) if value.ndim else value
        )
    if isinstance(value, dict):
        return {key: _turned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_turned(item) for item in value)
    return value


class RewrittenModel:
    """The stages of a model, partitioned and rewritten by the code that does so for training.

    Args:
        model: the whole model, without values; it is not changed.
        plan: its parallel plan.
        mesh: process groups of the run.
        options: options of the model.
        stages: blocks of each stage; None for one stage.
        seed: seed of the values of parameters.
        device: device of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ParallelPlan,
        mesh: Mesh | TensorMesh,
        options: ModelOptions,
        *,
        stages: tuple[range, ...] | None,
        seed: int,
        device: torch.device,
    ) -> None:
        self._mesh = mesh
        blocks = len(list(model.get_submodule(plan.layers).children())) if plan.layers else 0
        ranges = (range(blocks),) if stages is None else stages
        assignment = StageAssignment(ranges, tuple(range(len(ranges))))
        self._stages = []
        for stage in range(len(ranges)):
            module = deep_copy(model)
            part = take_part(
                module,
                "",
                plan,
                StageMesh(mesh, stage, len(ranges)),
                options,
                assignment,
                seed=seed,
                device=device,
            )
            fill(module, part.specs, seed, device, part.blueprint)
            self._stages.append(
                _Stage(module, part.specs, part.state, assignment.chunks_of(stage)[0])
            )

    @property
    def layout(self) -> Layout:
        return self._mesh.layout

    def modules(self) -> Iterator[nn.Module]:
        """The stages."""
        return (stage.module for stage in self._stages)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; what one sends to the next keeps its graph, so that one backward reaches
        all.

        Here all stages are in one process. In training they are in several, where none finds what
        another left in a class or a global of the code. So before a stage runs, the one before it
        runs again with the rows in another order: what it leaves is then wrong.
        """
        received: Tensor | None = None
        self._stages[0].state.boundaries = []
        before: _Stage | None = None
        entered: Tensor | None = None
        for stage in self._stages:
            sent = received
            if before is not None:
                boundaries, length = before.state.boundaries, before.state.sequence.length
                with torch.no_grad(), suppress(StageBoundary):
                    before.run(entered, *_turned((args, kwargs)), turned=True)
                stage.state.boundaries, stage.state.sequence.length = boundaries, length
            try:
                return stage.run(sent, args, kwargs)
            except StageBoundary as end:
                entered, received, before = sent, end.hidden, stage
        raise AssertionError("the last stage has no boundary")

    def sequence_part(self, hidden: Tensor, whole: Tensor) -> Tensor | None:
        """Select what this rank's `hidden` must equal: `whole`, or this rank's part of its tokens.
        None where the shapes do not show it."""
        if hidden.shape == whole.shape:
            return whole
        sequence = self._stages[-1].state.sequence
        if (
            not sequence.active
            or hidden.ndim < 3
            or hidden.shape[1] != sequence.part
            or whole.shape[1] != sequence.length
        ):
            return None
        rank = self._mesh.index("tp")
        return whole[:, rank * sequence.part : rank * sequence.part + sequence.real(rank)]

    def gradients(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """Sum the gradient of each trained parameter over all ranks that have a part of it; by
        canonical name.

        Communicates over the tensor, context and expert groups; all ranks have the same parameters
        in the same order.
        """
        local: dict[str, tuple[Tensor, ShardSpec]] = {}
        for stage in self._stages:
            for name, parameter in stage.module.named_parameters():
                if parameter.requires_grad:
                    spec = stage.specs[name]
                    canonical = spec.tied_to or spec.name
                    gradient = (
                        parameter.grad
                        if parameter.grad is not None
                        else torch.zeros_like(parameter)
                    )
                    local[canonical] = (
                        (local[canonical][0] + gradient if canonical in local else gradient),
                        spec,
                    )
        return {
            name: (self._total(gradient, spec), spec) for name, (gradient, spec) in local.items()
        }

    def total_of_input(self, gradient: Tensor) -> Tensor:
        """Sum the gradient of a floating-point input over context-parallel ranks, which have a part
        of it each."""
        total = gradient.detach().contiguous().clone()
        if self._mesh.size("cp") > 1:
            dist.all_reduce(total, group=self._mesh.group("cp"))
        return total

    def _total(self, gradient: Tensor, spec: ShardSpec) -> Tensor:
        total = gradient.detach().contiguous().clone()
        if spec.expert:
            if dist.get_world_size(self._mesh.expert_data_group) > 1:
                dist.all_reduce(total, group=self._mesh.expert_data_group)
            # data-parallel ranks all sent the same input to these experts
            return total / self._mesh.size("dp")
        if spec.tp_grad_sum:
            parts = [torch.empty_like(total) for _ in range(self._mesh.size("tp"))]
            dist.all_gather(parts, total, group=self._mesh.group("tp"))
            total = torch.stack([parts[coordinate] for coordinate in spec.tp_grad_sum]).sum(0)
        if self._mesh.size("cp") > 1:
            dist.all_reduce(total, group=self._mesh.group("cp"))
        return total
