"""Logits that are not computed before they are read, and the loss from a few rows of them at a
time.

The logits of a micro-batch are the largest tensor of a step: tokens times vocabulary, in the
model's type, in float32, and as gradient. A loss that is a sum over tokens needs only some rows at
once. For each part of the rows this computes the logits, replaces them piece by piece by their
gradient, and adds what follows from it to the gradients of hidden states and weight, so that the
backward only multiplies them. The work is that of the usual loss. (Liger Kernel, Hsu et al.,
arXiv:2410.10989, section 3.2, does the same with one kernel in place of the pieces.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_3d.errors import PlanError
from lightning_3d.layout.loss_chunks import LossRows, count_chunks, rows_of_parts
from lightning_3d.parallel.partial_tensors import (
    ALIKE,
    OF_THE_PART,
    OF_THE_WHOLE,
    is_scalar_operation,
    whole_arguments,
)
from lightning_3d.parallel.specialize import specialize

LossOfTokens = Callable[[Tensor, Tensor], Tensor]
"""Function from logits (tokens, vocabulary) and labels (tokens,) to the loss of each token,
(tokens,)."""

_PIECE = 2**24  # elements that are multiplied, or added up, in a wider type at once
_REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_OF_THE_RESULT = {getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf")}


class DeferredLogits(Tensor):
    """The product of hidden states and the weight of an output head, which reports its shape and
    type.

    Operations that treat every entry alike (casting, scaling, a soft cap) are deferred, too.
    Anything else, also a change in place, computes the product and keeps it: the loss is then
    computed from it. Gradients flow if they did when the head ran.

    Attributes:
        hidden: (..., hidden).
        weight, bias: of the head: (vocabulary, hidden) and (vocabulary,) or None.
        rows: that are computed together.
        operations: what follows the product.
        trains: whether gradients flow.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: LossRows
    operations: tuple[Callable[[Tensor], Tensor], ...]
    trains: bool
    _full: Tensor | None

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: LossRows,
        operations: tuple[Callable[[Tensor], Tensor], ...] = (),
        dtype: torch.dtype | None = None,
    ) -> DeferredLogits:
        # On meta: what gets past __torch_function__ fails loudly.
        shape = (*hidden.shape[:-1], weight.shape[0])
        return torch.empty(shape, dtype=dtype or _product_type(hidden), device="meta").as_subclass(
            cls
        )

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: LossRows,
        operations: tuple[Callable[[Tensor], Tensor], ...] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.rows, self.operations, self._full = (
            hidden,
            weight,
            bias,
            rows,
            operations,
            None,
        )
        self.trains = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
        )
        if _kept:
            _kept[-1].append(weakref.ref(self))

    def full(self) -> Tensor:
        """The logits as a plain tensor, computed at the first call."""
        trains = self.trains and torch.is_grad_enabled()
        if self._full is None or (trains and not self._full.requires_grad):
            with torch.set_grad_enabled(trains):
                self._full = _applied(
                    F.linear(self.hidden, self.weight, self.bias), self.operations
                )
        return self._full

    @property
    def was_read(self) -> bool:
        """True once something has seen the logits themselves, and may have changed them through a
        view."""
        return self._full is not None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else None
        if isinstance(logits, DeferredLogits):
            if func in OF_THE_WHOLE:
                return super().__torch_function__(func, types, args, kwargs)
            if func == _REQUIRES_GRAD:
                return logits.trains
            if func in OF_THE_PART and func not in _OF_THE_RESULT:
                return func(logits.hidden, *args[1:], **kwargs)
            deferrable = (
                func in ALIKE and func not in (Tensor.detach, torch.detach) and not logits.was_read
            )
            if deferrable and is_scalar_operation(args[1:], kwargs):
                return logits._followed_by(func, args[1:], kwargs)
        return func(
            *whole_arguments(args, DeferredLogits), **whole_arguments(kwargs, DeferredLogits)
        )

    def _followed_by(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DeferredLogits:
        numbers = [1.0 if isinstance(value, Tensor) else value for value in args]
        dtype = func(torch.empty((), dtype=self.dtype, device="meta"), *numbers, **kwargs).dtype
        operation = partial(_call, func, args, kwargs)
        made = DeferredLogits(
            self.hidden, self.weight, self.bias, self.rows, (*self.operations, operation), dtype
        )
        made.trains = self.trains and torch.is_grad_enabled()
        return made


def _call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
) -> Any:
    return func(value, *args, **kwargs)


