"""Activations and gradients between neighbouring stages.

A receiver posts its receives in the order in which the sender will send, which it knows because
every rank knows the actions of all. On NCCL the operations of one communicator run one after
another. Every pair of ranks has a communicator of its own there (see `connect_process_group`), and
messages to a higher and to a lower pipeline rank go through different groups, so that a
communicator carries one neighbour's messages in one direction: no send ever waits behind a receive.

The first run of each shape on GPUs takes its messages through host memory. CUDA loads a kernel at
its first launch, and that may wait for all that runs on the device, so also for a receive whose
sender waits in the same way (torchcomms issue 2334). Once every stage has run, no kernel is new,
and messages go from GPU to GPU.

A tensor that is sent is kept until the send has completed. NCCL reports completion; with gloo a
rank must wait to learn of it, which would stall the sender. But every rank knows the actions of all
ranks. When a message from a neighbour arrives, the neighbour has already received everything that
it needed to send this message. So waiting for the sends of those tensors takes no time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline.schedule import Action, Kind, Order

AHEAD = 2
"""Receives posted before they are needed, per neighbour, so that a transfer overlaps with
computation. Costs one buffer each."""


@dataclass(frozen=True)
class Message:
    """`forward`: hidden states to `stage`; otherwise the gradient of the hidden states that `stage`
    sent."""

    forward: bool
    stage: int
    micro_batch: int


@dataclass
class _Inbox:
    """Messages that one neighbour will send.

    Attributes:
        expected: messages without a posted receive, in the order in which they are sent.
        posted: messages with a posted receive, and its buffer.
        confirms: for each message, those of this rank's that the neighbour received since it sent
            the one before.
    """

    expected: deque[Message] = field(default_factory=deque)
    posted: dict[Message, tuple[Tensor, dist.Work]] = field(default_factory=dict)
    confirms: dict[Message, list[Message]] = field(default_factory=dict)


class Transport:
    """Point-to-point messages of one schedule run.

    Args:
        mesh: gives the two communicators and this rank's place.
        order: the actions of all pipeline ranks.
        rank_of_stage: pipeline rank that owns each stage.
        shape: shape of the hidden states, the same at every boundary.
        dtype: their type.
        device: device of the hidden states.
        through_host: whether messages go through host memory.
    """

    def __init__(
        self,
        mesh: Mesh,
        order: Order,
        rank_of_stage: list[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        through_host: bool = False,
    ) -> None:
        self._mesh = mesh
        self._me = mesh.index("pp")
        self._ranks = mesh.ranks("pp")
        self._rank_of_stage = rank_of_stage
        self._shape, self._dtype, self._device = shape, dtype, device
        self.through_host = through_host
        self._sent: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._inboxes = {peer: self._inbox(order[peer]) for peer in self._neighbours()}

    def _neighbours(self) -> set[int]:
        owners = self._rank_of_stage
        pairs = {*pairwise(owners), *pairwise(reversed(owners))}
        return {other for one, other in pairs if one == self._me != other}

    def _inbox(self, actions: tuple[Action, ...]) -> _Inbox:
        """Messages that a neighbour with these actions and this rank will send to each other."""
        inbox, received = _Inbox(), []
        for action in actions:
            if action.kind is Kind.BACKWARD_WEIGHT:
                continue
            forward, stage = action.kind is Kind.FORWARD, action.stage
            onward = 1 if forward else -1
            if self._is_mine(stage - onward):
                received.append(Message(forward, stage, action.micro_batch))
            if self._is_mine(stage + onward):
                answer = Message(forward, stage + onward, action.micro_batch)
                inbox.expected.append(answer)
                inbox.confirms[answer], received = received, []
        return inbox

    def _is_mine(self, stage: int) -> bool:
        return 0 <= stage < len(self._rank_of_stage) and self._rank_of_stage[stage] == self._me

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup:
        if self.through_host:
            return self._mesh.control
        return self._mesh.pipeline_up if receiver > sender else self._mesh.pipeline_down

    def check(self, hidden: Tensor, stage: int) -> None:
        """Refuse hidden states that the next stage does not expect. Raises PlanError."""
        if tuple(hidden.shape) != self._shape or hidden.dtype != self._dtype:
            raise PlanError(
                f"Stage {stage} produced hidden states of shape {tuple(hidden.shape)} and type"
                f" {hidden.dtype}, but this step's first micro-batch had shape {self._shape} and"
                f" type {self._dtype}. If all batches have the same shape, all hidden states must"
                " have the same shape too. Truncate sequences in the data loader, not in the step."
            )

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending; the tensor is kept alive until it is sent."""
        receiver = self._rank_of_stage[message.stage]
        tensor = tensor.detach().contiguous()
        if self.through_host:
            tensor = tensor.cpu()
        work = exchange.isend(tensor, self._ranks[receiver], self._group(self._me, receiver))
        self._sent[message] = work, tensor
        while self._sent and self._sent[oldest := next(iter(self._sent))][0].is_completed():
            del self._sent[oldest]

    def receive(self, message: Message, sender: int) -> Tensor:
        """Wait for one message and return it, of shape (micro-batch, sequence, hidden)."""
        inbox = self._inboxes[sender]
        while message not in inbox.posted:
            self._post(inbox, sender)
        tensor, work = inbox.posted.pop(message)
        for _ in range(AHEAD - len(inbox.posted)):
            self._post(inbox, sender)
        work.wait()
        for arrived in inbox.confirms.pop(message):
            self._release(arrived)
        return tensor.to(self._device)

    def _release(self, message: Message) -> None:
        """Wait until a message is sent, if necessary, and free it."""
        work, _ = self._sent.pop(message, (None, None))
        if work is not None:
            work.wait()

    def _post(self, inbox: _Inbox, sender: int) -> None:
        if not inbox.expected:
            return
        buffer = torch.empty(
            self._shape, dtype=self._dtype, device="cpu" if self.through_host else self._device
        )
        work = exchange.irecv(buffer, self._ranks[sender], self._group(sender, self._me))
        inbox.posted[inbox.expected.popleft()] = (buffer, work)

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for message in list(self._sent):
            self._release(message)
