"""Helpers for tensor subclasses that report the full shape but hold one shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def whole_arguments(value: Any, kind: type) -> Any:
    """Replace every tensor of this kind in the arguments by the full one (`full()`)."""
    if isinstance(value, kind):
        return value.full()  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)):
        items = [whole_arguments(item, kind) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: whole_arguments(item, kind) for key, item in value.items()}
    return value


def _getter(name: str) -> Callable[..., Any]:
    return getattr(Tensor, name).__get__


OF_THE_WHOLE = {
    *map(
        _getter,
        ("shape", "ndim", "dtype", "layout", "is_sparse", "is_quantized", "itemsize", "nbytes"),
    ),
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.__len__,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
}
"""Attributes that a tensor on meta with the full shape and type answers for the whole tensor."""

OF_THE_PART = {
    *map(
        _getter,
        (
            "device",
            "requires_grad",
            "grad_fn",
            "is_leaf",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_xla",
            "is_mps",
        ),
    ),
    Tensor.get_device,
    Tensor.is_inference,
    torch.is_inference,
}
"""Attributes that this rank's part answers for the whole tensor."""


def is_scalar_operation(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if the operation treats all entries alike, and no trained number needs the gradient of
    all of them."""
    values = [*args, *kwargs.values()]
    if any(
        isinstance(value, Tensor) and (value.ndim > 0 or value.requires_grad) for value in values
    ):
        return False
    return all(
        isinstance(value, (int, float, bool, str, torch.dtype, type(None), Tensor))
        for value in values
    )


ALIKE = {
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.contiguous,
    Tensor.detach,
    Tensor.clone,
    Tensor.mul,
    Tensor.div,
    Tensor.true_divide,
    Tensor.add,
    Tensor.sub,
    Tensor.neg,
    Tensor.tanh,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.__truediv__,
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.__sub__,
    Tensor.__neg__,
    torch.mul,
    torch.div,
    torch.true_divide,
    torch.add,
    torch.sub,
    torch.neg,
    torch.tanh,
    torch.detach,
    torch.clone,
}
"""Treat every entry alike when their other arguments are scalars."""


def changes_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Recognized by PyTorch's naming: `masked_fill_`, `__setitem__`, `__iadd__`, the setter of a
    property, `out=`."""
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name in _IN_PLACE_OPERATORS or kwargs.get("out") is not None


def with_target_first(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a function with the tensor that it changes as the first: those of
    `torch.nn.init` come with its name."""
    kwargs = dict(kwargs or {})
    return (args, kwargs) if args or "tensor" not in kwargs else ((kwargs.pop("tensor"),), kwargs)


_IN_PLACE_OPERATORS = {"__setitem__", "__set__"} | {
    f"__i{name}__"
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
}
