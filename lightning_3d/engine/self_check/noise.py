"""Removes what makes whole and rewritten models differ although neither is wrong: random numbers,
and products in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DROPOUTS = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.alpha_dropout,
    }
)
_HIGH = 0.75
"""What a number drawn from 0 .. 1 is."""


def _normal(self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return self.fill_(mean + std)


def _uniform(self: Tensor, low: float = 0.0, high: float = 1.0, **named: float) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return self.fill_(low + _HIGH * (high - low))


def _bernoulli(self: Tensor, p: Any = 0.5) -> Tensor:
    return self.copy_(p >= 0.5) if isinstance(p, Tensor) else self.fill_(p >= 0.5)


_NOISE: dict[Any, Callable[..., Any]] = {
    torch.randn_like: torch.ones_like,
    torch.rand_like: lambda *args, **kwargs: torch.ones_like(*args, **kwargs) * _HIGH,
}
_DRAWS: dict[Any, Callable[..., Any]] = {
    torch.randn: torch.ones,
    torch.rand: lambda *args, **kwargs: torch.ones(*args, **kwargs) * _HIGH,
    torch.bernoulli: lambda input: (input >= 0.5).to(input.dtype),
    Tensor.normal_: _normal,
    Tensor.uniform_: _uniform,
    Tensor.bernoulli_: _bernoulli,
}
"""Functions that draw with the process's generator, unless one is given: the values of a check's
weights are drawn with their own."""


class WithoutNoise(TorchFunctionMode):
    """Turns off dropout, and makes noise the same number everywhere, even where a model asks for
    both in evaluation mode.

    The number is not 0, so that a factor which depends on the length of a sequence shows.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and (len(args) > 4 or kwargs.get("dropout_p")):
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs if len(args) > 4 else kwargs | {"dropout_p": 0.0}
        kwargs = (
            {key: value for key, value in kwargs.items() if key != "generator"}
            if func in _NOISE
            else kwargs
        )
        if func in _DRAWS and kwargs.get("generator") is None:
            return _DRAWS[func](
                *args, **{key: value for key, value in kwargs.items() if key != "generator"}
            )
        return _NOISE.get(func, func)(*args, **kwargs)


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32. After `torch.set_float32_matmul_precision("high")` GPUs
    round them to TF32, whose 10 bits hide faults and differ between a whole product and its
    shards."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    set_before = [backend.fp32_precision for backend in backends]
    try:
        named_before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the settings of backends do not have a common name
        named_before = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if named_before is not None:
            torch.set_float32_matmul_precision(named_before)
        for backend, before in zip(backends, set_before, strict=True):
            backend.fp32_precision = before
