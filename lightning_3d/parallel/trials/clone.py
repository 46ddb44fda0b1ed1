"""Clones of modules for trials: hooks and replaced functions of a clone work on the cloned modules,
and on copies of what they remember."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.torch_fake import is_fake
from lightning_3d.models.reachable import hook_tables, is_of_lightning
from lightning_3d.parallel.trials.values import draw

Memo = dict[int, Any]
"""The memo of `copy.deepcopy`: id of an object -> its copy."""


def clone(module: nn.Module, value_of: Callable[[str, nn.Parameter], Tensor | None]) -> Any:
    """Copy a module with other values of its parameters, in evaluation mode, without dropout. Its
    own weights are neither copied nor read.

    Args:
        module: the module, on meta or not.
        value_of: function of the first name of a parameter in `module` and the parameter. The value
            may have another shape. Where it is None, the clone shares the parameter.
    """
    memo: Memo = {}
    for name, parameter in module.named_parameters():
        value = value_of(name, parameter)
        memo[id(parameter)] = parameter if value is None else _parameter(parameter, value)
    return _without_noise(deep_copy(module, memo).eval())


def _parameter(like: nn.Parameter, value: Tensor) -> nn.Parameter:
    made = nn.Parameter(value, requires_grad=like.requires_grad)
    vars(made).update(vars(like))
    return made


def _without_noise(module: nn.Module) -> nn.Module:
    for child in module.modules():
        # a stage cannot be computed again outside of its turn
        if getattr(child, "gradient_checkpointing", False) is True:
            child.gradient_checkpointing = False  # type: ignore[assignment]
        for owner in (child, getattr(child, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name.lower() and isinstance(value, float):
                    setattr(owner, name, 0.0)
        if "Drop" in type(child).__name__ and isinstance(getattr(child, "p", None), float):
            child.p = 0.0  # type: ignore[assignment]
    return module


def clone_in_float64(module: nn.Module, value_of: Callable[[str, nn.Parameter], Tensor]) -> Any:
    """Copy a module as `clone` does, to compute in float64. Buffers without values get random ones,
    or 1."""
    cloned = clone(module, value_of)
    for child in cloned.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                has_values = not buffer.is_meta and not is_fake(buffer)
                child._buffers[name] = buffer.cpu() if has_values else _filled(name, buffer)
    return in_float64(cloned)


def _filled(name: str, blank: Tensor) -> Tensor:
    if blank.is_floating_point():
        return draw(name, tuple(blank.shape))
    return torch.ones(blank.shape, dtype=blank.dtype, device="cpu")


def in_float64(module: nn.Module) -> Any:
    """Let a clone that shares no parameter compute in float64, in place, without grouped matrix
    products, which do not know it."""
    module._apply(_widened)
    for child in module.modules():
        if (config := vars(child).get("config")) is not None:
            config._experts_implementation = "eager"
    return module


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def deep_copy(module: nn.Module, memo: Memo | None = None) -> Any:
    """Copy `module` deeply; attributes that cannot be copied (locks, open files, results of
    computations) are shared with the copy.

    Modules outside of `module` that hooks refer to, such as the LightningModule, are shared as
    well.
    """
    hooks = {
        id(table): (table, type(table)())
        for child in module.modules()
        for table in hook_tables(child).values()
    }
    given = (memo or {}) | {key: empty for key, (_, empty) in hooks.items()}
    known = dict(given)
    try:
        copied = copy.deepcopy(module, known)
    except Exception:
        known = given | _without_copies(module, given)
        copied = copy.deepcopy(module, known)
    for table, empty in hooks.values():
        empty |= {key: _copy_of_code(hook, known) for key, hook in table.items()}
    for old, new in zip(module.modules(), copied.modules(), strict=True):
        for key, value in vars(old).items():
            if isinstance(value, FunctionType) and value.__closure__:
                vars(new)[key] = _copy_of_code(value, known)
    return copied


def _copy_of_code(value: Any, known: Memo) -> Any:
    """Copy a hook, or what a function refers to. `copy.deepcopy` does not copy functions."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, FunctionType) and value.__closure__:
        return _copy_of_function(value, known)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy_of_code(value.__self__, known))
    if isinstance(value, functools.partial):
        named = {key: _copy_of_code(item, known) for key, item in value.keywords.items()}
        return functools.partial(
            _copy_of_code(value.func, known),
            *(_copy_of_code(item, known) for item in value.args),
            **named,
        )
    if isinstance(value, nn.Module) or is_of_lightning(value):  # outside of what is copied
        return value
    try:
        return copy.deepcopy(value, known)
    except Exception:
        return value


def _copy_of_function(function: FunctionType, known: Memo) -> FunctionType:
    cells = [known.setdefault(id(cell), CellType()) for cell in function.__closure__ or ()]
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    known[id(function)] = copied
    vars(copied).update(vars(function))
    for old, new in zip(function.__closure__ or (), cells, strict=True):
        try:
            content = old.cell_contents
        except ValueError:  # empty
            continue
        new.cell_contents = _copy_of_code(content, known)
    return copied


def _without_copies(module: nn.Module, memo: Memo) -> Memo:
    """Find the attributes that cannot be copied, by id."""
    scratch: Memo = {
        id(value): value for value in (*module.parameters(), *module.buffers(), *module.modules())
    }
    scratch |= memo
    found: Memo = {}
    for child in module.modules():
        for key, value in vars(child).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, scratch)
            except Exception:
                found[id(value)] = value
    return found
