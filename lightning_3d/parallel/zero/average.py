"""An exponential moving average of the trained weights, in shards like the optimizer's state: each rank averages what it steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_3d.parallel.sharding import OptimizerShard
from lightning_3d.parallel.zero.stepper import Stepper

VALUE = "average"


class WeightAverage:
    """After step n with weights w_n the average is a_n = decay * a_(n-1) + (1 - decay) * w_n, and a_1 = w_1 for the first step averaged.

    The average has the type of the weights that the optimizer trains: float32 where bfloat16 parameters have master weights.

    Args:
        stepper: owner of the weights.
        decay: at least 0 and below 1.

    Attributes:
        begun: whether there is an average: after the first `update`, or after `restore`.
        shown: whether the average is in the place of the weights.
    """

    def __init__(self, stepper: Stepper, decay: float) -> None:
        self._stepper, self.decay = stepper, decay
        self._values = [weight.detach().clone() for _, weight in self._weights()]
        self.begun = self.shown = False

    def _weights(self) -> Iterator[tuple[OptimizerShard, Tensor]]:
        """The weights that this rank steps: (their place, the tensor itself)."""
        for shard in self._stepper.weights():
            [weight] = shard.values.values()
            assert isinstance(weight, Tensor)
            yield shard, weight.detach()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((value, weight) for value, (_, weight) in zip(self._values, self._weights(), strict=True))

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step. Local."""
        self._stepper.follow_writes()
        for value, weight in self._pairs():
            value.lerp_(weight, 1 - self.decay if self.begun else 1.0)
        self.begun = True

    @torch.no_grad()
    def show(self) -> None:
        """Put the average in the place of the weights, if there is one, until `hide`. Collective: as the parameters after a step."""
        if self.begun and not self.shown:
            self._stepper.follow_writes()
            self._exchange()

    @torch.no_grad()
    def hide(self) -> None:
        """Put the weights back, bit for bit. Collective like `show`."""
        if self.shown:
            self._exchange()

    def _exchange(self) -> None:
        for value, weight in self._pairs():
            kept = weight.clone()
            weight.copy_(value)
            value.copy_(kept)
        self._stepper.publish()
        self.shown = not self.shown

    @torch.no_grad()
    def restart(self) -> list[OptimizerShard]:
        """Copy the weights into the average, and return its tensors, for a checkpoint to be read into. Local. Call `restore` if it was."""
        for value, weight in self._pairs():
            value.copy_(weight)
        return self._shards()

    def restore(self) -> None:
        """Go on from the values that were read into the tensors of `restart`."""
        self.begun = True

    def shards(self) -> list[OptimizerShard]:
        """This rank's elements of the average, for checkpoints: views. Empty before it has begun."""
        assert not self.shown, "hide() comes before a save"
        return self._shards() if self.begun else []

    def _shards(self) -> list[OptimizerShard]:
        places = (shard for shard, _ in self._weights())
        return [OptimizerShard(at.name, at.start, {VALUE: value}) for at, value in zip(places, self._values, strict=True)]

    def held(self) -> list[Tensor]:
        return self._values
