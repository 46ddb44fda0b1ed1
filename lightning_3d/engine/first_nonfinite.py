"""Finds the first layer whose output or gradient is not finite, by computing a failed step again
with hooks on every layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.engine.step.again import RankOfModel
from lightning_3d.errors import listed
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.pipeline import runs_now

OUTPUT, GRADIENT = "output", "gradient of the output"
_MOST_NAMED = 3


@dataclass(frozen=True)
class Sighting:
    """The first layer of a rank whose output or gradient is not finite.

    Attributes:
        what: `OUTPUT` or `GRADIENT`.
        layer: name of the module.
        rank: global rank.
        stage: pipeline stage.
        micro_batch: number of the micro-batch.
        rows: (first, last) row of the batch of its data-parallel rank.
        data_rank: data-parallel rank.
    """

    what: str
    layer: str
    rank: int
    stage: int
    micro_batch: int
    rows: tuple[int, int]
    data_rank: int

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Place in the flow of data: forward before backward, and the backward from the last stage
        to the first."""
        forward = self.what == OUTPUT
        return (
            0 if forward else 1,
            self.micro_batch,
            self.stage if forward else -self.stage,
            self.rank,
        )

    @property
    def words(self) -> str:
        first, last = self.rows
        rows = f"row {first}" if first == last else f"rows {first} to {last}"
        return (
            f"the {self.what} of {self.layer} (rank {self.rank}, stage {self.stage}, micro-batch"
            f" {self.micro_batch}: {rows} of the batch of data-parallel rank {self.data_rank})"
        )


@dataclass(frozen=True)
class Repeated:
    """What the second run of a failed step has shown; the same on every rank.

    Attributes:
        finite: whether loss and gradient norm were finite this time.
        first: the first layers that were not, of each data-parallel rank where there are any.
    """

    finite: bool
    first: tuple[Sighting, ...] = ()

    @property
    def words(self) -> str:
        """A sentence about it."""
        if self.finite:
            return (
                " Computed again from the same numbers, the step is finite: look for a device that"
                " computes wrongly (lightning-3d selftest, trainer.rerun_every_n_steps)."
            )
        if not self.first:
            return (
                " No layer's output or gradient is infinite or NaN: look at the loss function, and"
                " at what follows the layers."
            )
        shown = [one.words for one in self.first[:_MOST_NAMED]]
        more = len(self.first) - len(shown)
        return (
            " The first that is not finite is"
            f" {listed([*shown, *([f'{more} more'] if more else [])])}."
        )


def repeat_failed_step(built: RankOfModel) -> Repeated | None:
    """Compute the step again, before the optimizer steps, and look at every layer. Collective over
    the world.

    Returns:
        What it showed; None where the step cannot be repeated, because it was not remembered on all
        ranks, or changed its batch, or where hooks would make compiled blocks compile again.
    """
    mesh = built.mesh
    if built.compilation is not None or not can_repeat(built):
        return None
    with _watched(built) as seen:
        computed = built.repeatable.again()
    finite = isfinite(computed.totals.mean_loss) and isfinite(built.backend.grad_norm())
    gathered: list[list[Sighting]] = [[] for _ in range(mesh.layout.world_size)]
    dist.all_gather_object(gathered, list(seen.values()))
    everything = sorted((one for own in gathered for one in own), key=lambda one: one.place)
    if not everything or finite:
        return Repeated(finite)
    return Repeated(False, _of_each_data_rank(everything))


def can_repeat(built: RankOfModel) -> bool:
    """Whether all ranks can compute the step again. Collective over the world."""
    can = torch.tensor(int(built.repeatable.can_repeat), device=built.device)
    dist.all_reduce(can, op=dist.ReduceOp.MIN)
    return bool(can.item())


def _of_each_data_rank(sightings: list[Sighting]) -> tuple[Sighting, ...]:
    """The first of each data-parallel rank; gradients only where no output is wrong."""
    kind = sightings[0].what
    found: dict[int, Sighting] = {}
    for one in sightings:
        if one.what == kind:
            found.setdefault(one.data_rank, one)
    return tuple(found[rank] for rank in sorted(found))


@contextmanager
def _watched(built: RankOfModel) -> Iterator[dict[str, Sighting]]:
    """Hook every layer of this rank; yields the first sighting of each kind."""
    seen: dict[str, Sighting] = {}
    rows = built.repeatable.rows
    heartbeat = built.tracer.recorder.heartbeat
    names = {module: name for name, module in built.module.named_modules()}

    def see(what: str, module: nn.Module) -> None:
        if what not in seen:
            _, stage, micro_batch = heartbeat.action or ("", 0, 0)
            number = micro_batch or 0
            span = (number * rows, (number + 1) * rows - 1)
            seen[what] = Sighting(
                what,
                names[module],
                built.mesh.rank,
                stage or 0,
                number,
                span,
                built.mesh.index("dp"),
            )

    def look(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        if not runs_now(module):
            return
        for tensor in _floats(output):
            if OUTPUT not in seen and _is_bad(tensor) and begins_here((arguments, keywords)):
                see(OUTPUT, module)
            if tensor.grad_fn is not None and OUTPUT not in seen:
                tensor.register_hook(lambda gradient: look_back(module, gradient))

    def look_back(module: nn.Module, gradient: Tensor) -> None:
        if GRADIENT not in seen and not bool(gradient.isfinite().all()):
            see(GRADIENT, module)

    def begins_here(inputs: Any) -> bool:
        """Whether what a layer gets is finite. Before their first block, later stages compute with
        placeholders, from token ids on."""
        floats = _floats(inputs)
        _, stage, _ = heartbeat.action or ("", 0, 0)
        return not any(map(_is_bad, floats)) and (bool(floats) or stage == 0)

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        yield seen


def _is_bad(tensor: Tensor) -> bool:
    """Minus infinity is no fault: masks consist of it."""
    return bool((tensor.detach().isnan() | tensor.detach().isposinf()).any())


def _floats(output: Any) -> list[Tensor]:
    """Plain tensors only: to look at those that are in parts on several ranks would communicate."""
    return [
        tensor
        for tensor in tensors_of(output)
        if type(tensor) is Tensor and tensor.is_floating_point() and tensor.numel()
    ]
