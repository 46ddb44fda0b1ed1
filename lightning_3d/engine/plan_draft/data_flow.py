"""The flow of data between the linear layers of a model, found by automatic differentiation.

Every linear layer returns random numbers that do not depend on its input. Whatever reaches the
input of another layer has then come through code that is not a linear layer: attention,
activations, residual connections, norms. The gradient of one layer's input with respect to another
layer's output shows whether, and through which features, the one is computed from the other. No
name is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.transformers import linear_sizes
from lightning_3d.engine.plan_draft.inputs import Inputs
from lightning_3d.parallel.trials.values import generator_of, normal

_SEEDS = (0, 1, 2)
"""Several random outputs: an activation that is flat at one of them is not at another."""


@dataclass(frozen=True)
class Sources:
    """What a tensor is computed from, up to the nearest linear layers.

    Attributes:
        linears: names of linear layers whose outputs it reads.
        parameters: names of parameters that are not those of linear layers.
    """

    linears: frozenset[str]
    parameters: frozenset[str]


@dataclass
class _Run:
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    returned: list[Tensor] = field(default_factory=list)


class DataFlow:
    """The data flow of a model, with some linear layers that return random numbers.

    Args:
        model: whole model with values on the CPU; its forwards are as before afterwards.
        linears: names of the linear layers.
        inputs: inputs with which it runs.
    """

    def __init__(self, model: nn.Module, linears: Iterable[str], inputs: Inputs) -> None:
        self._model, self._names, self._inputs = model, list(linears), inputs
        own = {
            id(parameter)
            for name in self._names
            for parameter in model.get_submodule(name).parameters()
        }
        self._parameters = {
            name: p
            for name, p in model.named_parameters()
            if id(p) not in own and p.is_floating_point()
        }
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        self._runs = [self._run(seed, {}) for seed in _SEEDS]
        self._sources: dict[str, Sources] = {}

    @property
    def order(self) -> list[str]:
        """The linear layers that run exactly once, in order of execution."""
        return [
            name for name in self._runs[0].inputs if all(run.calls[name] == 1 for run in self._runs)
        ]

    @property
    def calls(self) -> Counter[str]:
        """How often each linear layer runs."""
        return self._runs[0].calls

    def sources(self, name: str) -> Sources:
        """Find the sources of a linear layer's input."""
        if name not in self._sources:
            self._sources[name] = self._sources_of(self._runs[0], [self._runs[0].inputs[name]])
        return self._sources[name]

    @cached_property
    def sources_of_output(self) -> Sources:
        """Find the sources of what the model returns."""
        return self._sources_of(self._runs[0], self._runs[0].returned)

    def features_behind(self, columns: Mapping[str, Tensor], name: str) -> Tensor:
        """Find the output features of the layer `name` from which some columns of other layers'
        inputs are computed.

        Args:
            columns: name of a layer -> indices of columns of its input.

        Returns:
            A mask over the features.
        """
        masks = []
        for run in self._runs:
            generator = generator_of("directions")
            parts = [run.inputs[row][..., index] for row, index in columns.items()]
            total = sum((_random(part, generator) * part).sum() for part in parts)
            [gradient] = _gradients(total, [run.outputs[name]])
            changes = torch.zeros_like(run.outputs[name]) if gradient is None else gradient
            masks.append(changes.flatten(0, -2).ne(0).any(0))
        return torch.stack(masks).any(0)

    def columns_after(self, features: Mapping[str, Tensor], name: str) -> Tensor:
        """Find the columns of the input of the layer `name` that change with some output features
        of other layers, as a mask."""
        changed = [self._run(seed, features) for seed in _SEEDS[:2]]
        masks = [
            run.inputs[name].ne(other.inputs[name]).flatten(0, -2).any(0)
            for run, other in zip(self._runs, changed, strict=False)
        ]
        return torch.stack(masks).any(0)

    def _run(self, seed: int, features: Mapping[str, Tensor]) -> _Run:
        """Run the model once. `features` of outputs get other random numbers."""
        run, generator = _Run(), generator_of("outputs", seed)
        modules = [(name, self._model.get_submodule(name)) for name in self._names]
        for name, layer in modules:

            def stand_in(x: Tensor, name: str = name, layer: Any = layer) -> Tensor:
                run.calls[name] += 1
                output = normal((*x.shape[:-1], linear_sizes(layer)[1]), generator, torch.float32)  # type: ignore[index]
                if name in features:
                    other = _random(output, generator_of("other outputs", seed))
                    output[..., features[name]] = other[..., features[name]]
                output.requires_grad_(True)
                run.inputs.setdefault(name, x)
                run.outputs.setdefault(name, output)
                return output.clone()

            layer.forward = stand_in
        try:
            with torch.enable_grad():
                run.returned = [
                    tensor for tensor in self._inputs.run(self._model) if tensor.requires_grad
                ]
        finally:
            for _, layer in modules:
                del layer.forward
        return run

    def _sources_of(self, run: _Run, tensors: list[Tensor]) -> Sources:
        generator = generator_of("directions")
        total = sum((_random(t, generator) * t).sum() for t in tensors if t.requires_grad)
        wanted = {
            **run.outputs,
            **{f" {name}": parameter for name, parameter in self._parameters.items()},
        }
        found = [
            key
            for key, value in zip(wanted, _gradients(total, list(wanted.values())), strict=True)
            if _is_nonzero(value)
        ]
        return Sources(
            frozenset(key for key in found if not key.startswith(" ")),
            frozenset(key[1:] for key in found if key.startswith(" ")),
        )


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return normal(tuple(like.shape), generator, torch.float32)


def _gradients(total: Any, sources: list[Tensor]) -> list[Tensor | None]:
    """Return the gradient with respect to each source; None where nothing leads there."""
    if not isinstance(total, Tensor) or not total.requires_grad:
        return [None] * len(sources)
    return list(torch.autograd.grad(total, sources, retain_graph=True, allow_unused=True))


def _is_nonzero(gradient: Tensor | None) -> bool:
    """Check whether there is a gradient other than 0. For the gradient of a large table, `aminmax`
    is seven times as fast as `any`."""
    return (
        gradient is not None
        and gradient.numel() > 0
        and any(bool(bound != 0) for bound in gradient.aminmax())
    )
