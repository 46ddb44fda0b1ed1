"""The experts of a mixture as two operators in the graph of a compiled block: the start of the
exchange of tokens, and the rest.

A compiler cannot look into an operator, so the graph does not end at the experts: how many tokens
arrive, which only the host learns, and all that depends on it, such as messages and a loop over
experts, runs as it does without a compiler. The compiler may run other work between the two
operators.

Each operator records the operations in it for autograd, and its backward runs their backward. An
operator returns tensors only, so a record is not a result of it. It lives as long as a tensor of
one number that names it, its ticket, which the backward needs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_3d.compat.torch import autograd_in_operator, backward_runs_again


class Experts(Protocol):
    """A module of experts, whose calls have a start and an end."""

    def start(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        """Start to send the tokens of a call. `dispatch.under_way` of the result are the tensors of
        the start that the end uses."""
        ...

    def finish(self, begun: Any) -> Tensor:
        """Run the experts on the tokens that arrive, and return the output of a call, of the shape
        of its tokens."""
        ...


class BegunInGraph:
    """A call in a graph. What is between start and end in the graph runs while tokens travel.

    Args:
        place: see `register`.
        arguments: hidden states, experts (n, k) of each token, and weights (n, k) of these.
    """

    def __init__(self, place: Tensor, *arguments: Tensor) -> None:
        self._arguments, self._types = arguments, _autocast_type(arguments[0])
        self._ticket = begin_experts(*arguments, place, self._types, torch.is_grad_enabled())

    def is_of(self, *arguments: Tensor) -> bool:
        """Return whether these are the arguments of the call."""
        return all(now is then for now, then in zip(arguments, self._arguments, strict=True))

    def finish(self, parameters: list[Tensor]) -> Tensor:
        """Return the output; `parameters` are those of the experts that are trained."""
        output, _ = finish_experts(self._ticket, self._arguments[0], parameters, self._types)
        return output


_known: WeakValueDictionary[int, Any] = WeakValueDictionary()
_records: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def register(experts: Any) -> Tensor:
    """Give `experts` a name for operators: a tensor in host memory. As a number it would be part of
    the graph, and each layer would need its own."""
    number = next(_numbers)
    _known[number] = experts
    return torch.tensor([number], device="cpu")


class _Record(bytearray):
    """A record as the memory of its ticket: torch keeps it as long as the ticket.

    Args:
        kind: type of a number of 8 bytes in Python's `struct`.
    """

    def __init__(self, kind: str) -> None:
        number = next(_numbers)
        super().__init__(struct.pack(kind, number))
        _records[number] = self


class _Start(_Record):
    """The start of a call, and its record, if a backward follows.

    Attributes:
        experts: the module.
        begun: the call, which the end finishes.
        arriving: where the tensors that are under way enter the record of the end.
    """

    arriving: _Inputs | None = None

    def __init__(
        self, experts: Experts, hidden: Tensor, chosen: Tensor, weights: Tensor, *, train: bool
    ) -> None:
        super().__init__("d")
        self.experts = experts
        if not train:
            self.begun = experts.start(hidden, chosen, weights)
            return
        self._inputs = _Inputs([hidden, weights])
        with autograd_in_operator():
            hidden, weights = self._inputs.tensors()
            self.begun = experts.start(hidden, chosen, weights)
            tensors = list(self.begun.dispatch.under_way)
            places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
            self._sent = [get_gradient_edge(tensors[place]) for place in places]
            self.arriving = _Inputs([tensors[place] for place in places])
            for place, tensor in zip(places, self.arriving.tensors(), strict=True):
                tensors[place] = tensor
            self.begun.dispatch.under_way = tensors

    def backward(self) -> list[Tensor | None]:
        """Return the gradients of hidden states and weights, after the backward of the end."""
        assert self.arriving is not None
        pairs = zip(self._sent, self.arriving.gradients, strict=True)
        reached = [(sent, gradient) for sent, gradient in pairs if gradient is not None]
        self._inputs.backward(
            [sent for sent, _ in reached], [gradient for _, gradient in reached], []
        )
        return self._inputs.gradients


class _End(_Record):
    """The end of a call, and its record, if a backward follows.

    Attributes:
        output: the result; it is not kept after `take_output`.
    """

    def __init__(self, start: _Start) -> None:
        super().__init__("q")
        begun, start.begun = start.begun, None
        self._arriving = start.arriving
        if self._arriving is None:
            self._output = start.experts.finish(begun)
            return
        with autograd_in_operator(), _recorded_parameters(start.experts) as parameters:
            self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
            self._output = start.experts.finish(begun)
            self._edge = get_gradient_edge(self._output)

    def take_output(self) -> Tensor:
        """Return the result, and keep its place in the record only."""
        output: Tensor = self._output
        del self._output
        return output.detach().contiguous()

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of the parameters; those of what arrived wait for the backward of
        the start."""
        assert self._arriving is not None
        return self._arriving.backward([self._edge], [gradient], self._parameters)


@contextmanager
def _recorded_parameters(experts: Any) -> Iterator[list[Tensor]]:
    """Context in which `experts` have other tensors as parameters, in the same memory: hooks on
    parameters see the gradients that the operator returns, and must not see them in its record too.
    Yields these tensors in the order of the parameters."""
    others = {
        id(parameter): parameter.detach().requires_grad_(parameter.requires_grad)
        for parameter in experts.parameters()
    }
    owners = [(module, dict(module._parameters)) for module in experts.modules()]
    for module, own in owners:
        module._parameters.update(
            {name: others[id(value)] for name, value in own.items() if value is not None}
        )
    try:
        yield list(others.values())
    finally:
        for module, own in owners:
            module._parameters.update(own)


