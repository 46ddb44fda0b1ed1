"""Stage 0: every data-parallel rank runs the user's optimizer on all its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.parallel.sharding import OptimizerShard
from lightning_3d.parallel.zero.gradient_buffers import LOW_PRECISION, GradientSums
from lightning_3d.parallel.zero.gradient_norm import global_norm
from lightning_3d.parallel.zero.outside_writes import follow_writes, with_writes
from lightning_3d.parallel.zero.shared_matrices import TrainedRange, share_matrices, step_matrices
from lightning_3d.parallel.zero.stepper import (
    Stepper,
    new_state,
    skipping,
    skips_on_device,
    state_tensors,
)
from lightning_3d.parallel.zero.trained import Trained, TrainedParameters
from lightning_3d.parallel.zero.wrapped_state import SEPARATOR, inner_states, new_wrapped_states


class PlainStepper(Stepper):
    """Keeps double precision. bf16 parameters have float32 master weights, which the optimizer
    trains.

    Args:
        trained: parameters of this rank.
        sums: their gradients, reduced in place.
        optimizer: the user's; its parameter groups get the master weights.
    """

    def __init__(
        self, trained: TrainedParameters, sums: GradientSums, optimizer: Optimizer
    ) -> None:
        self._trained, self._sums, self._optimizer = trained, sums, optimizer
        self._masters = {
            parameter: nn.Parameter(parameter.detach().to(torch.float32))
            for parameter in trained.parameters
            if parameter.dtype in LOW_PRECISION
        }
        if self._masters:
            swap_parameters(optimizer, self._masters)
        ranges = (
            TrainedRange(
                self._masters.get(entry.parameter, entry.parameter),
                0,
                entry,
                0,
                entry.parameter.numel(),
            )
            for entry in trained.entries
        )
        share_matrices(optimizer, trained, ranges, sharded=False)

    @torch.no_grad()
    def follow_writes(self) -> None:
        for parameter, master in self._masters.items():
            follow_writes(master, parameter)

    def take_gradients(self) -> None:
        for parameter, master in self._masters.items():
            master.grad = self._sums[parameter]

    def gradients(self) -> Iterator[Tensor]:
        return self._sums.present()

    def gradient_pieces(self) -> Iterator[tuple[Trained, int | None, Tensor | None]]:
        return ((entry, None, self._sums[entry.parameter]) for entry in self._trained.entries)

    def gradient_norm(self) -> Tensor:
        counted = (
            entry.parameter for entry in self._trained.entries if self._trained.counts(entry)
        )
        gradients = (
            gradient for gradient in map(self._sums.__getitem__, counted) if gradient is not None
        )
        mesh = self._trained.mesh
        # Together these ranks count every element once: the data-parallel ranks all have the whole
        # gradient, except of experts.
        group = mesh.group("tp", "cp", "pp") if mesh.layout.ep == 1 else dist.group.WORLD
        return global_norm(gradients, self._trained.device, group)

    @property
    def can_skip(self) -> bool:
        return skips_on_device(self._optimizer)

    @torch.no_grad()
    def step(self, without_gradient: Sequence[nn.Parameter], skip: Tensor | None = None) -> None:
        step_matrices(self._optimizer, lambda tensor: tensor.grad)
        with skipping(self._optimizer, skip):
            self._optimizer.step()  # leaves parameters whose gradient is None as they are
        for parameter, master in self._masters.items():
            parameter.copy_(master)

    def discard(self) -> None:
        for parameter, master in self._masters.items():
            # or the gradients of this step would stay in memory until the next one
            master.grad = self._sums[parameter] = None

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        for parameter, master in self._masters.items():
            master.copy_(parameter)

    def weights(self) -> list[OptimizerShard]:
        found = (
            (entry.name, self._masters.get(entry.parameter, entry.parameter))
            for entry in self._trained.entries
        )
        return [OptimizerShard(name, None, {"weight": weight}) for name, weight in found]

    @torch.no_grad()
    def publish(self) -> None:
        for parameter, master in self._masters.items():
            parameter.copy_(master)

    def create_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None:
        groups = {
            id(parameter): group
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        for entry in self._trained.entries:
            tensor = self._masters.get(entry.parameter, entry.parameter)
            self._optimizer.state.pop(tensor, None)
            if entry.name in state:
                group, shape, saved = groups[id(tensor)], entry.spec.global_shape, state[entry.name]
                wrapped = new_wrapped_states(self._optimizer, group, tensor, saved, entry.name)
                made = {
                    key: new_state(value, tensor, shape, group)
                    for key, value in saved.items()
                    if SEPARATOR not in key
                }
                self._optimizer.state[tensor] = made | wrapped

    def shards(self, *, to_save: bool) -> list[OptimizerShard]:
        shards = []
        for entry in self._trained.entries:
            master = self._masters.get(entry.parameter)
            state = self._optimizer.state.get(entry.parameter if master is None else master, {})
            values = {key: value for key, value in inner_states(state).items() if value is not None}
            if master is not None:
                values["master"] = with_writes(master, entry.parameter) if to_save else master
            shards.append(OptimizerShard(entry.name, None, values))
        return shards

    def held(self) -> dict[str, list[Tensor]]:
        return {
            "parameters": [],
            "gradients": [],
            "optimizer": [*state_tensors(self._optimizer), *self._masters.values()],
        }

    def release(self) -> None:
        self._masters = {}


def swap_parameters(optimizer: Optimizer, masters: dict[nn.Parameter, nn.Parameter]) -> None:
    """Let `optimizer` train the master of each parameter that has one. Existing state moves along,
    in float32."""
    for group in optimizer.param_groups:
        group["params"] = [masters.get(parameter, parameter) for parameter in group["params"]]
    for parameter, master in masters.items():
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[master] = {
                key: (
                    value.to(torch.float32)
                    if isinstance(value, Tensor) and value.is_floating_point()
                    else value
                )
                for key, value in state.items()
            }
