"""Options of a model besides its layout. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.layout.given_stages import given_stages
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.loss_chunks import AUTO
from lightning_3d.layout.model_rules import CP_KINDS
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.options.experts import ExpertOptions
from lightning_3d.options.loss import CROSS_ENTROPY, LossOptions
from lightning_3d.options.schema import OptionGroup, defaults_of, one_of, option


def _check_chunks(name: str, value: Any) -> None:
    if value != AUTO and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(
            f"{name} must be auto or a whole number of at least 1 (1 computes the loss at once);"
            f" got {value!r}."
        )


@dataclass(frozen=True, kw_only=True)
class ModelArguments(OptionGroup):
    """Options of a model that belong to no other group."""

    stages: Sequence[int] | None = option(
        None,
        "number of blocks of each pipeline stage, such as [18, 21, 21, 20]. null balances the"
        " stages by FLOPs and parameters. On the command line, auto gives fewer blocks to stages"
        " that would not fit in the memory of the GPUs of the cluster",
    )
    cp_kind: str = option(
        "ring",
        "how context-parallel ranks compute attention. ring passes keys and values around a ring of"
        " ranks. ulysses gives each rank all tokens for some of the heads",
        one_of(*CP_KINDS),
    )
    loss_chunks: int | str = option(
        1,
        "n lets a model of Transformers compute its loss with 1/n of the memory of its logits. auto"
        " means 8, or fewer if the logits are small",
        _check_chunks,
    )


@dataclass(frozen=True)
class ModelOptions(ModelArguments):
    """Options that `engine.assembly` reads.

    Attributes:
        schedule: name of the pipeline schedule.
        blocks: options of the blocks.
        experts: options of a mixture of experts.
        loss: terms of the loss that a causal LM of Transformers computes from labels.

    Raises:
        ConfigError: an unknown kind of context parallelism, or loss_chunks that is neither "auto"
            nor a whole number.
    """

    schedule: str
    blocks: BlockOptions
    experts: ExpertOptions
    loss: LossOptions = CROSS_ENTROPY

    @classmethod
    def read(cls, options: Any, schedule: str) -> ModelOptions:
        """Return the options of a model that `Options` or the group `parallelism` have.

        Raises:
            ConfigError: an option has a wrong value, or excludes another one.
        """
        own = {name: getattr(options, name) for name in defaults_of(ModelArguments)}
        loss = LossOptions.of(options)
        return cls(schedule, BlockOptions.of(options), ExpertOptions.of(options), loss, **own)

    def require_suit(self, layout: Layout) -> None:
        """Raise LayoutError where blocks cannot run these options in this layout, or it has another
        number of stages.

        Raises ConfigError for experts on nodes of unequal size.
        """
        self.blocks.require_schedule(self.schedule, pp=layout.pp)
        self.experts.require_nodes(layout)
        if self.stages is not None:
            given_stages(self.stages, layout)
