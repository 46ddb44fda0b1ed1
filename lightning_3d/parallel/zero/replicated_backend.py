"""Stage 0: gradients are summed in buckets, every data-parallel rank runs the user's optimizer on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.parallel.sharding import OptimizerShard
from lightning_3d.parallel.zero.backend import DataParallelBackend, follow_writes, new_state, scale_, state_tensors, with_writes
from lightning_3d.parallel.zero.gradient_buffers import LOW_PRECISION, FlatGradients, end_to_end, sum_dtype
from lightning_3d.parallel.zero.gradient_norm import global_norm


class BucketedBackend(DataParallelBackend):
    """One all-reduce per bucket and step over the data-parallel ranks, whatever the number of micro-batches.

    Keeps double precision. Beside bf16 parameters there are float32 sums of gradients and float32 master weights.
    """

    _masters: dict[nn.Parameter, nn.Parameter]
    _flats: list[tuple[FlatGradients, dist.ProcessGroup]]
    _local: list[nn.Parameter]
    _optimizer: Optimizer | None = None

    @property
    def collectives(self) -> int:
        """All-reduces of gradients over the data-parallel ranks in one step."""
        return sum(flat.collectives for flat, _ in self._flats)

    def _install(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._masters = {}
        for entry in self._trained:
            if entry.parameter.dtype in LOW_PRECISION:
                self._masters[entry.parameter] = nn.Parameter(entry.parameter.detach().to(torch.float32))
        if self._masters:
            swap_parameters(optimizer, self._masters)
        self._flats, self._local = [], []
        for experts, group in ((False, self._group), (True, self._expert_group)):
            members = [entry.parameter for entry in self._trained if entry.spec.expert == experts]
            if dist.get_world_size(group) == 1:
                self._local += members
                continue
            for dtype in sorted({sum_dtype(parameter) for parameter in members}, key=str):
                slots = end_to_end(parameter for parameter in members if sum_dtype(parameter) == dtype)
                alone = [] if experts else self._alone()
                flat = FlatGradients(slots, slots[-1].stop, bucket_bytes=self._bucket_bytes, alone=alone, waves=self._waves)
                self._flats.append((flat, group))

    @torch.no_grad()
    def _begin_step(self) -> None:
        super()._begin_step()
        for flat, _ in self._flats:
            flat.forget()
        for parameter, master in self._masters.items():
            follow_writes(master, parameter)  # by a callback that clips weights, for example

    def _start_reducing(self, wave: int) -> None:
        for flat, group in self._flats:
            flat.start(wave, self._sums, group)

    def _reduce_data_parallel(self, scale: float | Tensor) -> None:
        for flat, group in self._flats:
            flat.all_reduce(self._sums, group, scale)
        if not (isinstance(scale, float) and scale == 1.0):
            scale_([gradient for gradient in map(self._sums.__getitem__, self._local) if gradient is not None], scale)
        for parameter, master in self._masters.items():
            master.grad = self._sums[parameter]

    def _global_norm(self) -> float:
        counted = (entry.parameter for entry in self._trained if self._counts(entry))
        gradients = (gradient for gradient in map(self._sums.__getitem__, counted) if gradient is not None)
        return global_norm(gradients, self._device, self._norm_group)

    def gradient_tensors(self) -> list[Tensor]:
        return [*super().gradient_tensors(), *(buffer for flat, _ in self._flats for buffer in flat.buffers)]

    def _gradients(self) -> Iterator[Tensor]:
        return self._sums.present()

    def held(self) -> dict[str, list[Tensor]]:
        held = super().held()
        held["optimizer"] += [*state_tensors(self._optimizer), *self._masters.values()]
        return held

    @torch.no_grad()
    def step(self) -> None:
        assert self._optimizer is not None
        self._optimizer.step()
        for parameter, master in self._masters.items():
            parameter.copy_(master)

    def discard(self) -> None:
        for master in self._masters.values():
            master.grad = None
        super().discard()

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        for parameter, master in self._masters.items():
            master.copy_(parameter)

    def create_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None:
        assert self._optimizer is not None
        groups = {id(parameter): group for group in self._optimizer.param_groups for parameter in group["params"]}
        for entry in self._trained:
            trained = self._masters.get(entry.parameter, entry.parameter)
            self._optimizer.state.pop(trained, None)
            if entry.name in state:
                group, whole = groups[id(trained)], entry.spec.global_shape
                made = {key: new_state(template, trained, whole, group) for key, template in state[entry.name].items()}
                self._optimizer.state[trained] = made

    def _shards(self, to_save: bool = False) -> list[OptimizerShard]:
        if self._optimizer is None:
            return []
        shards = []
        for entry in self._trained:
            master = self._masters.get(entry.parameter)
            state = self._optimizer.state.get(entry.parameter if master is None else master, {})
            values = {key: value for key, value in state.items() if value is not None}
            if master is not None:
                values["master"] = with_writes(master, entry.parameter) if to_save else master
            shards.append(OptimizerShard(entry.name, None, values))
        return shards

    def _release(self) -> None:
        self._optimizer = None
        self._masters, self._flats, self._local = {}, [], []


def swap_parameters(optimizer: Optimizer, masters: dict[nn.Parameter, nn.Parameter]) -> None:
    """Let `optimizer` train the master of each parameter that has one. State that exists goes along, in float32."""
    for group in optimizer.param_groups:
        group["params"] = [masters.get(parameter, parameter) for parameter in group["params"]]
    for parameter, master in masters.items():
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[master] = {
                key: value.to(torch.float32) if isinstance(value, Tensor) and value.is_floating_point() else value
                for key, value in state.items()
            }
