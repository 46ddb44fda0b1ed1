"""Tiny versions of the models of large recipes train as on one process, in layouts like those of
the recipes."""

from typing import Any

import models
import pytest
import torch
from composed_configs import recipe
from parity import assert_same_training
from sweeps import by_default

from lightning_3d.engine.plan_draft.draft import draft_plan
from lightning_3d.models.parallel_plan import Cut

ROUTERS = {"moe_aux_loss": 0.1}
BIASES = {"moe_aux_loss": 0.1, "moe_bias_update": 0.01}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama_yarn", "cp2", "1F1B", {}),
    ("gpt2_tiny", "tp2_pp2", "1F1B", {"plan": "auto", "dtype": "float32"}),
    ("llama_tiny", "tp2_pp2", "1F1B", {"recompute": "full"}),
    ("gpt_oss_tiny", "pp2_dp2_ep2", "1F1B", ROUTERS | {"recompute": "full"}),
    ("deepseek_v3_tiny", "pp2_dp2_ep2_vp2", "Interleaved1F1B", BIASES | {"recompute": "full"}),
    ("qwen3_moe_tiny", "pp2_dp2_ep2", "1F1B", ROUTERS | {"recompute": "full"}),
    ("qwen3_yarn", "tp2_cp2", "1F1B", {"recompute": "full"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "schedule", "options"), by_default(CASES, 0, 1))
def test_models_of_recipes_train_as_on_one_process(
    model: str, layout: str, schedule: str, options: dict[str, Any]
) -> None:
    assert_same_training(model, layout, schedule, **{"dtype": "float64"} | options)


@pytest.mark.parametrize("name", ["gpt3_175b_384xa100", "gpt_1t_3072xa100"])
def test_plans_in_recipes_are_those_that_are_derived(name: str) -> None:
    """Of the tiny GPT-2, with the sizes of the recipe's model: deriving the plan of the large one
    runs a whole block in float32."""
    config, _ = recipe(name)
    heads, width = config.model.config.n_head, config.model.config.n_embd
    with torch.device("meta"):
        tiny = models.build("gpt2_tiny")
    derived = draft_plan(tiny).plan
    packed = derived["tp"]["transformer.h.*.attn.c_attn"]
    assert packed == Cut("packed_colwise", units=8, parts=(256, 256, 256))
    derived["tp"]["transformer.h.*.attn.c_attn"] = {
        "style": packed.style,
        "units": heads,
        "parts": [width] * 3,
    }
    found = config.parallelism.plan
    assert found.tp == derived["tp"]
    assert {key: tuple(map(list, value)) for key, value in found.pp.items()} == derived["pp"]
