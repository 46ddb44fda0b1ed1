"""Runs forward and backward of an optimizer step again, before the optimizer steps, as if they had
not run before.

The second run begins with the same random numbers, buffers and batches, so that it gives the same
loss and gradients to the last bit where the arithmetic is deterministic. Afterwards its gradients
have replaced those of the first run. Metrics, logs and the loads of routers are as the first run
left them. Attributes that the user's step sets on Python objects of its own are not restored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_3d.engine.loop import Loop
from lightning_3d.engine.step.metrics import unchanged_metrics
from lightning_3d.engine.step.micro_batches import MicroBatches
from lightning_3d.engine.step.runner import Computed, StepRunner
from lightning_3d.engine.step.tracer import StepTracer
from lightning_3d.parallel.blocks import Compilation
from lightning_3d.parallel.expert import Routers
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.nested import same_tensors, tensors_of
from lightning_3d.parallel.random_streams import Generators
from lightning_3d.parallel.zero import DataParallelBackend


class Buffers:
    """Copies of the buffers of a module that steps change, as they were before a step.

    Which ones change is known after the first step, of which all are copied; later steps copy only
    those.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: dict[tuple[str, str], tuple[Tensor, int]] | None = None
        self._change: set[tuple[str, str]] = set()
        self._copies: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def remember(self) -> None:
        """Copy them, before a step."""
        first, found = self._seen is None, self._found()
        for place, buffer in found.items():
            before = (self._seen or {}).get(place)
            if before is not None and (before[0] is not buffer or before[1] != buffer._version):
                self._change.add(place)
        self._copies = {
            place: (buffer, buffer.clone())
            for place, buffer in found.items()
            if first or place in self._change
        }
        self._seen = {place: (buffer, buffer._version) for place, buffer in found.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copies back."""
        for (owner, name), (buffer, copy) in self._copies.items():
            if self._seen is not None and buffer._version == self._seen[owner, name][1]:
                continue  # the step did not write into it
            buffer.copy_(copy)
        for (owner, name), (buffer, _) in self._copies.items():
            self._module.get_submodule(owner)._buffers[name] = buffer

    def forget(self) -> None:
        """Free the copies."""
        self._copies = {}

    def _found(self) -> dict[tuple[str, str], Tensor]:
        return {
            (owner, name): buffer
            for owner, module in self._module.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        }


class RankOfModel(Protocol):
    """The part of a `BuiltModel` that a second run of a step needs."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def backend(self) -> DataParallelBackend: ...
    @property
    def compilation(self) -> Compilation | None: ...
    @property
    def tracer(self) -> StepTracer: ...
    @property
    def loop(self) -> Loop: ...
    @property
    def repeatable(self) -> RepeatableStep: ...


@dataclass(frozen=True)
class _Batch:
    """One batch of the step, as it was before its first run."""

    micro_batches: MicroBatches
    rest: tuple[Any, ...]
    generators: Generators
    versions: tuple[int, ...]


class RepeatableStep:
    """The batches of the running optimizer step, and its second run.

    Args:
        module: the user's module.
        runner: runs the batches.
        backend: its gradients.
        routers: of a mixture of experts.

    Attributes:
        wanted: whether to remember the steps that begin from now on. Costs some 20 microseconds a
            batch, keeps the batches of a step in memory until the next one begins, and copies
            buffers that steps change.
    """

    def __init__(
        self,
        module: nn.Module,
        runner: StepRunner,
        backend: DataParallelBackend,
        routers: Routers | None,
        device: torch.device,
    ) -> None:
        self._module, self._runner, self._backend, self._routers = module, runner, backend, routers
        self._device = device
        self._buffers = Buffers(module)
        self._batches: list[_Batch] = []
        self._step = 0
        self._remembers = False
        self.wanted = False

    def remember(
        self,
        micro_batches: MicroBatches,
        rest: tuple[Any, ...],
        step: int,
        place: int,
        *,
        anyway: bool = False,
    ) -> None:
        """Remember a batch, before its first run.

        Args:
            rest: further arguments of the user's step.
            step: number of optimizer steps before this one.
            place: index of this batch among those of the step.
            anyway: whether to remember a step that is not `wanted`.
        """
        if place == 0:
            self.forget()
            self._step, self._remembers = step, self.wanted or anyway
            if self._remembers:
                self._buffers.remember()
        if self._remembers:
            kept = replace(
                micro_batches, batches=tuple(same_tensors(batch) for batch in micro_batches.batches)
            )
            self._batches.append(_Batch(kept, rest, Generators(self._device), _versions(kept)))

    @property
    def rows(self) -> int:
        """Rows of a micro-batch of the step that is remembered."""
        return self._batches[-1].micro_batches.rows

    @property
    def can_repeat(self) -> bool:
        """Whether the step was remembered, and its batches are still as they were: a user's step
        may write into them."""
        return bool(self._batches) and all(
            _versions(batch.micro_batches) == batch.versions for batch in self._batches
        )

    def again(self) -> Computed:
        """Run forward, backward and reduction of all batches of the step again. Collective, like
        the first run; may be called repeatedly.

        Call it after the last batch was computed and before the optimizer steps or the gradients
        are clipped.

        Returns:
            The totals of the last batch. The backend has the reduced gradients.
        """
        if not self._batches:
            raise RuntimeError("The step was not remembered: set `wanted` before it begins.")
        after = Generators(self._device)
        loads = self._routers.loads() if self._routers is not None else None
        self._backend.discard()
        self._buffers.restore()
        last = len(self._batches) - 1
        with unchanged_metrics(self._module):
            for place, batch in enumerate(self._batches):
                batch.generators.restore()
                fresh = replace(
                    batch.micro_batches,
                    batches=tuple(same_tensors(one) for one in batch.micro_batches.batches),
                )
                computed = self._runner.compute(
                    fresh,
                    batch.rest,
                    self._backend,
                    self._step,
                    place=place,
                    ends=place == last,
                    of=None,
                )
        if self._routers is not None and loads is not None:
            self._routers.set_loads(loads)
        after.restore()
        return computed

    def forget(self) -> None:
        """Free what is remembered of the step."""
        self._batches = []
        self._buffers.forget()


def _versions(micro_batches: MicroBatches) -> tuple[int, ...]:
    """Counts of the writes into the tensors of all micro-batches."""
    return tuple(
        0 if tensor.is_inference() else tensor._version
        for batch in micro_batches.batches
        for tensor in tensors_of(batch)
    )
