"""What ZeRO shards over the data-parallel ranks and when it communicates. Pure: no torch.

ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_3d.errors import LayoutError, did_you_mean
from lightning_3d.schedules import find_schedule

STAGES = (0, 1, 2)
STEP, MICRO_BATCH = "step", "micro_batch"


@dataclass(frozen=True)
class ZeroOptions:
    """Arguments of `Lightning3DStrategy` and keys of the group `parallelism`, with `zero_` in front.

    Attributes:
        stage: 0: every data-parallel rank has everything. 1: the optimizer's state is sharded. 2: gradients too.
        reduce: "step": a rank keeps whole local gradients and they are reduced once for each optimizer step. "micro_batch": they are
            reduced during every backward and a rank keeps 1 / dp of them, for as many times the traffic as there are micro-batches.
            None: "micro_batch" at stage 2 without pipeline, else "step".
        reduce_scatter: gradients go only to the rank that steps with them, by reduce-scatter, for half the bytes of an all-reduce.
            None: on CUDA. (Between processes on one machine gloo's all-reduce is faster.)
    """

    stage: int = 0
    reduce: str | None = None
    reduce_scatter: bool | None = None

    def resolve(self, schedule: str, pp: int) -> ZeroOptions:
        """The options with what was left open filled in; `reduce_scatter` stays open, it depends on the device.

        Raises:
            LayoutError: a stage or word that does not exist, or options that the stage does not have.
        """
        if self.stage not in STAGES:
            raise LayoutError(self._unknown_stage())
        find_schedule(schedule)
        if self.reduce not in (None, STEP, MICRO_BATCH):
            hint = did_you_mean(str(self.reduce), (STEP, MICRO_BATCH))
            raise LayoutError(f'zero_reduce is "{self.reduce}";{hint} it must be step or micro_batch.')
        if self.reduce == MICRO_BATCH and self.stage < 2:
            raise LayoutError(
                f"zero_reduce=micro_batch keeps a share of the gradients, but zero_stage={self.stage} needs all of them on every rank. Use"
                " zero_stage=2, or zero_reduce=step."
            )
        if self.reduce_scatter and self.stage == 0:
            raise LayoutError("zero_reduce_scatter=true needs a zero_stage of 1 or 2: at stage 0 every rank needs the whole gradient.")
        return replace(self, reduce=self.reduce or (MICRO_BATCH if self.stage >= 2 and pp == 1 else STEP))

    def describe(self) -> str:
        """In a few words."""
        return f"ZeRO-{self.stage}" + (", gradients reduced in every micro-batch" if self.reduce == MICRO_BATCH else "")

    def _unknown_stage(self) -> str:
        if self.stage == 3:
            return "zero_stage=3 is not available yet. Use 2, which shards gradients and the optimizer's state."
        return f"zero_stage={self.stage!r} does not exist; use 0, 1 or 2."
