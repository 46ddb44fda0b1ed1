"""Options of a run between context-parallel and expert-parallel ranks: what one process computes,
as without these axes."""

from typing import Any

import lora_fits
import pytest
from parity import Cell, Data, Module, Rows, StepValues, assert_same_training, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default

from lightning_3d.errors import PlanError
from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "cp2_dp2", {"zero": 2, "accumulate": 2, "recompute": "full", "micro_batch_size": 1}),
    (
        "mixtral",
        "ep2_dp4",
        {"zero": 2, "accumulate": 2, "recompute": "selective", "micro_batch_size": 1},
    ),
    ("qwen3", "tp2_cp2_dp2", {"zero": 3, "zero_offload": "parameters"}),
    ("gemma3", "pp2_cp2", {"zero": 1, "zero_offload": "optimizer", "schedule": "ZBVZeroBubble"}),
    (
        "llama",
        "tp2_pp2_cp2",
        {"schedule": "Interleaved1F1B", "cp_kind": "ulysses", "recompute": "selective"},
    ),
    ("mistral", "cp4", {"zero": 1, "zero_reduce_scatter": True, "offload_activations": True}),
    ("qwen3_moe", "tp2_ep4_dp2", {"zero": 3, "zero_offload": "parameters"}),
    ("deepseek_v3", "ep2_pp2_dp2", {"zero": 2, "zero_offload": "optimizer", "recompute": "full"}),
    (
        "mixtral",
        "ep4_dp4",
        {"zero": 3, "zero_gather": "step", "accumulate": 2, "micro_batch_size": 1},
    ),
    (
        "qwen2_moe",
        "tp2_ep2_pp2_dp2",
        {"zero": 1, "schedule": "InterleavedZeroBubble", "zero_reduce_scatter": True},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "options"), by_default(CASES, 1), ids=str)
def test_options_change_nothing(model: str, layout: str, options: dict[str, Any]) -> None:
    assert_same_training(model, layout, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "mode"),
    by_default(
        [
            ("llama", "cp2", "zero0"),
            ("mixtral", "ep2_dp2", "zero0"),
            ("llama", "tp2_cp2_dp2", "zero1"),
            ("deepseek_v3", "tp2_ep4_dp2", "zero1"),
            ("mixtral", "ep2_pp2_dp2", "zero3 by block, eager"),
        ],
        1,
    ),
)
def test_adapters(model: str, layout: str, mode: str) -> None:
    """Of attention: experts are no linear layers, and stay frozen."""
    projections = ["q_proj", "o_proj"] if model != "deepseek_v3" else ["q_a_proj", "o_proj"]
    lora_fits.check(
        {"r": 4, "target_modules": projections, "init_lora_weights": False},
        layout,
        mode=mode,
        model=model,
    )


@pytest.mark.parametrize("layout", by_default(["ep2_dp2", "tp2"], 0))
def test_adapters_of_experts(layout: str) -> None:
    """Of all linear layers: PEFT takes experts for such."""
    recipe = lora_fits.recipe_of(Cell("mixtral"), lora_fits.EVERYWHERE, steps=1)
    with pytest.raises(
        PlanError,
        match=rf"have an adapter, so they cannot be sharded \({layout[:2]} > 1\).* target_modules",
    ):
        run_ranks(lora_fits.train_on_rank, 2, recipe, layout=layout)


def train_mixed(model: str, layout: str, zero: int) -> tuple[list[float], list[float]]:
    """bf16 in matrix products and attention, float32 weights."""
    recipe, values = Recipe(model), StepValues()
    plan = Lightning3DStrategy(layout, zero_stage=zero, micro_batch_size=2, seed=0)
    assert plan.layout is not None
    trainer = quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        precision="bf16-mixed",
        max_steps=20,
        gradient_clip_val=0.3,
        callbacks=[values],
    )
    trainer.fit(
        Module(recipe), datamodule=Data(Rows(data(recipe)), recipe.global_batch // plan.layout.dp)
    )
    return values.losses, values.grad_norms


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "layout", "zero"),
    [("llama", "cp2_dp2", 1), ("mixtral", "ep2_dp2", 0), ("mixtral", "tp2_ep4_dp2", 3)],
)
def test_mixed_precision(model: str, layout: str, zero: int) -> None:
    [alone] = run_ranks(train_mixed, 1, model, "tp1", 0)
    for losses, norms in run_ranks(
        train_mixed, Layout.parse(layout).world_size, model, layout, zero
    ):
        assert losses == pytest.approx(alone[0], rel=5e-3)
        assert norms == pytest.approx(alone[1], rel=5e-2)
