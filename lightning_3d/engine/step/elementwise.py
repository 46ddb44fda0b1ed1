"""Functions of torch that treat each element by itself, so that they give the same on a shard as on
the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_NAMES = frozenset(
    {
        "abs",
        "add",
        "addcdiv",
        "addcmul",
        "bfloat16",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clip",
        "clone",
        "contiguous",
        "copy",
        "cpu",
        "cuda",
        "data",
        "detach",
        "div",
        "divide",
        "double",
        "eq",
        "exp",
        "fill",
        "float",
        "ge",
        "gt",
        "half",
        "isfinite",
        "isinf",
        "isnan",
        "le",
        "lerp",
        "log",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mul",
        "multiply",
        "nan_to_num",
        "ne",
        "neg",
        "negative",
        "ones_like",
        "pow",
        "reciprocal",
        "relu",
        "requires_grad",
        "rsqrt",
        "sgn",
        "sign",
        "sqrt",
        "square",
        "sub",
        "subtract",
        "tanh",
        "to",
        "true_divide",
        "truediv",
        "type",
        "where",
        "zero",
        "zeros_like",
    }
)

RANDOM = frozenset(
    {
        "bernoulli",
        "cauchy",
        "dropout",
        "exponential",
        "geometric",
        "kaiming_uniform",
        "log_normal",
        "multinomial",
        "normal",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "randperm",
        "uniform",
    }
)
"""Functions that draw random numbers."""


def base_name(func: Any) -> str:
    """Name of an operation without what marks its forms: in place, reversed, of lists, of a
    property."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    if name.startswith("__"):
        name = name.strip("_")
        return name[1:] if name[1:] in _NAMES and name[0] in "ir" else name
    return name.removeprefix("_foreach_").rstrip("_")


def is_elementwise(
    func: Any, of: Tensor | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a function treats each element of `of` alike, or together with the same element of
    its other arguments."""
    return base_name(func) in _NAMES and all(
        _fits(value, of) for value in (*args, *kwargs.values())
    )


_REDUCTIONS = frozenset(
    {
        "amax",
        "amin",
        "any",
        "cumsum",
        "logsumexp",
        "mean",
        "norm",
        "normalize",
        "softmax",
        "std",
        "sum",
        "var",
        "vector_norm",
    }
)


def treats_rows_alike(
    func: Any, of: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a function treats each entry along the first dimension of `of` alike: element by
    element, or along other dimensions."""
    name = base_name(func)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if name in _NAMES:
        return all(
            value.ndim == 0 or (value.ndim == of.ndim and value.shape[0] in (1, of.shape[0]))
            for value in tensors
        )
    dims = kwargs.get(
        "dim", next((value for value in args if isinstance(value, (int, tuple, list))), None)
    )
    dims = [dims] if isinstance(dims, int) else dims
    return (
        name in _REDUCTIONS
        and bool(dims)
        and all(dim % of.ndim != 0 for dim in dims or ())
        and of.ndim > 1
    )


def _fits(value: Any, of: Tensor | None) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_fits(item, of) for item in value)
    return (
        not isinstance(value, Tensor)
        or value.ndim == 0
        or (of is not None and value.shape == of.shape)
    )
