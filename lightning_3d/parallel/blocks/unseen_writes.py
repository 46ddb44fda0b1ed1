"""Kept results into which code writes that the dispatcher does not see, without a new version of
the tensor.

Many rotary kernels write into the results of products in place and do not call `mark_dirty`. A
recomputation that takes such a result would apply the kernel a second time. So the first forward of
a block compares the bits of each result at its end with those that were computed, which the host
waits for. The result of a line of code that was written into is not kept: its operator runs again,
as it does where autograd sees the write. Later forwards compare nothing. If nothing was found, they
do not even look at lines of code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.compat.torch import kept_collectives
from lightning_3d.errors import listed
from lightning_3d.parallel.blocks.seen_memory import storages, tensors

Line = tuple[str, int]
Site = tuple[Any, tuple[Line, ...]]
"""An operator, and the lines of code that lead to it from the block's forward, innermost first."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
_CHECKPOINT = str(Path(_TORCH, "utils", "checkpoint.py"))
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass
class UnseenWrites:
    """Lines of code of one block whose results may be kept, or not.

    A result without a bit that is set proves nothing, because a rotation of zeros is zero. It is
    not kept, and the forwards 2, 4, 8, ... compare again until it proves something.

    Attributes:
        written: results into which was written.
        unchanged: results that were compared and had not changed.
        unproven: other results.
        forwards: number of forwards that began.
        compared: whether a forward has compared results.
    """

    written: set[Site] = field(default_factory=set)
    unchanged: set[Site] = field(default_factory=set)
    unproven: set[Site] = field(default_factory=set)
    forwards: int = 0
    compared: bool = False

    def watch(self) -> Watch:
        """Begin a forward."""
        self.forwards += 1
        undecided = bool(self.unproven) or not self.compared
        return Watch(self, compares=undecided and self.forwards & (self.forwards - 1) == 0)

    @property
    def all_may_be_kept(self) -> bool:
        """Whether no result needs to be looked at."""
        return self.compared and not self.written and not self.unproven

    def learn(self, found: dict[bool | None, set[Site]]) -> set[Site]:
        """Take what a forward found: what was written into, what was not, and what proves nothing.
        Returns what is new of the first."""
        new = found[True] - self.written
        self.written |= new
        self.unchanged = (self.unchanged | found[False]) - self.written
        self.unproven = (self.unproven | found[None]) - self.written - self.unchanged
        self.compared = True
        return new


@dataclass
class _Made:
    """A result, and sums of its bits and the versions of its tensors when it was made."""

    site: Site
    value: Any
    sums: Tensor
    versions: list[tuple[int, int]]


class Watch:
    """Watch over the results of one forward.

    Args:
        known: lines of code of this block.
        compares: whether this forward compares its results.
    """

    def __init__(self, known: UnseenWrites, *, compares: bool) -> None:
        self._known, self._compares = known, compares
        self._made: list[_Made] = []
        self._refused: frozenset[int] = frozenset()

    @property
    def found(self) -> bool:
        """Whether this block has code that writes unseen."""
        return bool(self._known.written)

    def allows(self, operator: Any, value: Any) -> bool:
        """Return whether what an operator has just returned may be kept, as far as is known."""
        known = self._known
        if known.all_may_be_kept or not _has_values(operator, value):
            return True
        site = (operator, _lines())
        if self._compares:
            self._made.append(_Made(site, value, _sums(value), versions(value)))
        elif site not in known.unchanged | known.written:
            known.unproven.add(site)
        allowed = site not in known.written and (
            self._compares or site in known.unchanged or operator is _WAIT
        )
        if not allowed:
            self._refused |= storages(value)
        return allowed

    @torch.no_grad()
    def changed(self, overwritten: frozenset[int]) -> frozenset[int]:
        """Compare, at the end of the forward. Returns the memory of results that cannot be kept.

        Args:
            overwritten: memory into which operators were seen to write.
        """
        if not self._made:
            return self._refused
        kinds = [(one, _is_changed(one, overwritten)) for one in self._made]
        self._made = []
        written = storages([one.value for one, kind in kinds if kind])
        found: dict[bool | None, set[Site]] = {True: set(), False: set(), None: set()}
        for one, kind in kinds:
            found[kind if written.isdisjoint(storages(one.value)) else True].add(one.site)
        new = self._known.learn(found)
        if new:
            _warn(new)
        kept = self._known.unchanged
        return self._refused | storages([one.value for one, _ in kinds if one.site not in kept])


def _is_changed(made: _Made, overwritten: frozenset[int]) -> bool | None:
    """Return whether a result was written into unseen; None if it proves nothing.

    New versions and operators that write are seen in each forward. Ranks must agree on repeating a
    message, so that the zeros of one rank do not count there.
    """
    if versions(made.value) != made.versions or not overwritten.isdisjoint(storages(made.value)):
        return False
    if not torch.equal(made.sums, _sums(made.value)):
        return True
    return False if made.site[0] is _WAIT or bool(made.sums.any()) else None


def _has_values(operator: Any, value: Any) -> bool:
    """Return whether results can be compared: messages that are on their way and tensors without
    values cannot."""
    if operator is not _WAIT and operator in kept_collectives():
        return False
    return all(
        type(x) is Tensor and not x.is_meta and x.layout is torch.strided for x in tensors(value)
    )


def _sums(value: Any) -> Tensor:
    """Sums of the bits of tensors along their last dimension and along the others. They need no
    copy of the tensors."""
    sums: list[Tensor] = []
    for x in tensors(value):
        real = torch.view_as_real(x) if x.is_complex() else x
        bits = torch.atleast_1d(real.view(_BITS[real.dtype.itemsize]))
        sums += [
            bits.sum(-1).flatten(),
            bits.sum(tuple(range(bits.ndim - 1))).flatten() if bits.ndim > 1 else bits.flatten(),
        ]
    return torch.cat(sums)


def versions(value: Any) -> list[tuple[int, int]]:
    """Return what changes when autograd sees a write into tensors, or their memory is freed."""
    return [(x._version, x.untyped_storage().nbytes()) for x in tensors(value)]


def _lines() -> tuple[Line, ...]:
    """Return the lines outside of torch that the block's forward is executing. (Lines of torch
    depend on hooks.)"""
    lines: list[Line] = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        if not frame.f_code.co_filename.startswith(_TORCH):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


def _warn(sites: Iterable[Site]) -> None:
    places = {
        _place(operator, [line for line in lines if not line[0].startswith(_PACKAGE)])
        for operator, lines in sites
    }
    rank_zero_warn(
        "recompute=selective: code that autograd does not see, such as a rotary kernel, writes in"
        f" place into {listed(sorted(places))}. So these results are not kept, but computed again"
        " in the backward. Gradients are right, and training is a little slower."
    )


def _place(operator: Any, lines: list[Line]) -> str:
    where = f" ({Path(lines[0][0]).name}:{lines[0][1]})" if lines else ""
    return f"the result of {operator}{where}"
