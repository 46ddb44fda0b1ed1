"""An exponential moving average of buffers that training changes, beside that of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lightning_3d.parallel.zero.gradient_buffers import sum_dtype


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
