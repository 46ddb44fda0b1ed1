"""Losses and biases of routers: the same numbers and the same training in every layout, those of
one process."""

import warnings
from dataclasses import replace
from typing import Any

import models
import parity
import pytest
import torch
from parity import assert_same_training
from ranks import run_ranks
from reference import Recipe
from sweeps import by_default
from torch import Tensor, nn
from transformers import Llama4ForCausalLM, Llama4TextConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lightning_3d.errors import PlanError
from lightning_3d.layout import Layout
from lightning_3d.parallel.expert.losses import balancing_loss, scores_of, tokens_per_expert

BOTH = {"moe_aux_loss": 0.1, "moe_z_loss": 0.01}
CASES: list[tuple[str, str, str, dict[str, float]]] = [
    ("mixtral", "pp2_dp2", "1F1B", BOTH),
    ("deepseek_v3", "ep2_pp2_dp2", "GPipe", {"moe_aux_loss": 0.1, "moe_bias_update": 0.01}),
]
MORE: list[tuple[str, str, str, dict[str, float]]] = [
    ("qwen3_moe", "tp2_pp2_ep2_dp2", "ZBVZeroBubble", BOTH),
    ("deepseek_v3", "ep4_pp2_dp4", "GPipe", {"moe_aux_loss": 0.1, "moe_bias_update": 0.01}),
    ("mixtral", "dp2", "1F1B", BOTH),
    ("mixtral", "dp4_ep4", "1F1B", BOTH),
    ("mixtral", "pp2", "ZBVZeroBubble", BOTH),
    ("mixtral", "pp2_ep2_dp2", "Interleaved1F1B", BOTH),
    ("qwen2_moe", "tp2_dp2", "1F1B", BOTH),
    ("qwen2_moe", "tp4_ep4_dp2", "1F1B", BOTH),
    ("gpt_oss", "ep2_pp2_dp2", "1F1B", BOTH),
    ("deepseek_v3", "tp2_pp2", "1F1B", {"moe_aux_loss": 0.1, "moe_bias_update": 0.01}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "schedule", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
)
def test_router_losses_are_those_of_one_process(
    model: str, layout: str, schedule: str, options: dict[str, float]
) -> None:
    assert_same_training(model, layout, schedule, dtype="float64", **options)


def test_the_loss_of_one_layer_is_the_one_of_transformers() -> None:
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    chosen = logits.softmax(-1).topk(2).indices
    found = balancing_loss(
        scores_of(logits, sigmoid=False), tokens_per_expert(chosen, 8), torch.tensor(40.0)
    )
    assert found.item() == pytest.approx(float(load_balancing_loss_func((logits,), 8, 2)), rel=1e-6)


class OtherRouters(parity.Module):
    """Llama 4, whose routers return scores and logits."""

    def configure_model(self) -> None:
        if self.model is None:
            sizes = {
                "vocab_size": models.vocabulary("mixtral"),
                "head_dim": 8,
                "intermediate_size_mlp": 48,
                "num_hidden_layers": 2,
            }
            experts = {
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
            }
            config = Llama4TextConfig(
                **models.COMMON | sizes | experts | {"num_key_value_heads": 2}
            )
            self.model = Llama4ForCausalLM(config)


def train_other(layout: str = "dp1", **strategy: Any) -> list[float]:
    recipe = Recipe("mixtral", steps=2)
    return parity.fit_on_rank(
        recipe, parity.Rows(parity.data(recipe)), OtherRouters(recipe), layout=layout, **strategy
    ).losses


def test_routers_that_return_something_else() -> None:
    assert torch.tensor(run_ranks(train_other, 1)[0]).isfinite().all()
    with pytest.raises(PlanError, match="does not return .* Remove moe_aux_loss"):
        run_ranks(train_other, 1, moe_aux_loss=0.1)


def test_experts_that_get_weighted_tokens_are_sharded() -> None:
    """Llama 4's router weighs the tokens, and its experts take nothing else."""
    expected = run_ranks(train_other, 1)[0]
    assert run_ranks(train_other, 2, layout="tp2")[1] == pytest.approx(expected, rel=1e-5)


class Asked(parity.Module):
    """Trains with what Transformers has for this: in the configuration of the model, or in the
    call."""

    in_call = False

    def configure_model(self) -> None:
        super().configure_model()
        model: Any = self.model
        model.config.output_router_logits, model.config.router_aux_loss_coef = not self.in_call, 0.1

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        assert isinstance(self.model, nn.Module)
        extra = {"output_router_logits": True} if self.in_call else {}
        out = self.model(**batch, **extra)
        return out.loss


class AskedInCall(Asked):
    in_call = True


def train_asked(recipe: Recipe, kind: type[Asked], layout: str) -> tuple[parity.Part, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = parity.Rows(parity.data(recipe))
        part = parity.fit_on_rank(recipe, rows, kind(recipe), layout=layout, micro_batch_size=4)
    return part, [
        str(warning.message) for warning in caught if "output_router_logits" in str(warning.message)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    by_default(
        [
            (Asked, "cp2_ep2_dp2"),
            (AskedInCall, "pp2_ep2_dp2"),
            (Asked, "pp2_ep2_dp2"),
            (AskedInCall, "tp2_cp2_dp2"),
        ],
        1,
    ),
)
def test_output_router_logits_is_translated_with_one_warning(
    kind: type[Asked], layout: str
) -> None:
    recipe = replace(
        Recipe("mixtral", dtype="float64", steps=5), routers=(("aux_loss", 0.1),), data_ranks=2
    )
    results = run_ranks(train_asked, Layout.parse(layout).world_size, recipe, kind, layout)
    parity.assert_same_run([part for part, _ in results], parity.reference(recipe)[0], "float64")
    told = [told for _, told in results]
    assert len(told[0]) == 1 and "a different function" in told[0][0] and not any(told[1:])
