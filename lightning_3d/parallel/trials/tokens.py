"""Does a module treat every token of a sequence separately?

A module that does can work on this rank's part of the tokens. To find out, a clone of it runs on a
few random tokens with random weights, once more with each of some tokens changed, and once with the
tokens in another order: no other token's result may change, and results change places as the tokens
do. A module with a capacity drops tokens only where there are many, so it counts as one that mixes
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.trials.ask import ask
from lightning_3d.parallel.trials.clone import clone_in_float64
from lightning_3d.parallel.trials.tolerances import SAME_TOKENS
from lightning_3d.parallel.trials.values import FewRows, generator_of, normal

_TOKENS = 7  # a size that nothing else in a model has
_CHANGED = (0, 3, 6)
_ORDER = (5, 0, 3, 6, 1, 4, 2)
_BY_TOKEN = (nn.Linear, nn.LayerNorm, nn.Dropout)


def mixing_tokens(block: nn.Module, width: int) -> Iterator[nn.Module]:
    """Yield the children of a block that are not known to treat every token separately, with or
    without parameters.

    Args:
        width: size of the hidden states.
    """
    for child in block.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from mixing_tokens(child, width)
        elif not treats_tokens_separately(child, width):
            yield child


def treats_tokens_separately(module: nn.Module, width: int) -> bool:
    """Return whether a module was seen to treat every token separately; False where it cannot run
    alone."""
    return type(module) in _BY_TOKEN or ask(_is_separate, module, width)


def _is_separate(module: nn.Module, width: int) -> bool:
    if any("capacity" in name for child in module.modules() for name in vars(child)):
        return False
    for widths in _possible_widths(module, width):
        try:
            return _separates(module, widths)
        except Exception:  # it has other arguments, or cannot run alone
            continue
    return False


def _separates(module: nn.Module, widths: tuple[int, ...]) -> bool:
    values = FewRows()
    tried = clone_in_float64(module, values.draw)
    generator = generator_of("tokens")
    inputs = _inputs(module, widths, generator)
    with values:
        whole = _results(tried, inputs)
        for token in _CHANGED:
            if not _changes_only(
                token, whole, _results(tried, [_with_another(x, token, generator) for x in inputs])
            ):
                return False
        moved = _results(
            tried, [x.index_select(_tokens_of(x), torch.tensor(_ORDER)) for x in inputs]
        )
    return _follows(whole, moved)


def _possible_widths(module: nn.Module, width: int) -> Iterator[tuple[int, ...]]:
    """Yield widths of the arguments without a default, likely ones first. The first of several may
    be as wide as a layer's input."""
    count = len(_required(module))
    yield (width,) * count
    inner = {layer.in_features for layer in module.children() if isinstance(layer, nn.Linear)} - {
        width
    }
    if count > 1:
        yield from ((other, *(width,) * (count - 1)) for other in sorted(inner))


def _required(module: nn.Module) -> list[str]:
    """Names of the arguments without a default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind in kinds
    ]


def _inputs(module: nn.Module, widths: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    """Values for the arguments without a default: hidden states (1, tokens, width).

    Experts of Transformers, which a router calls, get (tokens, width), and two experts for each
    token with their weights.
    """
    if _required(module) == ["hidden_states", "top_k_index", "top_k_weights"]:
        chosen = torch.randint(int(module.num_experts), (_TOKENS, 2), generator=generator)  # type: ignore[arg-type]
        return [normal((_TOKENS, widths[0]), generator), chosen, normal((_TOKENS, 2), generator)]
    return [normal((1, _TOKENS, width), generator) for width in widths]


def _tokens_of(value: Tensor) -> int:
    return value.shape.index(_TOKENS)


def _with_another(value: Tensor, token: int, generator: torch.Generator) -> Tensor:
    """Copy an input with other values of one token; whole numbers stay."""
    if not value.is_floating_point():
        return value
    dim = _tokens_of(value)
    change = normal((*value.shape[:dim], 1, *value.shape[dim + 1 :]), generator)
    return value.index_add(dim, torch.tensor([token]), change)


def _results(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Floating-point tensors that the module returns, by the forward of its class, without hooks,
    which belong to the model."""
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
        if not bool(difference.max() <= SAME_TOKENS * old.abs().max()):
            return False
    return changed


def _follows(before: list[Tensor], after: list[Tensor]) -> bool:
    """Return whether the results changed places as the tokens did."""
    for old, new in zip(before, after, strict=True):
        moved = old.index_select(old.shape.index(_TOKENS), torch.tensor(_ORDER))
        if not bool((new - moved).abs().max() <= SAME_TOKENS * old.abs().max()):
            return False
    return True
