"""The attention function that a module of a Transformers model calls, and whether it is one of
Transformers' own.

Modelling files look the function up in a global named `ALL_ATTENTION_FUNCTIONS`, by the name in
`config._attn_implementation`; under "eager" they call their global `eager_attention_forward`. Masks
come from `ALL_MASK_ATTENTION_FUNCTIONS`, under the same name. None of this is public. Tried with
Transformers 5.17 to 5.24.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import nn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"


def uses(module: nn.Module, *names: str) -> bool:
    """Return whether the forward of a module names one of these functions or globals."""
    code = getattr(_forward(module), "__code__", None)
    return code is not None and any(name in code.co_names for name in names)


def own_attention(module: nn.Module) -> str:
    """Say what a module that uses the interface does otherwise than causal attention by a function
    of Transformers; empty for nothing.

    Functions are known by the file of their code: wrappers that copy a name (`functools.wraps`) and
    registrations under a known name, such as "sdpa", are the user's.
    """
    if getattr(module, "is_causal", True) is False:
        return f"{type(module).__name__}.is_causal is False"
    implementation = (
        getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"
    )
    names: dict[str, Any] = getattr(_forward(module), "__globals__", {})
    function = (
        names[INTERFACE].get(implementation, names.get(_EAGER)) if INTERFACE in names else None
    )
    if function is not None and not _is_of_transformers(function):
        return f"attn_implementation={implementation} is the function {_name(function)}"
    if (
        function is not None
        and implementation == "sdpa"
        and not inspect.isbuiltin(F.scaled_dot_product_attention)
    ):
        return (
            "torch's scaled_dot_product_attention was replaced by"
            f" {_name(F.scaled_dot_product_attention)}"
        )
    mask = _mask_function(implementation)
    if mask is not None and not _is_of_transformers(mask):
        return f"masks for attn_implementation={implementation} come from {_name(mask)}"
    return ""


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _mask_function(implementation: str) -> Callable[..., Any] | None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)


def _is_of_transformers(function: Any) -> bool:
    """Return whether the code of a function is in the package of Transformers, or in this one,
    which replaces its functions."""
    import transformers

    file = Path(getattr(getattr(function, "__code__", None), "co_filename", ""))
    return any(
        file.is_relative_to(root)
        for root in (Path(transformers.__file__).parent, Path(__file__).parent.parent)
    )


def _name(function: Any) -> str:
    inside = function.func if isinstance(function, partial) else function
    return str(getattr(inside, "__qualname__", type(inside).__name__))