class _Inputs:
    """Where tensors enter an operator's record of autograd, which does not keep their memory."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values: Sequence[Tensor] = values
        self._anchor = torch.empty(0, requires_grad=True)
        self.gradients: list[Tensor | None] = [None] * len(values)

    def tensors(self) -> list[Tensor]:
        """The tensors, as the record has them. Call it once."""
        values, self._values = self._values, ()
        return list(_Enter.apply(self._anchor, self, *values)) if values else []

    def backward(
        self, outputs: list[Any], gradients: list[Tensor], others: list[Tensor]
    ) -> list[Tensor | None]:
        """Run the backward from `outputs` to these tensors, whose gradients are noted, and return
        the gradients of `others`."""
        if not outputs:
            return [None] * len(others)
        targets = [self._anchor, *others]
        found = torch.autograd.grad(
            outputs, targets, gradients, retain_graph=backward_runs_again(), allow_unused=True
        )
        return list(found[1:])


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: _Inputs, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.inputs.gradients = list(gradients)
        return None, None, *[None] * len(gradients)


@torch.library.custom_op("lightning_3d::begin_experts", mutates_args=())
def begin_experts(
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    place: Tensor,
    types: torch.dtype | None,
    train: bool,
) -> Tensor:
    """`Experts.start` of the experts with this name. Returns the ticket.

    Args:
        types: type of autocast; None where it is off.
        train: whether a backward follows.
    """
    with _autocast(hidden, types):
        start = _Start(
            _known[int(place.item())], hidden.detach(), chosen, weights.detach(), train=train
        )
    return torch.frombuffer(start, dtype=torch.float64)


@begin_experts.register_fake
def _(hidden: Tensor, *others: Any) -> Tensor:
    return hidden.new_empty(1, dtype=torch.float64, device="cpu")


@torch.library.custom_op("lightning_3d::finish_experts", mutates_args=())
def finish_experts(
    ticket: Tensor, hidden: Tensor, parameters: Sequence[Tensor], types: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """`Experts.finish`: the output, and a ticket. The gradients of `parameters` are those of the
    experts' own, which are read."""
    with _autocast(hidden, types):
        end = _End(_record_of(ticket))
    return end.take_output(), torch.frombuffer(end, dtype=torch.int64)


@finish_experts.register_fake
def _(
    ticket: Tensor, hidden: Tensor, parameters: Sequence[Tensor], types: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), torch.empty_like(ticket, dtype=torch.int64)


@torch.library.custom_op("lightning_3d::finish_experts_backward", mutates_args=())
def finish_experts_backward(
    gradient: Tensor, ticket: Tensor, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of `parameters`, and one of the ticket of the start, which only says that
    `begin_experts_backward` may run."""
    found = _record_of(ticket).backward(gradient)
    pairs = zip(found, parameters, strict=True)
    gradients = [
        torch.zeros_like(parameter) if value is None else value.contiguous()
        for value, parameter in pairs
    ]
    return [*gradients, torch.zeros_like(ticket, dtype=torch.float64)]


@finish_experts_backward.register_fake
def _(gradient: Tensor, ticket: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    return [
        *(parameter.new_empty(parameter.shape) for parameter in parameters),
        torch.empty_like(ticket, dtype=torch.float64),
    ]


@torch.library.custom_op("lightning_3d::begin_experts_backward", mutates_args=())
def begin_experts_backward(
    reached: Tensor,
    ticket: Tensor,
    hidden: Sequence[int],
    weights: Sequence[int],
    hidden_type: torch.dtype,
    weights_type: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states and weights, of these shapes and types.

    Args:
        reached: the gradient of the ticket.
    """
    of_hidden, of_weights = _record_of(ticket).backward()
    return (
        (
            torch.zeros(list(hidden), dtype=hidden_type, device=device)
            if of_hidden is None
            else of_hidden.contiguous()
        ),
        (
            torch.zeros(list(weights), dtype=weights_type, device=device)
            if of_weights is None
            else of_weights.contiguous()
        ),
    )


@begin_experts_backward.register_fake
def _(
    reached: Tensor,
    ticket: Tensor,
    hidden: Sequence[int],
    weights: Sequence[int],
    hidden_type: torch.dtype,
    weights_type: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    return torch.empty(hidden, dtype=hidden_type, device=device), torch.empty(
        weights, dtype=weights_type, device=device
    )


def _keep_start(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, _, weights, *_ = inputs
    ctx.save_for_backward(output)
    ctx.sizes = hidden.shape, weights.shape, hidden.dtype, weights.dtype, hidden.device


def _differentiate_start(ctx: Any, reached: Tensor) -> tuple[Any, ...]:
    of_hidden, of_weights = begin_experts_backward(reached, *ctx.saved_tensors, *ctx.sizes)
    return of_hidden, None, of_weights, None, None, None


def _keep_end(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, parameters, _ = inputs
    ctx.save_for_backward(output[1], *parameters)


def _differentiate_end(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    ticket, *parameters = ctx.saved_tensors
    *of_parameters, reached = finish_experts_backward(gradient, ticket, parameters)
    return reached, None, of_parameters, None


begin_experts.register_autograd(_differentiate_start, setup_context=_keep_start)
finish_experts.register_autograd(_differentiate_end, setup_context=_keep_end)


def _record_of(ticket: Tensor) -> Any:
    return _records[int(ticket.item())]


def _autocast_type(x: Tensor) -> torch.dtype | None:
    return (
        torch.get_autocast_dtype(x.device.type)
        if torch.is_autocast_enabled(x.device.type)
        else None
    )


def _autocast(x: Tensor, types: torch.dtype | None) -> Any:
    """Context with the autocast of the place where the operator stands in the graph; the graph
    itself runs without."""
    return nullcontext() if types is None else torch.autocast(x.device.type, types)
