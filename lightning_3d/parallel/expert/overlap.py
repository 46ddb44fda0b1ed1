"""Overlap of the token exchange with what a mixture computes beside its experts, such as a shared
expert.

The forward of a mixture is traced once (torch.fx), with its submodules as single operations.
Operations that neither lead to the call of the experts nor follow from it are moved between the
start of the exchange and that call. No family is known here: the order of calls decides. A mixture
that cannot be traced, or whose order does not allow the move, runs as it is written.

Every operation computes what it did before. Where a shared expert was called before the router, the
gradients of their common input are added up in another order.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.specialize import specialize

_DIMENSIONS = 3  # of hidden states: batch, sequence, hidden


class OverlappedMixture:
    """Mixin for a mixture whose other work runs while tokens travel to the experts.

    Attributes:
        overlapped: forward with that work between start and end of the exchange, for hidden states
            of three dimensions.
    """

    overlapped: Callable[[Any, Tensor], Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].ndim != _DIMENSIONS:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.overlapped(self, given[0])


def overlap_exchange(module: nn.Module, plan: ParallelPlan) -> None:
    """Let all mixtures of the whole `module` work while tokens travel, in place, where their order
    of calls allows it.

    Call it before anything else wraps the forwards of the mixtures.
    """
    made: dict[Any, Callable[[Any, Tensor], Any]] = {}
    for name, _ in list(module.named_modules()):
        cut = plan.cut_of(name)
        if cut is None or cut.style != "ep_dispatch_experts":
            continue
        parent, _, experts = name.rpartition(".")
        mixture = module.get_submodule(parent)
        if (forward := overlapped_forward(mixture, experts, made)) is not None:
            specialize(mixture, OverlappedMixture, overlapped=forward)


def overlapped_forward(
    mixture: nn.Module, experts: str, made: dict[Any, Callable[[Any, Tensor], Any]] | None = None
) -> Callable[[Any, Tensor], Any] | None:
    """Return a forward of `mixture` (a function of it and the hidden states) in which other work
    runs during the exchange; None if there is no such work, or the forward cannot be rewritten.

    Args:
        experts: name of the submodule that holds the experts.
        made: functions of earlier mixtures, to which this one is added. Mixtures of equal code
            share a function, and so a compiler makes one graph of all their blocks.
    """
    if len(inspect.signature(mixture.forward).parameters) != 1 or _enters_contexts(
        type(mixture).forward
    ):
        return None
    training, evaluating = _trace(mixture, training=True), _trace(mixture, training=False)
    if (
        training is None
        or evaluating is None
        or str(training) != str(evaluating)
        or not _move(training, experts)
    ):
        return None
    code, made = training.python_code("self"), {} if made is None else made
    key = (code.src, *((name, id(value)) for name, value in sorted(code.globals.items())))
    return made.setdefault(key, type(fx.GraphModule(mixture, training)).forward)


class _HiddenStates(fx.Proxy):
    """Hidden states, whose number of dimensions is known: code may unpack their shape, as in
    `view(*shape)`."""

    @property
    def shape(self) -> tuple[fx.Proxy, ...]:
        sizes: Any = self.tracer.create_proxy("call_function", getattr, (self, "shape"), {})
        return tuple(sizes[dim] for dim in range(_DIMENSIONS))


def _enters_contexts(forward: Any) -> bool:
    """Return whether a function has a `with` statement or is decorated: a trace would not repeat
    the context (autocast, no_grad)."""
    return hasattr(forward, "__wrapped__") or any(
        "WITH" in instruction.opname for instruction in dis.get_instructions(forward)
    )


class _Tracer(fx.Tracer):
    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled():
            raise ValueError(
                "a function that the forward calls turns gradients off, which a trace would not"
                " repeat"
            )
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _HiddenStates(node, self) if node.op == "placeholder" else super().proxy(node)


def _trace(mixture: nn.Module, *, training: bool) -> fx.Graph | None:
    """Trace the forward of `mixture`; None if it does what only values of tensors decide, makes
    tensors of its own, or sets attributes."""
    before, mode = [(child, dict(vars(child))) for child in mixture.modules()], mixture.training
    mixture.training = training
    try:
        with torch.enable_grad():
            graph = _Tracer().trace(mixture)
    except Exception:  # the code of a family may do anything with what is not a tensor here
        return None
    finally:
        mixture.training = mode
        changed = [(child, values) for child, values in before if not _same(vars(child), values)]
        for child, values in changed:
            vars(child).clear()
            vars(child).update(values)
    return None if changed else graph


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether attributes are the same objects."""
    return now.keys() == before.keys() and all(now[name] is value for name, value in before.items())


def _move(graph: fx.Graph, experts: str) -> bool:
    """Start the exchange in front of all work that does not depend on it, and move that work there.
    Returns whether there is any.

    The exchange starts right before the call of the experts, and the work is moved between the two.
    """
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == experts]
    if len(calls) != 1:
        return False
    [call] = calls
    needed, after = (
        _reached(call, lambda node: node.all_input_nodes),
        _reached(call, lambda node: node.users),
    )
    seen, moved = False, []
    for node in graph.nodes:
        seen = seen or node is call
        free = (
            node is not call
            and node not in needed
            and node not in after
            and node.op not in ("placeholder", "output")
        )
        if free and (
            seen or node.op == "call_module" or any(each in moved for each in node.all_input_nodes)
        ):
            moved.append(node)
    if not any(node.op == "call_module" for node in moved) or _overwrites(graph, moved[-1]):
        return False
    with graph.inserting_before(call):
        graph.call_function(_begin, (graph.get_attr(experts), *call.args), call.kwargs)
    for node in moved:
        call.prepend(node)
    return True


def _begin(experts: Any, *args: Any, **kwargs: Any) -> None:
    """Start the exchange, if the experts are split over ranks."""
    if (begin := getattr(experts, "begin", None)) is not None:
        begin(*args, **kwargs)


def _reached(start: fx.Node, following: Callable[[fx.Node], Any]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    queue = list(following(start))
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue += following(node)
    return found


def _overwrites(graph: fx.Graph, last: fx.Node) -> bool:
    """Whether an operation up to `last` changes a tensor in place: what is moved might then read
    another value."""
    before = list(graph.nodes)[: list(graph.nodes).index(last) + 1]
    return any(_is_in_place(node) for node in before if node.op in ("call_method", "call_function"))


def _is_in_place(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return named or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


_IN_PLACE = {
    "setitem",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "imatmul",
    "iand",
    "ior",
    "ixor",
}
"""Names of operators."""
