"""Stubs in place of the modules of other pipeline stages, and gates around this rank's own.

Module lists keep their full length and every name stays the user's, so a model that looks at
`layer_idx`, at per-layer attention kinds or at `config` sees what it would see on one process.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.parallel.pipeline.absent_values import AbsentValue, refuse_absent
from lightning_3d.parallel.pipeline.boundary import Spec
from lightning_3d.parallel.pipeline.left_behind import (
    HOOKS,
    Elsewhere,
    attributes_of,
    call_hooks,
    without_hooks,
    written_by,
)
from lightning_3d.parallel.pipeline.state import PipelineState, StageBoundary
from lightning_3d.parallel.pipeline.towers import tower_inputs
from lightning_3d.parallel.pipeline.unknown import Unknown, first_unknown
from lightning_3d.parallel.specialize import specialize


class Absent(nn.Module):
    """A module without parameters that replaces `original`, called `name`, which is on another
    stage.

    It keeps the attributes of `original` that are plain values, because some models read a block's
    attention kind.
    """

    def __init__(self, name: str, original: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(plain_values(original))
        self.absent_name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(
            f"'{self.absent_name}' is on another pipeline stage, but the step used it before that"
            " stage was reached. If 'pp' of the plan names this module, its order is wrong: 'pp'"
            " must list the modules in the order in which the model's forward calls them."
            " Otherwise call the module after the pipelined model has returned."
        )

    def extra_repr(self) -> str:
        return f"'{self.absent_name}' is on another stage"


def plain_values(module: nn.Module) -> dict[str, Any]:
    """Public attributes of a module, and of its class, that are plain values."""
    of_class = {
        key: getattr(module, key, None)
        for kind in type(module).__mro__
        if kind not in nn.Module.__mro__
        for key in vars(kind)
    }
    plain = (str, int, float, bool)
    return {
        key: value
        for key, value in (of_class | vars(module)).items()
        if isinstance(value, plain) and key[0] != "_"
    }


class AbsentOutside(Absent):
    """Replaces a module outside the pipelined one, which is on the last stage. What it returns is
    known there only."""

    def forward(self, *args: Any, **kwargs: Any) -> Unknown:
        return Unknown(f"'{self.absent_name}'")


class AbsentPart(Absent):
    """A stub of a part of the pipelined module. What its forward writes is not answered, and what
    the step may set reaches the part.

    Args:
        place: name of the part in its block; None outside of the blocks.
    """

    pipeline_state: PipelineState

    def __init__(
        self, name: str, original: nn.Module, state: PipelineState, place: str | None
    ) -> None:
        super().__init__(name, original)
        vars(self).update(
            pipeline_state=state,
            absent_class=type(original),
            attributes=attributes_of(original),
            written=set(),
        )
        vars(self)["absent_hooks"] = SimpleNamespace(
            **{key: value for key, value in vars(original).items() if key in HOOKS}
        )
        for written in written_by(original):
            self.forget(written)
        if place is not None:
            state.left.add_stub(place, self)

    def forget(self, name: str) -> None:
        """Stop answering an attribute that forwards write."""
        vars(self).pop(name, None)
        self.written.add(name)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "written" in own and name not in own["_modules"]:
            in_step = own["pipeline_state"].chunk is not None and name[:2] != "__"
            if name in own["written"] or (
                in_step and (name in own["attributes"] or hasattr(own["absent_class"], name))
            ):
                return Elsewhere(f"the attribute '{name}' of '{own['absent_name']}'")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "written" in own and own["pipeline_state"].is_after_calls and name != "training":
            raise PlanError(
                f"The step sets the attribute '{name}' of '{own['absent_name']}' after its call of"
                " the model. With pp > 1 only the last pipeline stage runs this code, and the"
                " module is on an earlier one. Set it before the call, or in a hook such as"
                " on_train_batch_end, which all ranks run, or use a layout with pp = 1."
            )
        if name not in own.get("written", ()):
            super().__setattr__(name, value)


class AbsentParameters:
    """Mixin for a module whose own parameters are on another stage: they exist as NaN, because some
    models look up the device of their embedding, or change the weights of blocks in place."""

    pipeline_state: PipelineState
    absent_shapes: dict[str, tuple[int, ...]]

    def __getattr__(self, name: str) -> Any:
        shape = self.__dict__.get("absent_shapes", {}).get(name)
        if shape is None:
            return super().__getattr__(name)  # type: ignore[misc]
        received = self.pipeline_state.received
        blank = (
            (received if received is not None else torch.empty(0))
            .new_full((), torch.nan)
            .expand(shape)
        )
        return AbsentValue.of(blank) if self.pipeline_state.chunk is None else blank


def remove_parameter(module: nn.Module, name: str, state: PipelineState) -> None:
    """Remove a parameter of a module, which then is NaN."""
    shapes = {
        **vars(module).get("absent_shapes", {}),
        name: tuple(module._parameters.pop(name).shape),  # type: ignore[union-attr]
    }
    if isinstance(module, AbsentParameters):
        module.absent_shapes = shapes
    else:
        specialize(module, AbsentParameters, pipeline_state=state, absent_shapes=shapes)


class AbsentEnd(AbsentParameters, AbsentPart):
    """Replaces a module before or after the blocks, or in a block. Names inside it exist too: some
    models look up their head in it."""

    def __init__(
        self, name: str, original: nn.Module, state: PipelineState, place: str | None = None
    ) -> None:
        super().__init__(name, original, state, place)
        self.absent_shapes = {
            key: tuple(parameter.shape)
            for key, parameter in original.named_parameters(recurse=False)
        }
        add_absent(self, name, original, state, place)


def add_absent(
    parent: nn.Module, name: str, original: nn.Module, state: PipelineState, place: str | None
) -> None:
    """Give a stub of `original`, called `name`, stubs of its children. Lists and dictionaries of
    modules stay what they are."""
    for child_name, child in original.named_children():
        inner, inner_place = (
            f"{name}.{child_name}",
            None if place is None else f"{place}.{child_name}".lstrip("."),
        )
        if type(child) in (nn.ModuleList, nn.ModuleDict):
            stub: nn.Module = type(child)()
            add_absent(stub, inner, child, state, inner_place)
        else:
            stub = AbsentEnd(inner, child, state, inner_place)
        parent.add_module(child_name, stub)


class AbsentInput(AbsentEnd):
    """Replaces a module that runs before the blocks (an embedding): returns what it returned on the
    first stage if that travels with the hidden states, otherwise NaN of the same shape. No result
    that is used may depend on the NaN, because the received hidden states replace it at the first
    block.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.pipeline_state.order is not None:
            self.pipeline_state.order.call_before(self.absent_name)
        return self.pipeline_state.input_of(self.absent_name)


