"""Mixtures of experts: every family, alone and with every other axis, computes what one process computes."""

import pytest
from parity import assert_same_training

FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(
    ("model", "layout", "schedule"),
    [
        ("mixtral", "pp2_dp2", "1F1B"),
        ("qwen3_moe", "pp2", "ZBVZeroBubble"),
        ("deepseek_v3", "pp4_dp2", "GPipe"),
        ("gpt_oss", "pp2", "1F1B"),
        ("mixtral", "ep2_dp2", "1F1B"),
        ("mixtral", "ep4_dp4", "1F1B"),
        ("qwen2_moe", "ep2_dp4", "1F1B"),
        ("deepseek_v3", "ep8_dp8", "1F1B"),
        ("qwen3_moe", "ep2_pp2_dp2", "1F1B"),
        ("gpt_oss", "ep2_dp2", "1F1B"),
        ("qwen3_moe", "tp2", "1F1B"),
        ("qwen2_moe", "tp2_pp2", "1F1B"),
        ("deepseek_v3", "tp2", "1F1B"),
        ("mixtral", "tp2_ep2", "1F1B"),
        ("mixtral", "tp2_ep4_dp4", "1F1B"),
        ("qwen2_moe", "tp4_ep2_pp2", "1F1B"),
        ("deepseek_v3", "tp2_ep4_pp2_dp2", "1F1B"),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_parity(model: str, layout: str, schedule: str, dtype: str) -> None:
    assert_same_training(model, layout, schedule, dtype=dtype)
