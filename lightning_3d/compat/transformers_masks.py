"""Positions for the masks of Transformers models that make them without positions.

Transformers' `create_causal_mask` and its relatives keep the documents of a packed sample apart if
they get `position_ids`. Some models, such as GPT-OSS, do not pass them on. The functions are
public, but a model finds them among the globals of its file, and that is where they are wrapped.
Tried with Transformers 5.17 and 5.24.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from threading import local
from typing import Any

from torch import Tensor, nn

MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
"""Functions that make masks, of models that look back only."""


class _Calls(local):
    """Positions of the running calls of models, in this thread; the last is the innermost."""

    def __init__(self) -> None:
        self.positions: list[Tensor | None] = []


_calls = _Calls()


def give_positions_to_masks(model: nn.Module) -> None:
    """Let every mask of a model know the positions with which the model is called. In place; a
    second call changes nothing.

    Masks of a model that passes its positions on, and those of other models, stay as they are.

    Args:
        model: a model of Transformers, or a module that contains some.
    """
    for child in model.modules():
        if (
            found := _files_with_makers(type(child))
        ) and _remember not in child._forward_pre_hooks.values():
            for file in found:
                _wrap_makers(file)
            child.register_forward_pre_hook(_remember, with_kwargs=True)
            child.register_forward_hook(_forget, always_call=True)


def _files_with_makers(kind: type) -> list[dict[str, Any]]:
    """Globals of the files of a model's classes that import functions of `MAKERS`."""
    from transformers import PreTrainedModel

    if not issubclass(kind, PreTrainedModel):
        return []
    files = (
        vars(sys.modules[parent.__module__])
        for parent in kind.__mro__
        if parent.__module__ in sys.modules
    )
    return [file for file in files if any(name in file for name in MAKERS)]


def _wrap_makers(file: dict[str, Any]) -> None:
    for name in MAKERS:
        if (maker := file.get(name)) is not None and not hasattr(maker, "gives_positions"):
            file[name] = _with_positions(maker)


def _with_positions(maker: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(maker)
    def make(*args: Any, **kwargs: Any) -> Any:
        if (
            _calls.positions
            and (positions := _calls.positions[-1]) is not None
            and kwargs.get("position_ids") is None
        ):
            kwargs["position_ids"] = positions
        return maker(*args, **kwargs)

    make.gives_positions = True  # type: ignore[attr-defined]
    return make


def _remember(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _calls.positions.append(kwargs.get("position_ids"))


def _forget(model: nn.Module, *args: Any) -> None:
    if _calls.positions:
        _calls.positions.pop()
