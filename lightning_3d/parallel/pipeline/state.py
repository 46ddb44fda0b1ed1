"""The chunk of the model that is running on this rank, and the hidden states that it received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.parallel.pipeline.boundary import Arrived, Boundary, Sides, Travels, spec_of
from lightning_3d.parallel.pipeline.call_order import CallOrder, PlanOrder
from lightning_3d.parallel.sequence_shards import SequenceShards

if TYPE_CHECKING:
    from lightning_3d.parallel.random_streams import RandomState


class StageBoundary(BaseException):
    """Ends a user's step where the next stage begins and carries there what `PipelineState.pack` joined.

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


class PipelineState:
    """State that the engine shares with the gates inside the model.

    Attributes:
        chunk: the chunk that is running, None outside a step.
        arrived: what the previous stage sent; None on the first stage.
        boundary: shapes and types of what stages send; None until the first stage has seen them.
        travels: what the plan sends with the hidden states.
        plan: the order of execution that the plan gives; None as long as nothing is partitioned.
        order: of the calls in the forward that is running; None in a backward, where blocks may be computed again.
        has_towers: whether the first stage has towers, which encode images or sounds.
        towers_unchecked: whether the self-check ran without inputs of towers.
        whole: whether this rank holds all blocks (no pipeline), so that the model works outside a step too.
        sequence: how the hidden states between blocks are split over tensor-parallel ranks.
    """

    def __init__(self, random: RandomState, sequence: SequenceShards | None = None) -> None:
        self.random = random
        self.sequence = sequence or SequenceShards()
        self.chunk: Chunk | None = None
        self.arrived: Arrived | None = None
        self.boundary: Boundary | None = None
        self.travels = Travels()
        self.has_towers = False
        self.towers_unchecked = False
        self.whole = False
        self.plan: PlanOrder | None = None
        self.order: CallOrder | None = None
        self._calls = 0
        self._inputs: dict[str, list[Tensor]] = {}
        self._read: Counter[str] = Counter()
        self._returned: Any = None
        self._looked: set[tuple[int, bool]] = set()

    @contextmanager
    def running(self, chunk: Chunk, received: Tensor | None, *, forward: bool = False) -> Iterator[None]:
        """Make `chunk` the active one for a forward or a backward (where recomputation runs blocks again)."""
        before = (self.chunk, self.arrived, self._calls, self.order)
        self.chunk, self._calls = chunk, 0
        self.arrived = self._unpacked(received)
        self.order = self._follow(chunk) if forward else None
        self._inputs, self._read, self._returned = {}, Counter(), None
        try:
            yield
        finally:
            self.chunk, self.arrived, self._calls, self.order = before
            self._inputs, self._returned = {}, None

    def _follow(self, chunk: Chunk) -> CallOrder | None:
        """Observer of the calls of a forward; it also looks for NaN in the first training and the first evaluation of a chunk."""
        if self.plan is None or chunk.stages == 1:
            return None
        key = (chunk.stage, torch.is_grad_enabled())
        order = CallOrder(self.plan, look=not chunk.is_first and key not in self._looked)
        self._looked.add(key)
        order.receive(self.received)
        return order

    @property
    def received(self) -> Tensor | None:
        """Hidden states from the previous stage, (micro-batch, sequence, hidden); None on the first stage."""
        return None if self.arrived is None else self.arrived.hidden

    def _unpacked(self, received: Tensor | None) -> Arrived | None:
        if received is None or self.boundary is None:
            return None if received is None else Arrived(received)
        return self.boundary.unpack(received)

    # What travels

    def note_input(self, name: str, output: Any) -> None:
        """Note what a module before the blocks returned on the first stage. The model may change the tensor in place afterwards."""
        if isinstance(output, Tensor) and output.is_floating_point():
            self._inputs.setdefault(name, []).append(output.clone() if name in self.travels.inputs else output)

    def note_returned(self, output: Any) -> None:
        """Note what a block of this stage returned."""
        self._returned = output

    def input_of(self, name: str) -> Tensor:
        """What a module before the blocks returned on the first stage, if it travels; otherwise NaN in its shape."""
        self.require_chunk()
        assert self.arrived is not None, "only the first stage receives nothing, and it owns its inputs"
        call = self._read[name]
        self._read[name] += 1
        if call < len(sent := self.arrived.inputs.get(name, ())):
            return sent[call].clone()
        known = self.boundary.inputs.get(name, ()) if self.boundary is not None else ()
        shape, dtype = known[min(call, len(known) - 1)] if known else self._like_hidden()
        return self.arrived.hidden.new_full(shape, torch.nan, dtype=dtype)

    def _like_hidden(self) -> tuple[list[int], torch.dtype]:
        assert self.arrived is not None
        shape = list(self.arrived.hidden.shape)
        if self.sequence.active:
            shape[1] = self.sequence.length
        return shape, self.arrived.hidden.dtype

    def pack(self, hidden: Tensor) -> Tensor:
        """Join the hidden states and what travels with them. The first stage describes them at the first micro-batch of a shape."""
        if self.boundary is None:
            known = {name: [spec_of(tensor) for tensor in made] for name, made in self._inputs.items()}
            self.boundary = Boundary(spec_of(hidden), known, _sides(self._returned), self.sequence.length, self.travels)
        inputs: Mapping[str, Sequence[Tensor]] = self._inputs if self.arrived is None else self.arrived.inputs
        sides = {place: value for place in self.travels.sides if _is_float(value := self._side(place))}
        return self.boundary.pack(Arrived(hidden, inputs, sides))

    def _side(self, place: int) -> Any:
        if isinstance(self._returned, (tuple, list)) and place + 1 < len(self._returned):
            return self._returned[place + 1]
        return None

    def require_tower_check(self, names: Iterable[str]) -> None:
        """Refuse inputs of towers that the self-check has not seen: a later stage may need more of them than the hidden states."""
        if self.towers_unchecked:
            raise PlanError(
                f"This batch has {', '.join(sorted(names))}, but the first one had no such input. So the self-check could not find out"
                " whether a pipeline computes the model with it. Let the first batch of each rank have it, or use a layout with pp = 1."
            )

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


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _sides(output: Any) -> Sides | None:
    if not isinstance(output, (tuple, list)):
        return None
    return tuple(spec_of(side) if _is_float(side) else None for side in output[1:])