class AbsentOutput(AbsentEnd):
    """Replaces a module that runs after the blocks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.pipeline_state.order is not None:
            self.pipeline_state.order.call_after(self.absent_name)
        return super().forward(*args, **kwargs)


class AbsentLayer(AbsentPart):
    """Replaces a block that another rank owns."""

    def __init__(self, name: str, original: nn.Module, index: int, state: PipelineState) -> None:
        super().__init__(name, original, state, "")
        vars(self)["absent_index"] = index
        add_absent(self, name, original, state, "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call_hooks(self, self.absent_name)
        with without_hooks(self):
            return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.pipeline_state.order is not None:
            self.pipeline_state.order.enter_block(self.absent_index)
        return _outside(self.pipeline_state, self.absent_index, args, kwargs)


class GatedInput:
    """Mixin for an owned module before the blocks: it runs only while the first stage is active."""

    pipeline_state: PipelineState
    pipeline_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.pipeline_state
        if state.order is not None:
            state.order.call_before(self.pipeline_name)
        if not state.require_chunk().is_first:
            return state.input_of(self.pipeline_name)
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        state.note_input(self.pipeline_name, output)
        return output


class GatedOutput:
    """Mixin for an owned module after the blocks."""

    pipeline_state: PipelineState
    pipeline_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        order = self.pipeline_state.order
        if order is not None:
            order.call_after(self.pipeline_name)
            order.look_at_hidden([args, kwargs], f"'{self.pipeline_name}'")
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class GatedLayer:
    """Mixin for an owned block: it runs while its own chunk is active and acts as a stub for the
    others."""

    pipeline_state: PipelineState
    pipeline_index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, index = self.pipeline_state, self.pipeline_index
        if state.chunk is None or state.plan is None or index in state.chunk.layers:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        call_hooks(self, f"{state.plan.layers}.{index}")  # type: ignore[arg-type]
        with without_hooks(self):  # type: ignore[arg-type]
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.pipeline_state
        if state.chunk is None and state.whole:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        chunk, order = state.require_chunk(), state.order
        if order is not None:
            order.enter_block(self.pipeline_index)
        if self.pipeline_index not in chunk.layers:
            return _outside(state, self.pipeline_index, args, kwargs)
        state.random.layer(self.pipeline_index)
        if (
            self.pipeline_index == chunk.layers.start
            and state.arrived is not None
            and order is not None
        ):
            # What the model does between blocks, the stage before has done already to what it sent.
            args, kwargs = _with_hidden_states(state.arrived.hidden, args, kwargs)
        if order is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # in a backward, where blocks are computed again
        order.look_at_inputs(self.pipeline_index, hidden_states_of(args, kwargs), args, kwargs)
        with order.in_block(self.pipeline_index), state.left.watching(self.pipeline_index):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        order.leave_block(output[0] if isinstance(output, (tuple, list)) else output)
        state.note_returned(output)
        return output


def runs_now(block: nn.Module) -> bool:
    """True if a call of `block` at this moment runs it: gated blocks act as stubs while another
    chunk is active."""
    if not isinstance(block, GatedLayer):
        return not isinstance(block, Absent)
    state = block.pipeline_state
    return state.whole if state.chunk is None else block.pipeline_index in state.chunk.layers


class CountedModel:
    """Mixin for the pipelined module: counts its calls in a step, and refuses a call that skips
    blocks. Before the last stage, a call whose output is not known returns an unknown value if the
    step calls the model again. Only the first stage gets the inputs of towers, such as images."""

    pipeline_state: PipelineState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        chunk, kind = self.pipeline_state.require_chunk(), type(self).__name__
        self.pipeline_state.begin_call(kind)
        refuse_absent([args, kwargs])
        if unknown := first_unknown([args, kwargs]):
            unknown[0].pass_over()
            raise PlanError(
                f"The step computes an input of {kind} from the value of"
                f" {unknown[0].unknown_origin}, which only the last pipeline stage knows. Compute"
                " the inputs of the model from the batch and the layers before its blocks alone,"
                " move the rest into the forward of the model (before the blocks, and named in"
                " 'pp' of the plan), or use a layout with pp = 1."
            )
        if self.pipeline_state.has_towers and (encoded := tower_inputs(kwargs)):
            self.pipeline_state.require_tower_check(encoded)
            if not chunk.is_first:
                kwargs = {name: value for name, value in kwargs.items() if name not in encoded}
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        except StageBoundary as end:
            return self.pipeline_state.send_from_call(end.hidden, kind)
        self.pipeline_state.return_from_call()
        order = self.pipeline_state.order
        if order is not None:
            order.finish()
            order.look_at_hidden(
                output if isinstance(output, Tensor) else getattr(output, "logits", None),
                "the step",
            )
            self.pipeline_state.left.hide(chunk.layers)
        return output


def refuse_to_generate(*args: Any, **kwargs: Any) -> NoReturn:
    """Take the place of a model's `generate`, which calls parts of the model, and needs its outputs
    on every rank."""
    raise PlanError(
        "generate() needs the whole model, but with pp > 1 each rank has only the blocks of its"
        " stage. Use a layout with pp = 1, or generate from a checkpoint: `lightning-3d generate"
        " RUN_FOLDER PROMPT` for a causal language model, any other one on one process with"
        " load_full_state_dict(path) of lightning_3d.checkpoint (docs/migrating.md)."
    )


def _outside(
    state: PipelineState, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a stub outside the active chunk: return the received hidden states or the input, or end
    the step."""
    chunk = state.require_chunk()
    hidden = hidden_states_of(args, kwargs)
    if index >= chunk.layers.stop:
        if state.order is not None:
            state.order.look_at_hidden(hidden, "the next stage")
        raise StageBoundary(state.pack(hidden))
    arrived = None
    if index == chunk.layers.start - 1:
        arrived = state.arrived
        assert arrived is not None
        hidden = arrived.hidden
    elif (
        index == 0
        and not chunk.is_first
        and isinstance(hidden, Tensor)
        and hidden.is_floating_point()
    ):
        # what the model computes from it, the first stage has
        hidden = torch.full_like(hidden, torch.nan)
    boundary = state.boundary
    if boundary is None or boundary.sides is None:
        return hidden
    sent = arrived.sides if arrived is not None else {}
    return (
        hidden,
        *(
            sent[place] if place in sent else _absent(hidden, side)
            for place, side in enumerate(boundary.sides)
        ),
    )


def _absent(like: Tensor, spec: Spec | None) -> Tensor | None:
    """NaN, so that nothing that is computed from an absent value can pass for a result."""
    return None if spec is None else like.new_full((), torch.nan, dtype=spec[1]).expand(spec[0])


def hidden_states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a block."""
    place = _place_of_hidden_states(args, kwargs)
    return args[place] if isinstance(place, int) else kwargs[place]


def _with_hidden_states(
    hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with other hidden states."""
    place = _place_of_hidden_states(args, kwargs)
    if isinstance(place, str):
        return args, {**kwargs, place: hidden}
    return (*args[:place], hidden, *args[place + 1 :]), kwargs


def _place_of_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    places: list[tuple[int | str, Any]] = [
        *enumerate(args),
        ("hidden_states", kwargs.get("hidden_states")),
        *kwargs.items(),
    ]
    for place, value in places:
        if isinstance(value, (Tensor, Unknown)):
            return place
    raise PlanError(
        "A block of the pipelined model was called without a tensor. Pass the hidden states to it."
    )
