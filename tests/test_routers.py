"""Losses and biases of routers: the same numbers and the same training in every layout, those of one process."""

import pytest
from parity import assert_same_training


@pytest.mark.parametrize(
    ("model", "layout", "schedule", "options"),
    [
        ("mixtral", "dp2", "1F1B", {"moe_aux_loss": 0.1, "moe_z_loss": 0.01}),
        ("mixtral", "pp2_dp2", "1F1B", {"moe_aux_loss": 0.1, "moe_z_loss": 0.01}),
        ("mixtral", "pp2", "ZBVZeroBubble", {"moe_aux_loss": 0.1, "moe_z_loss": 0.01}),
        ("qwen3_moe", "tp2_pp2_ep2_dp2", "1F1B", {"moe_aux_loss": 0.1}),
        ("qwen2_moe", "tp2_dp2", "1F1B", {"moe_aux_loss": 0.1}),
        ("deepseek_v3", "ep4_pp2_dp4", "GPipe", {"moe_aux_loss": 0.1, "moe_bias_update": 0.01}),
    ],
)
@pytest.mark.parametrize("dtype", ["float64"])
def test_router_losses_are_those_of_one_process(model: str, layout: str, schedule: str, options: dict, dtype: str) -> None:
    assert_same_training(model, layout, schedule, dtype=dtype, **options)
