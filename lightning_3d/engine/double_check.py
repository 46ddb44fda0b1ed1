"""Computes a step twice and compares all bits, to find a device whose arithmetic is wrong now and
then."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.engine.step.again import RepeatableStep
from lightning_3d.engine.step.runner import Computed
from lightning_3d.errors import ArithmeticFault, ConfigError, listed
from lightning_3d.health.step_record import Event, StepRecorder, first_difference
from lightning_3d.parallel.zero import DataParallelBackend

_MOST_NAMED = 4


class DoubleCheck:
    """Runs every n-th step of a rank twice, before the optimizer steps, and compares what every
    rank computes.

    Where the runs differ, a third one tells whether the fault is gone: then the gradients of the
    two runs that agree are used. A device that makes the same mistake each time is not found;
    comparing replicas (`ReplicaCheck`) finds some of those.

    Args:
        module: this rank's part of the user's module.
        repeatable: runs a step again.
        backend: has the reduced gradients.
        layers: see `StepRecorder`.

    Attributes:
        every: number of steps between those that run twice; None runs none twice. The first step of
            a fit never does: it checks and prepares what later steps do not.
    """

    def __init__(
        self,
        module: nn.Module,
        repeatable: RepeatableStep,
        backend: DataParallelBackend,
        device: torch.device,
        *,
        layers: bool,
    ) -> None:
        self._module, self._repeatable, self._backend, self._device = (
            module,
            repeatable,
            backend,
            device,
        )
        self._layers = layers
        self.begin_fit(None)

    def begin_fit(self, every: int | None) -> None:
        """Begin a fit, in which every so many steps one runs twice.

        Raises:
            ConfigError: the device is a GPU, and its kernels may add in any order: two healthy runs
                could differ.
        """
        if (
            every is not None
            and self._device.type == "cuda"
            and not torch.are_deterministic_algorithms_enabled()
        ):
            raise ConfigError(
                "trainer.rerun_every_n_steps compares two runs of a step bit for bit, so GPUs need"
                " deterministic kernels: attention and others add in any order by default. Set"
                " +trainer.extra.deterministic=true (in a script: Trainer(deterministic=True)), or"
                " trainer.rerun_every_n_steps=null."
            )
        self.every = every
        self._recorder: StepRecorder | None = None
        self._first = True

    def is_due(self, steps: int) -> bool:
        """Return whether the step after `steps` steps runs twice."""
        return self.every is not None and not self._first and (steps + 1) % self.every == 0

    @contextmanager
    def first_run(self, steps: int, place: int) -> Iterator[None]:
        """Record the first run of a batch of a step that runs twice."""
        if place == 0:
            self._recorder = None
            if self.is_due(steps):
                self._recorder = StepRecorder(self._module, self._device, layers=self._layers)
        with self._recorder.recording() if self._recorder is not None else nullcontext():
            yield

    def verify(self, computed: Computed, steps: int) -> Computed:
        """Run a step again, if it is due, after its last batch. Collective.

        Returns:
            The numbers of the run whose gradients the backend has.

        Raises:
            ArithmeticFault: on every rank, if three runs are all different.
        """
        recorder, self._recorder, self._first = self._recorder, None, False
        if recorder is None:
            return computed
        if not _everywhere(self._repeatable.can_repeat, self._device):
            rank_zero_warn(
                "A step cannot run twice (rerun_every_n_steps): training_step writes into the"
                " tensors of its batch."
            )
            self.every = None
            return computed
        first = self._taken(recorder, computed)
        computed, second = self._again(recorder)
        if _everywhere(first == second, self._device):
            return computed
        computed, third = self._again(recorder)
        if _everywhere(third == second, self._device) or _everywhere(third == first, self._device):
            rank_zero_warn(_message(first, second, steps, self._device, transient=True))
            return computed
        raise ArithmeticFault(_message(first, second, steps, self._device, transient=False))

    def _again(self, recorder: StepRecorder) -> tuple[Computed, list[Event]]:
        with recorder.recording():
            computed = self._repeatable.again()
        return computed, self._taken(recorder, computed)

    def _taken(self, recorder: StepRecorder, computed: Computed) -> list[Event]:
        recorder.note_result(list(self._backend.reduced_gradients()), computed.totals.loss)
        return recorder.take()


def _everywhere(true_here: bool, device: torch.device) -> bool:
    """Return whether something is true on all ranks: an all-reduce of one number."""
    false = torch.tensor(int(not true_here), device=device)
    dist.all_reduce(false)
    return not false.item()


def _message(
    first: list[Event], second: list[Event], steps: int, device: torch.device, *, transient: bool
) -> str:
    """Name the ranks that computed different results from what they had, and did not receive them.
    Collective."""
    found = first_difference(first, second)
    own = None if found is None else (found.what, found.arrived)
    everyone: list[tuple[str, tuple[str, bool] | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(everyone, (f"{socket.gethostname()}, {device}", own))
    differ = [(rank, host, *what) for rank, (host, what) in enumerate(everyone) if what is not None]
    wrong = [
        f"rank {rank} ({host}), first in {what}"
        for rank, host, what, arrived in differ
        if not arrived
    ]
    more = [f"{len(wrong) - _MOST_NAMED} more"] if len(wrong) > _MOST_NAMED else []
    who = listed([*wrong[:_MOST_NAMED], *more], last="and on")
    if not wrong:
        who = f"ranks {listed(rank for rank, *_ in differ)}, in what they receive from each other"
    begin = f"Step {steps + 1} was computed twice, and the results differ on {who}."
    if transient:
        return (
            f"{begin} A third run agrees with one of them: the fault was transient. Training"
            " continues with the result that two runs agree on. If the same device is named again,"
            " take it out of use."
        )
    often = ""
    if 2 * len(wrong) > len(everyone):
        often = (
            " With so many ranks, an operation of the model may not be deterministic:"
            " torch.use_deterministic_algorithms(True) names such operations."
        )
    return (
        f"{begin} A third run differs too: the fault is persistent. The optimizer did not take this"
        f" step.{often} Take the device out of use, and resume the newest checkpoint. To train"
        " without this check, set trainer.rerun_every_n_steps=null (in a script:"
        ' Lightning3DStrategy(reliability={"rerun_every_n_steps": None})).'
    )
