"""Results of operators that a forward keeps for its recomputation, and only those that the
recomputation reads.

torch's selective checkpoint keeps each result that its policy names. Here the forward writes down
which operator reads and writes which memory, and what autograd saves. Backwards through these notes
(liveness analysis) it is known at the end of the forward which results a recomputation needs: the
others are freed at once, such as the partial sums of a tensor-parallel product, or the last product
of a block.

Code that the dispatcher does not see (`seen_memory`) may read a result, too. So a result is freed
only if an operator was seen to read it, and none is freed where there are traces of such code. What
takes the place of a freed result is not a number, to make a mistake loud.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_3d.compat.torch import detached_in_mode, ignored_by_checkpoints, saved_tensor_hooks
from lightning_3d.parallel.blocks.seen_memory import (
    SeenMemory,
    acts,
    overwritten,
    storages,
    tensors,
)
from lightning_3d.parallel.blocks.unseen_writes import UnseenWrites, versions

Keeps = Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]


@dataclass
class _Step:
    """One operator of a forward.

    Attributes:
        reads: storages of its arguments.
        writes: storages of its results.
        acts: it does more than to return results to other operators.
        over: storages of arguments into which it writes.
        kept: its place among the results that may be kept.
    """

    reads: frozenset[int]
    writes: frozenset[int]
    acts: bool = False
    over: frozenset[int] = frozenset()
    kept: int | None = None


@dataclass
class _Result:
    """What an operator returned, the versions of its tensors then, and whether it is only a
    stand-in of the same shapes."""

    operator: Any
    value: Any
    versions: list[tuple[int, int]]
    stand_in: bool = False


@dataclass
class KeptResults:
    """Results of one forward.

    Args:
        keeps: function of an operator and its arguments that returns whether its results are
            expensive.
        writes: what earlier forwards of the block found out about writes into results.

    Attributes:
        seen: memory of the forward while it runs.
    """

    keeps: Keeps
    writes: UnseenWrites = field(default_factory=UnseenWrites)
    results: list[_Result | None] = field(default_factory=list)
    seen: SeenMemory | None = None

    def contexts(self) -> tuple[_Forward, _Again]:
        """Return the contexts of the forward and of its recomputation (`context_fn` of
        `torch.utils.checkpoint.checkpoint`)."""
        return _Forward(self), _Again(self)

    def noting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` that notes its inputs and what it returns, when it runs for the first
        time."""

        def run(*args: Any, **kwargs: Any) -> Any:
            seen = self.seen = SeenMemory((args, kwargs)) if self.seen is not None else None
            result = forward(*args, **kwargs)
            if seen is not None:
                seen.read(result)
            return result

        return run


