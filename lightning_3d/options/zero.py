"""Options of ZeRO: the shards of data-parallel ranks, and the times of communication. Pure: no
torch.

ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_3d.errors import LayoutError, did_you_mean
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.schedules import find_schedule
from lightning_3d.layout.shard_size import check_shard_size

STAGES = (0, 1, 2, 3)
STEP, MICRO_BATCH = "step", "micro_batch"
NONE, OPTIMIZER, PARAMETERS = "none", "optimizer", "parameters"
OFFLOAD = (NONE, OPTIMIZER, PARAMETERS)


@dataclass(frozen=True)
class ZeroOptions:
    """Options of ZeRO: arguments of `Lightning3DStrategy` and keys of the group `parallelism`, with
    the prefix `zero_`.

    Attributes:
        stage: what data-parallel ranks shard. 0: nothing, 1: optimizer state, 2: also gradients, 3:
            also parameters.
        reduce: when gradients are reduced. "step": once per optimizer step; a rank keeps whole
            local gradients until then. "micro_batch": during every backward pass; a rank keeps 1 /
            dp of them, and the traffic grows with the number of micro-batches. None: "micro_batch"
            at stages 2 and 3 without a pipeline, else "step".
        gather: when parameters are gathered at stage 3. "step": all parameters of a rank are
            gathered before a batch and freed after it. "micro_batch": each block before its forward
            and its backward pass, in every micro-batch. None: "step" where the schedule splits the
            backward pass, which needs it, else "micro_batch". The blocks of frozen second models,
            which run forward only, are gathered for each forward with such a schedule, too
            (`gather_frozen`).
        reduce_scatter: whether to send gradients only to the rank that uses them, in half the bytes
            of an all-reduce. None: only on CUDA. (Between processes on one machine gloo's
            all-reduce is faster.)
        offload: what is kept in host memory. "none": nothing. "optimizer" (stages 1 to 3):
            optimizer state and fp32 master weights; the optimizer's step runs on the CPU.
            "parameters" (stage 3): also the shards of the parameters. (ZeRO-Offload,
            arXiv:2101.06840.)
        shard_size: number of neighbouring data-parallel ranks, a divisor of dp, that shard; the
            groups of so many ranks hold replicas. Experts are sharded over the ranks of a group
            that have the same ones, so ep must divide shard_size * tp * cp. None: all data-parallel
            ranks shard. (HSDP: Zhao et al., "PyTorch FSDP", arXiv:2304.11277, section 3.2.2.)
        overlap_gather: whether the next forward begins while the parameters that an optimizer step
            has changed are still gathered (stages 1 and 2). A block waits only for its own. (As
            Megatron-LM's `--overlap-param-gather`.)
        gather_frozen: as `gather`, for frozen second models. Not a key: `resolve` sets it.
    """

    stage: int = 0
    reduce: str | None = None
    gather: str | None = None
    reduce_scatter: bool | None = None
    offload: str = NONE
    shard_size: int | None = None
    overlap_gather: bool = False
    gather_frozen: str | None = None

    @classmethod
    def of(cls, parallelism: Any) -> ZeroOptions:
        """Return the options that the group `parallelism` of a configuration has."""
        names = [option.name for option in fields(cls) if option.name != "gather_frozen"]
        return cls(**{name: getattr(parallelism, f"zero_{name}") for name in names})

    def resolve(self, schedule: str, pp: int) -> ZeroOptions:
        """Fill in the options that are None, except `reduce_scatter`, which depends on the device.

        Raises:
            LayoutError: an unknown stage or value, or options that the stage does not have.
        """
        if self.stage not in STAGES:
            raise LayoutError(f"zero_stage must be 0, 1, 2 or 3; got {self.stage!r}.")
        self._check_words()
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

    def _check_words(self) -> None:
        for key, value in (("zero_reduce", self.reduce), ("zero_gather", self.gather)):
            if value not in (None, STEP, MICRO_BATCH):
                hint = did_you_mean(str(value), (STEP, MICRO_BATCH))
                raise LayoutError(f'{key} must be step or micro_batch; got "{value}".{hint}')
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
        if self.offload not in OFFLOAD:
            hint = did_you_mean(str(self.offload), OFFLOAD)
            raise LayoutError(
                f'zero_offload must be none, optimizer or parameters; got "{self.offload}".{hint}'
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
