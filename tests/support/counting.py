"""Records what goes through ``torch.distributed`` while a block of code runs."""

import contextlib
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_3d.parallel import gloo_exchange as exchange

# Function -> the argument, by name and position, that holds what this rank hands over (or what it
# only receives).
COLLECTIVES: dict[str, tuple[str, int]] = {
    "all_reduce": ("tensor", 0),
    "broadcast": ("tensor", 0),
    "reduce": ("tensor", 0),
    "all_gather": ("tensor", 1),
    "all_gather_into_tensor": ("input_tensor", 1),
    "reduce_scatter": ("input_list", 1),
    "reduce_scatter_tensor": ("input", 1),
    "all_to_all_single": ("input", 1),
    "all_reduce_coalesced": ("tensors", 0),
    "all_gather_object": ("obj", 1),
    "broadcast_object_list": ("object_list", 0),
    "send": ("tensor", 0),
    "isend": ("tensor", 0),
    "recv": ("tensor", 0),
    "irecv": ("tensor", 0),
}
OWN_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


EXCHANGES = {  # functions of gloo_exchange: what they do
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "sum_now": "all_reduce",
    "gather_now": "all_gather_into_tensor",
    "scatter_sum_now": "reduce_scatter_tensor",
    "start_all_reduce": "all_reduce",
    "start_reduce": "reduce",
    "start_broadcast": "broadcast",
    "start_all_to_all": "all_to_all_single",
    "all_to_all": "all_to_all_single",
    "isend": "isend",
    "irecv": "irecv",
}


@dataclass(frozen=True)
class Call:
    """One call on this rank: the function, the global ranks of its group, what this rank puts in,
    and when by `perf_counter`."""

    name: str
    ranks: tuple[int, ...]
    numel: int
    bytes: int
    at: float = field(default_factory=time.perf_counter, compare=False)


class Recorder:
    """The calls so far, in order; objects (``broadcast_object_list``, ...) count no elements."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def over(self, ranks: Sequence[int], *names: str, numel: int | None = None) -> list[Call]:
        """Calls in the group of exactly these ranks, of these functions (of all by default) and
        this size."""
        return [
            call
            for call in self.calls
            if call.ranks == tuple(ranks)
            and (not names or call.name in names)
            and (numel is None or call.numel == numel)
        ]

    def summary(self) -> Counter[tuple[str, tuple[int, ...], int]]:
        return Counter((call.name, call.ranks, call.numel) for call in self.calls)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record every call made as ``torch.distributed.<function>`` or as one of ``exchange``; what
    these call inside is not counted again."""
    recorder = Recorder()
    names = {name: name for name in COLLECTIVES} | OWN_NAMES
    with pytest.MonkeyPatch.context() as patch:
        for place, counted in ((dist, names), (exchange, EXCHANGES)):
            for name, called in counted.items():
                if hasattr(place, name):
                    patch.setattr(place, name, _recorded(recorder, called, getattr(place, name)))
        patch.setattr(dist, "batch_isend_irecv", _recorded_batch(recorder, dist.batch_isend_irecv))
        yield recorder


def _recorded(recorder: Recorder, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    argument, position = COLLECTIVES[name]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value = kwargs[argument] if argument in kwargs else args[position]
        group = next(
            (arg for arg in (*args, *kwargs.values()) if isinstance(arg, dist.ProcessGroup)), None
        )
        recorder.calls.append(_described(name, value, group))
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def arriving_at_once() -> Iterator[None]:
    """Let `all_reduce` and `reduce` return when they are complete, so that the order of events does
    not depend on how fast messages are."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce"):
            patch.setattr(dist, name, _complete(getattr(dist, name)))
            patch.setattr(exchange, f"start_{name}", _complete(getattr(exchange, f"start_{name}")))
        yield


def _complete(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    return call


def _recorded_batch(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """``batch_isend_irecv``: each operation counts as if it were called by itself."""

    @functools.wraps(function)
    def call(operations: list[dist.P2POp]) -> Any:
        for operation in operations:
            recorder.calls.append(
                _described(operation.op.__name__, operation.tensor, operation.group)
            )
        return function(operations)

    return call


def _described(name: str, value: Any, group: dist.ProcessGroup | None) -> Call:
    tensors = value if isinstance(value, (list, tuple)) else [value]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    ranks = tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))
    numel = sum(tensor.numel() for tensor in tensors)
    return Call(
        name, ranks, numel, sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    )


class HostWaits(TorchDispatchMode):
    """Counts for what a host would have to wait if the tensors were on a GPU: numbers that it
    reads, and results whose shape it must learn.

    Args:
        on_host: names of functions whose tensors are in host memory whatever the device is; what
            they and what they call read does not count.

    Attributes:
        names: what it was, in order.
    """

    _shapes = (
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
    )
    _numbers = ("_local_scalar_dense", "equal")

    def __init__(self, on_host: Sequence[str] = ()) -> None:
        super().__init__()
        self._on_host = frozenset(on_host)
        self.names: list[str] = []

    def _count(self, name: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name in self._on_host:
                return
            frame = frame.f_back
        self.names.append(name)

    def __enter__(self) -> "HostWaits":
        self._tolist = torch.Tensor.tolist
        torch.Tensor.tolist = self._read  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*error)

    @property
    def _read(self) -> Callable[..., Any]:
        """``Tensor.tolist``, which reads the memory of a CPU tensor without an operator."""

        def tolist(tensor: torch.Tensor) -> Any:
            self._count("tolist")
            return self._tolist(tensor)

        return tolist

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            leaf.dtype == torch.bool for leaf in tree_leaves(args[1:2]) if hasattr(leaf, "dtype")
        )
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in self._shapes + self._numbers or by_mask or repeats:
            self._count(name)
        return func(*args, **kwargs)


def when_a_gradient_arrives(parameter: torch.Tensor, function: Callable[[], None]) -> Any:
    """Call a function when autograd has added to the gradient of a parameter. The strategy defers
    the hooks of the parameter itself, but not those of this node of the graph. Returns a handle,
    whose `remove` ends it."""
    with torch.enable_grad():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert node is not None
    handle: Any = node.register_hook(lambda *_: function())
    handle.node = node  # only the graph of a backward holds it otherwise
    return handle
