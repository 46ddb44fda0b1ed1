"""Finds what a forward leaves for the user's step and a rank has only a part of: outputs next to
logits and loss, attributes of modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.engine.self_check import compare
from lightning_3d.engine.self_check.stages import RewrittenModel
from lightning_3d.parallel.pipeline.left_behind import contents_of, is_same
from lightning_3d.parallel.pipeline.unknown import Unknown

Remnant = tuple[str, ...]
"""("output", key), or ("attribute", name of the module, name of the attribute). The number of a
block is `*`."""


def find_partial(
    whole: nn.Module,
    rewritten: RewrittenModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layers: str,
    anywhere: Callable[[bool], bool],
) -> list[Remnant]:
    """List what a forward leaves that has other values on a rank than on one process, or whose
    gradients lead to other ones.

    Args:
        whole: the whole model; its weights are those of `rewritten`.
        rewritten: the model as the ranks run it. What is on the last stage is compared: the step
            runs there.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        layers: name of the list of blocks.
        anywhere: function that returns whether something is true on any rank. Communicates.
    """
    expected = _values_left(whole, whole, args, kwargs)
    found = _values_left(rewritten, list(rewritten.modules())[-1], args, kwargs)
    by_place: dict[Remnant, list[Remnant]] = {}
    for place in expected:
        if place in found or place[0] == "output":  # else it is on another stage
            by_place.setdefault(_of_any_block(place, layers), []).append(place)
    partial = []
    for common, places in by_place.items():
        pairs = [_here(_leaves(expected[place]), _leaves(found.get(place))) for place in places]
        # All ranks do the same next: a backward and its gradients communicate.
        if anywhere(not all(_are_alike(*pair) for pair in pairs)) or anywhere(
            not _runs_backward(whole, rewritten, pairs)
        ):
            partial.append(common)
            continue
        differs = any(
            not deviation.error <= compare.LARGEST
            for deviation in compare.weight_deviations(whole, rewritten)
        )
        if anywhere(differs):
            partial.append(common)
    return partial


def _values_left(
    model: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[Remnant, Any]:
    """Run a model. Return what it returns in containers, and what its forward has written into
    attributes of `module`."""
    before = contents_of(module)
    output = model(*args, **kwargs)
    found: dict[Remnant, Any] = {
        ("output", str(key)): value for key, value in entries(output) if _leaves(value)
    }
    for (path, name), content in contents_of(module).items():
        if not is_same(before.get((path, name)), content) and _leaves(content[0]):
            found["attribute", path, name] = content[0]
    return found


def entries(output: Any) -> list[tuple[Any, Any]]:
    """List the entries of an output that is a container or an object; none for a tensor."""
    if isinstance(output, Tensor):
        return []
    if isinstance(output, (list, tuple)):
        return list(enumerate(output))
    return list(
        (output if isinstance(output, Mapping) else getattr(output, "__dict__", {})).items()
    )


def _of_any_block(place: Remnant, layers: str) -> Remnant:
    if place[0] == "output" or not layers:
        return place
    return (place[0], re.sub(rf"^{re.escape(layers)}\.\d+", f"{layers}.*", place[1]), place[2])


def _leaves(value: Any) -> list[Tensor]:
    """List the tensors and numbers in nested containers, as tensors."""
    if isinstance(value, Tensor):
        return [compare.whole_tensor(value)]
    if isinstance(value, Unknown):
        return [torch.tensor(torch.nan)]
    if isinstance(value, (bool, int, float)):
        return [torch.tensor(float(value))]
    items: Any = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return [leaf for item in items for leaf in _leaves(item)]


def _here(expected: list[Tensor], found: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Leave out what is on another stage, which is NaN or refused there: a step that reads it ends
    with an error in any case."""
    if len(expected) != len(found):
        return expected, found
    kept = [
        (one, other) for one, other in zip(expected, found, strict=True) if not other.isnan().all()
    ]
    return [one for one, _ in kept], [other for _, other in kept]


def _are_alike(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    if len(expected) != len(found):
        return False
    pairs = list(zip(expected, found, strict=True))
    if any(
        one.shape != other.shape or one.requires_grad != other.requires_grad for one, other in pairs
    ):
        return False
    return all(compare.relative(other, one) <= compare.LARGEST for one, other in pairs)


def _runs_backward(
    whole: nn.Module, rewritten: RewrittenModel, pairs: Sequence[tuple[list[Tensor], list[Tensor]]]
) -> bool:
    """Give both models the gradients of some values alone. Returns whether that was possible: it is
    not through an earlier forward."""
    expected = {
        str(number): leaf
        for number, leaf in enumerate(leaf for one, _ in pairs for leaf in one)
        if leaf.requires_grad
    }
    found = {
        str(number): leaf
        for number, leaf in enumerate(leaf for _, other in pairs for leaf in other)
        if leaf.requires_grad
    }
    for model in (whole, *rewritten.modules()):
        model.zero_grad()
    if not expected:
        return True
    try:
        compare.project(expected, list(expected)).backward(retain_graph=True)
        (compare.project(found, list(found)) / rewritten.layout.cp).backward(retain_graph=True)
    except RuntimeError:
        return False
    return True
