"""A canary: a style, or a table of plans, that Transformers has and nobody here has looked at."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import (
    DENSE_STYLES,
    EXPERT_STYLES,
    OLDER_NAMES,
    read_plan,
    require_supported,
)

REFUSED = {"sequence_parallel"}
"""Styles that are known, and refused by name."""

TABLES = {
    "tp_plan": "read",
    "pp_plan": "read",
    "ep_plan": "read",
    "fsdp_plan": (
        "not read: which weights FSDP frees after a forward does not change what a model computes"
    ),
}
ROOT = Path(transformers.__file__).parent
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_every_style_is_known() -> None:
    styles = set(ALL_PARALLEL_STYLES.keys())
    assert styles >= {"colwise", "rowwise"}
    unknown = styles - DENSE_STYLES - EXPERT_STYLES - OLDER_NAMES.keys() - REFUSED
    assert not unknown, (
        f"new in Transformers: implement these styles, or add them to REFUSED: {sorted(unknown)}"
    )


def tables_in(files: list[Path]) -> set[str]:
    text = "".join(file.read_text() for file in files)
    return {
        name.removeprefix("base_model_").lstrip("_")
        for name in re.findall(r"\b(base_model_[a-z]+_plan|_[a-z]{2,4}_plan)\b", text)
    }


@pytest.mark.parametrize(
    "patterns",
    [
        ["configuration_utils.py", "modeling_utils.py"],
        pytest.param(
            ["models/*/configuration_*.py", "models/*/modeling_*.py"], marks=pytest.mark.full
        ),
    ],
    ids=["base", "families"],
)
def test_every_table_of_plans_is_known(patterns: list[str]) -> None:
    found = tables_in([file for pattern in patterns for file in ROOT.glob(pattern)])
    assert "tp_plan" in found
    assert not found - TABLES.keys(), (
        "new in Transformers: read these tables, or say in TABLES why not:"
        f" {sorted(found - TABLES.keys())}"
    )


@pytest.mark.parametrize("style", ["new_in_transformers_6", *sorted(REFUSED)])
def test_a_style_that_is_not_known_is_refused_by_name(style: str) -> None:
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=11, **SIZES))
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.up_proj": style}
    with pytest.raises(
        PlanError,
        match=f"'model.layers.\\*.mlp.up_proj' with the style '{style}', which is not supported",
    ):
        require_supported(read_plan(model).tp)
