"""Removes what makes whole and rewritten models differ although neither is wrong: random numbers, and products in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout, torch.alpha_dropout}
)
_NOISE = {torch.randn_like: torch.zeros_like, torch.rand_like: torch.zeros_like}


class WithoutNoise(TorchFunctionMode):
    """Turns off dropout, and makes noise shaped like a tensor zero, even where a model asks for both in evaluation mode."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and (len(args) > 4 or kwargs.get("dropout_p")):
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs if len(args) > 4 else kwargs | {"dropout_p": 0.0}
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"} if func in _NOISE else kwargs
        return _NOISE.get(func, func)(*args, **kwargs)


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32. After `torch.set_float32_matmul_precision("high")` GPUs round them to TF32, whose 10 bits hide
    faults and differ between a whole product and its shards."""
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
