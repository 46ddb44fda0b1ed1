"""The chunk of the model that is running on this rank, and the hidden states that it received."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.parallel.pipeline.call_order import CallOrder, PlanOrder
from lightning_3d.parallel.sequence_shards import SequenceShards

if TYPE_CHECKING:
    from lightning_3d.parallel.random_streams import RandomState


class StageBoundary(BaseException):
    """Ends a user's step where the next stage begins and carries the hidden states there.

    It derives from BaseException so that an `except Exception` in the user's step lets it pass.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the step ends at a pipeline stage boundary")
        self.hidden = hidden


@dataclass(frozen=True)
class Chunk:
    """One stage of the pipeline as this rank runs it.

    Attributes:
        stage: index in 0 .. stages - 1.
        stages: number of stages of the whole pipeline, pp * vp.
        layers: global indices of the blocks that belong to the stage.
    """

    stage: int
    stages: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


Sides = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
"""Values that blocks return after the hidden states: shape and type of floating-point tensors, None for anything else."""


class PipelineState:
    """State that the engine shares with the gates inside the model.

    Attributes:
        chunk: the chunk that is running, None outside a step.
        received: hidden states from the previous stage, (micro-batch, sequence, hidden); None on the first stage.
        sides: blocks return a tuple with the hidden states first, and these behind them; None when they return the bare tensor.
            The first stage sees it and broadcasts it, so that a stub returns what a block would.
        plan: the order of execution that the plan gives; None as long as nothing is partitioned.
        order: of the calls in the forward that is running; None in a backward, where blocks may be computed again.
        whole: whether this rank holds all blocks (no pipeline), so that the model works outside a step too.
        sequence: how the hidden states between blocks are split over tensor-parallel ranks.
    """

    def __init__(self, random: RandomState, sequence: SequenceShards | None = None) -> None:
        self.random = random
        self.sequence = sequence or SequenceShards()
        self.chunk: Chunk | None = None
        self.received: Tensor | None = None
        self.sides: Sides | None = None
        self.whole = False
        self.plan: PlanOrder | None = None
        self.order: CallOrder | None = None
        self._calls = 0
        self._looked: set[tuple[int, bool]] = set()

    @contextmanager
    def running(self, chunk: Chunk, received: Tensor | None, *, forward: bool = False) -> Iterator[None]:
        """Make `chunk` the active one for a forward or a backward (where recomputation runs blocks again)."""
        before = (self.chunk, self.received, self._calls, self.order)
        self.chunk, self.received, self._calls = chunk, received, 0
        self.order = self._follow(chunk) if forward else None
        try:
            yield
        finally:
            self.chunk, self.received, self._calls, self.order = before

    def _follow(self, chunk: Chunk) -> CallOrder | None:
        """Observer of the calls of a forward; it also looks for NaN in the first training and the first evaluation of a chunk."""
        if self.plan is None or chunk.stages == 1:
            return None
        key = (chunk.stage, torch.is_grad_enabled())
        order = CallOrder(self.plan, look=not chunk.is_first and key not in self._looked)
        self._looked.add(key)
        order.receive(self.received)
        return order

    def require_chunk(self) -> Chunk:
        if self.chunk is None:
            raise PlanError(
                "The pipelined model was called outside a step. With pp > 1 no rank holds the whole model: call it only in"
                " training_step, validation_step, test_step or predict_step, or use a layout with pp = 1."
            )
        return self.chunk

    @property
    def called(self) -> bool:
        """True once the running step has called the model."""
        return self._calls > 0

    def count_call(self) -> None:
        """Refuse a second call of the model in one step: its first call already ended the step on every earlier stage."""
        self._calls += 1
        if self._calls > 1:
            raise PlanError(
                "The step called the pipelined model twice. With pp > 1 a step may call it once: join the two inputs into one"
                " batch, or use a layout with pp = 1."
            )
