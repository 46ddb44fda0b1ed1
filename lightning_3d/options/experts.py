"""Options of a mixture of experts: balancing losses, the capacity of each expert, and nodes. Pure:
no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.node_ranks import by_node
from lightning_3d.layout.sizes import check_number, check_sizes

GROUPED_ROW_BYTES = 16
"""Rows of weights in grouped matrix products are a multiple of this
(`torch.nn.functional.grouped_mm`)."""


@dataclass(frozen=True)
class ExpertOptions:
    """Options of mixtures of experts: arguments of `Lightning3DStrategy` and keys of the group
    `parallelism`, with the prefix `moe_`.

    Attributes:
        aux_loss: coefficient of the load-balancing loss of the Switch Transformer
            (arXiv:2101.03961, equation 4), averaged over layers. None: `router_aux_loss_coef` of a
            model whose configuration has `output_router_logits`, else 0.
        z_loss: coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE,
            arXiv:2202.08906, equation 5), averaged over layers.
        bias_update: amount by which a router's bias for choosing experts moves towards experts with
            few tokens, after each optimizer step (arXiv:2408.15664); for models with such a bias
            (DeepSeek-V3). 0 leaves it unchanged.
        capacity_factor: most tokens that an expert accepts, as a multiple of its even share of a
            rank's tokens of a micro-batch. First choices come before second ones, then earlier
            tokens (GShard, arXiv:2006.16668); the expert skips the others. None: no limit.
        node_size: ranks of a node for the exchange of tokens. If the ranks that share experts are
            on several nodes, equally many on each, a token crosses once to each node on which it
            has experts. None: the nodes of the run. At least ep: each token is sent straight to
            each of its experts.

    Raises:
        ConfigError: a number is out of range.
    """

    aux_loss: float | None = None
    z_loss: float = 0.0
    bias_update: float = 0.0
    capacity_factor: float | None = None
    node_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("moe_aux_loss", self.aux_loss),
            ("moe_z_loss", self.z_loss),
            ("moe_bias_update", self.bias_update),
        ):
            if value is not None:
                check_number(name, value)
        if self.capacity_factor is not None:
            if self.capacity_factor <= 0:
                raise ConfigError(
                    f"moe_capacity_factor={self.capacity_factor:g} would drop every token. Use 1 or"
                    " more, or null to drop none."
                )
            check_number("moe_capacity_factor", self.capacity_factor)
        if self.node_size is not None:
            check_sizes(moe_node_size=self.node_size)

    def require_suits(self, layout: Layout) -> None:
        """Raise ConfigError for a `node_size` that splits ranks that share experts unevenly."""
        if self.node_size is not None:
            _check_node_size(layout, self.node_size)

    @property
    def asked_for(self) -> list[str]:
        """Names of the options that are set and therefore need a mixture of experts."""
        values = {
            "moe_aux_loss": self.aux_loss,
            "moe_z_loss": self.z_loss,
            "moe_bias_update": self.bias_update,
        }
        return [
            name
            for name, value in (values | {"moe_capacity_factor": self.capacity_factor}).items()
            if value
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
