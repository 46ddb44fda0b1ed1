"""Engine that runs the actions of a schedule on this rank's chunks of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.host_memory import locking_no_memory
from lightning_3d.compat.torch import backward_input, backward_weight
from lightning_3d.errors import PlanError
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline.boundary import Spec, spec_of
from lightning_3d.parallel.pipeline.calls import Calls
from lightning_3d.parallel.pipeline.schedule import (
    Action,
    Kind,
    Order,
    forward_order,
    training_order,
)
from lightning_3d.parallel.pipeline.sent_output import graph_only
from lightning_3d.parallel.pipeline.stages import StageAssignment
from lightning_3d.parallel.pipeline.state import Chunk, PipelineState, StageBoundary
from lightning_3d.parallel.pipeline.transport import Message, Transport
from lightning_3d.parallel.uneven_work import uneven_work
from lightning_3d.parallel.witness import received, sent
from lightning_3d.tracing.recorder import Recorder
from lightning_3d.tracing.trace import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVE,
    REDUCE,
    SEND,
    WEIGHT_GRADIENT,
)


class AfterBackward(Protocol):
    """See `PipelineEngine`."""

    def __call__(self, parameters: Sequence[nn.Parameter], *, stage: int, last: bool) -> None: ...


class Step(Protocol):
    """The user's step on the micro-batches of one batch."""

    def enter(self, micro_batch: int) -> None:
        """Set the random state of a micro-batch before each forward and backward of it, so that
        recomputation draws the same numbers."""

    def __call__(self, micro_batch: int) -> Tensor | None:
        """Run the step: returns the weighted loss on the last stage, ends in a StageBoundary before
        it."""


class ProbeFailed(Exception):
    """A step that is only tried failed: its error and the error's first line."""


@dataclass
class _InFlight:
    """One micro-batch on one stage between its forward and its last backward action.

    Attributes:
        received: hidden states from the previous stage, whose gradient goes back there; None on the
            first stage.
        output: the loss, or the hidden states for the next stage. Once these are sent, only their
            place in the graph is kept. None if no gradient flows through it.
        gradient: of `output`, from the next stage.
        weight_work: state between the two halves of a split backward.
    """

    received: Tensor | None
    output: Tensor | None
    gradient: Tensor | None = None
    weight_work: list[dict[str, Any]] | None = None


