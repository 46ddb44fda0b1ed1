"""The parts of each ZeRO stage: reductions of its gradients and the stepper of its parameters.

| stage | parameters | optimizer | gradients |
|---|---|---|---|
| 0 | whole | the user's, on all of them | all-reduced |
| 1, 2 | whole | DeepSpeed's, on this rank's part | reduced to partitions, or overlapped |
| 3 | sharded | DeepSpeed's, on this rank's pieces | overlapped |

With a shard size, the parts are those of a group of neighbouring data-parallel ranks
(`Mesh.shard_group`; for experts, those in it that have the same ones). Gradients are summed in it
as the table says, and then each part over its replicas: `EarlyReplicaSums` for overlapped ones,
else `ReplicaSums`.

Gradients are reduced by `FlatGradients`, once in each step, or by `EagerReduction`, in every
backward. DeepSpeed's own reduction (`coalesce_grad_reduction`) sends even when the rank raised
inside it and keeps float32 sums of bf16 gradients only under another stage. Its hooks do not see
the gradients of a split backward. So its stage 1 is used for stages 1 to 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_3d.compat import deepspeed as deepspeed_compat
from lightning_3d.options.zero import MICRO_BATCH, STEP, ZeroOptions
from lightning_3d.parallel.zero.deepspeed_stepper import DeepSpeedStepper
from lightning_3d.parallel.zero.early_replica_sums import EarlyReplicaSums
from lightning_3d.parallel.zero.flat_partition import slots_of
from lightning_3d.parallel.zero.gradient_buffers import (
    FlatGradients,
    GradientSums,
    Slot,
    end_to_end,
    sum_dtype,
)
from lightning_3d.parallel.zero.overlapped_gather import GatheredParameters
from lightning_3d.parallel.zero.overlapped_reduction import EagerReduction, Share
from lightning_3d.parallel.zero.parameter_store import ParameterStore
from lightning_3d.parallel.zero.plain_stepper import PlainStepper
from lightning_3d.parallel.zero.reducer import (
    AddedToPieces,
    AllReduced,
    Overlapped,
    ReducedToPartitions,
    Reducer,
    Reduction,
    UnsharedGradients,
)
from lightning_3d.parallel.zero.replica_sums import ReplicaSums
from lightning_3d.parallel.zero.sharded_parameters import ShardedParameters
from lightning_3d.parallel.zero.stepper import Stepper
from lightning_3d.parallel.zero.trained import TrainedParameters


@dataclass(frozen=True)
class Composition:
    """Builds the stepper and the reducer of a stage, once the optimizer is known.

    Attributes:
        zero: resolved options.
        bucket_bytes: upper bound of the bytes of one reduction of gradients, except for a single
            larger parameter.
        library: `compat.deepspeed`, or what takes its place in a dry run.
        equal_copies: kernels of two tensor-parallel ranks may round differently, so copies of a
            parameter take the gradient of the first.
    """

    zero: ZeroOptions
    bucket_bytes: int
    library: Any = deepspeed_compat
    equal_copies: bool = False

    def copies_before_reduction(self, trained: TrainedParameters) -> bool:
        """Whether copies take the first one's gradient before the data-parallel ranks add it up: if
        they do not step the same elements of a parameter, because ZeRO shards buffers whose size
        differs between tensor-parallel ranks."""
        return self.equal_copies and self.zero.stage > 0 and trained.any_uneven

    def early_bytes(self, trained: TrainedParameters) -> int | None:
        """Bytes of gradients that are sent together while a backward still runs.

        None where they are all sent in it, or whole blocks at a time (stage 3); and where the
        buffer of all gradients is one tensor, which must not be there together with the
        activations.
        """
        in_one_tensor = self.zero.stage > 0 and not self._scatters(trained)
        return (
            None
            if self.zero.stage == 3 or self.zero.reduce == MICRO_BATCH or in_one_tensor
            else self.bucket_bytes
        )

    def build(
        self, trained: TrainedParameters, store: ParameterStore, optimizer: Optimizer
    ) -> tuple[Stepper, Reducer]:
        """Take over the gradients of `trained` and the step of `optimizer`."""
        tensors = store.tensors_to_train(trained)
        sums = GradientSums(trained.parameters)
        if self.zero.stage == 0:
            plain = PlainStepper(trained, sums, optimizer)
            return plain, Reducer(
                trained, sums, self._all_reductions(trained, sums), absorbs=True, shows=True
            )
        sharded = not isinstance(store, ShardedParameters)
        gather = store.gather if isinstance(store, GatheredParameters) else None
        stepper = DeepSpeedStepper(
            trained,
            tensors,
            optimizer,
            self.zero,
            sharded=sharded,
            library=self.library,
            gather=gather,
        )
        if isinstance(store, ShardedParameters):
            return stepper, self._reducer_of_units(trained, sums, stepper, store)
        return stepper, self._reducer_of_partitions(trained, sums, stepper)

    def _all_reductions(self, trained: TrainedParameters, sums: GradientSums) -> list[Reduction]:
        """Stage 0: one flat buffer for each type of gradients and each group of ranks."""
        reductions: list[Reduction] = []
        for experts, group in ((False, trained.group), (True, trained.expert_group)):
            members = [entry.parameter for entry in trained.entries if entry.spec.expert == experts]
            if dist.get_world_size(group) == 1:
                reductions.append(UnsharedGradients(members, sums))
                continue
            for dtype in sorted({sum_dtype(parameter) for parameter in members}, key=str):
                of_type = [parameter for parameter in members if sum_dtype(parameter) == dtype]
                # Wave by wave, so that each lies in one piece.
                slots = end_to_end(
                    sorted(of_type, key=lambda parameter: trained.wave_of[id(parameter)])
                )
                flat = self._flat(
                    trained, slots, alone=[] if experts else trained.reduced_alone(), whole=False
                )
                reductions.append(AllReduced(flat, group, sums))
        return reductions

    def _reducer_of_partitions(
        self, trained: TrainedParameters, sums: GradientSums, stepper: DeepSpeedStepper
    ) -> Reducer:
        """Stages 1 and 2: all gradients in DeepSpeed's flat buffers, one behind the other."""
        dense = [partition for partition in stepper.partitions if not partition.experts]
        experts = [partition for partition in stepper.partitions if partition.experts]
        scatters = self._scatters(trained)
        overlapped = None
        slots = slots_of(dense)
        # With several waves, the reduce-scatter of a whole part would have to wait for the last
        # one.
        if dense and (self.zero.reduce == MICRO_BATCH or (scatters and len(trained.waves) > 2)):
            shares = [
                share
                for partition in dense
                for share in partition.shares(range(dist.get_world_size(trained.shard_group)))
            ]
            eager = self._eager(
                trained, trained.stages, slots, shares, at_once=self.zero.reduce == MICRO_BATCH
            )
            overlapped = self._overlapped(
                eager, sums, lambda: [partition.sum_of_gradients() for partition in dense], trained
            )
        reductions: list[Reduction] = []
        if overlapped is not None:
            reductions.append(overlapped)
            reductions += self._rest(
                trained,
                sums,
                stepper,
                [slot.parameter for slot in slots if slot.parameter not in overlapped],
            )
        # elsewhere than in its part, the buffer has sums over the shard group only
        frees = self.zero.stage > 1 or trained.in_two_levels
        for partitions, group, everyone in (
            (dense if overlapped is None else [], trained.first_group, trained.group),
            (experts, trained.first_expert_group, trained.expert_group),
        ):
            if partitions:
                slots, alone = slots_of(partitions), trained.reduced_alone()
                ends = [
                    (partition.base, partition.base + partition.numel) for partition in partitions
                ]
                flat = FlatGradients(
                    slots,
                    ends[-1][1],
                    bucket_bytes=self.bucket_bytes,
                    alone=alone,
                    waves=trained.wave_of,
                    scattered=ends if scatters else None,
                    everyone=everyone if trained.in_two_levels else None,
                )
                in_parts = {id(slot.parameter) for slot in slots} - {
                    id(parameter) for parameter in alone
                }
                replicas = self._replica_sums(trained, stepper, in_parts)
                reductions.append(
                    ReducedToPartitions(
                        flat,
                        group,
                        sums,
                        partitions,
                        scatters=scatters,
                        frees=frees,
                        replicas=replicas,
                    )
                )
        absorbs = self.zero.reduce != MICRO_BATCH
        kept = dense if overlapped is not None else ()
        shows = overlapped is None and not scatters and not frees
        return Reducer(
            trained, sums, reductions, accumulated=kept, frees=frees, absorbs=absorbs, shows=shows
        )

    def _reducer_of_units(
        self,
        trained: TrainedParameters,
        sums: GradientSums,
        stepper: DeepSpeedStepper,
        store: ShardedParameters,
    ) -> Reducer:
        """Stage 3: gradients in the order of the units, of which each rank keeps those of its
        pieces."""
        experts = [entry.parameter for entry in trained.entries if entry.spec.expert]
        expert_ids = {id(parameter) for parameter in experts}
        dense = [parameter for parameter in trained.parameters if id(parameter) not in expert_ids]
        slots = end_to_end(store.in_unit_order(dense))
        # Where blocks are gathered in the backward too, both kinds of messages need one order on
        # all ranks, whatever gradients they have: those of a block are sent when the next one is
        # gathered.
        at_once = self.zero.reduce == MICRO_BATCH and self.zero.gather == STEP
        stages = trained.stages
        if not at_once:  # parameters outside the blocks are sent last
            outside = {id(parameter) for parameter in store.units.outside_blocks}
            stages = [
                sorted(stage, key=lambda parameter: id(parameter) not in outside)
                for stage in stages
            ]
        eager = (
            self._eager(trained, stages, slots, store.shares(slots), at_once=at_once)
            if slots
            else None
        )
        pieces = {
            id(piece.entry.parameter): piece
            for piece in stepper.owned
            if not piece.entry.spec.expert
        }
        kept = [pieces[id(slot.parameter)] for slot in slots if id(slot.parameter) in pieces]
        overlapped = self._overlapped(
            eager, sums, lambda: [piece.sum_of_gradients() for piece in kept], trained
        )
        reductions: list[Reduction] = []
        if overlapped is not None:
            reductions.append(overlapped)
            store.on_block_finished = overlapped.block_finished
        rest = [
            slot.parameter
            for slot in slots
            if overlapped is None or slot.parameter not in overlapped
        ]
        reductions += self._rest(trained, sums, stepper, rest)
        if experts:
            everyone = trained.expert_group if trained.in_two_levels else None
            flat = self._flat(trained, end_to_end(store.in_unit_order(experts)), everyone=everyone)
            replicas = self._replica_sums(trained, stepper, expert_ids)
            reductions.append(
                AddedToPieces(
                    flat, trained.first_expert_group, sums, stepper.owned, replicas=replicas
                )
            )
        absorbs = self.zero.reduce != MICRO_BATCH
        return Reducer(
            trained, sums, reductions, accumulated=stepper.partitions, frees=True, absorbs=absorbs
        )

    def _flat(
        self,
        trained: TrainedParameters,
        slots: Sequence[Slot],
        *,
        alone: Iterable[nn.Parameter] = (),
        whole: bool = True,
        everyone: dist.ProcessGroup | None = None,
    ) -> FlatGradients:
        size, waves = self.bucket_bytes, trained.wave_of
        return FlatGradients(
            slots,
            slots[-1].stop,
            bucket_bytes=size,
            alone=alone,
            waves=waves,
            whole=whole,
            everyone=everyone,
        )

    def _rest(
        self,
        trained: TrainedParameters,
        sums: GradientSums,
        stepper: DeepSpeedStepper,
        parameters: Sequence[nn.Parameter],
    ) -> list[Reduction]:
        """The reduction of what is summed over other ranks first, and therefore once in each
        step."""
        if not parameters:
            return []
        flat = self._flat(trained, end_to_end(parameters), alone=trained.reduced_alone())
        return [AddedToPieces(flat, trained.group, sums, stepper.owned)]

    def _overlapped(
        self,
        eager: EagerReduction | None,
        sums: GradientSums,
        targets: Any,
        trained: TrainedParameters,
    ) -> Overlapped | None:
        if eager is None:
            return None
        return Overlapped(
            eager, sums, targets, trained, each_micro_batch=self.zero.reduce == MICRO_BATCH
        )

    def _replica_sums(
        self, trained: TrainedParameters, stepper: DeepSpeedStepper, chosen: set[int]
    ) -> ReplicaSums | None:
        """Sums over the replicas of the parameters with the ids `chosen`, which are reduced in the
        shard group first."""
        group = trained.mesh.replica_group
        if group is None or not trained.in_two_levels:
            return None
        return ReplicaSums(
            group, [piece for piece in stepper.owned if id(piece.entry.parameter) in chosen]
        )

    def _eager(
        self,
        trained: TrainedParameters,
        stages: Sequence[Sequence[nn.Parameter]],
        slots: Iterable[Slot],
        shares: Sequence[Share],
        *,
        at_once: bool,
    ) -> EagerReduction | None:
        """The reduction of parameters that one stage uses and whose gradients are whole on this
        rank; None if there are none."""
        places = {id(slot.parameter): slot for slot in slots}
        if sum(share.stop - share.start for share in shares) < sum(
            slot.stop - slot.start for slot in places.values()
        ):
            raise RuntimeError(
                "Some gradients would be sent to no rank: the shares of the ranks do not cover the"
                " buffer of gradients."
            )
        whole = {
            id(e.parameter)
            for e in trained.entries
            if not trained.summed_over_tp(e) and len(e.spec.pp_replicas) <= 1
        }
        uses = Counter(id(parameter) for stage in stages for parameter in stage)
        chosen = {key for key in whole & places.keys() if uses[key] == 1}
        of_stages = [[places[id(p)] for p in stage if id(p) in chosen] for stage in stages]
        if not any(of_stages):
            return None
        replicas = trained.mesh.replica_group if trained.in_two_levels else None
        return EagerReduction(
            of_stages,
            shares,
            trained.first_group,
            trained.shard_group,
            trained.mesh.data_control,
            bucket_bytes=self.bucket_bytes,
            alone=trained.reduced_alone(),
            to_owners=self._scatters(trained),
            at_once=at_once,
            replicas=None if replicas is None else EarlyReplicaSums(replicas, trained.device),
        )

    def _scatters(self, trained: TrainedParameters) -> bool:
        """True if gradients are sent only to their owners. One rank owns all of them, and sends
        none.

        Buffers that differ between tensor-parallel ranks would be split differently on them, and
        copies would not stay bit-equal.
        """
        alone = dist.get_world_size(trained.group) == 1
        if alone or (trained.order_matters and trained.any_uneven):
            return False
        wanted = self.zero.reduce_scatter
        return wanted if wanted is not None else trained.device.type == "cuda"
