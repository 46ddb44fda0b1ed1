"""The data-parallel backend: gradients, optimizer state and the optimizer's step over data-parallel
ranks.

One backend (`backend`) has three parts: a store of parameters (`parameter_store`), a reducer of
gradients (`reducer`) and a stepper that runs the optimizer (`stepper`, `deepspeed_stepper`). Each
ZeRO stage has its own:

| stage | parameters | optimizer | gradients |
|---|---|---|---|
| 0 | whole | the user's, on all of them | all-reduced |
| 1, 2 | whole | DeepSpeed's, on this rank's part | reduced to partitions, or overlapped |
| 3 | sharded | DeepSpeed's, on this rank's pieces | overlapped |

With a shard size, the parts are those of a group of neighbouring data-parallel ranks
(`Mesh.shard_group`; for experts, those in it that have the same ones). Gradients are summed in it
as the table says, and then each part over its replicas.

DeepSpeed is imported only at stages above 0, which takes a second. Its own reduction
(`coalesce_grad_reduction`) sends even when the rank raised inside it and keeps float32 sums of bf16
gradients only under another stage, and its hooks do not see the gradients of a split backward. So
its stage 1 is used for stages 1 to 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_3d.compat import deepspeed as deepspeed_compat
from lightning_3d.errors import ConfigError
from lightning_3d.options.zero import MICRO_BATCH, STEP, ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.zero.backend import DataParallelBackend
from lightning_3d.parallel.zero.deepspeed_engine import Partition, ShapeOnly, slots_of
from lightning_3d.parallel.zero.deepspeed_stepper import DeepSpeedStepper
from lightning_3d.parallel.zero.gradients import (
    GradientSums,
    ReplicaSums,
    Share,
    Slot,
    Target,
    end_to_end,
    sum_dtype,
)
from lightning_3d.parallel.zero.parameter_store import (
    GatheredParameters,
    ParameterStore,
    ShardedParameters,
    WholeParameters,
)
from lightning_3d.parallel.zero.reducer import Reducer
from lightning_3d.parallel.zero.reduction import Policy, Reduction
from lightning_3d.parallel.zero.stepper import PlainStepper, Stepper
from lightning_3d.parallel.zero.trained import TrainedParameters, Wave

BUCKET_BYTES = 32 * 2**20
"""Bytes of one all-reduce of gradients: large enough that its latency does not count, small enough
that copying the next bucket overlaps with it."""

__all__ = ["BUCKET_BYTES", "DataParallelBackend", "make_backend"]


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

    def build(
        self, trained: TrainedParameters, store: ParameterStore, optimizer: Optimizer
    ) -> tuple[Stepper, Reducer]:
        """Take over the gradients of `trained` and the step of `optimizer`."""
        trained.first_copies = self._copies_before_reduction(trained)
        trained.plan_waves(self._early_bytes(trained))
        tensors = store.tensors_to_train(trained)
        sums = GradientSums(trained.parameters)
        if self.zero.stage == 0:
            plain = PlainStepper(trained, sums, optimizer)
            return plain, self._reducer_of_gradients(trained, sums)
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

    def _copies_before_reduction(self, trained: TrainedParameters) -> bool:
        """Whether copies take the first one's gradient before the data-parallel ranks add it up: if
        they do not step the same elements of a parameter, because ZeRO shards buffers whose size
        differs between tensor-parallel ranks."""
        return self.equal_copies and self.zero.stage > 0 and trained.any_uneven

    def _early_bytes(self, trained: TrainedParameters) -> int | None:
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

    def _reducer_of_gradients(self, trained: TrainedParameters, sums: GradientSums) -> Reducer:
        """Stage 0: one flat buffer for each type of gradients and each group of ranks."""
        reductions: list[Reduction] = []
        unshared: list[nn.Parameter] = []
        for experts, group in ((False, trained.group), (True, trained.expert_group)):
            members = [entry.parameter for entry in trained.entries if entry.spec.expert == experts]
            if dist.get_world_size(group) == 1:
                unshared += members
                continue
            alone = () if experts else trained.reduced_alone()
            policy = Policy(group, self.bucket_bytes, alone, into_gradients=True)
            for dtype in sorted({sum_dtype(parameter) for parameter in members}, key=str):
                of_type = [parameter for parameter in members if sum_dtype(parameter) == dtype]
                # Wave by wave, so that each lies in one piece.
                slots = end_to_end(
                    sorted(of_type, key=lambda parameter: trained.wave_of[id(parameter)])
                )
                reductions.append(Reduction(policy, slots, trained.waves, sums))
        return Reducer(trained, sums, reductions, unshared=unshared, absorbs=True, shows=True)

    def _reducer_of_partitions(
        self, trained: TrainedParameters, sums: GradientSums, stepper: DeepSpeedStepper
    ) -> Reducer:
        """Stages 1 and 2: all gradients in DeepSpeed's flat buffers, one behind the other."""
        dense = [partition for partition in stepper.partitions if not partition.experts]
        experts = [partition for partition in stepper.partitions if partition.experts]
        # Elsewhere than in its part, the buffer has sums over the shard group only.
        frees = self.zero.stage > 1 or trained.in_two_levels
        overlapped = self._overlapped_partitions(trained, sums, dense)
        reductions: list[Reduction] = []
        if overlapped is not None:
            reductions.append(overlapped)
            left = [slot.parameter for slot in slots_of(dense) if slot.parameter not in overlapped]
            reductions += self._added(trained, sums, stepper, left)
        elif dense:
            reductions.append(
                self._in_parts(
                    trained, sums, dense, trained.first_group, trained.group, frees=frees
                )
            )
        if experts:
            group, everyone = trained.first_expert_group, trained.expert_group
            reductions.append(self._in_parts(trained, sums, experts, group, everyone, frees=frees))
        return Reducer(
            trained,
            sums,
            reductions,
            accumulated=dense if overlapped is not None else (),
            frees=frees,
            absorbs=self.zero.reduce != MICRO_BATCH,
            shows=overlapped is None and not self._scatters(trained) and not frees,
        )

    def _overlapped_partitions(
        self, trained: TrainedParameters, sums: GradientSums, partitions: Sequence[Partition]
    ) -> Reduction | None:
        """The reduction of buckets that are sent to the owners of their elements while a backward
        still runs.

        None if none is: one reduce-scatter of each whole part is less, but would have to wait for
        the last of several waves, and nothing can be alone in it.
        """
        scatters = self._scatters(trained)
        waves = len(trained.waves) > 2 or bool(trained.reduced_alone())
        if not partitions or not (self.zero.reduce == MICRO_BATCH or (scatters and waves)):
            return None
        ranks = range(dist.get_world_size(trained.shard_group))
        shares = [share for partition in partitions for share in partition.shares(ranks)]
        targets = [
            Target(*partition.place, total=partition.sum_of_gradients) for partition in partitions
        ]
        listens = self.zero.reduce == MICRO_BATCH
        return self._overlapped(
            trained, sums, trained.stages, slots_of(partitions), shares, targets, listens=listens
        )

    def _in_parts(
        self,
        trained: TrainedParameters,
        sums: GradientSums,
        partitions: Sequence[Partition],
        group: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        *,
        frees: bool,
    ) -> Reduction:
        """The reduction in one tensor with DeepSpeed's own layout, so that the part that a rank
        owns is a view and nothing is copied twice. With `frees`, that part is kept alone."""
        ends = [(partition.base, partition.base + partition.numel) for partition in partitions]
        scatters = self._scatters(trained)
        policy = Policy(
            group,
            self.bucket_bytes,
            trained.reduced_alone(),
            everyone=everyone if trained.in_two_levels else None,
            replicas=self._replicas(trained),
            scattered=ends if scatters else None,
            in_one_tensor=True,
            into_gradients=not scatters and not frees,
        )
        copies = frees and not scatters
        targets = [
            Target(*each.place, keep=each.keep_copy if copies else each.keep) for each in partitions
        ]
        return Reduction(
            policy, slots_of(partitions), trained.waves, sums, targets, numel=ends[-1][1]
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
        listens = self.zero.reduce == MICRO_BATCH and self.zero.gather == STEP
        stages = trained.stages
        if not listens:  # parameters outside the blocks are sent last
            outside = {id(parameter) for parameter in store.units.outside_blocks}
            stages = [
                sorted(stage, key=lambda parameter: id(parameter) not in outside)
                for stage in stages
            ]
        targets = _targets(stepper, slots)
        overlapped = None
        if slots:
            overlapped = self._overlapped(
                trained, sums, stages, slots, store.shares(slots), targets, listens=listens
            )
        reductions = [] if overlapped is None else [overlapped]
        rest = [
            slot.parameter
            for slot in slots
            if overlapped is None or slot.parameter not in overlapped
        ]
        reductions += self._added(trained, sums, stepper, rest)
        if experts:
            policy = Policy(
                trained.first_expert_group,
                self.bucket_bytes,
                everyone=trained.expert_group if trained.in_two_levels else None,
                replicas=self._replicas(trained),
            )
            slots = end_to_end(store.in_unit_order(experts))
            reductions.append(
                Reduction(policy, slots, trained.waves, sums, _targets(stepper, slots))
            )
        absorbs = self.zero.reduce != MICRO_BATCH
        reducer = Reducer(
            trained, sums, reductions, accumulated=stepper.partitions, frees=True, absorbs=absorbs
        )
        store.on_block_finished = reducer.block_finished
        return reducer

    def _added(
        self,
        trained: TrainedParameters,
        sums: GradientSums,
        stepper: DeepSpeedStepper,
        parameters: Sequence[nn.Parameter],
    ) -> list[Reduction]:
        """The reduction of what is summed over other ranks first, and therefore once in each step.
        This rank adds its pieces to what their partitions have already."""
        if not parameters:
            return []
        slots = end_to_end(parameters)
        policy = Policy(trained.group, self.bucket_bytes, trained.reduced_alone())
        return [Reduction(policy, slots, trained.waves, sums, _targets(stepper, slots))]

    def _replicas(self, trained: TrainedParameters) -> ReplicaSums | None:
        """Sums over the replicas of shards, where gradients are reduced in the shard group
        first."""
        group = trained.mesh.replica_group
        if group is None or not trained.in_two_levels:
            return None
        return ReplicaSums(group, trained.device)

    def _overlapped(
        self,
        trained: TrainedParameters,
        sums: GradientSums,
        stages: Sequence[Sequence[nn.Parameter]],
        slots: Iterable[Slot],
        shares: Sequence[Share],
        targets: Sequence[Target],
        *,
        listens: bool,
    ) -> Reduction | None:
        """The reduction of parameters that one stage uses and whose gradients are whole on this
        rank; None if there are none."""
        slots = list(slots)
        if sum(share.stop - share.start for share in shares) < sum(
            slot.stop - slot.start for slot in slots
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
        chosen = [
            slot for slot in slots if id(slot.parameter) in whole and uses[id(slot.parameter)] == 1
        ]
        if not chosen:
            return None
        policy = Policy(
            trained.first_group,
            self.bucket_bytes,
            trained.reduced_alone(),
            everyone=trained.group if trained.in_two_levels else None,
            replicas=self._replicas(trained),
            shares=shares if self._scatters(trained) else None,
            from_the_end=True,
            control=trained.mesh.data_control if self.zero.reduce == MICRO_BATCH else None,
            listens=listens,
        )
        waves = [Wave(stage, parameters) for stage, parameters in enumerate(stages)]
        return Reduction(policy, chosen, waves, sums, targets)

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


def _targets(stepper: DeepSpeedStepper, slots: Iterable[Slot]) -> list[Target]:
    """This rank's pieces of a buffer in which parameters have these slots, rising."""
    starts = {id(slot.parameter): slot.start for slot in slots}
    found = []
    for piece in stepper.owned:
        start = starts.get(id(piece.entry.parameter))
        if start is not None:
            first = start + piece.first
            found.append(
                Target(
                    first, first + piece.slot.stop - piece.slot.start, total=piece.sum_of_gradients
                )
            )
    return sorted(found, key=lambda target: target.start)


def make_backend(
    zero: ZeroOptions,
    mesh: Mesh,
    specs: Mapping[str, ShardSpec],
    *,
    stages: Sequence[Sequence[nn.Parameter]] | None = None,
    precision: str = "fp32",
    bucket_bytes: int = BUCKET_BYTES,
    shape_only: bool = False,
    equal_copies: bool = False,
) -> DataParallelBackend:
    """Make the backend of a ZeRO stage.

    Args:
        zero: resolved options.
        mesh: process groups.
        specs: where each parameter that is trained lies in the whole model, by its name in the
            module that `prepare` gets.
        stages: for each pipeline stage on this rank its parameters, in the order in which the
            forward uses them. None: one stage with all.
        precision: "fp32", "fp64", "bf16" (bf16 parameters with fp32 master weights) or "bf16_mixed"
            (fp32 parameters).
        bucket_bytes: upper bound of the bytes of one reduction of gradients, except for a single
            larger parameter; with `zero.overlap_gather` also of one message of new parameters.
        shape_only: tensors have no values (dry runs): without DeepSpeed.
        equal_copies: kernels of two tensor-parallel ranks may round differently, as on GPUs, so
            copies of a parameter take the gradient of the first one.

    Raises:
        ConfigError: a stage above 0 in double precision.
    """
    if zero.stage > 0 and precision == "fp64":
        raise ConfigError(
            f"zero_stage={zero.stage} cannot train in double precision: DeepSpeed's master weights"
            " are float32. Use zero_stage=0 for float64, or precision 32-true."
        )
    store: ParameterStore = WholeParameters()
    if zero.stage == 3:
        store = ShardedParameters(mesh, specs, zero)
    elif zero.overlap_gather:
        store = GatheredParameters(bucket_bytes)
    composition = Composition(
        zero, bucket_bytes, ShapeOnly if shape_only else deepspeed_compat, equal_copies
    )
    return DataParallelBackend(
        mesh,
        specs,
        store,
        composition.build,
        zero,
        bucket_bytes=bucket_bytes,
        equal_copies=equal_copies,
        stages=stages,
        precision=precision,
    )