class _Mode(TorchDispatchMode):
    """Mode that leaves functions compiled which are compiled inside the block, as those of torch's
    selective checkpoint do."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Forward(_Mode):
    """Mode of a forward: notes what it reads and writes, and keeps results."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept = kept
        self._steps: list[_Step] = []
        self._hooks = ExitStack()

    def __enter__(self) -> _Forward:
        pack, unpack = saved_tensor_hooks()  # those of the checkpoint

        self._kept.seen = SeenMemory(())
        self._watch = self._kept.writes.watch()

        def note(x: Tensor) -> Any:
            self._steps.append(_Step(storages(x), frozenset(), acts=True))
            self._seen.read(x)
            return pack(x)

        self._hooks.enter_context(saved_tensors_hooks(note, unpack))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        if error[0] is None:
            self._leave_out_written()
        self._free_unread()
        self._kept.seen = None

    @property
    def _seen(self) -> SeenMemory:
        assert self._kept.seen is not None
        return self._kept.seen

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if operator in ignored_by_checkpoints():
            return result
        self._seen.step(operator, (args, kwargs), result)
        given = (args, kwargs)
        step = _Step(
            storages(given),
            storages(result),
            acts(operator, given, result),
            overwritten(operator, given, result),
        )
        if self._kept.keeps(operator, args, kwargs):
            step.kept = len(self._kept.results)
            value = tree_map_only(Tensor, detached_in_mode, result)
            self._kept.results.append(
                _Result(operator, value, versions(value))
                if self._watch.allows(operator, value)
                else None
            )
        self._steps.append(step)
        return result

    def _leave_out_written(self) -> None:
        """Leave out results into which code writes that nothing here sees. Where there is such
        code, nothing is freed."""
        memory = self._watch.changed(frozenset().union(*(step.over for step in self._steps)))
        for step in self._steps:
            if step.kept is not None and not memory.isdisjoint(step.writes):
                self._kept.results[step.kept] = None
        self._seen.unseen = self._seen.unseen or self._watch.found

    def _free_unread(self) -> None:
        """Free results that no recomputation reads. A result that was written into cannot be kept;
        its operator runs again."""
        seen = self._seen
        needed: set[int] = set()
        over: set[int] = set()
        results = self._kept.results
        for step in reversed(self._steps):
            result = results[step.kept] if step.kept is not None else None
            if result is not None and (
                versions(result.value) != result.versions or not over.isdisjoint(step.writes)
            ):
                results[step.kept] = result = None  # type: ignore[index]
            over |= step.over
            read, was_read = not needed.isdisjoint(step.writes), seen.was_read(step.writes)
            if (
                result is not None
                and was_read
                and not read
                and not seen.unseen
                and _may_be_any(result.value)
            ):
                result.value, result.stand_in = tree_map_only(Tensor, _shape_of, result.value), True
            # what no operator reads, Python may read
            if result is None and (step.acts or read or not was_read):
                needed |= step.reads
            elif result is not None:
                needed -= step.writes - step.reads
        self._steps.clear()


class _Again(_Mode):
    """Mode of the recomputation: takes kept results instead of running their operators, once."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept = kept
        self._place = 0

    def __enter__(self) -> _Again:
        self._place = 0
        return super().__enter__()

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if operator in ignored_by_checkpoints() or not self._kept.keeps(operator, args, kwargs):
            return operator(*args, **kwargs)
        place, self._place = self._place, self._place + 1
        result = self._kept.results[place] if place < len(self._kept.results) else None
        if result is None:
            return operator(*args, **kwargs)
        return _taken(result, operator)


def _taken(result: _Result, operator: Any) -> Any:
    """Return a kept result, which is then kept no longer.

    Raises:
        RuntimeError: the recomputation runs other operators than the forward, runs a second time,
            or finds changed values.
    """
    if result.operator is not operator:
        raise RuntimeError(
            f"A recomputed block ran {operator} where its forward ran {result.operator}. Use"
            " recompute=full or none."
        )
    if result.value is None:
        raise RuntimeError(
            "recompute=selective allows one backward pass for each forward. Use recompute=full or"
            " none."
        )
    value, result.value = result.value, None
    if result.stand_in:
        return tree_map_only(_Shape, _Shape.filled, value)
    if versions(value) != result.versions:
        raise RuntimeError(
            f"The result of {operator} was changed in place after the forward of a block with"
            " recompute=selective."
        )
    return value


@dataclass
class _Shape:
    """Shape of a tensor whose values nobody reads, and an empty tensor of its kind. It is filled
    with what is not a number."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    like: Tensor

    def filled(self) -> Tensor:
        return self.like.new_empty_strided(self.size, self.stride).fill_(torch.nan)


def _shape_of(x: Tensor) -> _Shape:
    return _Shape(tuple(x.shape), x.stride(), x.new_empty(0))


def _may_be_any(value: Any) -> bool:
    """Return whether all tensors are plain ones of floating point that have NaN: a stand-in for an
    index could be out of bounds."""
    return all(
        not _is_subclass(x) and x.is_floating_point() and x.dtype.itemsize > 1
        for x in tensors(value)
    )


def _is_subclass(x: Tensor) -> bool:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(x)
