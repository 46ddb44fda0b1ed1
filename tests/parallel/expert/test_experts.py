"""Mixtures of experts: every family, alone and with every other axis, computes what one process
computes.

``pytest`` runs each axis and each ZeRO stage with some family, ``pytest -m full`` all families on
all layouts.
"""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import parity
import pytest
import torch
from checkpoint_fits import all_tensors, assert_equal, make_trainer
from command_line import run_commands
from counting import HostWaits
from master_weights import train_with_masters
from parity import assert_same_training
from plain_module import VOCABULARY, LanguageModel
from ranks import run_ranks
from reference import Recipe, cut, data, reference, split, train_on
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from uneven_batches import batches_of_all_lengths, train_batches, train_rows

from lightning_3d.errors import ConfigError
from lightning_3d.strategy import Lightning3DStrategy

LAYOUTS = (
    "pp2_dp2",
    "tp2",
    "ep2_dp2",
    "ep4_dp4",
    "ep8_dp8",
    "tp2_ep2",
    "tp2_ep4_dp4",
    "ep2_pp2_dp2",
    "tp2_ep4_pp2_dp2",
    "tp4_ep2_pp2",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "schedule"),
    [
        ("qwen3_moe", "pp2_dp2", "ZBVZeroBubble"),
        ("deepseek_v3", "tp2", "1F1B"),
        pytest.param("deepseek_v3", "tp2_dp2", "1F1B", marks=pytest.mark.full),
        pytest.param("mixtral", "ep4_dp4", "1F1B", marks=pytest.mark.full),
        ("qwen2_moe", "tp2_ep2", "1F1B"),
        pytest.param("qwen2_moe", "tp4_ep2_pp2", "1F1B", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "tp2_ep4_pp2_dp2", "ZBVZeroBubble", marks=pytest.mark.full),
    ],
)
def test_parity(model: str, layout: str, schedule: str) -> None:
    assert_same_training(model, layout, schedule, dtype="float64")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) for model in models.MIXTURES for layout in LAYOUTS],
)
def test_parity_of_all(model: str, layout: str, dtype: str) -> None:
    assert_same_training(model, layout, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        ("mixtral", "ep2_dp4", {"zero": 1}),
        pytest.param(
            "qwen3_moe",
            "ep2_pp2_dp4",
            {"zero": 2, "zero_reduce_scatter": True},
            marks=pytest.mark.full,
        ),
        ("deepseek_v3", "tp2_ep4_dp2", {"zero": 3}),
    ],
)
def test_zero_deals_experts_to_the_ranks_that_have_the_same(
    model: str, layout: str, options: dict[str, Any]
) -> None:
    assert_same_training(model, layout, **options)


