"""Mixtures of experts whose sequences lie on several ranks: context parallelism with expert
parallelism over the same ranks.

``pytest`` runs some combinations, ``pytest -m full`` all families on all layouts.
"""

from dataclasses import replace
from typing import Any

import models
import parity
import pytest
import torch
from context_batches import BATCHES, KINDS, train_batches, world_size
from counting import recording
from parity import Module, Rows, assert_same_training, fit_on_rank
from ranks import run_ranks
from reference import Recipe, data, reference, split, train_on
from sweeps import by_default

BOTH = {"moe_aux_loss": 0.1, "moe_z_loss": 0.01}
BIAS = {"moe_aux_loss": 0.1, "moe_bias_update": 0.01}
LAYOUTS = (
    "cp2",
    "cp4_ep4",
    "tp2_cp2_ep2",
    "tp2_cp2_ep4",
    "cp2_ep4_dp2",
    "tp2_cp2_ep8_dp2",
    "cp2_pp2_ep4_dp2",
    "tp2_cp2_pp2_ep2",
)
CUT = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.shared_expert.gate_proj",
    "mlp.shared_expert.up_proj",
)
ENDS = ("self_attn.o_proj", "mlp.shared_expert.down_proj")
SHARED_EXPERT = {
    f"model.layers.*.{name}": "colwise" if name in CUT else "rowwise" for name in CUT + ENDS
}
"""A plan that cuts the shared expert of Qwen2-MoE, which Transformers leaves whole. Its code
flattens batch and sequence first."""


def of_routers(model: str) -> dict[str, float]:
    return BIAS if model == "deepseek_v3" else BOTH


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "options"),
    by_default(
        [
            ("mixtral", "cp2_ep2", BOTH),
            ("deepseek_v3", "tp2_cp2_ep4", BIAS),
            ("qwen2_moe", "tp2_cp2_pp2_ep4", {"schedule": "ZBVZeroBubble"} | BOTH),
            ("qwen3_moe", "tp4_cp2_ep2", {"cp_kind": "ring"}),
            ("mixtral", "tp2_cp2", {"cp_kind": "ulysses"} | BOTH),
            ("mixtral", "tp2_cp2_ep2", {"sequence_parallel": False} | BOTH),
            ("gpt_oss", "tp2_cp2_ep4", {"recompute": "full"} | BOTH),
        ],
        0,
    ),
)
def test_same_as_one_process(model: str, layout: str, options: dict[str, Any]) -> None:
    assert_same_training(model, layout, dtype="float64", **options)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", models.MIXTURES)
def test_every_family(model: str, layout: str) -> None:
    kind = KINDS[LAYOUTS.index(layout) % 2]
    assert_same_training(model, layout, dtype="float64", cp_kind=kind, **of_routers(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "zero"),
    by_default(
        [
            ("mixtral", "tp2_cp2_ep2_dp2", 1),
            ("qwen3_moe", "cp2_ep4_dp2", 2),
            ("deepseek_v3", "cp2_pp2_ep2_dp2", 3),
        ],
        1,
    ),
)
def test_zero_deals_experts_to_context_ranks_too(model: str, layout: str, zero: int) -> None:
    assert_same_training(model, layout, zero=zero)


# Documents, padding, windows, lengths


def assert_same_with(
    batches: str, model: str, layout: str, options: dict[str, Any]
) -> list[parity.Part]:
    """As ``parity.assert_same_training``, with other batches, for layouts that do not deal out the
    batch."""
    recipe = replace(
        Recipe(model, dtype="float64", steps=4),
        routers=tuple((key.removeprefix("moe_"), BOTH[key]) for key in BOTH),
    )
    whole = BATCHES[batches](recipe)
    expected = train_on(recipe, [split(part, 4) for part in split(whole, recipe.global_batch)])
    arguments = {"layout": layout, "micro_batch_size": 4} | BOTH | options
    parts = run_ranks(train_batches, world_size(layout), recipe, batches, timeout=180, **arguments)
    parity.assert_same_run(parts, expected, "float64")
    for part in parts:
        found = [(step.aux_loss, step.z_loss) for step in part.routers]
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected.router_losses), rtol=1e-10, atol=0
        )
        pairs = 2 * recipe.global_batch * whole["input_ids"].shape[1]
        assert all(sum(tokens) == pairs for step in part.routers for tokens in step.tokens)
    return parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "model", "layout", "kind"),
    by_default(
        [
            ("packed", "mixtral", "cp4_ep4", "ring"),
            ("packed", "qwen3_moe", "cp2_ep2", "ulysses"),
            ("padded", "qwen3_moe", "cp4_ep2", "ring"),
            ("padded", "mixtral", "cp2_ep2", "ulysses"),
            ("packed", "mixtral", "cp2_ep2", "ulysses"),
            ("packed", "qwen3_moe", "tp2_cp2_ep4", "ring"),
            ("packed", "mixtral", "cp4", "ulysses"),
            ("padded", "gpt_oss", "tp2_cp2_ep2", "ulysses"),
        ],
        3,
    ),
)
def test_documents_and_padding(batches: str, model: str, layout: str, kind: str) -> None:
    """Mixtral's has a window here. All have fewer key heads than heads."""
    assert_same_with(batches, model, layout, {"cp_kind": kind})


@pytest.mark.parametrize(
    ("model", "layout"), by_default([("mixtral", "tp4_cp2_ep2"), ("deepseek_v3", "tp4_ep4")])
)
def test_tokens_that_tensor_parallel_ranks_do_not_divide(model: str, layout: str) -> None:
    """Four ranks share six (twelve) tokens, so that the last has none: nothing that fills it up is
    counted or takes an expert's room."""
    for part in assert_same_with("twelve", model, layout, {"moe_capacity_factor": 8.0}):
        assert all(dropped == 0 for step in part.routers for dropped in step.dropped)


# What sequence parallelism leaves of a mixture


def count_gathers(layout: str) -> int:
    """All-gathers of the hidden states of one micro-batch, forward and backward."""
    recipe = Recipe("mixtral", layers=2, steps=1, global_batch=2)
    with recording() as recorder:
        # it would gather, too
        fit_on_rank(recipe, Rows(data(recipe)), Module(recipe), layout=layout, self_check="never")
    part = recipe.global_batch * models.SEQUENCE * models.COMMON["hidden_size"] // 2
    return sum(
        call.name == "all_gather_into_tensor" and call.numel == part for call in recorder.calls
    )


def test_a_mixture_gathers_nothing_where_its_experts_are_dealt() -> None:
    """Its router sees this rank's tokens. An attention gathers once each way and once more in the
    backward, the ends once each way."""
    assert run_ranks(count_gathers, 2, "tp2_ep2")[0] == 3 * 2 + 2


@pytest.mark.slow
def test_a_shared_expert_that_is_cut_gathers_the_tokens_of_a_mixture() -> None:
    recipe = Recipe("qwen2_moe", dtype="float64", steps=4)
    strategy: dict[str, Any] = {
        "layout": "tp2_ep2",
        "micro_batch_size": 4,
        "plan": {"tp": SHARED_EXPERT},
    }
    parity.assert_same_run(
        run_ranks(parity.train_on_rank, 2, recipe, **strategy), reference(recipe)[0], "float64"
    )
