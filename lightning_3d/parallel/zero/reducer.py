"""Gradients of one rank: added up over micro-batches, and summed over the ranks that share their
parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.zero.deepspeed_engine import Partition
from lightning_3d.parallel.zero.gradients import (
    LOW_PRECISION,
    GradientSums,
    end_to_end,
    scale_,
    sum_dtype,
)
from lightning_3d.parallel.zero.reduction import Policy, Reduction
from lightning_3d.parallel.zero.trained import TrainedParameters, Wave, is_copied, ranks_along


class Reducer:
    """Makes the gradients of the whole batch out of those of this rank's micro-batches.

    Args:
        trained: parameters of this rank.
        sums: where their gradients add up over micro-batches.
        reductions: how each parameter is summed over the data-parallel ranks, in the order in which
            all ranks send.
        unshared: parameters that no other data-parallel rank has: their gradients are only
            multiplied.
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
        unshared: Sequence[nn.Parameter] = (),
        accumulated: Sequence[Partition] = (),
        frees: bool = False,
        absorbs: bool = False,
        shows: bool = False,
    ) -> None:
        self._shows = shows
        self._unshared = unshared
        self._trained, self._sums, self._reductions = trained, sums, reductions
        self._accumulated, self._frees = accumulated, frees
        summed = [
            (entry.parameter, replace(entry.spec, tp_grad_sum=trained.summed_over_tp(entry)))
            for entry in trained.entries
        ]
        self._partial = PartialSums(trained.mesh, summed, sums, trained.wave_of)
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
            if reduction.each_micro_batch:
                reduction.flush(parameters)  # before the sums, which these gradients never reach
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
            if not reduction.each_micro_batch:
                reduction.arrived(self._trained.waves[self._wave].parameters)
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
        self._partial.reduce(wave)

    def reduce(self, scale: float | Tensor) -> list[nn.Parameter]:
        """See `DataParallelBackend.reduce`. Returns the parameters that no rank has a gradient
        for."""
        self._sums.absorb()
        self._arrivals.finish_step()
        while self._wave < self._trained.last_wave:
            self._complete_wave()
        self._sum_over_tp(self._trained.last_wave)
        self._partial.reduce_tied()  # after the partial sums: a tied copy is sent when it is whole
        for partition in self._accumulated:
            partition.sum_of_gradients()
        absent = [
            parameter for reduction in self._reductions for parameter in reduction.finish(scale)
        ]
        self._scale_unshared(scale)
        if self._frees:
            self._sums.clear()
        return absent

    def _scale_unshared(self, scale: float | Tensor) -> None:
        present = [
            gradient
            for gradient in map(self._sums.__getitem__, self._unshared)
            if gradient is not None
        ]
        for dtype in {gradient.dtype for gradient in present}:
            scale_([gradient for gradient in present if gradient.dtype == dtype], scale)

    def block_finished(self, parameters: list[nn.Parameter]) -> None:
        """Send the gradients of a block when a micro-batch's backward through it has ended. All
        ranks call this at the same point."""
        for reduction in self._reductions:
            if reduction.each_micro_batch:
                reduction.arrived(parameters)

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """See `DataParallelBackend.local_gradient`."""
        for reduction in self._reductions:
            if reduction.each_micro_batch and parameter in reduction:
                # Ranks with other sizes have other pieces, which cannot be compared.
                return None if self._trained.any_uneven else reduction.local(parameter)
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


Named = tuple[nn.Parameter, ShardSpec]


