"""Plans that are derived for models of Transformers that declare none."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from lightning_3d import Cut
from lightning_3d.engine.plan_draft import Draft, draft_plan
from lightning_3d.errors import PlanError
from lightning_3d.layout import Layout
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.parallel.tensor import resolve
from lightning_3d.parallel.tensor.head_arguments import HeadArgument, Place, take_heads

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from family_configs import build


def draft(family: str, tp: int = 2) -> Draft:
    return draft_plan(build_on_meta(family), tp)


def build_on_meta(family: str) -> Any:
    with torch.device("meta"):
        return build(family)


def test_gpt2_has_transposed_layers() -> None:
    found = draft("gpt2")
    assert not any(found.problems.values())
    assert found.plan["tp"] == {
        "transformer.h.*.attn.c_attn": Cut("packed_colwise", units=4, parts=(32, 32, 32)),
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }
    assert list(found.plan["pp"]) == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h",
        "transformer.ln_f",
        "lm_head",
    ]
    blocks = build_on_meta("gpt2").transformer.h
    assert found.local_sizes == {
        f"transformer.h.{index}.attn.split_size": 16 for index in range(len(blocks))
    }


def test_what_cannot_be_split_gathers_its_output() -> None:
    """Falcon's query_key_value makes the queries of all heads and one key for all of them."""
    found = draft("falcon")
    assert (
        found.plan["tp"]["transformer.h.*.self_attention.query_key_value"]
        == "colwise_gather_output"
    )
    assert found.plan["tp"]["transformer.h.*.self_attention.dense"] == "rowwise_split_input"
    assert found.plan["tp"]["transformer.h.*.mlp.dense_h_to_4h"] == "colwise"
    found.require(Layout.parse("tp2"), ["tp"], partly=True)
    with pytest.raises(
        PlanError, match="Falcon.* declares no plan for tp, and none can be derived. .* or use dp2"
    ):
        found.require(Layout.parse("tp2"), ["tp"], partly=False)


def test_a_pipeline_sends_what_blocks_read_besides_the_hidden_states() -> None:
    """Zamba's blocks read the embedding again; ZAYA's hand the hidden states of their routers on,
    and the model reads two parameters."""
    zamba = draft("zamba", 1).plan["pp"]
    assert zamba["model.embed_tokens"] == (["inputs"], ["model.embed_tokens"])
    assert zamba["model.layers"] == (["hidden", "model.embed_tokens"], ["hidden"])
    zaya = draft("zaya", 1).plan["pp"]
    assert zaya["model.layers"] == (["hidden", "side_1"], ["hidden", "side_1"])
    assert {"model.input_hidden_states_scale", "model.input_hidden_states_bias"} <= set(zaya)
    assert draft("gpt2", 1).plan["pp"]["transformer.h"] == (["hidden"], ["hidden"])


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * input @ self.weight.T


@pytest.mark.parametrize(("layer", "works"), [(FalconLinear, True), (Doubled, False)])
def test_a_layer_that_computes_the_product_itself_is_sharded(
    layer: type[nn.Linear], works: bool
) -> None:
    model = nn.Sequential(layer(4, 6), nn.Linear(6, 4))
    if works:
        assert resolve(model, ParallelPlan({"0": Cut("colwise")}), 2)["0"].style == "colwise"
        return
    with pytest.raises(PlanError, match="Doubled.forward does not call super"):
        resolve(model, ParallelPlan({"0": Cut("colwise")}), 2)


class Adds(nn.Module):
    def forward(self, scores: Tensor, *, slopes: Tensor) -> Any:
        return scores + slopes


@pytest.mark.parametrize("rows", [1, 3])
def test_a_rank_takes_the_slopes_of_its_heads(rows: int) -> None:
    """As BLOOM has them: (rows x heads, 1, length)."""
    heads, module = 4, Adds()
    slopes = torch.arange(rows * heads * 5.0).view(rows * heads, 1, 5)
    take_heads(module, HeadArgument("slopes", 0, heads), Place(1, 2))
    expected = slopes.view(rows, heads, 1, 5)[:, 2:].reshape(-1, 1, 5)
    assert torch.equal(module(torch.zeros(1), slopes=slopes), expected)
    # again, for a module that is fitted twice
    take_heads(module, HeadArgument("slopes", 0, heads), Place(1, 2))
    assert torch.equal(module(torch.zeros(1), slopes=slopes), expected)
