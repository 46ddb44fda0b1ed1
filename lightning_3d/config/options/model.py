"""What is asked of a model beside its layout. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.config.options.blocks import BlockOptions
from lightning_3d.config.options.experts import ExpertOptions
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.model_rules import check_cp_kind


@dataclass(frozen=True)
class ModelOptions:
    """What `assembly` reads.

    Attributes:
        schedule: what the stages are dealt for.
        blocks: what happens around the forward of blocks.
        experts: what routers do beside routing.
        cp_kind: how context-parallel ranks attend to each other's tokens.

    Raises:
        ConfigError: a kind that does not exist.
    """

    schedule: str
    blocks: BlockOptions
    experts: ExpertOptions
    cp_kind: str = "ring"

    def __post_init__(self) -> None:
        check_cp_kind(self.cp_kind)

    def require_suit(self, layout: Layout) -> None:
        """Raises LayoutError where blocks cannot do what is asked in this layout."""
        self.blocks.require_suits(self.schedule, tp=layout.tp, pp=layout.pp, cp=layout.cp)
