"""Counts the target tokens of models that compute a loss in their own forward, not through
`loss_function`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.models.parallel_plan import models_in

CountTokens = Callable[[Tensor], None]

_MEANS = (F.cross_entropy, F.nll_loss)


class _CountedMeans(TorchFunctionMode):
    """Reports how many targets each mean of cross-entropies is taken over. A mean over no targets
    is 0, as it has no weight."""

    def __init__(self, count: CountTokens) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _MEANS:
            return func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        target: Tensor = values["target"]
        if (
            values["reduction"] != "mean"
            or values["weight"] is not None
            or target.is_floating_point()
        ):
            return func(*args, **kwargs)
        tokens = (target != values["ignore_index"]).sum()
        self._count(tokens)
        values["reduction"] = "sum"
        total = func(*given.args, **given.kwargs)
        return total / tokens.clamp(min=1).to(total.dtype)


class CountedForward:
    """The forward of a model that is called with `labels=` and computes its loss itself.

    Args:
        forward: forward of the model.
        count: receives the number of target tokens.
    """

    def __init__(self, forward: Callable[..., Any], count: CountTokens) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._count = forward, count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is None:
            return self._forward(*args, **kwargs)
        with _CountedMeans(self._count):
            return self._forward(*args, **kwargs)

    @property
    def inner(self) -> Callable[..., Any]:
        """Forward of the model."""
        return self._forward


def count_own_losses(root: nn.Module, count: CountTokens) -> None:
    """Count the targets of every Transformers model in `root` whose loss does not come through a
    loss function that counts.

    Args:
        root: the user's module.
        count: receives the number of target tokens.
    """
    for model in models_in(root).values():
        if _counts_nothing(model):
            current: Any = model.forward
            model.forward = CountedForward(
                current.inner if isinstance(current, CountedForward) else current, count
            )


def _counts_nothing(model: nn.Module) -> bool:
    """Check whether a model computes a loss from `labels` in its own forward, or by a loss function
    of Transformers for other tasks.

    A loss function of the user's own is weighted by rows, and `TokenMeanLoss` counts. The usual one
    is replaced by it wherever there is a head, so it is never called where it still is there.
    """
    forwards = _own_forwards(model)
    if not any("labels" in inspect.signature(forward).parameters for forward in forwards):
        return False
    if not any("loss_function" in forward.__code__.co_names for forward in forwards):
        return True
    used: Any = model.loss_function
    used = getattr(used, "inner", used)
    return (
        getattr(used, "__module__", "").startswith("transformers.")
        and getattr(used, "__name__", "") != "ForCausalLMLoss"
    )


def _own_forwards(model: nn.Module) -> list[FunctionType]:
    """Return the forwards of a model's classes, without decorators and without those that this
    package puts in front (`specialize`)."""
    found = [
        inspect.unwrap(vars(kind)["forward"])
        for kind in type(model).__mro__
        if "forward" in vars(kind)
    ]
    return [
        one
        for one in found
        if isinstance(one, FunctionType) and not one.__module__.startswith("lightning_3d.")
    ]
