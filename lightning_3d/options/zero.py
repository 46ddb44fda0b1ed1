"""Options of ZeRO: the shards of data-parallel ranks, and the times of communication. Pure: no
torch.

ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning_3d.errors import LayoutError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.schedules import find_schedule
from lightning_3d.layout.shard_size import check_shard_size
from lightning_3d.options.schema import SPEED, OptionGroup, defaults_of, one_of, option

STAGES = (0, 1, 2, 3)
STEP, MICRO_BATCH = "step", "micro_batch"
NONE, OPTIMIZER, PARAMETERS = "none", "optimizer", "parameters"
OFFLOAD = (NONE, OPTIMIZER, PARAMETERS)


def _check_stage(name: str, value: Any) -> None:
    if value not in STAGES:
        raise LayoutError(f"{name} must be 0, 1, 2 or 3; got {value!r}.")


_check_moment = one_of(STEP, MICRO_BATCH, null=True, error=LayoutError)


@dataclass(frozen=True, kw_only=True)
class ZeroArguments(OptionGroup):
    """Options of ZeRO as a user gives them. `ZeroOptions` has them settled and checked."""

    zero_stage: int = option(
        0,
        "what to shard over the data-parallel ranks. 0 shards nothing (DeepSpeed is not used), 1"
        " shards the optimizer state, 2 also shards gradients, and 3 also shards parameters",
        _check_stage,
    )
    zero_reduce: str | None = option(
        None,
        "when to reduce gradients. step reduces them once per optimizer step. micro_batch (with"
        " zero_stage 2 or 3) reduces them in every backward, so that a rank keeps 1/dp of them."
        " null means micro_batch if zero_stage is 2 or 3 and pp is 1, and step otherwise",
        _check_moment,
    )
    zero_gather: str | None = option(
        None,
        "when to gather parameters, with zero_stage 3. step gathers all parameters of a rank once"
        " per batch. micro_batch gathers them block by block in every forward and backward. null"
        " means step with zero-bubble schedules and DualPipeV, and micro_batch otherwise",
        _check_moment,
    )
    zero_reduce_scatter: bool | None = option(
        None,
        "true sends each gradient only to the rank that updates its parameter (reduce-scatter"
        " instead of all-reduce). null means true on GPUs and false on CPUs",
    )
    zero_offload: str = option(
        NONE,
        "what to keep in host memory. none keeps nothing there. optimizer keeps the optimizer state"
        " and the fp32 master weights (zero_stage 1, 2 or 3). parameters also keeps each rank's"
        " shard of the parameters (zero_stage 3)",
        one_of(*OFFLOAD, error=LayoutError),
    )
    zero_shard_size: int | None = option(
        None,
        "number of neighboring data-parallel ranks that shard, such as those of a node. It must"
        " divide dp. The groups of so many ranks hold replicas, so that parameters are gathered"
        " within a group. With experts, ep must divide zero_shard_size * tp * cp. null shards over"
        " all data-parallel ranks; with parallelism=auto, the planner chooses",
    )
    zero_overlap_gather: bool = option(
        False,
        "true begins the next forward while the parameters that the optimizer has updated are still"
        " gathered. Each block waits only for its own parameters (zero_stage 1 or 2)",
        beyond_torch=SPEED,
    )


@dataclass(frozen=True)
class ZeroOptions:
    """Options of ZeRO as ranks use them. Those that `resolve` fills in are None before.

    Offload: ZeRO-Offload, arXiv:2101.06840. Shards over a part of the ranks: HSDP (Zhao et al.,
    "PyTorch FSDP", arXiv:2304.11277, section 3.2.2). Overlapped gather: as Megatron-LM's
    `--overlap-param-gather`. Reduce-scatter pays off on CUDA: between processes on one machine
    gloo's all-reduce is faster.

    Attributes:
        gather_frozen: as `gather`, for frozen second models. Their blocks run forward only, and are
            gathered for each forward also with schedules that split the backward pass.
    """

    stage: int = ZeroArguments.zero_stage
    reduce: str | None = ZeroArguments.zero_reduce
    gather: str | None = ZeroArguments.zero_gather
    reduce_scatter: bool | None = ZeroArguments.zero_reduce_scatter
    offload: str = ZeroArguments.zero_offload
    shard_size: int | None = ZeroArguments.zero_shard_size
    overlap_gather: bool = ZeroArguments.zero_overlap_gather
    gather_frozen: str | None = None

    @classmethod
    def of(cls, arguments: Any) -> ZeroOptions:
        """Return the options that `ZeroArguments` or the group `parallelism` have."""
        return cls(
            **{
                name.removeprefix("zero_"): getattr(arguments, name)
                for name in defaults_of(ZeroArguments)
            }
        )

    def resolve(self, schedule: str, pp: int) -> ZeroOptions:
        """Fill in the options that are None, except `reduce_scatter`, which depends on the device.

        Raises:
            LayoutError: an unknown stage or value, or options that the stage does not have.
        """
        # checks each value
        ZeroArguments(
            **{
                name: getattr(self, name.removeprefix("zero_"))
                for name in defaults_of(ZeroArguments)
            }
        )
        self._check_together()
        splits = find_schedule(schedule).split_backward and pp > 1
        if self.gather == MICRO_BATCH and splits:
            raise LayoutError(
                "zero_gather=micro_batch frees a block's parameters after its backward pass, but"
                f" {schedule} computes the gradients of inputs and weights in separate passes. Use"
                " zero_gather=step, or the schedule 1F1B."
            )
        reduce = self.reduce or (MICRO_BATCH if self.stage >= 2 and pp == 1 else STEP)
        gather = self.gather or ((STEP if splits else MICRO_BATCH) if self.stage == 3 else None)
        return replace(
            self,
            reduce=reduce,
            gather=gather,
            gather_frozen=MICRO_BATCH if self.stage == 3 and splits else gather,
        )

    def over(self, layout: Layout) -> ZeroOptions:
        """Check `shard_size` against a layout.

        Returns:
            These options; `shard_size` is None where one group of all data-parallel ranks shards.

        Raises:
            LayoutError: a shard size that does not suit dp and ep, or that stage 0 has no use for.
        """
        size = self.shard_size
        if size is None:
            return self
        check_shard_size(size, layout)
        if self.stage == 0:
            raise LayoutError(
                f"zero_shard_size={size} needs zero_stage=1, 2 or 3; got 0, which shards nothing."
            )
        return replace(self, shard_size=None) if size == layout.dp else self

    def _check_together(self) -> None:
        if self.reduce == MICRO_BATCH and self.stage < 2:
            raise LayoutError(
                f"zero_reduce=micro_batch shards the gradients, but zero_stage={self.stage} needs"
                " all of them on every rank. Use zero_stage=2, or zero_reduce=step."
            )
        if self.gather is not None and self.stage != 3:
            raise LayoutError(
                f"zero_gather={self.gather} needs zero_stage=3; got {self.stage}, which gathers no"
                " parameters."
            )
        needed = {OPTIMIZER: 1, PARAMETERS: 3}.get(self.offload, 0)
        if self.stage < needed:
            raise LayoutError(
                f"zero_offload={self.offload} needs"
                f" zero_stage={needed}{' or more' if needed < 3 else ''}; got {self.stage}."
            )
        if self.overlap_gather and self.stage not in (1, 2):
            why = (
                "which gathers no parameters"
                if self.stage == 0
                else "which already gathers each block while the one before it runs"
            )
            raise LayoutError(
                f"zero_overlap_gather=true needs zero_stage=1 or 2; got {self.stage}, {why}."
            )
        if self.reduce_scatter and self.stage == 0:
            raise LayoutError(
                "zero_reduce_scatter=true needs zero_stage=1 or more; got 0, where every rank needs"
                " the whole gradient."
            )

    @property
    def gathers_every_micro_batch(self) -> bool:
        """True if data-parallel ranks communicate in every forward pass, so that they must run the
        same number of micro-batches."""
        return MICRO_BATCH in (self.gather, self.gather_frozen)

    @property
    def reduces_every_micro_batch(self) -> bool:
        """True if data-parallel ranks communicate in every backward pass."""
        return self.reduce == MICRO_BATCH

    def describe(self) -> str:
        """Describe the options in a few words."""
        when = {"gather": self.gather == MICRO_BATCH, "reduce": self.reduces_every_micro_batch}
        eager = [word for word, each in when.items() if each]
        offloaded = "" if self.offload == NONE else f", {self.offload} offloaded"
        where = "" if self.shard_size is None else f" in groups of dp {self.shard_size}"
        gathered = ", gather overlapped" if self.overlap_gather else ""
        return (
            f"ZeRO-{self.stage}{where}"
            + (f" ({' and '.join(eager)} in every micro-batch)" if eager else "")
            + gathered
            + offloaded
        )
