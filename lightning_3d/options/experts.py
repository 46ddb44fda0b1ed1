"""Options of a mixture of experts: balancing losses, the capacity of each expert, and nodes. Pure:
no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.node_ranks import by_node
from lightning_3d.layout.sizes import check_number, check_sizes
from lightning_3d.options.schema import RESULT, OptionGroup, at_least, defaults_of, option

GROUPED_ROW_BYTES = 16
"""Rows of weights in grouped matrix products are a multiple of this
(`torch.nn.functional.grouped_mm`)."""


def _check_capacity(name: str, value: Any) -> None:
    if value is None:
        return
    if value <= 0:
        raise ConfigError(
            f"{name}={value:g} would drop every token. Use 1 or more, or null to drop none."
        )
    check_number(name, value)


def _check_node_ranks(name: str, value: Any) -> None:
    check_sizes(**{name: value})


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(OptionGroup):
    """Options of mixtures of experts.

    Load-balancing loss: Switch Transformer, arXiv:2101.03961, equation 4; router z-loss: ST-MoE,
    arXiv:2202.08906, equation 5; both are averaged over layers. Bias update: arXiv:2408.15664.
    Capacity: first choices come before second ones, then earlier tokens (GShard, arXiv:2006.16668).

    Raises:
        ConfigError: a number is out of range.
    """

    moe_aux_loss: float | None = option(
        None,
        "coefficient of the load-balancing loss in mixtures of experts. null uses the model's own"
        " coefficient if the model sets output_router_logits, and 0 otherwise",
        at_least(0, null=True),
        beyond_torch=RESULT,
    )
    moe_z_loss: float = option(
        0.0,
        "coefficient of the router z-loss in mixtures of experts. This loss keeps router logits"
        " small",
        at_least(0),
        beyond_torch=RESULT,
    )
    moe_bias_update: float = option(
        0.0,
        "how far the bias of an expert moves after each step, in models that balance the load with"
        " a bias (DeepSeek-V3 uses 0.001)",
        at_least(0),
        beyond_torch=RESULT,
    )
    moe_capacity_factor: float | None = option(
        None,
        "largest number of tokens for one expert, as a multiple of its even share. The expert skips"
        " the others. null skips no token",
        _check_capacity,
        beyond_torch=RESULT,
    )
    moe_node_size: int | None = option(
        None,
        "ranks of a node, for tokens that go to experts on several nodes: a token crosses once to"
        " each of these nodes and is sent on there. null uses the nodes of the run. A number of at"
        " least ep sends each token straight to each of its experts",
        _check_node_ranks,
    )

    def require_nodes(self, layout: Layout) -> None:
        """Raise ConfigError for a `node_size` that splits ranks that share experts unevenly."""
        if self.moe_node_size is not None:
            _check_node_size(layout, self.moe_node_size)

    @property
    def asked_of_experts(self) -> list[str]:
        """Names of the options that are set and therefore need a mixture of experts."""
        return [
            name
            for name in defaults_of(ExpertOptions, beyond_torch=[RESULT])
            if getattr(self, name)
        ]


def _check_node_size(layout: Layout, size: int) -> None:
    """Refuse a `moe_node_size` that puts more ranks of a group that shares experts on one node than
    on another.

    Args:
        size: ranks of a node, which are filled in order.
    """
    if _splits_evenly(layout, size):
        return
    near = [
        next(n for n in way if _splits_evenly(layout, n))
        for way in (range(size, 0, -1), range(size, layout.world_size + 1))
    ]
    raise ConfigError(
        f"moe_node_size={size} puts the {layout.ep} ranks that share experts in the layout {layout}"
        f" unevenly on nodes. The nearest sizes that work are {near[0]} and {near[1]}."
    )


def _splits_evenly(layout: Layout, size: int) -> bool:
    """Whether each group of ranks that share experts has equally many ranks on each of its
    nodes."""
    return all(
        len({rank // size for rank in group}) == 1 or by_node(group, size) != []
        for group in layout.expert_groups()
    )
