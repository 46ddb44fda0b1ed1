"""Gradients of one rank: added up over micro-batches, and summed over the ranks that share their
parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.parallel.zero.flat_partition import OwnedPiece, Partition
from lightning_3d.parallel.zero.gradient_buffers import (
    LOW_PRECISION,
    FlatGradients,
    GradientSums,
    scale_,
)
from lightning_3d.parallel.zero.overlapped_reduction import EagerReduction
from lightning_3d.parallel.zero.partial_and_tied_gradients import PartialSums
from lightning_3d.parallel.zero.replica_sums import ReplicaSums
from lightning_3d.parallel.zero.trained import TrainedParameters
from lightning_3d.parallel.zero.waves import Arrivals


class Reduction(ABC):
    """One way to sum the gradients of some parameters over the data-parallel ranks."""

    def begin(self) -> None:  # noqa: B027 - a reduction need not have state
        """Forget the gradients of the step before."""

    def after_backward(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: B027 - most wait for the last micro-batch
        """Take note of a backward action of a stage with these parameters."""

    def before_last_backward(self, stage: int) -> None:  # noqa: B027 - most send nothing before it
        """Take note that the last backward of a stage begins, which may overlap with the
        reduction."""

    def start(self, wave: int) -> None:  # noqa: B027 - what is not started is reduced by `finish`
        """Start to sum the gradients of a wave, which must be complete."""

    @abstractmethod
    def finish(self, scale: float | Tensor) -> list[nn.Parameter]:
        """Complete the sums and multiply them by `scale`. Returns the parameters that no rank had a
        gradient for."""

    def takes_at_once(self, parameter: nn.Parameter) -> bool:
        """True if the gradient of a parameter is taken in every micro-batch; `local` then has this
        rank's part of the sum."""
        return False

    def local(self, parameter: nn.Parameter) -> Tensor | None:
        return None

    def buffers(self) -> list[Tensor]:
        """Buffers of gradients that are held at the moment, apart from the gradients themselves."""
        return []

    def close(self) -> None:  # noqa: B027
        """Let go of the parameters."""


class UnsharedGradients(Reduction):
    """Gradients of parameters that no other data-parallel rank has: only multiplied."""

    def __init__(self, parameters: Sequence[nn.Parameter], sums: GradientSums) -> None:
        self._parameters, self._sums = parameters, sums

    def finish(self, scale: float | Tensor) -> list[nn.Parameter]:
        present = [
            gradient
            for gradient in map(self._sums.__getitem__, self._parameters)
            if gradient is not None
        ]
        for dtype in {gradient.dtype for gradient in present}:
            scale_([gradient for gradient in present if gradient.dtype == dtype], scale)
        return []


class _Buffered(Reduction):
    """Gradients that are copied into one flat buffer, whose messages are sent wave by wave."""

    def __init__(self, flat: FlatGradients, group: dist.ProcessGroup, sums: GradientSums) -> None:
        self._flat, self._group, self._sums = flat, group, sums

    def begin(self) -> None:
        self._flat.forget()

    def start(self, wave: int) -> None:
        self._flat.start(wave, self._sums, self._group)

    def buffers(self) -> list[Tensor]:
        return self._flat.buffers


class AllReduced(_Buffered):
    """Every rank gets all of every gradient (stage 0)."""

    def finish(self, scale: float | Tensor) -> list[nn.Parameter]:
        self._flat.all_reduce(self._sums, self._group, scale)
        return self._flat.absent


class ReducedToPartitions(_Buffered):
    """Gradients in DeepSpeed's own layout, so that the part that a rank owns is a view and nothing
    is copied twice (stages 1 and 2).

    Args:
        scatters: one reduce-scatter for each partition instead of all-reduces of buckets.
        frees: keep only the owned part, not the buffer that it is a view of.
        replicas: further sums of the owned parts, where `group` is only a part of the data-parallel
            ranks.
    """

    def __init__(
        self,
        flat: FlatGradients,
        group: dist.ProcessGroup,
        sums: GradientSums,
        partitions: Sequence[Partition],
        *,
        scatters: bool,
        frees: bool,
        replicas: ReplicaSums | None = None,
    ) -> None:
        super().__init__(flat, group, sums)
        self._partitions, self._scatters, self._frees, self._replicas = (
            partitions,
            scatters,
            frees,
            replicas,
        )

    def finish(self, scale: float | Tensor) -> list[nn.Parameter]:
        if self._scatters:
            parts = self._flat.reduce_scatter(self._sums, self._group, scale)
        else:
            flat = self._flat.all_reduce(self._sums, self._group, scale)
            assert flat is not None
            parts = [partition.owned_part(flat) for partition in self._partitions]
            if self._frees:
                parts = [part.clone() for part in parts]
        for partition, part in zip(self._partitions, parts, strict=True):
            partition.gradient = part
        if self._replicas is not None:
            self._replicas.add_up()
        return self._flat.absent


