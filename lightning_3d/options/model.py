"""Options of a model besides its layout. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_3d.layout.given_stages import given_stages
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.loss_chunks import check_loss_chunks
from lightning_3d.layout.model_rules import check_cp_kind
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.options.experts import ExpertOptions
from lightning_3d.options.loss import CROSS_ENTROPY, LossOptions


@dataclass(frozen=True)
class ModelOptions:
    """Options that `strategy.assembly` reads.

    Attributes:
        schedule: name of the pipeline schedule.
        blocks: options of the blocks.
        experts: options of a mixture of experts.
        cp_kind: kind of context parallelism.
        stages: number of blocks of each pipeline stage; None to balance them.
        loss_chunks: n computes the loss of a micro-batch with 1/n of the memory of its logits;
            "auto": 8, or fewer where the logits are small. It concerns the loss that a causal LM of
            Transformers computes from labels.
        loss: terms of that loss.

    Raises:
        ConfigError: an unknown kind of context parallelism, or loss_chunks that is neither "auto"
            nor a whole number.
    """

    schedule: str
    blocks: BlockOptions
    experts: ExpertOptions
    cp_kind: str = "ring"
    stages: Sequence[int] | None = None
    loss_chunks: int | str = 1
    loss: LossOptions = CROSS_ENTROPY

    def __post_init__(self) -> None:
        check_cp_kind(self.cp_kind)
        check_loss_chunks(self.loss_chunks)

    def require_suit(self, layout: Layout) -> None:
        """Raise LayoutError where blocks cannot run these options in this layout, or it has another
        number of stages.

        Raises ConfigError for experts on nodes of unequal size.
        """
        self.blocks.require_suits(self.schedule, pp=layout.pp)
        self.experts.require_suits(layout)
        if self.stages is not None:
            given_stages(self.stages, layout)
