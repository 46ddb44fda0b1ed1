"""Activations and gradients between neighbouring stages.

A receiver posts its receives in the order in which the sender will send, which it knows because every rank knows the actions of
all. On NCCL the operations of one communicator run one after another. Every pair of ranks has a communicator of its own there (see
`connect_process_group`), and messages to a higher and to a lower pipeline rank go through different groups, so that a
communicator carries one neighbour's messages in one direction: no send ever waits behind a receive.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.schedule import Action, Kind, Order

AHEAD = 2
"""Receives posted before they are needed, per neighbour, so that a transfer overlaps with computation. Costs one buffer each."""


@dataclass(frozen=True)
class Message:
    """`forward`: hidden states to `stage`; otherwise the gradient of the hidden states that `stage` sent."""

    forward: bool
    stage: int
    micro_batch: int


@dataclass
class _Inbox:
    """Messages that one neighbour will send, in its order."""

    expected: deque[Message]
    posted: dict[Message, tuple[Tensor, dist.Work]] = field(default_factory=dict)


class Transport:
    """Point-to-point messages of one schedule run.

    Args:
        mesh: gives the two communicators and this rank's place.
        order: the actions of all pipeline ranks.
        rank_of_stage: pipeline rank that owns each stage.
        shape, dtype: of the hidden states, the same at every boundary.
    """

    def __init__(
        self, mesh: Mesh, order: Order, rank_of_stage: list[int], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._mesh = mesh
        self._me = mesh.index("pp")
        self._ranks = mesh.ranks("pp")
        self._rank_of_stage = rank_of_stage
        self._shape, self._dtype, self._device = shape, dtype, device
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._inboxes = {
            peer: _Inbox(deque(m for m in self._messages(order[peer]) if rank_of_stage[m.stage] == self._me))
            for peer in range(len(order))
            if peer != self._me
        }

    def _messages(self, actions: tuple[Action, ...]) -> list[Message]:
        messages = []
        for action in actions:
            if action.kind is Kind.FORWARD and action.stage + 1 < len(self._rank_of_stage):
                messages.append(Message(True, action.stage + 1, action.micro_batch))
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and action.stage > 0:
                messages.append(Message(False, action.stage - 1, action.micro_batch))
        return messages

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup:
        return self._mesh.pipeline_up if receiver > sender else self._mesh.pipeline_down

    def check(self, hidden: Tensor, stage: int) -> None:
        """Refuse hidden states that the next stage does not expect. Raises PlanError."""
        if tuple(hidden.shape) != self._shape or hidden.dtype != self._dtype:
            raise PlanError(
                f"Stage {stage} produced hidden states of shape {tuple(hidden.shape)} and type {hidden.dtype}, but this step's first"
                f" micro-batch had {self._shape} and {self._dtype}. Steps that are given batches of one shape must pass"
                " hidden states of one shape: cut sequences in the data loader, not in the step."
            )

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending; the tensor is kept alive until it has gone."""
        receiver = self._rank_of_stage[message.stage]
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._ranks[receiver], group=self._group(self._me, receiver))
        assert work is not None
        self._sent.append((work, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def receive(self, message: Message, sender: int) -> Tensor:
        """Wait for one message and return it, of shape (micro-batch, sequence, hidden)."""
        inbox = self._inboxes[sender]
        while message not in inbox.posted:
            self._post(inbox, sender)
        tensor, work = inbox.posted.pop(message)
        for _ in range(AHEAD - len(inbox.posted)):
            self._post(inbox, sender)
        work.wait()
        return tensor

    def _post(self, inbox: _Inbox, sender: int) -> None:
        if not inbox.expected:
            return
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, self._ranks[sender], group=self._group(sender, self._me))
        assert work is not None
        inbox.posted[inbox.expected.popleft()] = (buffer, work)

    def finish(self) -> None:
        """Wait until everything that was sent has gone."""
        while self._sent:
            work, _ = self._sent.popleft()
            work.wait()