def _applied(value: Tensor, operations: tuple[Callable[[Tensor], Tensor], ...]) -> Tensor:
    for operation in operations:
        value = operation(value)
    return value


def _product_type(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return (
        torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
        else hidden.dtype
    )


def computed(logits: Tensor) -> Tensor:
    """Return logits as a plain tensor, for functions of autograd, which do not see what a tensor of
    a subclass defers."""
    return logits.full() if isinstance(logits, DeferredLogits) else logits


_kept: list[list[weakref.ref[DeferredLogits]]] = []


@contextmanager
def computing_what_is_kept() -> Iterator[None]:
    """Compute, at the end of the body, the deferred logits of the body that something still holds:
    later the weight may have changed, or be on other ranks."""
    _kept.append([])
    try:
        yield
        for kept in (reference() for reference in _kept[-1]):
            if kept is not None:
                kept.full()
    finally:
        _kept.pop()


def deferred(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunks: int | str,
    *,
    columns: int | None = None,
) -> Tensor:
    """Return the logits of an output head: deferred where their loss is to be computed in more than
    one chunk.

    Args:
        chunks: see `ModelOptions.loss_chunks`.
        columns: logits of a token on the rank that has most, so that all ranks compute as many
            parts. None: as many as here.
    """
    tokens, columns, width = (
        hidden.numel() // hidden.shape[-1],
        columns or weight.shape[0],
        _product_type(hidden).itemsize,
    )
    count = count_chunks(chunks, tokens, columns, hidden.shape[-1], width)
    if count <= 1:
        return F.linear(hidden, weight, bias)
    return DeferredLogits(
        hidden,
        weight,
        bias,
        rows_of_parts(count, tokens, columns, width, on_cpu=hidden.device.type == "cpu"),
    )


class DeferringHead:
    """Mixin for an output head of the whole vocabulary."""

    loss_chunks: int | str = 1

    def forward(self: Any, input: Tensor) -> Tensor:
        return deferred(input, self.weight, self.bias, self.loss_chunks)


def defer_heads(module: nn.Module, chunks: int | str) -> bool:
    """Let the output heads of all models in `module` defer their logits, in place.

    One that is sharded by vocabulary defers by itself. Heads of other kinds than `nn.Linear` stay
    as they are.

    Returns:
        Whether all heads that were found do what `chunks` says, and there is one.
    """
    models: list[Any] = [
        child for child in module.modules() if hasattr(type(child), "get_output_embeddings")
    ]
    heads = [model.get_output_embeddings() for model in models]
    done = [
        _defer(head, chunks)
        for head in {id(head): head for head in heads if isinstance(head, nn.Module)}.values()
    ]
    return bool(done) and all(done)


def _defer(head: Any, chunks: int | str) -> bool:
    if hasattr(type(head), "loss_chunks"):
        head.loss_chunks = chunks
    elif chunks != 1:
        if type(head).forward is not nn.Linear.forward:
            return False
        specialize(head, DeferringHead, loss_chunks=chunks)
    return True


def summed_loss(logits: DeferredLogits, labels: Tensor, loss_of_tokens: LossOfTokens) -> Tensor:
    """Sum the losses of all tokens, chunk by chunk.

    Args:
        logits: (..., vocabulary).
        labels: (...).
        loss_of_tokens: the loss of each token from the logits of some.

    Returns:
        Shape (), in the type of the losses. Gradients of `hidden`, `weight` and `bias` are computed
        here.
    """
    hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    part = _Part(
        loss_of_tokens, logits.operations, logits.rows, logits.trains and torch.is_grad_enabled()
    )
    with torch.set_grad_enabled(part.with_gradients):
        return _SummedLoss.apply(hidden, logits.weight, logits.bias, labels.reshape(-1), part)


@dataclass(frozen=True)
class _Part:
    """The loss of the rows of one product."""

    loss_of_tokens: LossOfTokens
    operations: tuple[Callable[[Tensor], Tensor], ...]
    rows: LossRows
    with_gradients: bool

    def loss_and_gradient(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum of the losses of some rows of hidden states, and the gradient of their
        product with the weight."""
        product = F.linear(hidden, weight, bias)
        pieces = zip(product.split(self.rows.piece), labels.split(self.rows.piece), strict=True)
        loss = torch.stack([self._replaced(*piece) for piece in pieces]).sum()
        return loss, product if self.with_gradients else None

    def _replaced(self, product: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of some rows, and write its gradient over their product."""
        if not self.with_gradients:
            return self.loss_of_tokens(_applied(product, self.operations), labels).sum()
        with torch.enable_grad():
            source = _Source.apply(product, product.new_empty(0, requires_grad=True))
            edge = get_gradient_edge(source)
            loss = self.loss_of_tokens(_applied(source, self.operations), labels).sum()
            gradient = torch.autograd.grad(loss, edge)[0]
        product.copy_(gradient)
        return loss.detach()


class _Source(torch.autograd.Function):
    """Begins a graph at `value`, which the graph does not hold. Autograd stops at this node, so it
    has no backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, part: _Part
    ) -> Tensor:
        wanted = [part.with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = (
            _SumOfProducts(weight, one=len(hidden) <= part.rows.product) if wanted[1] else None
        )
        # A sum of many rows, so not in 16 bits.
        of_bias = (
            torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
            if bias is not None and wanted[2]
            else None
        )
        losses = []
        for start in range(0, len(hidden), part.rows.product):
            here = slice(start, start + part.rows.product)
            loss, gradient = part.loss_and_gradient(hidden[here], weight, bias, labels[here])
            losses.append(loss)
            if gradient is None:
                continue
            if of_hidden is not None:
                of_hidden[here] = gradient @ weight.to(gradient.dtype)
            if of_weight is not None:
                of_weight.add(gradient.mT, hidden[here].to(gradient.dtype))
            if of_bias is not None:
                of_bias += gradient.sum(0)
            del gradient  # before the logits of the next part are computed
        ctx.save_for_backward(
            of_hidden,
            (
                None
                if of_weight is None or of_weight.total is None
                else of_weight.total.to(weight.dtype)
            ),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
        )
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True
            raise PlanError(
                "loss_chunks computes gradients that have no derivatives themselves. Use"
                " loss_chunks=1."
            )
        # Not in place: schedules with a split backward come twice, for hidden states and for
        # weights.
        of_inputs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return (
            *(
                _scaled(saved, gradient) if saved is not None and needed else None
                for saved, needed in of_inputs
            ),
            None,
            None,
        )


class _SumOfProducts:
    """The gradient of a weight, added up from products of the gradients of logits with hidden
    states.

    Args:
        weight: (rows, columns).
        one: there is only one product, so that no sum is rounded: the total has the weight's type.
            Otherwise it is in float32 or wider.

    Attributes:
        total: like the weight; None before the first product.
    """

    def __init__(self, weight: Tensor, *, one: bool) -> None:
        self.total: Tensor | None = None
        self._weight, self._dtype = (
            weight,
            weight.dtype if one else torch.promote_types(weight.dtype, torch.float32),
        )

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add a product, in one pass over the total where it has the type of the factors, and
        otherwise a few rows at a time."""
        first = self.total is None
        total = self.total = (
            torch.empty_like(self._weight, dtype=self._dtype) if self.total is None else self.total
        )
        if total.dtype == left.dtype:
            (
                torch.mm(left, right, out=total)
                if first
                else torch.addmm(total, left, right, out=total)
            )
            return
        size = max(1, _PIECE // total.shape[-1])
        for rows, of_rows in zip(total.split(size), left.split(size), strict=True):
            rows.copy_(of_rows @ right) if first else rows.add_(of_rows @ right)


def _scaled(saved: Tensor, factor: Tensor) -> Tensor:
    """Multiply by a number that is not rounded to the type of `saved`, piece by piece."""
    if saved.dtype == factor.dtype:
        return saved * factor
    scaled = torch.empty_like(saved)
    rows = max(1, _PIECE // max(1, saved[0].numel()))
    for start in range(0, len(saved), rows):
        scaled[start : start + rows] = saved[start : start + rows].to(factor.dtype) * factor
    return scaled
