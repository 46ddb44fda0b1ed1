"""Random numbers of compiled graphs (private PyTorch APIs, torch 2.11 to 2.13).

A compiler may move, merge and repeat operators, and has a generator of its own. Here a graph takes
the state of torch's generator as an input and returns the next one, and each random operator in it
is a function: (state, arguments) -> (next state, results). So a graph draws the numbers that the
same code draws without compilation, whatever the compiler does with it, and draws them again in a
backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils._python_dispatch import TorchDispatchMode

_LIBRARY = torch.library.Library("lightning_3d", "FRAGMENT")
_FUSED_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
"""Attention whose nine results are (output, logarithms, None, None, length of queries, length of
keys, seed, offset, debug mask)."""


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which operators on a device draw."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


@cache
def state_bytes(device: torch.device) -> int:
    """Size of the state of a device's generator, a uint8 tensor in host memory."""
    return torch.Generator(device).get_state().numel()


@contextmanager
def drawing_from(generator: torch.Generator, state: Tensor) -> Iterator[None]:
    """Context in which a generator has another state."""
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


class EagerRandomness:
    """Backend of `torch.compile` whose graphs draw the numbers that the same code draws without
    compilation.

    The blocks of a model share one object: for two of them, Dynamo would compile twice.

    Args:
        device: random operators on this kind of device are followed; others are left to the
            compiler.
        restart: operator that returns a state. The random operators behind it draw from there on.
        compiler: what compiles the graphs: a name or a function, as the `backend` of
            `torch.compile`.
    """

    def __init__(self, device: torch.device, restart: Any, compiler: Any = "inductor") -> None:
        self._device = device
        self._compiler = compiler
        self._restart = restart
        self._modes: list[_Draws] = []
        for function in (self._begin, self._end):
            torch.fx.node.has_side_effect(function)

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph of Dynamo."""
        generator = default_generator(self._device)
        state = generator.get_state()
        fake = torch._guards.detect_fake_mode(inputs)
        state = state if fake is None else fake.from_tensor(state, static_shapes=True)
        with self._none_left():
            compiled = torch._dynamo.lookup_backend(self._compiler)(
                self._with_state(module, state), [*inputs, state]
            )

        def run(*arguments: Any) -> Any:
            *results, after = compiled(*arguments, generator.get_state())
            generator.set_state(after)
            return results

        return run

    def _with_state(self, module: torch.fx.GraphModule, example: Tensor) -> torch.fx.GraphModule:
        """A copy with the state as last input and last output. Between two nodes that begin and end
        it, tracing follows the state."""
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        outputs: Any = graph.graph_copy(module.graph, copies)
        for node, copied in copies.items():
            if node.op == "placeholder":
                copied._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
        inputs = graph.find_nodes(op="placeholder")
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
            state = graph.placeholder("random_state")
        state._dynamo_source = None
        with graph.inserting_after(state):
            begin = graph.call_function(self._begin, (state,))
        end = graph.call_function(self._end)
        for node in (state, begin, end):
            node.meta["example_value"] = example
        graph.output((*outputs, end))
        changed = torch.fx.GraphModule(module, graph)
        changed.meta, changed._param_name_to_source = module.meta, module._param_name_to_source
        return changed

    def _begin(self, state: Tensor) -> Tensor:
        """Follow the state from here on."""
        self._modes.append(_Draws(self._device.type, self._restart, state))
        self._modes[-1].__enter__()
        return state

    def _end(self) -> Tensor:
        """Stop following it; returns what it is now."""
        mode = self._modes.pop()
        mode.__exit__(None, None, None)
        return mode.state

    @contextmanager
    def _none_left(self) -> Iterator[None]:
        """A compiler that fails in the middle of a graph leaves nothing behind."""
        before = len(self._modes)
        try:
            yield
        finally:
            while len(self._modes) > before:
                self._end()


class _Draws(TorchDispatchMode):
    """While a graph is traced below autograd, replaces random operators by functions of a state."""

    supports_higher_order_operators = True

    def __init__(self, device: str, restart: Any, state: Tensor) -> None:
        super().__init__()
        self.state = state
        self._device, self._restart = device, restart

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func, args, kwargs) or _device_of(args, kwargs).type != self._device:
            result = func(*args, **kwargs)
            self.state = result if func is self._restart else self.state
            return result
        self.state, *results = _explicit(func)(self.state, *args, **kwargs)
        written = _written(func)
        for place in written:
            args[place].copy_(results.pop(0))
        if written and not results:
            return args[written[0]]
        if func._schema.name in _FUSED_ATTENTION:
            return *results[:2], None, None, args[0].shape[2], args[1].shape[2], *results[2:], None
        return tuple(results) if len(results) > 1 else results[0]


def _is_random(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call draws from the default generator."""
    if (
        torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ())
        or kwargs.get("generator") is not None
    ):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            rate = (
                args[place]
                if place < len(args)
                else kwargs.get("dropout_p", argument.default_value)
            )
            return rate != 0
    return True


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return next((value.device for value in args if isinstance(value, Tensor)), torch.device("cpu"))


def _written(operator: Any) -> list[int]:
    """Positions of the arguments into which an operator writes."""
    infos = [argument.alias_info for argument in operator._schema.arguments]
    return [place for place, info in enumerate(infos) if info is not None and info.is_write]


@cache
def _explicit(operator: Any) -> Any:
    """The function of a random operator: (state, its arguments) -> (next state, new values of
    arguments that it writes into, results).

    Raises:
        UnsupportedOperatorException: it returns more than tensors. Dynamo then runs the function
            that it compiles as it is.
    """
    schema, written = operator._schema, _written(operator)
    fused = schema.name in _FUSED_ATTENTION
    kept = (
        (0, 1, 6, 7)
        if fused
        else tuple(
            place for place, result in enumerate(schema.returns) if result.alias_info is None
        )
    )
    if any(str(schema.returns[place].type) != "Tensor" for place in kept) or any(
        schema.arguments[place].kwarg_only for place in written
    ):
        raise UnsupportedOperatorException(operator)
    name = f"drawn_{schema.name.replace('::', '_')}_{operator._overloadname}"
    arguments = re.sub(r"\(\w+!?\)", "", str(schema)).partition("(")[2].rpartition(") -> ")[0]
    arguments = arguments.replace(" from=", " low=").replace(" from,", " low,")  # names in Python
    _LIBRARY.define(
        f"{name}(Tensor random_state, {arguments}) ->"
        f" ({', '.join(['Tensor'] * (1 + len(written) + len(kept)))})"
    )

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        args = tuple(
            value.clone() if place in written else value for place, value in enumerate(args)
        )
        results = operator(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        return *(args[place] for place in written), *(results[place] for place in kept)

    def draw(state: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        generator = default_generator(_device_of(args, kwargs))
        with drawing_from(generator, state):
            results = call(args, kwargs)
            return generator.get_state(), *results

    _LIBRARY.impl(name, draw, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"lightning_3d::{name}",
        lambda state, *args, **kwargs: (torch.empty_like(state), *call(args, kwargs)),
        lib=_LIBRARY,
    )
    return getattr(torch.ops.lightning_3d, name).default
