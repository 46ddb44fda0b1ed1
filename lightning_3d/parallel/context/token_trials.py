"""Trials that show whether a module treats every token of a sequence separately.

A module that does can work on this rank's part of the tokens. To find out, a copy of it runs on a
few random tokens with random weights, once more with each of some tokens changed, and once with the
tokens in another order, in float64 on the CPU: no other token's result may change, and results
change places as the tokens do. No rank communicates, the model may be on meta, and large matrices
take no memory (`few_rows`). A module with a capacity drops tokens only where there are many, so it
counts as one that mixes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.torch import real_values
from lightning_3d.models.code_description import code_and_sizes
from lightning_3d.parallel.context.few_rows import FewRows, random_values
from lightning_3d.parallel.module_copy import deep_copy
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.undone import undone

_TOKENS = 7  # a size that nothing else in a model has
_CHANGED = (0, 3, 6)
_ORDER = (5, 0, 3, 6, 1, 4, 2)
_BY_TOKEN = (nn.Linear, nn.LayerNorm, nn.Dropout)
_SAME = 1e-6  # relative; some models compute parts in float32


class TokenTrials:
    """Finds the modules of blocks that mix tokens; each kind of module runs once.

    Args:
        width: size of the hidden states.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._known: dict[Any, bool] = {}

    def mixing(self, block: nn.Module) -> Iterator[nn.Module]:
        """Yield the children of a block that are not known to treat every token separately, with or
        without parameters."""
        for child in block.children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                yield from self.mixing(child)
            elif not self.is_separate(child):
                yield child

    def is_separate(self, module: nn.Module) -> bool:
        """Return whether a module was seen to treat every token separately; False where it cannot
        run alone."""
        if type(module) in _BY_TOKEN:
            return True
        key = code_and_sizes(module)
        if key is None or key not in self._known:
            with undone(module), real_values(), torch.device("cpu"), torch.no_grad():
                self._known[key] = _is_separate(module, self._width)
        return self._known[key]


def _is_separate(module: nn.Module, width: int) -> bool:
    if any("capacity" in name for child in module.modules() for name in vars(child)):
        return False
    try:
        clone = _clone(module)
        generator = torch.Generator().manual_seed(0)
        inputs = _inputs(module, width, generator)
        whole = _results(clone, inputs)
        for token in _CHANGED:
            if not _changes_only(
                token, whole, _results(clone, [_with_another(x, token, generator) for x in inputs])
            ):
                return False
        if not _follows(
            whole,
            _results(clone, [x.index_select(_tokens_of(x), torch.tensor(_ORDER)) for x in inputs]),
        ):
            return False
    except Exception:  # it has other arguments, or cannot run alone
        return False
    return True


def _inputs(module: nn.Module, width: int, generator: torch.Generator) -> list[Tensor]:
    """Values for the arguments without a default: hidden states (1, tokens, width).

    Experts of Transformers, which a router calls, get (tokens, width), and two experts for each
    token with their weights.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind in kinds
    ]
    if names == ["hidden_states", "top_k_index", "top_k_weights"]:
        chosen = torch.randint(int(module.num_experts), (_TOKENS, 2), generator=generator)  # type: ignore[arg-type]
        return [_normal((_TOKENS, width), generator), chosen, _normal((_TOKENS, 2), generator)]
    return [_normal((1, _TOKENS, width), generator) for _ in names]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _tokens_of(value: Tensor) -> int:
    return value.shape.index(_TOKENS)


def _with_another(value: Tensor, token: int, generator: torch.Generator) -> Tensor:
    """Copy an input with other values of one token; whole numbers stay."""
    if not value.is_floating_point():
        return value
    dim = _tokens_of(value)
    change = _normal((*value.shape[:dim], 1, *value.shape[dim + 1 :]), generator)
    return value.index_add(dim, torch.tensor([token]), change)


def _results(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Floating-point tensors that the module returns, by the forward of its class, without hooks,
    which belong to the model."""
    with FewRows():
        return [
            value
            for value in tensors_of(type(module).forward(module, *inputs))
            if value.is_floating_point()
        ]


def _changes_only(token: int, before: list[Tensor], after: list[Tensor]) -> bool:
    """Return whether the results of one token changed, and those of no other."""
    changed = False
    for old, new in zip(before, after, strict=True):
        dim = next((place for place, size in enumerate(old.shape) if size == _TOKENS), None)
        if dim is None or not bool(old.isfinite().all()):
            return False
        difference = (new - old).abs().transpose(0, dim).flatten(1).amax(1)
        changed |= bool(difference[token] > 0)
        difference[token] = 0
        if not bool(difference.max() <= _SAME * old.abs().max()):
            return False
    return changed


def _follows(before: list[Tensor], after: list[Tensor]) -> bool:
    """Return whether the results changed places as the tokens did."""
    for old, new in zip(before, after, strict=True):
        moved = old.index_select(old.shape.index(_TOKENS), torch.tensor(_ORDER))
        if not bool((new - moved).abs().max() <= _SAME * old.abs().max()):
            return False
    return True


def _clone(module: nn.Module) -> Any:
    """Copy a module with random weights, in evaluation mode. Its own weights are neither copied nor
    read."""
    memo: dict[int, Any] = {
        id(value): nn.Parameter(random_values(value), value.requires_grad)
        for value in module.parameters()
    }
    clone = deep_copy(module, memo).eval()
    for child in clone.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                value = (
                    torch.ones(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer.cpu()
                )
                child._buffers[name] = value.double() if value.is_floating_point() else value
        if (config := vars(child).get("config")) is not None:
            config._experts_implementation = "eager"  # grouped products do not know float64
    return clone
