"""The interface to the optimizer of a rank: what it trains, how it steps, and its state for
checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.parallel.sharding import OptimizerShard, ShardSpec
from lightning_3d.parallel.zero.trained import Trained
from lightning_3d.parallel.zero.wrapped_state import inner_states


class Stepper(ABC):
    """Steps what this rank's optimizer trains, with gradients that are reduced.

    Every method is local, except `gradient_norm`, `step` and `publish`, which all ranks call.
    """

    @abstractmethod
    def follow_writes(self) -> None:
        """Copy what a callback (one that clips weights, for example) wrote into parameters into the
        master weights, before a step."""

    # Only separate master weights have gradients of their own.
    def take_gradients(self) -> None:  # noqa: B027
        """Give the optimizer's tensors their gradients, after the reduction."""

    @abstractmethod
    def gradients(self) -> Iterator[Tensor]:
        """The reduced gradients that this rank's optimizer steps with."""

    @abstractmethod
    def gradient_pieces(self) -> Iterator[tuple[Trained, int | None, Tensor | None]]:
        """The same gradients, each with its parameter, and the element of the flattened parameter
        that it begins with; None if it is the whole gradient. None for a gradient where none
        arrived."""

    def gradients_by_parameter(self) -> Iterator[tuple[ShardSpec, Tensor | None]]:
        """The same gradients, each with the place of its parameter."""
        return ((entry.spec, gradient) for entry, _, gradient in self.gradient_pieces())

    @abstractmethod
    def gradient_norm(self) -> Tensor:
        """Norm of the reduced gradients of the whole model, on the device: one all-reduce."""

    @property
    @abstractmethod
    def can_skip(self) -> bool:
        """Whether `step` can take `skip`. Local."""

    @abstractmethod
    def step(self, without_gradient: Sequence[nn.Parameter], skip: Tensor | None = None) -> None:
        """Run the optimizer and bring the new weights to all ranks that use them. The gradients
        stay until `discard`.

        Args:
            without_gradient: parameters that no rank has a gradient for, which stay as they are.
            skip: 1.0 on the device (float32, shape ()) if weights and state are to stay as they
                are, else 0.0.
        """

    def discard(self) -> None:  # noqa: B027 - gradients may be in `GradientSums` alone
        """Drop the reduced gradients."""

    @abstractmethod
    def refresh_master_weights(self) -> None:
        """Copy the module's parameters, written from outside, into the master weights."""

    @abstractmethod
    def weights(self) -> list[OptimizerShard]:
        """The weights themselves that this rank's optimizer trains, master weights where there are
        any, under one key. Local."""

    @abstractmethod
    def publish(self) -> None:
        """Bring what was written into `weights` to all ranks that use them, as after a step.
        Collective over the data-parallel ranks."""

    @abstractmethod
    def create_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None:
        """See `DataParallelBackend.create_optimizer_state`."""

    @abstractmethod
    def shards(self, *, to_save: bool) -> list[OptimizerShard]:
        """See `DataParallelBackend.optimizer_shards`."""

    @abstractmethod
    def held(self) -> dict[str, list[Tensor]]:
        """See `DataParallelBackend.held`."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the optimizer and all process groups."""


def new_state(
    template: Tensor | float, like: Tensor, full_shape: Sequence[int], group: Mapping[str, object]
) -> Tensor | float:
    """One state of `like`, a trained tensor that is a part of a parameter of shape `full_shape`.

    Args:
        template: see `DataParallelBackend.create_optimizer_state`.
        like: the trained tensor.
        full_shape: shape of the parameter in an unsharded model.
        group: the optimizer's parameter group; capturable and fused optimizers want their step
            count on the device.
    """
    if not isinstance(template, Tensor):
        return template
    if not template.is_meta:
        # its kernels want a step count of this type, whatever torch's default type is
        if group.get("fused"):
            return template.to(like.device, torch.float32)
        return template.to(like.device if group.get("capturable") else "cpu")
    shape = like.shape if tuple(template.shape) == tuple(full_shape) else template.shape
    dtype = like.dtype if template.is_floating_point() else template.dtype
    return torch.zeros(shape, dtype=dtype, device=like.device)


def start_state(optimizer: Optimizer) -> None:
    """Make the state that an optimizer makes when it is built, for the tensors that are in its
    groups now. Only Adagrad makes any."""
    if isinstance(optimizer, torch.optim.Adagrad):
        groups = [dict(group) for group in optimizer.param_groups]
        made = torch.optim.Adagrad(groups, **optimizer.defaults).state
        optimizer.state.clear()
        optimizer.state.update(made)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """All tensors that an optimizer keeps."""
    return [
        value
        for state in optimizer.state.values()
        for value in inner_states(state).values()
        if isinstance(value, Tensor)
    ]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer of torch leaves weights and state as they are where its `found_inf` is 1
    on the device.

    Its fused kernels do. The first step of SGD with momentum makes the momenta all the same.
    """
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return type(optimizer) in kinds and all(
        group.get("fused") and not group.get("momentum") for group in optimizer.param_groups
    )


@contextmanager
def skipping(optimizer: Optimizer, skip: Tensor | None) -> Iterator[None]:
    """Context of a step of `optimizer` that the device may skip. `found_inf` is what
    `torch.amp.GradScaler` sets (torch 2.8 to 2.13)."""
    if skip is None:
        yield
        return
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
