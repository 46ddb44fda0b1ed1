"""What a stage sends to the next one: the hidden states, and values of earlier stages that the plan
declares, in one tensor.

One message carries everything, so a schedule, its messages and its gradients are the same with and
without further values: the backward of `unpack` adds up what every stage contributes to the
gradient of a value that several stages read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_3d.errors import PlanError

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""

Sides = tuple[Spec | None, ...]
"""Values that blocks return after the hidden states: shape and type of floating-point tensors, None
for anything else."""


@dataclass(frozen=True)
class _Leaf:
    """A tensor in a container."""

    spec: Spec


@dataclass(frozen=True)
class Nested:
    """The form of what a module returns that is not a tensor, such as an LSTM's output and its
    states."""

    value: Any

    @classmethod
    def like(cls, output: Any) -> Nested:
        return cls(tree_map_only(Tensor, lambda tensor: _Leaf(spec_of(tensor)), output))

    def filled(self, make: Callable[[Spec], Tensor]) -> Any:
        """A value of this form with new tensors."""
        return tree_map_only(_Leaf, lambda leaf: make(leaf.spec), self.value)


@dataclass(frozen=True)
class Travels:
    """What travels with the hidden states, as the plan declares it.

    Attributes:
        inputs: names of modules before the blocks whose outputs later stages read too.
        sides: places, behind the hidden states, of values that a block returns and the next one
            reads.
    """

    inputs: tuple[str, ...] = ()
    sides: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arrived:
    """What a stage received.

    Attributes:
        hidden: hidden states.
        inputs: outputs of modules before the blocks, by name, in order of the module's calls.
        sides: values behind the hidden states, by place.
    """

    hidden: Tensor
    inputs: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    sides: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Boundary:
    """Shapes and types at the boundaries between stages, the same at every boundary. The first
    stage sees and broadcasts them.

    Attributes:
        hidden: of the hidden states, (micro-batch, sequence, hidden) or as the model has them.
        inputs: of what each module before the blocks returns, by name, in order of its calls; a
            `Nested` where that is not a tensor.
        sides: of the values that blocks return behind the hidden states; None when they return the
            bare tensor.
        length: tokens of the whole sequence where the hidden states are a part of it
            (`SequenceShards`).
        travels: which of these are sent.
    """

    hidden: Spec
    inputs: Mapping[str, Sequence[Any]]
    sides: Sides | None
    length: int
    travels: Travels

    def pack(self, sent: Arrived) -> Tensor:
        """Join what is sent; the bare hidden states if nothing travels with them.

        Raises:
            PlanError: a value has another shape or type than on the first stage.
        """
        names = ["hidden states", *self._names]
        tensors = [
            sent.hidden,
            *(t for name in self.travels.inputs for t in sent.inputs.get(name, ())),
            *sent.sides.values(),
        ]
        if len(self._specs) == len(tensors) == 1:
            return sent.hidden
        if len(tensors) != len(self._specs):
            raise PlanError(
                f"A stage must send {len(self._specs)} tensors ({', '.join(names)}), but has"
                f" {len(tensors)} of them."
            )
        for name, tensor, spec in zip(names, tensors, self._specs, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != spec:
                raise PlanError(
                    f"A stage sends {name} of shape {tuple(tensor.shape)} and type {tensor.dtype},"
                    f" but the first stage sent {spec[0]} and {spec[1]}. All stage boundaries must"
                    " carry the same shapes and types."
                )
        return torch.cat([tensor.to(self._dtype).flatten() for tensor in tensors])

    def unpack(self, packed: Tensor) -> Arrived:
        """Separate what `pack` joined."""
        if len(self._specs) == 1:
            return Arrived(packed)
        parts = packed.split([prod(shape) for shape, _ in self._specs])
        tensors = iter(
            [part.view(spec[0]).to(spec[1]) for part, spec in zip(parts, self._specs, strict=True)]
        )
        hidden = next(tensors)
        inputs = {
            name: [next(tensors) for _ in self.inputs.get(name, ())] for name in self.travels.inputs
        }
        return Arrived(hidden, inputs, {place: next(tensors) for place in self._places})

    @property
    def _places(self) -> list[int]:
        sides = self.sides or ()
        return [
            place for place in self.travels.sides if place < len(sides) and sides[place] is not None
        ]

    @property
    def _names(self) -> list[str]:
        inputs = [
            f"the output of '{name}'"
            for name in self.travels.inputs
            for _ in self.inputs.get(name, ())
        ]
        return [*inputs, *(f"value {place + 2} that blocks return" for place in self._places)]

    @property
    def _specs(self) -> list[Spec]:
        sides = self.sides or ()
        inputs = [spec for name in self.travels.inputs for spec in self.inputs.get(name, ())]
        return [
            self.hidden,
            *inputs,
            *(spec for place in self._places if (spec := sides[place]) is not None),
        ]

    @property
    def _dtype(self) -> torch.dtype:
        """A type that holds the values of all."""
        return reduce(torch.promote_types, (dtype for _, dtype in self._specs))


def spec_of(tensor: Tensor) -> Spec:
    """Shape and type of a tensor."""
    return tuple(tensor.shape), tensor.dtype
