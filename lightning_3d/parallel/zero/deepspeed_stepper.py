"""Stages 1 to 3: DeepSpeed keeps float32 master weights and runs the optimizer on them.

DeepSpeed keeps the parameters of each optimizer group in one flat buffer, of which each
data-parallel rank owns a contiguous part with its float32 master weights and optimizer state. After
the optimizer's step the parts are all-gathered, or `OverlappedGather` sends them. At stages 1 and 2
these are the whole parameters. At stage 3 they are this rank's pieces of them, and the engine has
one data-parallel rank only.

This package computes the gradient norm itself. DeepSpeed's norm costs one all-reduce per parameter
group, and hangs if pipeline ranks have different groups.

With `offload`, master weights, optimizer state and step are in host memory, where DeepSpeed's
`offload_optimizer` has them. The gradient of the owned part is reduced, measured and clipped on the
device and copied to host memory for the step. The new weights of that part are copied back before
they are all-gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.compat import deepspeed as deepspeed_compat
from lightning_3d.compat.deepspeed import EXPERTS
from lightning_3d.options.optimizer import CPU_ADAM
from lightning_3d.options.zero import NONE, PARAMETERS, ZeroOptions
from lightning_3d.parallel.collectives import all_gather_flat
from lightning_3d.parallel.sharding import OptimizerShard
from lightning_3d.parallel.zero.deepspeed_engine import (
    Groups,
    Holder,
    OwnedPiece,
    Partition,
    deepspeed_config,
)
from lightning_3d.parallel.zero.gradients import Slot, global_norm
from lightning_3d.parallel.zero.parameter_store import OverlappedGather, TrainedTensor
from lightning_3d.parallel.zero.stepper import (
    Stepper,
    TrainedRange,
    new_state,
    share_matrices,
    skipping,
    skips_on_device,
    start_state,
    state_tensors,
    step_matrices,
)
from lightning_3d.parallel.zero.trained import Trained, TrainedParameters, Writes


class DeepSpeedStepper(Stepper):
    """Master weights and optimizer state of the parts that this rank owns.

    Args:
        trained: parameters of this rank.
        tensors: what the optimizer trains of them.
        optimizer: the user's; DeepSpeed gets its parameter groups.
        zero: resolved options.
        sharded: DeepSpeed shards `tensors` over the data-parallel ranks; otherwise they are sharded
            already.
        library: `compat.deepspeed`, or what takes its place in a dry run.
        gather: gathers the new parameters instead of DeepSpeed, while the next forward runs; None:
            DeepSpeed does, in the step.

    Attributes:
        partitions: this rank's part of each optimizer group, those of experts last.
        owned: the pieces of parameters in them.
    """

    def __init__(
        self,
        trained: TrainedParameters,
        tensors: Sequence[TrainedTensor],
        optimizer: Optimizer,
        zero: ZeroOptions,
        *,
        sharded: bool,
        library: Any = deepspeed_compat,
        gather: OverlappedGather | None = None,
    ) -> None:
        self._trained, self._optimizer, self._zero, self._library, self._gather = (
            trained,
            optimizer,
            zero,
            library,
            gather,
        )
        self._entries = {id(each.tensor): each for each in tensors}
        self._tensors = {each.entry.parameter: each.tensor for each in tensors}
        self._sharded = sharded
        self._engine: Any = None
        self._expert_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.partitions: list[Partition] = []
        for group in optimizer.param_groups:
            group["params"] = [
                self._tensors[parameter]
                for parameter in group["params"]
                if parameter in self._tensors
            ]
        if sharded:
            # parameters of uneven size come last in every flat buffer
            for group in optimizer.param_groups:
                group["params"].sort(
                    key=lambda tensor: trained.is_uneven(self._entries[id(tensor)].entry)
                )
            self._expert_groups = self._split_off_experts()
        if tensors:  # else a wholly frozen stage; its data-parallel replicas are frozen too
            self._start_engine(
                [each.tensor for each in tensors], Groups(trained.mesh, sharded=sharded)
            )
        self.owned = [
            self._owned(partition, slot)
            for partition in self.partitions
            for slot in partition.owned_slots
        ]
        self._writes = Writes(piece.slot.parameter for piece in self.owned)
        if gather is not None:
            gather.connect(self.partitions, trained)
        with self._groups_for_deepspeed():
            share_matrices(optimizer, trained, map(_range_of, self.owned), sharded=True)

    def _owned(self, partition: Partition, slot: Slot) -> OwnedPiece:
        tensor = self._entries[id(slot.parameter)]
        return OwnedPiece(
            partition, slot, tensor.entry, tensor.first + partition.start_in_parameter(slot)
        )

    def _split_off_experts(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Move parts of experts out of the optimizer's groups: (group, another with its options,
        which only DeepSpeed sees)."""
        split = []
        for group in self._optimizer.param_groups:
            experts = [
                tensor for tensor in group["params"] if self._entries[id(tensor)].entry.spec.expert
            ]
            if experts:
                moved = {id(tensor) for tensor in experts}
                group["params"] = [tensor for tensor in group["params"] if id(tensor) not in moved]
                split.append((group, {**group, "params": experts, "moe": True, "name": EXPERTS}))
        return split

    @contextmanager
    def _groups_for_deepspeed(self) -> Iterator[None]:
        """Hide parameter groups that are empty on this rank, which DeepSpeed would remove for good,
        and show those of experts.

        Schedulers have one learning rate per group and address them by position.
        """
        groups = self._optimizer.param_groups
        for group, of_experts in self._expert_groups:
            of_experts.update(
                {key: value for key, value in group.items() if key not in ("params", "name")}
            )
        shown = (*groups, *(of_experts for _, of_experts in self._expert_groups))
        self._optimizer.param_groups = [group for group in shown if group["params"]]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups

    def _start_engine(self, tensors: list[nn.Parameter], groups: Groups) -> None:
        """Let DeepSpeed take over the tensors in the groups of the optimizer: it makes them views
        of a flat buffer for each group, and puts the float32 master of this rank's part in their
        place."""
        device = self._trained.device
        self._library.import_deepspeed(device)
        on_host = self._zero.offload == PARAMETERS
        config = deepspeed_config(
            tensors[0].dtype, offload=self._zero.offload != NONE, pin=device.type != "cpu"
        )
        with self._groups_for_deepspeed():
            holder = Holder([*tensors, *self._add_padding(groups)], stays=on_host)
            self._engine = self._library.deepspeed_engine(
                holder,
                self._optimizer,
                groups,
                config,
                device,
                on_host=on_host,
                expert_group=self._trained.expert_shard_group if self._expert_groups else None,
            )
            start_state(self._optimizer)
            found = self._library.deepspeed_groups(self._engine)
        for group in found:
            # without padding
            group.parameters[:] = [
                tensor for tensor in group.parameters if id(tensor) in self._entries
            ]
        dense = len(found) - len(self._expert_groups)
        self.partitions = [
            Partition(group, base, self._optimizer, device, experts=experts)
            for experts, groups_of_kind in ((False, found[:dense]), (True, found[dense:]))
            for group, base in zip(
                groups_of_kind,
                accumulate((group.flat.numel() for group in groups_of_kind), initial=0),
                strict=False,
            )
        ]

    def _add_padding(self, groups: Groups) -> list[nn.Parameter]:
        """Append zeros to each group where that makes a rank's part of it a number of whole
        vectors."""
        on_cpu = self._zero.offload != NONE or self._trained.device.type == "cpu"
        padding = []
        for group in (
            self._optimizer.param_groups if on_cpu and rounds_by_place(self._optimizer) else ()
        ):
            ranks = (
                dist.get_world_size(self._trained.expert_shard_group)
                if group.get("moe")
                else groups.get_data_parallel_world_size()
            )
            missing = -sum(tensor.numel() for tensor in group["params"]) % (VECTOR * ranks)
            padding.append(nn.Parameter(group["params"][0].new_zeros(missing)))
            group["params"].append(padding[-1])
        return padding

    @property
    def _pieces_that_can_be_written(self) -> list[OwnedPiece]:
        # At stage 3 parameters have no values between batches, and `Unit.require_untouched` refuses
        # writes.
        return [] if self._zero.stage == 3 else self.owned

    def follow_writes(self, *, unseen: bool = False) -> None:
        for piece in self._pieces_that_can_be_written:
            if unseen or piece.slot.parameter in self._writes:
                piece.partition.follow_writes(piece.slot)
        self._writes.ours()

    def unseen_writes(self) -> list[tuple[str, Tensor]]:
        return [
            (piece.entry.name, piece.partition.differs(piece.slot))
            for piece in self._pieces_that_can_be_written
            if piece.slot.parameter not in self._writes
        ]

    def gradients(self) -> Iterator[Tensor]:
        for partition in self.partitions:
            assert partition.gradient is not None
            yield partition.gradient

    def gradient_pieces(self) -> Iterator[tuple[Trained, int | None, Tensor | None]]:
        return ((piece.entry, piece.first, piece.gradient) for piece in self.owned)

    def gradient_norm(self) -> Tensor:
        mesh = self._trained.mesh
        tp, pp = mesh.index("tp"), mesh.index("pp")
        counted = (
            piece.gradient
            # other shard groups have the same gradients
            for piece in (self.owned if mesh.replica_index == 0 else ())
            if piece.entry.spec.counts_in_norm(tp, pp) and piece.partition.gradient is not None
        )
        return global_norm(counted, self._trained.device, dist.group.WORLD)

    @property
    def can_skip(self) -> bool:
        # An optimizer in host memory waits for the gradients anyway, and could not see what the
        # device decides.
        return self._zero.offload == NONE and skips_on_device(self._optimizer)

    @torch.no_grad()
    def step(self, without_gradient: Sequence[nn.Parameter], skip: Tensor | None = None) -> None:
        if self._engine is None:
            # other ranks of the stage may have parts of some
            step_matrices(self._optimizer, self._gradient_of)
            return
        if type(self._optimizer).__name__ == CPU_ADAM:
            self._library.revive_cpu_adam(self._optimizer)
        if self._gather is not None:
            self._gather.settle()  # before the step writes into what may still be sent
        with (
            self._groups_for_deepspeed(),
            self._unchanged(without_gradient),
            skipping(self._optimizer, skip),
        ):
            step_matrices(self._optimizer, self._gradient_of)
            self._library.set_deepspeed_gradients(self._engine, list(self.gradients()))
            (
                self._engine.step()
                if self._gather is None
                else self._library.step_without_gathering(self._engine)
            )
        self._writes.ours()
        if self._gather is not None:
            self._gather.start()  # after `_unchanged`, which undoes a part of the step

    def _gradient_of(self, master: Tensor) -> Tensor | None:
        return next(
            (
                partition.gradient
                for partition in self.partitions
                if partition.group.master is master
            ),
            None,
        )

    def discard(self) -> None:
        for partition in self.partitions:
            partition.gradient = None

    @contextmanager
    def _unchanged(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Undo what the step does to parameters that no rank has a gradient for: one process would
        not decay them."""
        chosen = {id(parameter) for parameter in parameters}
        with ExitStack() as undo:
            for piece in self.owned if chosen else ():
                if id(piece.entry.parameter) in chosen:
                    undo.callback(
                        piece.partition.restore, piece.slot, piece.partition.copy_of(piece.slot)
                    )
            for tensor in (
                self._tensors[parameter] for parameter in parameters if parameter in self._tensors
            ):
                undo.callback(tensor.copy_, tensor.clone())
            yield

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        for partition in self.partitions:
            partition.group.master.copy_(partition.group.owned)
        self._writes.ours()

    def weights(self) -> list[OptimizerShard]:
        return [
            OptimizerShard(
                piece.entry.name,
                piece.first,
                {"weight": piece.partition.group.master[piece.slot.start : piece.slot.stop]},
            )
            for piece in self.owned
        ]

    @torch.no_grad()
    def publish(self) -> None:
        if self._gather is not None:
            self._gather.settle()  # before this writes into what may still be sent
        for partition in self.partitions:
            partition.group.owned.copy_(partition.group.master)
        for partition in self.partitions if self._sharded else ():
            group = (
                self._trained.expert_shard_group if partition.experts else self._trained.shard_group
            )
            all_gather_flat(partition.group.flat, partition.group.owned.clone(), group).wait()
        self._writes.ours()

    def create_state(self, state: Mapping[str, Mapping[str, Tensor | float]]) -> None:
        with self._groups_for_deepspeed():
            groups = {
                id(parameter): group
                for group in self._optimizer.param_groups
                for parameter in group["params"]
            }
        for partition in self.partitions:
            master = partition.group.master
            # one state for all parameters of the partition, which have taken the same steps
            made = {}
            for entry in (piece.entry for piece in self.owned if piece.partition is partition):
                for key, template in state.get(entry.name, {}).items():
                    if key not in made:
                        made[key] = new_state(
                            template, master, entry.spec.global_shape, groups[id(master)]
                        )
            self._optimizer.state[master] = made

    def shards(self, *, to_save: bool) -> list[OptimizerShard]:
        return [
            OptimizerShard(
                piece.entry.name, piece.first, piece.partition.values_of(piece.slot, to_save)
            )
            for piece in self.owned
        ]

    def held(self) -> dict[str, list[Tensor]]:
        masters = [partition.group.master for partition in self.partitions]
        gradients = [partition.gradient for partition in self.partitions] + [
            master.grad for master in masters
        ]
        return {
            "parameters": [partition.group.flat for partition in self.partitions],
            "gradients": [gradient for gradient in gradients if gradient is not None],
            "optimizer": [*state_tensors(self._optimizer), *masters],
        }

    def release(self) -> None:
        if self._engine is not None:
            with self._groups_for_deepspeed():
                self._library.release_deepspeed(self._engine)
        if self._gather is not None:
            self._gather.release()
        self._engine = None
        self.partitions, self.owned, self._expert_groups = [], [], []
        self._entries, self._tensors = {}, {}
        self._writes = Writes([])


def _range_of(piece: OwnedPiece) -> TrainedRange:
    return TrainedRange(
        piece.partition.group.master,
        piece.slot.start,
        piece.entry,
        piece.first,
        piece.slot.stop - piece.slot.start,
    )


def rounds_by_place(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's update of an element on a CPU depends on the element's place in
    the tensor.

    Kernels for the whole update compute the last elements of a tensor, too few for a vector
    instruction, rounding them differently from the others (DeepSpeed 0.19, torch 2.13: 6e-8 after
    30 steps). Copies that several ranks step, tied ones for example, would drift apart.
    """
    return type(optimizer).__name__ == CPU_ADAM or any(
        group.get("fused") for group in optimizer.param_groups
    )


VECTOR = 16
"""Elements of the widest vector of a CPU, in float32: 512 bits. A tensor of a multiple of them has
no such last elements."""
