"""Stages 1 and 2: DeepSpeed shards the optimizer's state over the data-parallel ranks.

DeepSpeed keeps the parameters of each optimizer group in one flat buffer, of which each data-parallel rank owns a
contiguous part with its float32 master weights and optimizer state; after the optimizer's step the parts are
all-gathered. That is what it does here. The reduction, the norm and clipping are ours:

- Gradients are reduced by `FlatGradients`, once for each step, or by `EagerReduction`, in every backward, in DeepSpeed's
  own layout, so that the owned part is a view and nothing is copied twice. DeepSpeed's reduction
  (`coalesce_grad_reduction`) sends even when the rank raised inside it, keeps float32 sums of bf16 gradients only under
  another stage, and hooks do not see the gradients of a split backward. So its stage 1 is used for both stages.
- DeepSpeed's norm costs one all-reduce per parameter group, which waits for ever where pipeline ranks have different
  groups.

With `offload`, master weights, optimizer state and step are in host memory, where DeepSpeed's `offload_optimizer` has them. The
gradient of the owned part is reduced, measured and clipped on the device, copied to host memory for the step, and the new weights of
that part are copied back before they are all-gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.compat import deepspeed as deepspeed_compat
from lightning_3d.compat.deepspeed import EXPERTS
from lightning_3d.config.options.zero import MICRO_BATCH, NONE, PARAMETERS, STEP
from lightning_3d.errors import ConfigError, listed
from lightning_3d.parallel.sharding import OptimizerShard
from lightning_3d.parallel.zero.backend import WHOLE_TENSOR_OPTIMIZERS, DataParallelBackend, Trained, new_state, state_tensors
from lightning_3d.parallel.zero.deepspeed_inputs import Groups, Holder, deepspeed_config
from lightning_3d.parallel.zero.flat_partition import Partition, add_owned, slots_of
from lightning_3d.parallel.zero.gradient_buffers import FlatGradients, Slot, end_to_end
from lightning_3d.parallel.zero.gradient_norm import global_norm
from lightning_3d.parallel.zero.offload import CPU_ADAM, VECTOR, rounds_by_place
from lightning_3d.parallel.zero.overlapped_reduction import EagerReduction, Share


class DeepSpeedBackend(DataParallelBackend):
    """ZeRO 1 and 2: gradients go to the rank that steps with them, one all-gather of parameters per optimizer group in each step.

    Optimizer state and float32 master weights take 1 / (dp * cp) of their size. With `reduce="micro_batch"` so do the sums of
    gradients, except of those that are still to be summed over other ranks: partial ones and those of tied parameters. `clip` changes
    the part that this rank steps with. At stage 1 with an all-reduce `.grad` shows the whole reduced gradient until the step,
    else nothing.
    """

    library: Any = deepspeed_compat
    """Whose engine it is; a dry run has one for shapes."""

    _engine: Any = None
    _partitions: Sequence[Partition] = ()
    _flat: FlatGradients | None = None
    _expert_flat: FlatGradients | None = None
    _eager: EagerReduction | None = None
    _untouched: Sequence[nn.Parameter] = ()
    _entries: dict[int, Trained]
    _optimizer: Optimizer | None = None
    _twins: Sequence[tuple[dict[str, Any], dict[str, Any]]] = ()

    @property
    def collectives(self) -> int:
        """All-reduces of gradients over the data-parallel ranks in one step."""
        return sum(flat.collectives for flat in (self._flat, self._expert_flat) if flat is not None)

    @property
    def _dense(self) -> list[Partition]:
        """Parts of parameters that all data-parallel ranks have."""
        return [partition for partition in self._partitions if not partition.experts]

    @property
    def _experts(self) -> list[Partition]:
        """Parts of parameters that only ranks with the same experts have."""
        return [partition for partition in self._partitions if partition.experts]

    def _check(self, optimizer: Optimizer) -> None:
        super()._check(optimizer)
        name = type(optimizer).__name__
        if name in WHOLE_TENSOR_OPTIMIZERS:
            raise ConfigError(
                f"{name} needs whole weight matrices, but zero_stage={self._zero.stage} cuts them. Use zero_stage=0, or AdamW."
            )
        if name == "Adagrad":
            raise ConfigError(
                "DeepSpeed replaces Adagrad by a copy that schedulers do not reach. Use zero_stage=0, or RMSprop."
            )
        whole = [f"{e.spec.name} {tuple(e.parameter.shape)}" for e in self._trained if not (e.parameter.ndim and e.parameter.numel())]
        if whole:
            raise ConfigError(
                f"zero_stage={self._zero.stage} cannot cut parameters without a dimension or without an element: {listed(whole)}. Give a"
                " single number the shape (1,), freeze it, or use zero_stage=0."
            )
        dtypes = {entry.parameter.dtype for entry in self._trained}
        if torch.float64 in dtypes:
            raise ConfigError(
                f"zero_stage={self._zero.stage} cannot keep float64 parameters: DeepSpeed's master weights are float32. Use"
                " zero_stage=0."
            )
        if len(dtypes) > 1:
            kinds = ", ".join(sorted(map(str, dtypes)))
            raise ConfigError(
                f"zero_stage={self._zero.stage} needs trained parameters of one type, found {kinds}. Use zero_stage=0."
            )

    def _install(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._partitions = []
        self._entries = {id(entry.parameter): entry for entry in self._trained}
        uneven = {id(entry.parameter) for entry in self._trained if self._uneven(entry)}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
            group["params"].sort(key=lambda parameter: id(parameter) in uneven)
        self._twins = self._split_off_experts(optimizer)
        if not self._trained:  # a wholly frozen stage; its data-parallel replicas are frozen too
            return
        self._start_engine([entry.parameter for entry in self._trained], optimizer, Groups(self._mesh))
        self._lay_out()

    def _split_off_experts(self, optimizer: Optimizer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Take parts of experts out of the optimizer's groups: (group, another with its options, which DeepSpeed alone sees)."""
        twins = []
        for group in optimizer.param_groups:
            experts = [parameter for parameter in group["params"] if self._entry(parameter).spec.expert]
            if experts:
                dealt = {id(parameter) for parameter in experts}
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in dealt]
                twins.append((group, {**group, "params": experts, "moe": True, "name": EXPERTS}))
        return twins

    @contextmanager
    def _groups_for_deepspeed(self, optimizer: Optimizer) -> Iterator[None]:
        """Hide parameter groups that are empty on this rank, which DeepSpeed would remove for good, and show those of experts.

        Schedulers have one learning rate per group and address them by position.
        """
        groups = optimizer.param_groups
        for group, twin in self._twins:
            twin.update({key: value for key, value in group.items() if key not in ("params", "name")})
        shown = (*groups, *(twin for _, twin in self._twins))
        optimizer.param_groups = [group for group in shown if group["params"]]
        try:
            yield
        finally:
            optimizer.param_groups = groups

    def _start_engine(self, parameters: list[nn.Parameter], optimizer: Optimizer, groups: Groups) -> None:
        """Let DeepSpeed take over the parameters in the groups of `optimizer`."""
        self.library.import_deepspeed(self._device)
        on_host = self._zero.offload == PARAMETERS
        config = deepspeed_config(parameters[0].dtype, offload=self._zero.offload != NONE, pin=self._device.type != "cpu")
        expert_group = self._expert_group if self._twins else None
        with self._groups_for_deepspeed(optimizer):
            holder = Holder([*parameters, *self._fill_up(optimizer, groups)], stays=on_host)
            self._engine = self.library.deepspeed_engine(
                holder, optimizer, groups, config, self._device, on_host=on_host, expert_group=expert_group
            )
            found = self.library.deepspeed_groups(self._engine)
        for group in found:
            group.parameters[:] = [parameter for parameter in group.parameters if id(parameter) in self._entries]
        dense = len(found) - len(self._twins)
        self._partitions = [
            Partition(group, base, optimizer, self._device, experts=experts)
            for experts, groups_of_kind in ((False, found[:dense]), (True, found[dense:]))
            for group, base in zip(groups_of_kind, accumulate((group.flat.numel() for group in groups_of_kind), initial=0), strict=False)
        ]

    def _fill_up(self, optimizer: Optimizer, groups: Groups) -> list[nn.Parameter]:
        """Zeros behind the parameters of each group where that makes a rank's part of it a number of whole vectors."""
        on_cpu = self._zero.offload != NONE or self._device.type == "cpu"
        fillers = []
        for group in optimizer.param_groups if on_cpu and rounds_by_place(optimizer) else ():
            ranks = dist.get_world_size(self._expert_group) if group.get("moe") else groups.get_data_parallel_world_size()
            missing = -sum(parameter.numel() for parameter in group["params"]) % (VECTOR * ranks)
            fillers.append(nn.Parameter(group["params"][0].new_zeros(missing)))
            group["params"].append(fillers[-1])
        return fillers

    def _lay_out(self) -> None:
        """All gradients in DeepSpeed's flat buffers, one behind the other; those that are reduced at once apart from the others."""
        if self._experts:
            self._expert_flat = self._in_buffers(self._experts)
        if not self._dense:
            return
        slots = slots_of(self._dense)
        ranks = range(dist.get_world_size(self._group))
        # A part that is reduce-scattered whole would wait for the last of several stages.
        if self._zero.reduce == MICRO_BATCH or (self._reduce_scatters and len(self._stages) > 1):
            shares = [share for partition in self._dense for share in partition.shares(ranks)]
            self._eager = self._reduce_eagerly(slots, shares, at_once=self._zero.reduce == MICRO_BATCH)
        if self._eager is None:
            self._flat = self._in_buffers(self._dense)
        else:
            self._flat = self._rest([slot.parameter for slot in slots])

    def _in_buffers(self, partitions: Sequence[Partition]) -> FlatGradients:
        """The reduction, once for each step, of all gradients of some partitions."""
        return FlatGradients(
            slots_of(partitions),
            partitions[-1].base + partitions[-1].numel,
            bucket_bytes=self._bucket_bytes,
            alone=self._alone(),
            waves=self._waves,
            cuts=[(partition.base, partition.base + partition.numel) for partition in partitions] if self._reduce_scatters else None,
        )

    def _rest(self, parameters: Iterable[nn.Parameter]) -> FlatGradients | None:
        """The reduction of what is summed over other ranks first, and therefore once for each step."""
        slots = end_to_end(p for p in parameters if self._eager is None or p not in self._eager)
        if not slots:
            return None
        return FlatGradients(slots, slots[-1].stop, bucket_bytes=self._bucket_bytes, alone=self._alone(), waves=self._waves)

    def _reduce_eagerly(
        self, slots: Iterable[Slot], shares: Sequence[Share], *, at_once: bool
    ) -> EagerReduction | None:
        """The reduction of what one stage uses and is whole on this rank; None where there is nothing of this kind."""
        places = {id(slot.parameter): slot for slot in slots}
        whole = {
            id(e.parameter) for e in self._trained if len(e.spec.tp_grad_sum) <= 1 and len(e.spec.pp_replicas) <= 1
        }
        uses = Counter(id(parameter) for stage in self._stages for parameter in stage)
        chosen = {key for key in whole & places.keys() if uses[key] == 1}
        stages = [[places[id(p)] for p in stage if id(p) in chosen] for stage in self._stages]
        if not any(stages):
            return None
        return EagerReduction(
            stages,
            shares,
            self._group,
            bucket_bytes=self._bucket_bytes,
            alone=self._alone(),
            to_owners=self._reduce_scatters,
            at_once=at_once,
        )

    @property
    def _reduce_scatters(self) -> bool:
        """Whether gradients go only to their owners. Buffers that differ between tensor-parallel ranks would be cut differently on
        them, and copies would not stay bit-equal."""
        wanted = self._zero.reduce_scatter
        if self._data_ranks > 2 and any(self._uneven(entry) for entry in self._trained):
            return False
        return wanted if wanted is not None else self._device.type == "cuda"

    def _begin_step(self) -> None:
        super()._begin_step()
        for partition in self._partitions:
            for slot in partition.owned_slots:
                partition.follow_writes(slot)  # by a callback that clips weights, for example
        for flat in (self._flat, self._expert_flat):
            if flat is not None:
                flat.forget()
        if self._eager is not None:
            take = None if self._zero.reduce == MICRO_BATCH else self._take_sum
            self._eager.begin([partition.new_gradient() for partition in self._dense], take)

    def after_backward(self, parameters: Iterable[nn.Parameter], *, stage: int = 0, last: bool = False) -> None:
        parameters = list(parameters)
        if self._eager is not None and self._zero.reduce == MICRO_BATCH:
            self._eager.flush(parameters)
        super().after_backward(parameters, stage=stage, last=last)

    def _start_reducing(self, wave: int) -> None:
        if self._eager is not None and self._zero.reduce == STEP:
            self._eager.flush(self._stages[len(self._stages) - 1 - wave])
        if self._flat is not None:
            self._flat.start(wave, self._sums, self._group)
        if self._expert_flat is not None:
            self._expert_flat.start(wave, self._sums, self._expert_group)

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if self._eager is None or parameter not in self._eager or self._zero.reduce == STEP:
            return super().local_gradient(parameter)
        # Ranks with other sizes have other pieces, which cannot be compared.
        return None if any(self._uneven(entry) for entry in self._trained) else self._eager.local(parameter)

    def _reduce_data_parallel(self, scale: float | Tensor) -> None:
        self._untouched = []
        if self._eager is not None:
            self._untouched = self._eager.finish(scale, self._take_sum)
        if self._flat is not None and self._eager is not None:
            flat = self._flat.all_reduce(self._sums, self._group, scale)
            for partition in self._dense:
                add_owned(partition, self._flat, flat)
            self._untouched = [*self._untouched, *self._flat.nowhere]
        elif self._flat is not None:
            self._reduce_buffers(self._flat, self._dense, self._group, scale)
        if self._expert_flat is not None:
            self._reduce_buffers(self._expert_flat, self._experts, self._expert_group, scale)
        if self._zero.stage > 1:
            self._sums.clear()

    def _reduce_buffers(
        self, layout: FlatGradients, partitions: Sequence[Partition], group: dist.ProcessGroup, scale: float | Tensor
    ) -> None:
        if self._reduce_scatters:
            parts = layout.reduce_scatter(self._sums, group, scale)
        else:
            flat = layout.all_reduce(self._sums, group, scale)
            parts = [partition.owned_part(flat) for partition in partitions]
            if self._zero.stage > 1:
                parts = [part.clone() for part in parts]
        for partition, part in zip(partitions, parts, strict=True):
            partition.gradient = part
        self._untouched = [*self._untouched, *layout.nowhere]

    def _take_sum(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = self._sums[parameter]
        self._sums[parameter] = None
        return gradient

    def gradient_tensors(self) -> list[Tensor]:
        parts = [partition.gradient for partition in self._partitions if partition.gradient is not None]
        flat = [buffer for each in (self._flat, self._expert_flat) if each is not None for buffer in each.buffers]
        return [*super().gradient_tensors(), *parts, *flat]

    def optimizer_tensors(self) -> list[Tensor]:
        return [tensor for partition in self._partitions for tensor in partition.tensors().values()]

    def _gradients(self) -> Iterator[Tensor]:
        for partition in self._partitions:
            assert partition.gradient is not None
            yield partition.gradient

    def _global_norm(self) -> float:
        tp, pp = self._mesh.index("tp"), self._mesh.index("pp")
        owned = (
            partition.gradient[slot.start : slot.stop]
            for partition in self._partitions
            for slot in partition.owned_slots
            if self._entry(slot.parameter).spec.counts_in_norm(tp, pp) and partition.gradient is not None
        )
        return global_norm(owned, self._device, dist.group.WORLD)

    def held(self) -> dict[str, list[Tensor]]:
        held = super().held()
        masters = [partition.group.master for partition in self._partitions]
        held["parameters"] += [partition.group.flat for partition in self._partitions]
        held["gradients"] += [p.gradient for p in self._partitions if p.gradient is not None]
        held["gradients"] += [master.grad for master in masters if master.grad is not None]
        held["optimizer"] += [*state_tensors(self._optimizer), *masters]
        return held

    @torch.no_grad()
    def step(self) -> None:
        if self._engine is None or self._optimizer is None:
            return
        if type(self._optimizer).__name__ == CPU_ADAM:
            self.library.revive_cpu_adam(self._optimizer)
        with self._groups_for_deepspeed(self._optimizer), self._kept(self._untouched):
            self.library.set_deepspeed_gradients(self._engine, list(self._gradients()))
            self._engine.step()
        self.discard()

    def discard(self) -> None:
        for partition in self._partitions:
            partition.gradient = None
        super().discard()

    @contextmanager
    def _kept(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Undo what the step does to parameters that no rank has a gradient for: one process would not decay them."""
        chosen = {id(parameter) for parameter in parameters}
        with ExitStack() as undo:
            for partition in self._partitions if chosen else ():
                for slot in partition.owned_slots:
                    if id(slot.parameter) in chosen:
                        undo.callback(partition.restore, slot, partition.copy_of(slot))
            for parameter in parameters:
                undo.callback(parameter.copy_, parameter.clone())
            yield

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        for partition in self._partitions:
            partition.group.master.copy_(partition.group.owned)

    def create_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None:
        assert self._optimizer is not None
        with self._groups_for_deepspeed(self._optimizer):
            groups = {id(parameter): group for group in self._optimizer.param_groups for parameter in group["params"]}
        for partition in self._partitions:
            master = partition.group.master
            made = {}  # one state for all parameters of the partition, which have taken the same steps
            for entry in (self._entry(slot.parameter) for slot in partition.owned_slots):
                for key, template in state.get(entry.name, {}).items():
                    if key not in made:
                        made[key] = new_state(template, master, entry.spec.global_shape, groups[id(master)])
            self._optimizer.state[master] = made

    def _shards(self, to_save: bool = False) -> list[OptimizerShard]:
        return [
            OptimizerShard(self._entry(slot.parameter).name, self._start(partition, slot), partition.values_of(slot, to_save))
            for partition in self._partitions
            for slot in partition.owned_slots
        ]

    def _entry(self, parameter: nn.Parameter) -> Trained:
        """What a parameter of the optimizer is."""
        return self._entries[id(parameter)]

    def _start(self, partition: Partition, slot: Slot) -> int:
        """Which element of the flattened parameter an owned piece begins with."""
        return partition.start_in_parameter(slot)

    def _release(self) -> None:
        if self._engine is not None and self._optimizer is not None:
            with self._groups_for_deepspeed(self._optimizer):
                self.library.release_deepspeed(self._engine)
        if self._eager is not None:
            self._eager.close()
        self._engine = self._flat = self._expert_flat = self._eager = self._optimizer = None
        self._partitions, self._untouched, self._entries, self._twins = [], [], {}, []
