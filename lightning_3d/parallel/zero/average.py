"""An exponential moving average of the trained weights, in shards like the optimizer's state: each
rank averages what it steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_3d.parallel.sharding import OptimizerShard
from lightning_3d.parallel.zero.gradients import sum_dtype
from lightning_3d.parallel.zero.stepper import Stepper

VALUE = "average"


class WeightAverage:
    """After step n with weights w_n the average is a_n = decay * a_(n-1) + (1 - decay) * w_n, and
    a_1 = w_1 for the first step averaged.

    The average has the type of the weights that the optimizer trains: float32 where bfloat16
    parameters have master weights.

    Args:
        stepper: owner of the weights.
        module: this rank's part of the model, whose buffers are averaged too.
        decay: at least 0 and below 1.

    Attributes:
        buffers: the average of the buffers.
        begun: whether there is an average: after the first `update`, or after `restore`.
        shown: whether the average is in the place of the weights.
    """

    def __init__(self, stepper: Stepper, module: nn.Module, decay: float) -> None:
        self._stepper, self.decay = stepper, decay
        self.buffers = BufferAverage(module, decay)
        self._values = [weight.detach().clone() for _, weight in self._weights()]
        self.begun = self.shown = False

    def _weights(self) -> Iterator[tuple[OptimizerShard, Tensor]]:
        """The weights that this rank steps: (their place, the tensor itself)."""
        for shard in self._stepper.weights():
            [weight] = shard.values.values()
            assert isinstance(weight, Tensor)
            yield shard, weight.detach()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (
            (value, weight)
            for value, (_, weight) in zip(self._values, self._weights(), strict=True)
        )

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step. Local."""
        self._stepper.follow_writes()
        for value, weight in self._pairs():
            value.lerp_(weight, 1 - self.decay if self.begun else 1.0)
        if self.begun:
            self.buffers.update()
        else:
            self.buffers.restart()
        self.begun = True

    @torch.no_grad()
    def show(self) -> None:
        """Put the average in the place of the weights, if there is one, until `hide`. Collective:
        as the parameters after a step."""
        if self.begun and not self.shown:
            self._stepper.follow_writes()
            self._exchange()
            self.buffers.show()

    @torch.no_grad()
    def hide(self) -> None:
        """Put the weights back, bit for bit. Collective like `show`."""
        if self.shown:
            self._exchange()
            self.buffers.hide()

    def _exchange(self) -> None:
        for value, weight in self._pairs():
            kept = weight.clone()
            weight.copy_(value)
            value.copy_(kept)
        self._stepper.publish()
        self.shown = not self.shown

    @torch.no_grad()
    def restart(self) -> list[OptimizerShard]:
        """Copy weights and buffers into the average, and return those of weights, for a checkpoint
        to be read into. Local. Call `restore` if it was."""
        for value, weight in self._pairs():
            value.copy_(weight)
        self.buffers.restart()
        return self._shards()

    def restore(self) -> None:
        """Go on from the values that were read into the tensors of `restart`."""
        self.begun = True

    def shards(self) -> list[OptimizerShard]:
        """This rank's elements of the average, for checkpoints: views. Empty before it has
        begun."""
        assert not self.shown, "hide() comes before a save"
        return self._shards() if self.begun else []

    def saved_buffers(self) -> dict[str, Tensor]:
        """This rank's averages of buffers, for checkpoints, by their names. Empty before it has
        begun."""
        return self.buffers.values if self.begun else {}

    def _shards(self) -> list[OptimizerShard]:
        places = (shard for shard, _ in self._weights())
        return [
            OptimizerShard(at.name, at.start, {VALUE: value})
            for at, value in zip(places, self._values, strict=True)
        ]

    def held(self) -> list[Tensor]:
        return [*self._values, *self.buffers.values.values()]


class BufferAverage:
    """Averages the floating-point buffers of a module that checkpoints have, running statistics for
    example. Every method is local.

    Counts, flags and buffers that are not saved keep their values. Buffers of 16 bits are averaged
    in float32.

    Args:
        module: this rank's part of the model.
        decay: see `WeightAverage`.

    Attributes:
        values: the averages by the names of the buffers, from the first `update` or `restart`.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self._places = {
            f"{prefix}.{key}" if prefix else key: (owner, key)
            for prefix, owner in module.named_modules(remove_duplicate=False)
            for key, buffer in owner._buffers.items()
            if buffer is not None
            and buffer.is_floating_point()
            and key not in owner._non_persistent_buffers_set
        }
        self.values: dict[str, Tensor] = {}
        self._hidden: dict[str, Tensor] = {}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers as they are now: a forward may have put others in their place."""
        for name, (owner, key) in self._places.items():
            buffer = owner._buffers[key]
            if buffer is not None:
                yield name, buffer.detach()

    def restart(self) -> None:
        """Copy the buffers into the average."""
        self.values = {
            name: buffer.to(sum_dtype(buffer), copy=True) for name, buffer in self._buffers()
        }

    def update(self) -> None:
        """Add the buffers after a step. A buffer that has another shape than before begins
        again."""
        for name, buffer in self._buffers():
            value = self.values.get(name)
            if value is None or value.shape != buffer.shape:
                self.values[name] = buffer.to(sum_dtype(buffer), copy=True)
            else:
                value.lerp_(buffer.to(value.dtype), 1 - self._decay)

    def show(self) -> None:
        """Put the average in the place of the buffers."""
        # all of them first: two may be one
        self._hidden = {name: buffer.clone() for name, buffer in self._buffers()}
        for name, buffer in self._buffers():
            buffer.copy_(self.values[name])

    def hide(self) -> None:
        """Put the buffers back, bit for bit."""
        for name, buffer in self._buffers():
            buffer.copy_(self._hidden[name])
        self._hidden = {}
