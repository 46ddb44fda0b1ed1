"""All-to-all of rows between ranks that travels while other work runs, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.parallel import gloo_exchange, witness


class Exchange:
    """One all-to-all of rows: the first `sent[0]` rows go to the first rank of the group and so on,
    and the `received` rows of all ranks arrive in their order. It starts when this object is made;
    what runs until `wait` runs while the rows travel.

    One all-to-all forward, one backward with the gradients. The backward starts where the forward
    waited and waits where the forward started, because autograd runs later operations first: the
    backward of what ran in between runs while the gradients travel, too. A group of one rank sends
    nothing.

    Args:
        x: rows (sum of `sent`, ...).
        group: ranks that call this equally often.
        sent: rows for each rank.
        received: rows from each rank.

    Attributes:
        arriving: the rows that come, before they have arrived.
    """

    arriving: Tensor

    def __init__(
        self, x: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        self._travel, self._counts = _Travel(group), (list(sent), list(received))
        self.arriving = _Start.apply(x, self._travel, *self._counts)

    def wait(self) -> Tensor:
        """Return the rows (sum of `received`, ...) when they have arrived. Call it once."""
        return _Wait.apply(self.arriving, self._travel, *self._counts)


def exchange(
    x: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """Exchange rows as `Exchange` does, and wait for them."""
    return Exchange(x, group, sent, received).wait()


class _Travel:
    """The rows, or their gradients, that are under way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._under_way: tuple[dist.Work | None, Tensor, Tensor] | None = None

    def start(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Start to send `x`. Returns the tensor that `wait` returns, before anything has arrived in
        it."""
        x, work = x.contiguous(), None
        result = x.view_as(x)
        if dist.get_world_size(self._group) > 1:
            result = x.new_empty((sum(received), *x.shape[1:]))
            witness.sent("all-to-all", x)
            work = gloo_exchange.start_all_to_all(result, x, received, sent, self._group)
        self._under_way = work, x, result  # x must live until it is sent
        return result

    def wait(self) -> Tensor:
        """Wait for what was started, and return it."""
        assert self._under_way is not None
        work, _, result = self._under_way
        self._under_way = None
        if work is not None:
            work.wait()
            witness.received("all-to-all", result)
        return result


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, travel: _Travel, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.travel = travel
        return travel.start(x, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.travel.wait(), None, None, None  # `gradient` is what `_Wait` sent


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, arriving: Tensor, travel: _Travel, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.travel, ctx.way_back = travel, (received, sent)
        travel.wait()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.travel.start(gradient, *ctx.way_back)
        # autograd wants a gradient of this shape; `_Start` returns the one that has travelled
        return gradient, None, None, None
