"""What keeps the load of experts balanced, and what happens to tokens of crowded ones. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.errors import ConfigError
from lightning_3d.layout.sizes import check_number


@dataclass(frozen=True)
class ExpertOptions:
    """Arguments of `Lightning3DStrategy` and keys of the group `parallelism`, with `moe_` in front.

    Attributes:
        aux_loss: coefficient of the load-balancing loss of the Switch Transformer (arXiv:2101.03961, equation 4), the mean over
            layers. None: `router_aux_loss_coef` of a model whose configuration has `output_router_logits`, else 0.
        z_loss: coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE, arXiv:2202.08906, equation 5), the mean over
            layers.
        bias_update: how much the bias that a router adds to the scores of its experts before it chooses moves after each optimizer
            step, towards experts with few tokens (arXiv:2408.15664); for models with such a bias (DeepSeek-V3). 0 leaves it alone.
        capacity_factor: an expert takes at most so many times its even share of the tokens that a rank has of a micro-batch; first
            choices go before second ones, then the earlier token (GShard, arXiv:2006.16668). Others pass it by. None: no token is dropped.

    Raises:
        ConfigError: a number that cannot be.
    """

    aux_loss: float | None = None
    z_loss: float = 0.0
    bias_update: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("moe_aux_loss", self.aux_loss), ("moe_z_loss", self.z_loss), ("moe_bias_update", self.bias_update)):
            if value is not None:
                check_number(name, value)
        if self.capacity_factor is not None:
            if self.capacity_factor <= 0:
                raise ConfigError(
                    f"moe_capacity_factor={self.capacity_factor:g} would drop every token. Use 1 or more, or null to drop none."
                )
            check_number("moe_capacity_factor", self.capacity_factor)

    @property
    def asked_for(self) -> list[str]:
        """Options that mean something only for a mixture of experts."""
        values = {"moe_aux_loss": self.aux_loss, "moe_z_loss": self.z_loss, "moe_bias_update": self.bias_update}
        return [name for name, value in (values | {"moe_capacity_factor": self.capacity_factor}).items() if value]
