"""Inputs with which a model runs: those that its module declares, or random ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.trials.values import generator_of, normal

_ROWS, _LENGTH = 2, 8
_MOST_IDS = 1000


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, model: nn.Module) -> list[Tensor]:
        """Call a model with these arguments, and return the tensors in its output."""
        output = model(*self.args, **self.kwargs)
        known = isinstance(output, (Tensor, Mapping, list, tuple))
        return list(tensors_of(output if known else dict(getattr(output, "__dict__", {}))))

    def __str__(self) -> str:
        return ", ".join(
            str(tuple(tensor.shape)) for tensor in tensors_of((self.args, dict(self.kwargs)))
        )


def example_inputs(root: nn.Module, model: nn.Module) -> Iterator[Inputs]:
    """Inputs with which the model may run, likely ones first: Lightning's `example_input_array`,
    else random token ids or features."""
    given = next(
        (
            value
            for owner in (model, root)
            if (value := getattr(owner, "example_input_array", None)) is not None
        ),
        None,
    )
    if given is not None:
        given = _with_values(given, model)
        # As Lightning passes it to the forward.
        yield (
            Inputs(kwargs=given)
            if isinstance(given, Mapping)
            else Inputs(tuple(given) if isinstance(given, (list, tuple)) else (given,))
        )
        return
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    for example in _examples(model):
        yield Inputs((example,) * max(required, 1))


def _with_values(given: Any, model: nn.Module, name: str = "") -> Any:
    """Give an example that a module made on the meta device values: random numbers or ids, and
    masks that mask nothing."""
    if isinstance(given, Mapping):
        return {key: _with_values(value, model, str(key)) for key, value in given.items()}
    if isinstance(given, (list, tuple)):
        return [_with_values(value, model) for value in given]
    if not isinstance(given, Tensor) or not given.is_meta:
        return given
    generator = generator_of("inputs")
    if given.is_floating_point():
        return normal(tuple(given.shape), generator).to(given.dtype)
    if given.dtype == torch.bool or "mask" in name:
        return torch.ones(given.shape, dtype=given.dtype)
    return torch.randint(0, _ids(model), given.shape, generator=generator).to(given.dtype)


def _ids(model: nn.Module) -> int:
    """Return a number of ids that every embedding of a model has."""
    return min(
        [
            _MOST_IDS,
            *(child.num_embeddings for child in model.modules() if isinstance(child, nn.Embedding)),
        ]
    )


def _examples(model: nn.Module) -> Iterator[Tensor]:
    generator = generator_of("inputs")
    embeds = any(isinstance(child, nn.Embedding) for child in model.modules())
    widths = [child.in_features for child in model.modules() if isinstance(child, nn.Linear)]
    if embeds or not widths:
        yield torch.randint(0, _ids(model), (_ROWS, _LENGTH), generator=generator)
        return
    yield normal((_ROWS, _LENGTH, widths[0]), generator, torch.float32)
    yield normal((_ROWS, widths[0]), generator, torch.float32)
