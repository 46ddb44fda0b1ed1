"""What stands in a partitioned model where another stage's modules were, and the gates around this rank's own.

Module lists keep their full length and every name stays the user's, so a model that looks at `layer_idx`, at per-layer attention
kinds or at `config` sees what it would see on one process.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.pipeline.state import PipelineState, StageBoundary


class Absent(nn.Module):
    """A module without parameters in the place of `original`, called `name`, which lives on another stage.

    It has the plain values among the attributes of `original`: some models ask a block for its attention kind.
    """

    def __init__(self, name: str, original: nn.Module) -> None:
        super().__init__()
        plain = (str, int, float, bool)
        self.__dict__.update({key: value for key, value in vars(original).items() if isinstance(value, plain) and key[0] != "_"})
        self.absent_name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(
            f"'{self.absent_name}' lives on another pipeline stage, but the step used it before that stage was reached."
            " Modules with parameters beside the pipelined model may be used only after it has returned."
        )

    def extra_repr(self) -> str:
        return f"'{self.absent_name}' is on another stage"


class AbsentInput(Absent):
    """In the place of a module that runs before the blocks (an embedding): zeros of the shape of the hidden states."""

    def __init__(self, name: str, original: nn.Module, state: PipelineState) -> None:
        super().__init__(name, original)
        self.state = state

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return _zeros(self.state)


class AbsentLayer(Absent):
    """In the place of a block that another rank owns."""

    def __init__(self, name: str, original: nn.Module, index: int, state: PipelineState) -> None:
        super().__init__(name, original)
        self.index = index
        self.state = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _outside(self.state, self.index, args, kwargs)


class GatedInput:
    """Mixin for an owned module before the blocks: it runs only while the first stage is active."""

    pipeline_state: PipelineState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.pipeline_state.require_chunk().is_first:
            return _zeros(self.pipeline_state)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class GatedLayer:
    """Mixin for an owned block: it runs while its own chunk is active and stands aside, like a stub, for the others."""

    pipeline_state: PipelineState
    pipeline_index: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.pipeline_state
        if state.chunk is None and state.whole:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if self.pipeline_index not in state.require_chunk().layers:
            return _outside(state, self.pipeline_index, args, kwargs)
        state.random.layer(self.pipeline_index)
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        state.tuple_length = len(output) if isinstance(output, tuple) else 0
        return output


def runs_now(block: nn.Module) -> bool:
    """Whether a call of `block` at this moment runs it: gated ones stand aside while another chunk is active."""
    if not isinstance(block, GatedLayer):
        return True
    state = block.pipeline_state
    return state.whole if state.chunk is None else block.pipeline_index in state.chunk.layers


class CountedModel:
    """Mixin for the pipelined module: refuses a second call in one step."""

    pipeline_state: PipelineState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.pipeline_state.require_chunk()
        self.pipeline_state.count_call()
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def _zeros(state: PipelineState) -> Tensor:
    state.require_chunk()
    assert state.received is not None, "only the first stage has nothing received, and it owns its inputs"
    shape = list(state.received.shape)
    if state.sequence.active:
        shape[1] = state.sequence.length
    return state.received.new_zeros(shape)


def _outside(state: PipelineState, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A block outside the active chunk: hand over what was received, pass on, or end the step."""
    chunk = state.require_chunk()
    hidden = hidden_states_of(args, kwargs)
    if index >= chunk.layers.stop:
        raise StageBoundary(hidden)
    if index == chunk.layers.start - 1:
        assert state.received is not None
        hidden = state.received
    return (hidden, *([None] * (state.tuple_length - 1))) if state.tuple_length else hidden


def hidden_states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for value in (*args, kwargs.get("hidden_states"), *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise PlanError("A block of the pipelined model was called without a tensor, so its hidden states are unknown.")
