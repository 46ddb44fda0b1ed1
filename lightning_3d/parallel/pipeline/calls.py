"""What a stage sends to the next one in a step that calls the model several times.

A stage runs the user's step once for each micro-batch, with all calls of the model in it, and sends
what each call sends in one message. So the schedule, its messages and its backward are the same for
any number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import torch
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.parallel.pipeline.boundary import Boundary, Spec, spec_of


@dataclass(frozen=True)
class Calls:
    """The calls of the model in a step, as the first stage has seen them. The same on all stages.

    Attributes:
        boundaries: boundary of each call, in their order.
        sent: shape and type of what each call sends.
        end: why the first stage could not follow the step after the last of these calls; empty if
            the step returned.
    """

    boundaries: tuple[Boundary, ...]
    sent: tuple[Spec, ...]
    end: str = ""

    def __len__(self) -> int:
        return len(self.boundaries)

    def pack(self, sent: Sequence[Tensor]) -> Tensor:
        """Join what all calls send. A single call sends what it has.

        Raises:
            PlanError: a call sends another shape or type than on the first stage.
        """
        if len(self) == 1:
            return sent[0]
        for call, (tensor, spec) in enumerate(zip(sent, self.sent, strict=True), 1):
            if spec_of(tensor) != spec:
                raise PlanError(
                    f"Call {call} of the model sends hidden states of shape {tuple(tensor.shape)}"
                    f" and type {tensor.dtype} to the next stage, but sent {spec[0]} and {spec[1]}"
                    " in this step's first micro-batch on the first stage. All micro-batches and"
                    " stages must send the same shapes. Truncate sequences in the data loader, not"
                    " in the step."
                )
        dtype = reduce(torch.promote_types, (dtype for _, dtype in self.sent))
        return torch.cat([tensor.to(dtype).flatten() for tensor in sent])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Separate what `pack` joined."""
        if len(self) == 1:
            return [packed]
        parts = packed.split([prod(shape) for shape, _ in self.sent])
        return [
            part.view(shape).to(dtype)
            for part, (shape, dtype) in zip(parts, self.sent, strict=True)
        ]