class PipelineEngine:
    """Runs one rank's part of the pipeline.

    Args:
        mesh: process groups; point-to-point messages go to pipeline neighbours, one small broadcast
            over the pipeline ranks comes with each new shape of micro-batch.
        assignment: which layers are in which stage, and who owns it.
        parameters: for each of this rank's stages, its parameters.
        schedule: name as in `lightning_3d.layout.schedules`.
        vp: stages per rank.
        state: shared with the gates in the model.
        device: where hidden states live.
        after_backward: called with a stage's parameters after each action that may add to their
            gradients. Its keywords are `stage` (index among this rank's stages) and `last` (True if
            no such action follows).
        before_last_backward: called with the index of a stage before the action after which no
            other adds to its gradients.
        recorder: records actions and messages.

    Attributes:
        probes: whether steps are only tried: where the first stage cannot run one of a new shape,
            all ranks raise `ProbeFailed`.
    """

    def __init__(
        self,
        mesh: Mesh,
        assignment: StageAssignment,
        parameters: dict[int, list[nn.Parameter]],
        *,
        schedule: str,
        vp: int,
        state: PipelineState,
        device: torch.device,
        after_backward: AfterBackward,
        before_last_backward: Callable[[int], None] = lambda stage: None,
        recorder: Recorder | None = None,
    ) -> None:
        self._mesh = mesh
        self._assignment = assignment
        self._parameters = parameters
        self._schedule, self._vp = schedule, vp
        self._state = state
        self._device = device
        self._after_backward, self._before_last_backward = after_backward, before_last_backward
        self.recorder = recorder or Recorder()
        self._chunks = {chunk.stage: chunk for chunk in assignment.chunks_of(mesh.index("pp"))}
        self._boundaries: dict[Hashable, tuple[Calls, Spec]] = {}
        self._has_run: set[Hashable] = set()
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._local: dict[Message, Tensor] = {}
        self._early: _InFlight | None = None
        self._to_come: Counter[int] = Counter()
        self.probes = False

    @property
    def owns_last(self) -> bool:
        """True if this rank computes the loss."""
        return any(chunk.is_last for chunk in self._chunks.values())

    @property
    def stage(self) -> int:
        """Stage that runs now."""
        return self._state.require_chunk().stage

    @property
    def last_rank(self) -> int:
        """Pipeline rank that owns the last stage."""
        return self._assignment.rank_of_stage[-1]

    @property
    def model_called(self) -> bool:
        """True once the user's step, on the micro-batch and stage that run now, has called the
        model."""
        return self._state.called

    @property
    def knows_outputs(self) -> bool:
        """False once the user's step has called the model on a stage before the last, and goes on
        to its next call."""
        return self._state.knows_outputs

    @property
    def passes_calls(self) -> bool:
        """True if code after a call of the model may run on this stage without its output: it is
        not the last one, and the step calls the model several times, or that is not known."""
        several = self._state.calls is not None and len(self._state.calls) > 1
        return (
            (several or self._state.counts_calls)
            and self._state.chunk is not None
            and not self._state.chunk.is_last
        )

    def end_step(self) -> None:
        """End the user's step on this stage, once it has returned. Raises StageBoundary before the
        last stage."""
        self._state.end_step()

    def train(self, micro_batches: int, signature: Hashable, step: Step) -> None:
        """Forward and backward of all micro-batches; gradients are added to `.grad`, unreduced.

        Args:
            micro_batches: number of them, enough for the schedule.
            signature: shapes of one micro-batch; the same on all ranks of the pipeline.
            step: the user's training step on micro-batch i.
        """
        self._run(
            training_order(self._schedule, self._mesh.size("pp"), self._vp, micro_batches),
            signature,
            step,
        )

    def evaluate(self, micro_batches: int, signature: Hashable, step: Step) -> None:
        """Forward of all micro-batches, without gradients."""
        with torch.no_grad():
            self._run(
                forward_order(self._schedule, self._mesh.size("pp"), self._vp, micro_batches),
                signature,
                step,
            )

    def _run(self, order: Order, signature: Hashable, step: Step) -> None:
        key = signature, torch.is_grad_enabled()
        transport = self._connect(order, key, step)
        try:
            actions = order[self._mesh.index("pp")]
            self._to_come = Counter(
                action.stage
                for action in actions
                if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            )
            with locking_no_memory(when=transport is not None and not transport.through_host):
                for action in actions:
                    with self.recorder.action(action):
                        self._act(action, transport, step)
                if transport is not None:
                    transport.finish()
            self._has_run.add(key)
        finally:
            self._in_flight.clear()
            self._local.clear()
            self._early = None

    def _act(self, action: Action, transport: Transport | None, step: Step) -> None:
        chunk = self._chunks[action.stage]
        if action.kind is Kind.FORWARD:
            self._forward(chunk, action.micro_batch, transport, step)
            return
        step.enter(action.micro_batch)
        if self._to_come[chunk.stage] == 1 and action.kind is not Kind.BACKWARD_INPUT:
            self._before_last_backward(self._place(chunk))
        if action.kind is Kind.BACKWARD_WEIGHT:
            self._backward_weight(chunk, action.micro_batch)
        else:
            self._backward(
                chunk, action.micro_batch, transport, split=action.kind is Kind.BACKWARD_INPUT
            )

    def _connect(self, order: Order, key: Hashable, step: Step) -> Transport | None:
        """Agree on the shape of the hidden states and prepare the messages of this run."""
        if self._assignment.stages == 1:
            return None
        calls, (shape, dtype) = self._calls(key, step)
        self._state.calls, self._state.boundaries = calls, list(calls.boundaries)
        self._state.sequence.length = calls.boundaries[0].length
        owners = list(self._assignment.rank_of_stage)
        new = self._device.type == "cuda" and key not in self._has_run
        return Transport(self._mesh, order, owners, shape, dtype, self._device, through_host=new)

    def _calls(self, key: Hashable, step: Step) -> tuple[Calls, Spec]:
        """Look up the calls of the model in a step, and the shape of a message; for a new shape of
        micro-batch the first stage runs its first micro-batch early, to the end of the user's step,
        and broadcasts them.

        What it computed is kept for its turn in the schedule, so the user's step is called exactly
        once per micro-batch and stage.
        """
        if key not in self._boundaries:
            shared: list[tuple[Calls, Spec] | str] = [""]
            first = self._assignment.rank_of_stage[0]
            if self._mesh.index("pp") == first:
                self._state.calls, self._state.boundaries, self._state.counts_calls = None, [], True
                try:
                    self._early = self._compute(self._chunks[0], None, step, micro_batch=0)
                    assert self._early.output is not None and self._state.calls is not None
                    shared = [(self._state.calls, spec_of(self._early.output))]
                except Exception as error:
                    if not self.probes:
                        raise
                    shared = [f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"]
                finally:
                    self._state.counts_calls = False
            dist.broadcast_object_list(
                shared, self._mesh.ranks("pp")[first], group=self._mesh.control
            )
            if isinstance(shared[0], str):
                raise ProbeFailed(shared[0])
            self._boundaries[key] = shared[0]
        return self._boundaries[key]

    def _forward(
        self, chunk: Chunk, micro_batch: int, transport: Transport | None, step: Step
    ) -> None:
        if chunk.is_first and micro_batch == 0 and self._early is not None:
            flight, self._early = self._early, None
        else:
            flight = self._compute(
                chunk, self._receive(True, chunk, micro_batch, transport), step, micro_batch
            )
        if not chunk.is_last:
            assert flight.output is not None
            if transport is not None:
                transport.check(flight.output, chunk.stage)
            self._send(Message(True, chunk.stage + 1, micro_batch), flight.output, transport)
            # The message keeps the values until it is sent, and the graph those that its operations
            # need.
            flight.output = graph_only(flight.output) if flight.output.requires_grad else None
        if torch.is_grad_enabled():
            self._in_flight[chunk.stage, micro_batch] = flight

    def _compute(
        self, chunk: Chunk, received: Tensor | None, step: Step, micro_batch: int
    ) -> _InFlight:
        """Run the user's step with `chunk` active."""
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_(True)
        with (
            self._state.running(chunk, received, forward=True),
            self.recorder.span(FORWARD, chunk.stage, micro_batch),
        ):
            step.enter(micro_batch)
            try:
                output = self._run_step(step, micro_batch)
            except StageBoundary as boundary:
                return _InFlight(received, self._checked(boundary.hidden, received, chunk))
            if self._state.order is not None:
                self._state.order.look_at_loss(output)
        if not chunk.is_last:
            raise PlanError(
                f"The step returned on pipeline stage {chunk.stage} of {chunk.stages} without"
                " calling the pipelined model. With pp > 1 every step must call it."
            )
        return _InFlight(received, output)

    def _run_step(self, step: Step, micro_batch: int) -> Tensor | None:
        """Run the user's step on the active chunk. Raises StageBoundary before the last stage, if
        it has called the model."""
        try:
            output = step(micro_batch)
        except Exception as error:
            self._state.end_step(error)
            raise
        self._state.end_step()
        return output

    def _checked(self, hidden: Tensor, expected: Tensor | None, chunk: Chunk) -> Tensor:
        if expected is not None and (
            hidden.shape != expected.shape or hidden.dtype != expected.dtype
        ):
            raise PlanError(
                f"Stage {chunk.stage} received hidden states of shape {tuple(expected.shape)} and"
                f" type {expected.dtype}, but produced {tuple(hidden.shape)} and {hidden.dtype}."
                " All stage boundaries must carry the same shape and type."
            )
        return hidden

    def _backward(
        self, chunk: Chunk, micro_batch: int, transport: Transport | None, *, split: bool
    ) -> None:
        """The whole backward of one micro-batch on one stage, or only the part that the previous
        stage waits for."""
        flight = self._in_flight[chunk.stage, micro_batch]
        flight.gradient = self._receive(False, chunk, micro_batch, transport)
        kind = INPUT_GRADIENT if split else BACKWARD
        with (
            self._state.running(chunk, flight.received),
            self.recorder.span(kind, chunk.stage, micro_batch),
        ):
            if not split:
                _backward_all(flight)
            elif not chunk.is_first:
                flight.weight_work = backward_input(
                    flight.output, flight.gradient, flight.received, self._parameters[chunk.stage]
                )
                flight.output = flight.gradient = None
        if not chunk.is_first:
            assert flight.received is not None
            gradient = flight.received.grad
            flight.received.grad = None
            if gradient is None:
                gradient = torch.zeros_like(flight.received)
            self._send(Message(False, chunk.stage - 1, micro_batch), gradient, transport)
        if not split:
            self._finish(chunk, micro_batch)

    def _backward_weight(self, chunk: Chunk, micro_batch: int) -> None:
        """Compute the weight gradients of a split backward. The first stage, which no other waits
        for, runs the whole backward here."""
        flight = self._in_flight[chunk.stage, micro_batch]
        # the experts' part cannot be separated from the rest
        uneven = uneven_work() if self._mesh.layout.ep > 1 else nullcontext()
        with (
            self._state.running(chunk, flight.received),
            self.recorder.span(WEIGHT_GRADIENT, chunk.stage, micro_batch),
            uneven,
        ):
            if chunk.is_first:
                _backward_all(flight)
            elif flight.weight_work is not None:
                backward_weight(self._parameters[chunk.stage], flight.weight_work)
        self._finish(chunk, micro_batch)

    def _finish(self, chunk: Chunk, micro_batch: int) -> None:
        """Clean up when the weight gradients of a micro-batch on a stage are complete."""
        del self._in_flight[chunk.stage, micro_batch]
        self._to_come[chunk.stage] -= 1
        with self.recorder.span(REDUCE, chunk.stage, micro_batch):
            self._after_backward(
                self._parameters[chunk.stage],
                stage=self._place(chunk),
                last=self._to_come[chunk.stage] == 0,
            )

    def _place(self, chunk: Chunk) -> int:
        """Index of a stage among this rank's."""
        return sorted(self._chunks).index(chunk.stage)

    def _receive(
        self, forward: bool, chunk: Chunk, micro_batch: int, transport: Transport | None
    ) -> Tensor | None:
        """Hidden states from the stage before (forward) or their gradient from the stage after;
        None at the ends."""
        if chunk.is_first if forward else chunk.is_last:
            return None
        message = Message(forward, chunk.stage, micro_batch)
        sender = self._assignment.rank_of_stage[chunk.stage - 1 if forward else chunk.stage + 1]
        if sender == self._mesh.index("pp"):
            return self._local.pop(message)
        assert transport is not None
        what = (
            f"the {'activation' if forward else 'gradient'} of micro-batch {micro_batch} at stage"
            f" {chunk.stage}"
        )
        waiting = self.recorder.heartbeat.waiting(self._mesh.ranks("pp")[sender], what)
        with self.recorder.span(RECEIVE, chunk.stage, micro_batch), waiting:
            tensor = transport.receive(message, sender)
        received("hidden states" if forward else "gradient of hidden states", tensor)
        return tensor

    def _send(self, message: Message, tensor: Tensor, transport: Transport | None) -> None:
        if self._assignment.rank_of_stage[message.stage] == self._mesh.index("pp"):
            self._local[message] = tensor.detach()
            return
        assert transport is not None
        sender = message.stage - 1 if message.forward else message.stage + 1
        sent("hidden states" if message.forward else "gradient of hidden states", tensor)
        with self.recorder.span(SEND, sender, message.micro_batch):
            transport.send(message, tensor)


def _backward_all(flight: _InFlight) -> None:
    if flight.output is not None and flight.output.requires_grad:
        torch.autograd.backward(flight.output, flight.gradient)