class PartialSums:
    """The sums that a rank takes part in.

    Args:
        mesh: has the groups; those that are not whole axes must have been created (`Mesh.create`).
        parameters: those of this rank that are trained, with what they are. The order does not
            matter.
        sums: their gradients.
        waves: by id of a parameter, when in a step its gradient is complete: 0, 1, ...; 0 for those
            that are not named.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Sequence[Named],
        sums: GradientSums,
        waves: Mapping[int, int] | None = None,
    ) -> None:
        waves = waves or {}
        partial = [pair for pair in parameters if len(pair[1].tp_grad_sum) > 1]
        tied = [pair for pair in parameters if len(pair[1].pp_replicas) > 1]
        by_wave: dict[int, list[tuple[tuple[int, ...], Named]]] = {}
        for parameter, spec in partial:
            ranks = ranks_along(mesh, "tp", spec.tp_grad_sum)
            by_wave.setdefault(waves.get(id(parameter), 0), []).append((ranks, (parameter, spec)))
        self._partial = {wave: _sums(mesh, by_wave[wave], sums) for wave in sorted(by_wave)}
        self._tied = _sums(
            mesh, [(ranks_along(mesh, "pp", pair[1].pp_replicas), pair) for pair in tied], sums
        )

    def reduce(self, wave: int) -> None:
        """Sum over tensor-parallel ranks what is complete in `wave`: one all-reduce for each set of
        ranks and each type of gradients."""
        for each in self._partial.get(wave, ()):
            each.begin()
            each.finish(1.0)

    def reduce_tied(self) -> None:
        """Sum over pipeline ranks, after `reduce`: a tied copy is sent when it is whole."""
        for each in self._tied:
            each.begin()
            each.finish(1.0)


def _sums(
    mesh: Mesh, members: list[tuple[tuple[int, ...], Named]], sums: GradientSums
) -> list[Reduction]:
    """One sum for each set of ranks and each type, in an order that all ranks share: smaller sets
    first, then by rank.

    Ranks may be in several sets; any common order of the sets prevents a deadlock.
    """
    batches: dict[tuple[int, tuple[int, ...], str], list[Named]] = {}
    for ranks, pair in members:
        batches.setdefault((len(ranks), ranks, str(sum_dtype(pair[0]))), []).append(pair)
    found = []
    for _, ranks, dtype in sorted(batches):
        # Tied copies have different names; sort by the canonical one, which is the same on all
        # ranks.
        pairs = sorted(
            batches[len(ranks), ranks, dtype], key=lambda pair: pair[1].tied_to or pair[1].name
        )
        parameters = [parameter for parameter, _ in pairs]
        policy = Policy(mesh.group_for(ranks), into_gradients=True)
        found.append(Reduction(policy, end_to_end(parameters), [Wave(None, parameters)], sums))
    return found


class Arrivals:
    """Listens to autograd during the last backward of each stage, and tells which early waves are
    complete.

    A parameter that several segments of a reentrant checkpoint use gets several gradients in one
    backward, so that its first one is not its last. In the first step nothing is early, and if any
    rank of the group sees such a parameter, nothing ever is.

    Args:
        waves: all waves of the rank.
        control: the data-parallel ranks, for tensors in host memory.
        arrived: function that is called with a parameter whose gradient is complete, and the number
            of its wave.
    """

    def __init__(
        self,
        waves: Sequence[Wave],
        control: dist.ProcessGroup,
        arrived: Callable[[nn.Parameter, int], None],
    ) -> None:
        early = [(number, wave) for number, wave in enumerate(waves) if wave.is_early]
        self._number = {
            id(parameter): number for number, wave in early for parameter in wave.parameters
        }
        self._stage_of = {number: wave.stage for number, wave in early}
        self._of_wave = {
            number: {id(parameter) for parameter in wave.parameters} for number, wave in early
        }
        self._missing: dict[int, set[int]] = {}
        self._control, self._tell = control, arrived
        self._stage: int | None = None
        self._trial: Counter[int] = Counter()
        self._most = 0
        self._watched = False
        self._state = "first step" if early else "off"
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._arrived)
            for _, wave in early
            for p in wave.parameters
        ]

    def begin(self) -> None:
        """Start an optimizer step."""
        self._stage = None
        self._missing = {number: set(members) for number, members in self._of_wave.items()}

    def watch(self, stage: int | None) -> None:
        """The last backward of a stage begins; None: it is over."""
        self._stage = stage
        self._watched |= stage is not None
        self._trial.clear()

    @property
    def in_first_step(self) -> bool:
        """True until a step has shown how often gradients arrive."""
        return self._state == "first step"

    def are_complete(self, number: int) -> bool:
        """Return whether all gradients of an early wave have arrived; False for another wave."""
        return self._state == "on" and number in self._missing and not self._missing[number]

    def finish_step(self) -> None:
        """The backwards of the step are over. One small all-reduce in the first step."""
        if not self.in_first_step or not self._watched:
            return
        most = torch.tensor(self._most)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._control)
        self._state = "on" if most.item() <= 1 else "off"
        if self._state == "off":
            self.close()

    def _arrived(self, parameter: Tensor) -> None:
        number = self._number[id(parameter)]
        if self._stage is None or self._stage != self._stage_of[number]:
            return  # not the last backward of the stage, or one outside of a training step
        if self.in_first_step:
            self._trial[id(parameter)] += 1
            self._most = max(self._most, self._trial[id(parameter)])
            return
        if id(parameter) not in self._missing[number]:
            raise RuntimeError(
                f"A parameter of shape {tuple(parameter.shape)} got a second gradient in one"
                " backward after its gradient was sent to other ranks. In the first step it got"
                " one. Use the same activation checkpointing in all steps, and"
                " use_reentrant=False."
            )
        self._missing[number].discard(id(parameter))
        assert isinstance(parameter, nn.Parameter)
        self._tell(parameter, number)

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def take_first_copies(
    mesh: Mesh, gradients: Iterable[tuple[ShardSpec, Tensor | None]], bucket_bytes: int
) -> None:
    """Overwrite the gradients of copied parameters by those of the first rank that holds them.
    Collective over tensor-parallel ranks.

    One broadcast for each set of ranks and each type of gradients, of at most `bucket_bytes`,
    except for a single larger gradient.

    Args:
        gradients: this rank's reduced gradients, or its pieces of them: the same parameters,
            elements and order on all ranks with a copy. None where no rank has a gradient.
    """
    found: dict[tuple[int, tuple[int, ...], str], list[Tensor]] = {}
    for spec, gradient in gradients:
        if is_copied(spec) and gradient is not None and gradient.numel():
            ranks = ranks_along(mesh, "tp", spec.tp_replicas)
            found.setdefault((len(ranks), ranks, str(gradient.dtype)), []).append(gradient)
    # in one order on all ranks, as partial gradients are
    for (_, ranks, _), tensors in sorted(found.items(), key=lambda item: item[0]):
        for bucket in _buckets(tensors, bucket_bytes):
            _broadcast(bucket, ranks[0], mesh.rank, mesh.group_for(ranks))


def _broadcast(tensors: Sequence[Tensor], first: int, own: int, group: dist.ProcessGroup) -> None:
    """Copy `tensors` of rank `first` to the others of the group."""
    sizes = [tensor.numel() for tensor in tensors]
    if own == first:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    else:
        flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    dist.broadcast(flat, src=first, group=group)
    if own != first:
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