@pytest.mark.full
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", ["ep2_dp4", "ep4_pp2_dp4", "tp2_ep2_dp2", "tp4_ep2_dp2"])
@pytest.mark.parametrize("model", ["mixtral", "deepseek_v3"])
def test_zero_of_all(model: str, layout: str, zero: int) -> None:
    assert_same_training(model, layout, zero=zero)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("ep2_dp2", {"recompute": "full"}),
        pytest.param("tp2_ep4_dp2", {"recompute": "full"}, marks=pytest.mark.full),
        pytest.param(
            "tp2_ep4_dp2",
            {"recompute": "selective", "recompute_keep": ["mm"]},
            marks=pytest.mark.full,
        ),
        pytest.param("tp2_ep4_dp2", {"offload_activations": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_blocks_that_run_again_send_again(layout: str, options: dict[str, Any]) -> None:
    """In the same order on all ranks, and what routers did is counted once."""
    assert_same_training("qwen2_moe", layout, dtype="float64", moe_aux_loss=0.1, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "layout", "ranks"),
    [
        (("experts",), "ep2_pp2_dp2", 4),
        pytest.param(("experts",), "ep4_pp2_dp4", 8, marks=pytest.mark.full),
        pytest.param(("gate.weight",), "ep4_pp2_dp4", 8, marks=pytest.mark.full),
        pytest.param(("self_attn", "lm_head"), "ep4_pp2_dp4", 8, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_frozen_experts_and_routers(trained: tuple[str, ...], layout: str, ranks: int) -> None:
    recipe = replace(Recipe("mixtral", dtype="float64"), trained=trained)
    strategy = {"layout": layout, "micro_batch_size": 8 // ranks}
    parts = run_ranks(parity.train_on_rank, ranks, recipe, **strategy)
    parity.assert_same_run(parts, reference(recipe)[0], "float64")


@pytest.mark.slow
def test_a_crowded_expert_drops_tokens_and_says_so() -> None:
    """With room for half of an even share something is dropped; with room for all nothing is, and
    it is the training without."""
    recipe = Recipe("mixtral", dtype="float64", steps=2)
    arguments = {"layout": "ep2_dp2", "micro_batch_size": 4}
    few, all_of_them = (
        run_ranks(parity.train_on_rank, 2, recipe, **arguments, moe_capacity_factor=factor)[0]
        for factor in (0.5, 8.0)
    )
    assert all(0.4 < fraction < 0.9 for step in few.routers for fraction in step.dropped)
    assert all(fraction == 0 for step in all_of_them.routers for fraction in step.dropped)
    assert all_of_them.losses == pytest.approx(reference(recipe)[0].losses, rel=1e-12)
    assert few.losses != all_of_them.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"), [("ep2_dp2", 2), pytest.param("ep2_pp2_dp2", 4, marks=pytest.mark.full)]
)
def test_ranks_with_different_numbers_of_tokens(layout: str, ranks: int) -> None:
    """Batches of all lengths, on one rank longer than on the other; then a short last one, in which
    a rank repeats a row."""
    recipe, strategy = Recipe("mixtral", steps=6), {"layout": layout, "zero_stage": 1}
    batches = batches_of_all_lengths(recipe, 12)
    parts = run_ranks(train_batches, ranks, recipe, batches, micro_batch_size=1, **strategy)
    parity.assert_same_run(
        parts, train_on(recipe, [batches[start : start + 2] for start in range(0, 12, 2)])
    )
    rows = cut(data(recipe), 0, recipe.global_batch + 5)
    parts = run_ranks(train_rows, ranks, recipe, rows, micro_batch_size=2, **strategy)
    parity.assert_same_run(
        parts, train_on(recipe, [split(batch, 2) for batch in split(rows, recipe.global_batch)])
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("ep4_dp4", {}),
        ("ep2_pp2_dp2", {"zero_stage": 1}),
        ("ep2_dp4", {"zero_stage": 2}),
        ("tp2_ep2_dp2", {"zero_stage": 3}),
    ],
)
def test_bf16(layout: str, strategy: dict[str, Any]) -> None:
    recipe = Recipe("mixtral", dtype="bfloat16")
    expected = train_with_masters(recipe)
    part = run_ranks(
        parity.train_on_rank, 4, recipe, layout=layout, micro_batch_size=2, **strategy
    )[0]
    assert part.losses == pytest.approx(expected.losses, rel=2e-2)
    assert part.grad_norms == pytest.approx(expected.grad_norms, rel=5e-2)


def waits_of_a_step(layers: int) -> list[str]:
    """For what the host waits in forward and backward of a step, with grouped products and losses
    of routers."""
    recipe = Recipe("mixtral", layers=layers, steps=1, global_batch=4)
    # A self-check, which runs with versions whose families are not listed as verified, waits too.
    plan = Lightning3DStrategy(
        "tp2_ep4_dp2", moe_aux_loss=0.1, moe_z_loss=0.01, seed=0, self_check="never"
    )
    trainer = parity.quiet_trainer(strategy=plan, devices=4, max_steps=1)
    waits, step = HostWaits(), plan.training_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        with waits:
            return step(*args, **kwargs)

    plan.training_step = counted  # type: ignore[method-assign]
    trainer.fit(parity.Module(recipe), datamodule=parity.Data(parity.Rows(data(recipe)), 2))
    return waits.names


@pytest.mark.slow
def test_the_host_waits_once_for_each_layer() -> None:
    """For the number of tokens that come; what a step waits for beside that does not depend on the
    number of layers."""
    few, many = (run_ranks(waits_of_a_step, 4, layers) for layers in (2, 5))
    for short, long in zip(few, many, strict=True):
        assert Counter(long) - Counter(short) == Counter({"tolist": 3})


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "layout"), [("qwen2_moe", "tp2_ep2"), ("mixtral", "ep2_dp2")])
def test_compiled_blocks(model: str, layout: str) -> None:
    """By Inductor."""
    recipe = Recipe(model)
    strategy = {"layout": layout, "micro_batch_size": 4, "compile": True}
    parity.assert_same_run(
        run_ranks(parity.train_on_rank, 2, recipe, timeout=500, **strategy), reference(recipe)[0]
    )


class Mixture(LanguageModel):
    """With a bias that balances the experts: a buffer that changes from step to step."""

    def configure_model(self) -> None:
        if self.model is None:
            _, own = models.MIXTURES["deepseek_v3"]
            sizes = {"num_hidden_layers": 4, "vocab_size": VOCABULARY, "pad_token_id": None}
            self.model = DeepseekV3ForCausalLM(DeepseekV3Config(**models.COMMON | own | sizes))


def fit_mixture(
    layout: str, epochs: int, resume: str | None, at_end: str | None, **strategy: Any
) -> list[float]:
    """The loss of every step and of a validation after them."""
    values = parity.StepValues()
    trainer, rows = make_trainer(layout, epochs, [values], moe_bias_update=0.01, **strategy)
    trainer.fit(Mixture(), datamodule=rows, ckpt_path=resume)
    if at_end:
        trainer.save_checkpoint(at_end)
    return [*values.losses, float(trainer.callback_metrics["val_loss"])]


@pytest.mark.full  # by default test_checkpoint_matrix.py has such a pair
@pytest.mark.parametrize(
    ("layout", "ranks", "strategy"),
    [("tp1", 1, {}), ("tp2_ep2_dp2", 4, {"zero_stage": 1}), ("ep4_dp4", 4, {"zero_stage": 3})],
    ids=["tp1", "tp2_ep2_dp2-zero1", "ep4_dp4-zero3"],
)
def test_a_checkpoint_of_dealt_experts_loads_on_any_layout(
    layout: str, ranks: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    """Experts, their optimizer state and the bias of the routers: the training goes on as if it had
    not been interrupted, to rounding."""
    first, again, whole = (str(tmp_path / f"{name}.ckpt") for name in ("first", "again", "whole"))
    expected = run_ranks(fit_mixture, 4, "ep2_pp2_dp2", 2, None, whole)[0]
    begun = run_ranks(fit_mixture, 4, "ep2_pp2_dp2", 1, None, first, zero_stage=1)[0]
    losses = run_ranks(fit_mixture, ranks, layout, 2, first, again, **strategy)[0]
    assert losses == pytest.approx(expected[len(begun) - 1 :], rel=1e-5)
    found, wanted = all_tensors(Path(again)), all_tensors(Path(whole))
    assert found.keys() == wanted.keys()
    biases = {name for name in found if name.endswith("e_score_correction_bias")}
    assert len(biases) == 3 and all(found[name].abs().sum() > 0 for name in biases)
    assert_equal({name: found[name] for name in biases}, {name: wanted[name] for name in biases})
    for name in found:
        torch.testing.assert_close(
            found[name].double(), wanted[name].double(), rtol=1e-3, atol=2e-5
        )


def predict_mixture(layout: str) -> list[Tensor]:
    class Predicts(Mixture):
        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            assert self.model is not None
            return self.model(input_ids=batch["input_ids"]).logits.float().sum(-1)

    trainer, rows = make_trainer(layout, 1, [])
    return trainer.predict(Predicts(), dataloaders=rows.val_dataloader())


@pytest.mark.slow
def test_predictions_equal_those_of_one_process() -> None:
    alone, dealt = run_ranks(predict_mixture, 1, "tp1")[0], run_ranks(predict_mixture, 2, "tp2_ep2")
    for found in dealt:
        torch.testing.assert_close(torch.cat(found), torch.cat(alone))


def refuse(layout: str, model: str, **strategy: Any) -> str:
    try:
        parity.train_on_rank(Recipe(model, steps=1), layout=layout, **strategy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("layout", "model", "options", "words"),
    [
        ("dp2_ep2", "llama", {}, ["(ep)", "is dense: it has no experts"]),
        ("dp2", "llama", {"moe_aux_loss": 0.1}, ["moe_aux_loss", "no router"]),
        ("dp2", "mixtral", {"moe_bias_update": 0.1}, ["moe_bias_update", "Use moe_aux_loss"]),
        ("dp2", "mixtral", {"moe_capacity_factor": 0}, ["moe_capacity_factor=0"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(layout: str, model: str, options: dict[str, Any], words: list[str]) -> None:
    for message in run_ranks(refuse, 2, layout, model, **options):
        assert all(word in message for word in words), message
        assert message.split(":")[0] in ("ConfigError", "PlanError", "NoPlanError", "LayoutError")


class TooManyChoices(parity.Module):
    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        for router in self.model.modules():
            if type(router).__name__.endswith("Router"):
                router.top_k = 9  # type: ignore[assignment]


def refuse_choices() -> str:
    recipe = Recipe("mixtral", steps=1)
    try:
        parity.fit_on_rank(
            recipe, parity.Rows(data(recipe)), TooManyChoices(recipe), layout="ep2_dp2"
        )
    except ConfigError as error:
        return str(error)
    return "trained"


def test_f15_more_choices_than_experts() -> None:
    for message in run_ranks(refuse_choices, 2):
        assert "sends each token to 9 experts, but there are only 8" in message


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_main_job_trains_a_mixture(tmp_path: Path) -> None:
    """Eight ranks in three dimensions and a fourth laid over them, from the command line; the loss
    falls and loads are written."""
    overrides = [
        "model=mixtral_tiny",
        "parallelism=tp2_ep4_dp4",
        "parallelism.moe_aux_loss=0.01",
        "trainer.log_every_n_steps=5",
    ]
    overrides += [
        "trainer.max_steps=30",
        "trainer.val_check_interval=30",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    [result] = run_commands([["train", *overrides]], timeout=500)
    assert result.code == 0, result.output
    with (tmp_path / "run" / "metrics.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert float(steps[-1]["loss"]) < float(steps[0]["loss"]) - 1
    assert all(
        float(step["aux_loss"]) >= 1.9 and 1 <= float(step["max_load"]) <= 4 for step in steps
    )
    with (tmp_path / "run" / "routers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows[::4]] == ["5", "10", "15", "20", "25", "30"] and len(
        {row["layer"] for row in rows}
    ) == 4
    assert all(sum(map(int, row["tokens"].split())) == 2 * 16 * 128 for row in rows)