class AddedToPieces(_Buffered):
    """Gradients that are all-reduced and of which this rank adds its pieces to what their
    partitions have already.

    Args:
        replicas: further sums of these pieces, where `group` is only a part of the ranks that share
            them.
    """

    def __init__(
        self,
        flat: FlatGradients,
        group: dist.ProcessGroup,
        sums: GradientSums,
        pieces: Sequence[OwnedPiece],
        *,
        replicas: ReplicaSums | None = None,
    ) -> None:
        super().__init__(flat, group, sums)
        self._pieces, self._replicas = pieces, replicas

    def finish(self, scale: float | Tensor) -> list[nn.Parameter]:
        flat = self._flat.all_reduce(self._sums, self._group, scale)
        assert flat is not None
        places = {id(slot.parameter): slot for slot in self._flat.slots}
        for piece in self._pieces:
            place = places.get(id(piece.entry.parameter))
            if place is not None:
                target, first = piece.gradient, place.start + piece.first
                target += flat[first : first + target.numel()]
        if self._replicas is not None:
            self._replicas.add_up()
        return self._flat.absent


class Overlapped(Reduction):
    """Gradients that are reduced while the backward still runs.

    Args:
        eager: the reduction.
        sums: where gradients add up over micro-batches.
        targets: function that makes zeros, which the sums of this rank's shares are added to.
        trained: parameters of this rank.
        each_micro_batch: gradients are reduced in every micro-batch; otherwise once, wave by wave.
    """

    def __init__(
        self,
        eager: EagerReduction,
        sums: GradientSums,
        targets: Callable[[], list[Tensor]],
        trained: TrainedParameters,
        *,
        each_micro_batch: bool,
    ) -> None:
        self._eager, self._sums, self._targets, self._trained = eager, sums, targets, trained
        self._each_micro_batch = each_micro_batch

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._eager

    def begin(self) -> None:
        self._eager.begin(self._targets, None if self._each_micro_batch else self._take)

    def after_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._each_micro_batch:
            self._eager.flush(parameters)

    def before_last_backward(self, stage: int) -> None:
        self._eager.before_last_backward(stage)

    def block_finished(self, parameters: list[nn.Parameter]) -> None:
        """Send the gradients of a block when a micro-batch's backward through it has ended. All
        ranks call this at the same point."""
        if self._each_micro_batch:
            self._eager.finished(parameters)

    def start(self, wave: int) -> None:
        if self._each_micro_batch:
            return
        sent = self._trained.waves[wave]
        self._eager.finished(sent.parameters)
        if not sent.is_early and sent.stage is not None:
            self._eager.flush(self._trained.stages[sent.stage])

    def finish(self, scale: float | Tensor) -> list[nn.Parameter]:
        return self._eager.finish(scale, self._take)

    def takes_at_once(self, parameter: nn.Parameter) -> bool:
        return self._each_micro_batch and parameter in self._eager

    def local(self, parameter: nn.Parameter) -> Tensor | None:
        # Ranks with other sizes have other pieces, which cannot be compared.
        return None if self._trained.any_uneven else self._eager.local(parameter)

    def buffers(self) -> list[Tensor]:
        return self._eager.in_flight()

    def close(self) -> None:
        self._eager.close()

    def _take(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = self._sums[parameter]
        self._sums[parameter] = None
        return gradient


class Reducer:
    """Makes the gradients of the whole batch out of those of this rank's micro-batches.

    Args:
        trained: parameters of this rank.
        sums: where their gradients add up over micro-batches.
        reductions: how each parameter is summed over the data-parallel ranks, in the order in which
            all ranks send.
        accumulated: partitions whose gradient is a sum of pieces, and starts each step at zero.
        frees: after the reduction drop the gradients in `sums`; the optimizer steps with those of
            its partitions.
        absorbs: add bf16 gradients to their sums as they arrive, so that there is never one of each
            parameter.
        shows: after the reduction `.grad` is the memory that the optimizer steps with.
    """

    def __init__(
        self,
        trained: TrainedParameters,
        sums: GradientSums,
        reductions: Sequence[Reduction],
        *,
        accumulated: Sequence[Partition] = (),
        frees: bool = False,
        absorbs: bool = False,
        shows: bool = False,
    ) -> None:
        self._shows = shows
        self._trained, self._sums, self._reductions = trained, sums, reductions
        self._accumulated, self._frees = accumulated, frees
        summed = [
            (entry.parameter, replace(entry.spec, tp_grad_sum=trained.summed_over_tp(entry)))
            for entry in trained.entries
        ]
        self._partial = PartialSums(trained.mesh, summed, trained.wave_of)
        own = trained.mesh.index("tp")
        copies = [
            entry
            for entry in trained.entries
            if trained.takes_first_copy(entry) and own != min(entry.spec.tp_replicas)
        ]
        self._copies = [entry.parameter for entry in copies]
        self._arrivals = Arrivals(trained.waves, trained.mesh.data_control, self._arrived)
        self._finished: set[int] = set()
        self._wave = 0
        self._adds_up = False
        self.ends = self.overlaps = False
        narrow = [
            parameter
            for parameter in trained.parameters
            if absorbs and parameter.dtype in LOW_PRECISION
        ]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._absorb) for parameter in narrow
        ]

    def clear(self) -> None:
        """Drop all gradients of this rank's micro-batches."""
        self._sums.clear()

    def begin(self) -> None:
        """Start an optimizer step, after `clear`."""
        self._finished, self._wave = set(), 0
        self._arrivals.begin()
        for partition in self._accumulated:
            # made when something is added: until then activations need the memory
            partition.gradient = None
        for reduction in self._reductions:
            reduction.begin()

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Context of the forward and backward of a batch. A backward outside of it is the user's
        own."""
        self._adds_up = True
        try:
            yield
        finally:
            self._adds_up = False
            self._arrivals.watch(None)

    @torch.no_grad()
    def _absorb(self, parameter: Tensor) -> None:
        """Autograd has added a gradient of a micro-batch."""
        if self._adds_up:
            assert isinstance(parameter, nn.Parameter)
            self._sums.absorb([parameter])

    def before_last_backward(self, stage: int) -> None:
        """See `DataParallelBackend.before_last_backward`."""
        if self.overlaps or (self.ends and self._arrivals.in_first_step):
            self._arrivals.watch(stage)
        for reduction in self._reductions if self.overlaps else ():
            reduction.before_last_backward(stage)

    def after_backward(self, parameters: Iterable[nn.Parameter], *, stage: int, last: bool) -> None:
        """See `DataParallelBackend.after_backward`."""
        parameters = list(parameters)
        for reduction in self._reductions:
            # before the sums, which these gradients never reach
            reduction.after_backward(parameters)
        self._sums.absorb(parameters)
        if last:
            self._arrivals.watch(None)
        if last and self.overlaps:
            self._finished.add(stage)
            self._complete_waves()

    @torch.no_grad()
    def _arrived(self, parameter: nn.Parameter, wave: int) -> None:
        """Autograd has added the last gradient of a parameter of an early wave."""
        self._sums.absorb([parameter])
        if self._arrivals.are_complete(wave):
            self._complete_waves()

    def _complete_waves(self) -> None:
        waves = self._trained.waves
        while self._wave < self._trained.last_wave:
            if waves[self._wave].stage not in self._finished and not self._arrivals.are_complete(
                self._wave
            ):
                return
            self._complete_wave()

    def _complete_wave(self) -> None:
        """All gradients of the next wave have arrived. All ranks complete the waves in the same
        order."""
        # Partial gradients first: what is summed over the data-parallel ranks must be whole.
        self._sum_over_tp(self._wave)
        for reduction in self._reductions:
            reduction.start(self._wave)
        self._wave += 1

    def _sum_over_tp(self, wave: int) -> None:
        """Sum what is complete in a wave over the tensor-parallel ranks. Of copies, only the first
        rank's gradient counts."""
        for parameter in self._copies:
            gradient = (
                self._sums[parameter] if self._trained.wave_of[id(parameter)] == wave else None
            )
            if gradient is not None:
                gradient.zero_()
        self._partial.reduce(self._sums, wave)

    def reduce(self, scale: float | Tensor) -> list[nn.Parameter]:
        """See `DataParallelBackend.reduce`. Returns the parameters that no rank has a gradient
        for."""
        self._sums.absorb()
        self._arrivals.finish_step()
        while self._wave < self._trained.last_wave:
            self._complete_wave()
        self._sum_over_tp(self._trained.last_wave)
        # after the partial sums: a tied copy is sent when it is whole
        self._partial.reduce_tied(self._sums)
        for partition in self._accumulated:
            partition.sum_of_gradients()
        absent = [
            parameter for reduction in self._reductions for parameter in reduction.finish(scale)
        ]
        if self._frees:
            self._sums.clear()
        return absent

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """See `DataParallelBackend.local_gradient`."""
        for reduction in self._reductions:
            if reduction.takes_at_once(parameter):
                return reduction.local(parameter)
        return self._sums[parameter]

    def shows_gradient(self, parameter: Tensor) -> bool:
        """Whether `.grad` of a parameter is what the optimizer steps with, after the reduction."""
        return self._shows and parameter.dtype not in LOW_PRECISION

    def held(self) -> list[Tensor]:
        """Gradients and their buffers; several may share their memory."""
        arrived = [
            parameter.grad for parameter in self._trained.parameters if parameter.grad is not None
        ]
        buffers = [buffer for reduction in self._reductions for buffer in reduction.buffers()]
        return [*self._sums.present(), *arrived, *buffers]

    def close(self) -> None:
        """Let go of the parameters."""
        self.clear()
        self._arrivals.close()
        for hook in self._hooks:
            hook.remove()
        for reduction in self._reductions:
            reduction.close()
