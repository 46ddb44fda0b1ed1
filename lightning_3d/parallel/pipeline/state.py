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
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.pipeline.boundary import (
    Arrived,
    Boundary,
    Nested,
    Sides,
    Spec,
    Travels,
    spec_of,
)
from lightning_3d.parallel.pipeline.call_order import CallOrder, PlanOrder
from lightning_3d.parallel.pipeline.calls import Calls
from lightning_3d.parallel.pipeline.left_behind import LeftBehind
from lightning_3d.parallel.pipeline.unknown import Unknown
from lightning_3d.parallel.sequence_shards import SequenceShards

if TYPE_CHECKING:
    from lightning_3d.parallel.random_streams import RandomState


class StageBoundary(BaseException):
    """Ends a user's step where the next stage begins and carries there what `PipelineState.pack`
    joined.

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
        arrived: what the previous stage sent in the call of the model that runs; None on the first
            stage.
        boundaries: shapes and types of what stages send in each call of a step; those that the
            first stage has seen.
        calls: the calls of a step; None until the first stage has seen them, and where a single one
            is expected.
        counts_calls: whether the first stage runs a step to find out how often it calls the model.
        travels: what the plan sends with the hidden states.
        plan: the order of execution that the plan gives; None as long as nothing is partitioned.
        order: of the calls in the forward that is running; None in a backward, where blocks may be
            computed again.
        has_towers: whether the first stage has towers, which encode images or sounds.
        towers_unchecked: whether the self-check ran without inputs of towers.
        whole: whether this rank holds all blocks (no pipeline), so that the model works outside a
            step too.
        left: what the forwards of blocks leave in attributes.
        sequence: how the hidden states between blocks are split over tensor-parallel ranks.
    """

    def __init__(self, random: RandomState, sequence: SequenceShards | None = None) -> None:
        self.random = random
        self.sequence = sequence or SequenceShards()
        self.chunk: Chunk | None = None
        self.arrived: Arrived | None = None
        self.boundaries: list[Boundary] = []
        self.calls: Calls | None = None
        self.counts_calls = False
        self.travels = Travels()
        self.has_towers = False
        self.towers_unchecked = False
        self.whole = False
        self.plan: PlanOrder | None = None
        self.order: CallOrder | None = None
        self.left = LeftBehind()
        self._calls = 0
        self._in_call = False
        self._received: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._inputs: dict[str, list[Any]] = {}  # tensors, and the form of others
        self._read: Counter[str] = Counter()
        self._returned: Any = None
        self._looked: set[tuple[int, bool]] = set()

    @contextmanager
    def running(
        self, chunk: Chunk, received: Tensor | None, *, forward: bool = False
    ) -> Iterator[None]:
        """Make `chunk` the active one for a forward or a backward (where recomputation runs blocks
        again)."""
        before = (self.chunk, self.arrived, self._calls, self.order)
        self.chunk, self._calls, self._in_call = chunk, 0, False
        self._received, self._sent = self._of_calls(received), []
        self._expect_call(forward=forward)
        try:
            yield
        finally:
            self.left.show()
            self.chunk, self.arrived, self._calls, self.order = before
            self._received, self._sent = [], []
            self._inputs, self._returned = {}, None

    def _of_calls(self, received: Tensor | None) -> list[Tensor]:
        """What the previous stage sent in each call."""
        if received is None:
            return []
        return [received] if self.calls is None else self.calls.unpack(received)

    def _expect_call(self, *, forward: bool) -> None:
        """Prepare for the next call of the model."""
        received = self._received[self._calls] if self._received else None
        boundary = self.boundaries[self._calls] if self._calls < len(self.boundaries) else None
        if received is None:
            self.arrived = None
        else:
            self.arrived = Arrived(received) if boundary is None else boundary.unpack(received)
            if boundary is not None:
                self.sequence.length = boundary.length
        self.order = self._follow(self.require_chunk()) if forward else None
        self._inputs, self._read, self._returned = {}, Counter(), None

    @property
    def boundary(self) -> Boundary | None:
        """Boundary of the call of the model that runs, or that comes first; None until the first
        stage has seen it."""
        place = max(self._calls - 1, 0)
        return self.boundaries[place] if place < len(self.boundaries) else None

    def _follow(self, chunk: Chunk) -> CallOrder | None:
        """Observer of the calls of a forward; it also looks for NaN in the first training and the
        first evaluation of a chunk."""
        if self.plan is None or chunk.stages == 1:
            return None
        key = (chunk.stage, torch.is_grad_enabled())
        order = CallOrder(self.plan, look=not chunk.is_first and key not in self._looked)
        self._looked.add(key)
        order.receive(self.received)
        return order

    @property
    def received(self) -> Tensor | None:
        """Hidden states from the previous stage, (micro-batch, sequence, hidden); None on the first
        stage."""
        return None if self.arrived is None else self.arrived.hidden

    # What travels

    def note_input(self, name: str, output: Any) -> None:
        """Note what a module before the blocks returned on the first stage. The model may change
        the tensor in place afterwards."""
        travels, tensors = name in self.travels.inputs, list(tensors_of(output))
        if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
            return
        if isinstance(output, Tensor):
            self._inputs.setdefault(name, []).append(output.clone() if travels else output)
        elif not travels:
            self._inputs.setdefault(name, []).append(Nested.like(output))

    def note_returned(self, output: Any) -> None:
        """Note what a block of this stage returned."""
        self._returned = output

    def input_of(self, name: str) -> Any:
        """What a module before the blocks returned on the first stage, if it travels; otherwise NaN
        in its shape."""
        self.require_chunk()
        assert self.arrived is not None, (
            "only the first stage receives nothing, and it owns its inputs"
        )
        call = self._read[name]
        self._read[name] += 1
        if call < len(sent := self.arrived.inputs.get(name, ())):
            return sent[call].clone()
        known = self.boundary.inputs.get(name, ()) if self.boundary is not None else ()
        like = known[min(call, len(known) - 1)] if known else self._like_hidden()
        if isinstance(like, Nested):
            return like.filled(self._absent)
        return self._absent(like)

    def _absent(self, spec: Spec) -> Tensor:
        assert self.arrived is not None
        return self.arrived.hidden.new_full(spec[0], torch.nan, dtype=spec[1])

    def _like_hidden(self) -> Spec:
        assert self.arrived is not None
        shape = list(self.arrived.hidden.shape)
        if self.sequence.active:
            shape[1] = self.sequence.length
        return tuple(shape), self.arrived.hidden.dtype

    def pack(self, hidden: Tensor) -> Tensor:
        """Join the hidden states and what travels with them. The first stage describes them at the
        first micro-batch of a shape."""
        boundary = self.boundary
        if boundary is None:
            known = {
                name: [spec_of(one) if isinstance(one, Tensor) else one for one in made]
                for name, made in self._inputs.items()
            }
            boundary = Boundary(
                spec_of(hidden), known, _sides(self._returned), self.sequence.length, self.travels
            )
            self.boundaries.append(boundary)
        inputs: Mapping[str, Sequence[Any]] = (
            self._inputs if self.arrived is None else self.arrived.inputs
        )
        sides = {
            place: value for place in self.travels.sides if _is_float(value := self._side(place))
        }
        return boundary.pack(Arrived(hidden, inputs, sides))

    def _side(self, place: int) -> Any:
        if isinstance(self._returned, (tuple, list)) and place + 1 < len(self._returned):
            return self._returned[place + 1]
        return None

    def require_tower_check(self, names: Iterable[str]) -> None:
        """Refuse inputs of towers that the self-check has not seen: a later stage may need more of
        them than the hidden states."""
        if self.towers_unchecked:
            raise PlanError(
                f"This batch has {', '.join(sorted(names))}, but the first one had no such input."
                " So the self-check could not find out whether a pipeline computes the model with"
                " it. Let the first batch of each rank have it, or use a layout with pp = 1."
            )

    def require_chunk(self) -> Chunk:
        if self.chunk is None:
            raise PlanError(
                "The pipelined model was called outside a step. With pp > 1 no rank holds the whole"
                " model: call it only in training_step, validation_step, test_step or predict_step,"
                " or use a layout with pp = 1."
            )
        return self.chunk

    # Calls of the model

    @property
    def called(self) -> bool:
        """True once the running step has called the model."""
        return self._calls > 0

    @property
    def is_after_calls(self) -> bool:
        """True on the last stage after the last call of the model, where no other stage runs the
        step's code."""
        last = self.chunk is not None and self.chunk.is_last and self.called and not self._in_call
        return last and (self.calls is None or self._calls >= len(self.calls))

    @property
    def knows_outputs(self) -> bool:
        """False where the step goes on after a call whose output only the last stage knows."""
        return self.chunk is None or self.chunk.is_last or not self.called

    def begin_call(self, model: str) -> None:
        """Begin a call of the model in the step that runs.

        Args:
            model: class of the model.

        Raises:
            PlanError: the earlier stages have sent nothing for this call.
        """
        expected = 1 if self.calls is None else len(self.calls)
        if self._calls >= expected and not self.counts_calls:
            raise PlanError(
                f"The step calls {model} more often than the {_times(expected)} that the first"
                f" stage has seen in a micro-batch of these shapes.{self._why_not_seen()} With pp >"
                " 1, how often a step calls the model may depend only on the shapes of its batch."
                " Or join the inputs into one batch, or use a layout with pp = 1."
            )
        if self._calls > 0:
            self.left.show()
            self._expect_call(forward=True)
        self._calls, self._in_call = self._calls + 1, True
        if self.order is not None:
            self.order.entered = True

    def _why_not_seen(self) -> str:
        end = self.calls.end if self.calls is not None else ""
        return f" There it ended after that with {end}" if end else ""

    def return_from_call(self) -> None:
        """Note that the model has returned, on the last stage. What is drawn before the next one is
        the same on all stages."""
        self._in_call = False
        if self.calls is not None and self._calls < len(self.calls):
            self.random.after_call(self._calls)

    def send_from_call(self, hidden: Tensor, model: str) -> Unknown:
        """Keep what a call sends to the next stage.

        Returns:
            The model's output, for the code between this call and the next.

        Raises:
            StageBoundary: this was the last call of the step.
        """
        self._in_call = False
        self._sent.append(hidden)
        if not self.counts_calls and len(self._sent) == (
            1 if self.calls is None else len(self.calls)
        ):
            raise StageBoundary(hidden if self.calls is None else self.calls.pack(self._sent))
        self.random.after_call(self._calls)
        return Unknown(f"the output of {model}", hidden.device)

    def end_step(self, error: Exception | None = None) -> None:
        """End a step that has returned, or failed, after a call of the model. Before the last
        stage, does nothing if it has called none.

        Args:
            error: failure of code that is given an unknown output of the model. It ends the step
                only while the first stage counts the calls: if the step does call the model again,
                the last stage says so.

        Raises:
            StageBoundary: the first stage now knows the calls.
            PlanError: the step has returned after fewer calls than the first stage has seen.
        """
        if error is None:
            self._require_all_calls()
        if self.knows_outputs or self._in_call or not (error is None or self.counts_calls):
            return
        if not self.counts_calls:
            raise PlanError(
                f"The step calls the model {_times(len(self._sent))}, but called it"
                f" {_times(len(self.calls or ()))} in the first micro-batch of these shapes. With"
                " pp > 1, how often a step calls the model may depend only on the shapes of its"
                " batch."
            )
        end = (
            ""
            if error is None
            else f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        )
        self.calls, self.counts_calls = (
            Calls(tuple(self.boundaries), tuple(map(spec_of, self._sent)), end),
            False,
        )
        raise StageBoundary(self.calls.pack(self._sent))

    def _require_all_calls(self) -> None:
        """Refuse a step that has returned on the last stage after fewer calls than the first stage
        has seen."""
        if (
            self.chunk is None
            or not self.chunk.is_last
            or self.calls is None
            or self._calls >= len(self.calls)
        ):
            return
        raise PlanError(
            f"On the last pipeline stage, the step calls the model {_times(self._calls)}, but on"
            f" the first stage {_times(len(self.calls))}, because there it gets no values of the"
            " model's output. With pp > 1, how often a step calls the model may depend only on the"
            " shapes of its batch. Make the same calls in every case, or use a layout with pp = 1."
        )


def _times(count: int) -> str:
    return f"{count} time{'s' * (count != 1)}"


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _sides(output: Any) -> Sides | None:
    if not isinstance(output, (tuple, list)):
        return None
    return tuple(spec_of(side) if _is_float(side) else None for side in output[1:])
