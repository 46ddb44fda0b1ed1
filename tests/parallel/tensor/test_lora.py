"""PEFT's LoRA adapters on sharded layers equal the same PEFT model on one process."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import parity
import pytest
import torch
from counting import Recorder, recording
from finetuned import MODES, Finetuned
from lora_fits import EVERYWHERE, QUERIES, check, recipe_of, train_on_rank
from parity import SCHEDULES, Cell, Part, Rows, assert_same_run, fit_on_rank
from peft import (
    IA3Config,
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from ranks import run_ranks
from reference import STEPS, Recipe, Run, data, initial_model, train
from sweeps import by_default
from torch.utils.data import DataLoader

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.errors import Lightning3DError

FEW = 3 if STEPS < 5 else 6
"""Steps of short runs. B is zero before the first one, so A is trained from the second on."""

CHOSEN = [
    (QUERIES, "tp2", "1F1B", "zero0", "llama"),
    (QUERIES, "pp2", "1F1B", "zero0", "llama"),
    (EVERYWHERE, "tp2_pp2_dp2", "1F1B", "zero0", "llama"),
    (EVERYWHERE, "tp2_pp2_dp2", "1F1B", "zero1", "llama"),
    (EVERYWHERE, "tp2_pp2_dp2", "1F1B", "zero2 eager", "llama"),
    (EVERYWHERE, "tp2_pp2_dp2", "1F1B", "zero3 by block, eager", "llama"),
    (EVERYWHERE, "pp2_dp2", "1F1B", "zero3 by block, eager", "llama"),
]


def names(values: Any) -> str | None:
    return "all-linear" if values is EVERYWHERE else "queries" if values is QUERIES else None


@pytest.mark.parametrize(
    ("lora", "layout", "schedule", "mode", "model"), by_default(CHOSEN, 6), ids=names
)
def test_layouts(lora: dict[str, Any], layout: str, schedule: str, mode: str, model: str) -> None:
    check(lora, layout, schedule, mode, model)


class Injected(Finetuned):
    """The adapters are put into the model itself, as `add_adapter` of Transformers does: no
    PeftModel is around it."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = models.build(self.recipe.model, self.recipe.layers)
            inject_adapter_in_model(LoraConfig(**dict(self.recipe.lora)), self.model, "default")


def train_injected(recipe: Recipe, **strategy: Any) -> Part:
    return fit_on_rank(recipe, Rows(data(recipe)), Injected(recipe), **strategy)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), by_default([("tp2", 2), ("tp2_pp2", 4)], 0))
def test_adapters_in_a_bare_model(layout: str, ranks: int) -> None:
    """The names are others and so are the values; on one rank PEFT's code runs as it is."""
    recipe = recipe_of(
        Cell(), EVERYWHERE | {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}, FEW
    )
    [alone] = run_ranks(train_injected, 1, recipe, layout="dp1", micro_batch_size=4)
    parts = run_ranks(train_injected, ranks, recipe, layout=layout, micro_batch_size=4)
    assert_same_run(parts, Run(alone.losses, alone.grad_norms, alone.weights))


FAMILIES = [
    (EVERYWHERE, "tp4", "1F1B", "zero0", "llama"),  # fewer key heads than ranks
    (EVERYWHERE, "tp2_dp2", "1F1B", "zero1 scattered", "phi3"),  # packed matrices
    # biases of row-parallel layers
    (EVERYWHERE | {"bias": "all"}, "tp2_pp2", "1F1B", "zero0", "gpt_neox"),
    (EVERYWHERE, "tp2_pp2", "ZBVZeroBubble", "zero0", "qwen2"),  # tied embeddings
    (
        EVERYWHERE | {"target_modules": ["q", "k", "up", "down"]},
        "tp2_pp2",
        "DualPipeV",
        "zero0",
        models.PLAIN,
    ),
    (
        QUERIES | {"target_modules": ["o_proj", "lm_head", "embed_tokens"]},
        "tp2_pp2",
        "1F1B",
        "zero0",
        "llama",
    ),
    (QUERIES | {"modules_to_save": ["lm_head", "norm"]}, "tp2_pp2", "1F1B", "zero0", "llama"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "layout", "schedule", "mode", "model"), by_default(FAMILIES, 2), ids=names
)
def test_families(lora: dict[str, Any], layout: str, schedule: str, mode: str, model: str) -> None:
    check(lora, layout, schedule, mode, model, steps=FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "layout"),
    [
        pytest.param(QUERIES, "tp2_pp2", marks=pytest.mark.full),
        (QUERIES | {"use_dora": True}, "pp2_dp2"),
        pytest.param(QUERIES | {"init_lora_weights": "olora"}, "tp2", marks=pytest.mark.full),
        (QUERIES | {"lora_bias": True}, "pp2"),
        (
            QUERIES
            | {
                "modules_to_save": ["k_proj", "embed_tokens"],
                "target_parameters": ["mlp.down_proj.weight"],
            },
            "pp2_dp2",
        ),
    ],
    ids=["plain", "dora", "olora", "bias", "others"],
)
# of a class of PEFT, which the process that prints would import
@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
def test_models_in_memory(lora: dict[str, Any], layout: str) -> None:
    """Adapters that are computed from the weights need these; PEFT made them when the model was
    built."""
    check(lora, layout, steps=FEW, in_memory=True)


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 3])
def test_bf16(zero: int) -> None:
    """Near the run in float32; what is frozen stays, rounded once."""
    recipe = recipe_of(Cell(), EVERYWHERE, 6)
    coarse = replace(recipe, dtype="bfloat16")
    parts = run_ranks(
        train_on_rank, 4, coarse, layout="tp2_dp2", micro_batch_size=4, zero_stage=zero
    )
    whole, drift = parity.assemble(parts)
    assert drift == 0.0
    expected = train(recipe)
    assert torch.allclose(
        torch.tensor(parts[0].losses), torch.tensor(expected.losses), rtol=1e-2, atol=0
    )
    for name, parameter in initial_model(coarse).named_parameters():
        assert torch.equal(whole[f"model.{name}"], parameter) != parameter.requires_grad, name


REFUSED = [
    (
        QUERIES | {"use_dora": True},
        "tp2",
        True,
        r"layers\.0\.self_attn\.q_proj' is sharded .* LoRA with use_dora=True",
    ),
    (QUERIES | {"lora_bias": True}, "tp2", False, r"LoRA with lora_bias=True.* use tp=1"),
    (
        QUERIES | {"target_modules": ["q_proj"], "modules_to_save": ["v_proj"]},
        "tp2",
        False,
        r"v_proj' .*ModulesToSaveWrapper",
    ),
    (
        QUERIES | {"target_parameters": ["mlp.down_proj.weight"]},
        "tp2",
        False,
        r"down_proj' .*ParamWrapper",
    ),
    (
        QUERIES | {"use_dora": True},
        "pp2",
        False,
        "use_dora=True computes adapters .* build the model in memory",
    ),
    (
        QUERIES | {"init_lora_weights": "pissa"},
        "dp2",
        False,
        "init_lora_weights='pissa' computes .* build the model in memory",
    ),
]


@pytest.mark.parametrize(("lora", "layout", "in_memory", "message"), by_default(REFUSED, 0, 1, 4))
def test_what_is_refused_by_name(
    lora: dict[str, Any], layout: str, in_memory: bool, message: str
) -> None:
    recipe = recipe_of(Cell(), lora, 1, in_memory)
    with pytest.raises(Lightning3DError, match=message):
        run_ranks(train_on_rank, 2, recipe, layout=layout)


def train_scaled(recipe: Recipe, **strategy: Any) -> Part:
    """Another tuner: learned factors of keys, values and the MLP."""
    config = IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    model = get_peft_model(initial_model(recipe), config)
    return fit_on_rank(
        recipe, Rows(data(recipe)), Finetuned(recipe, model), micro_batch_size=4, **strategy
    )


@pytest.mark.slow
def test_another_tuner() -> None:
    recipe = Recipe(steps=4)
    [alone] = run_ranks(train_scaled, 1, recipe, layout="dp1")
    parts = run_ranks(train_scaled, 2, recipe, layout="pp2")
    assert_same_run(parts, Run(alone.losses, alone.grad_norms, alone.weights))
    with pytest.raises(Lightning3DError, match=r"k_proj' .*PEFT's tuners\.ia3\.layer\.Linear"):
        run_ranks(train_scaled, 2, recipe, layout="tp2")


def count_on_rank(recipe: Recipe) -> Counter[int]:
    """Sizes of the all-reduces of one step over tp2, a training batch of two micro-batches, of all
    collectives without parallel sequences."""
    from lightning_3d.strategy import Lightning3DStrategy

    strategy = Lightning3DStrategy(
        "tp2", micro_batch_size=8, sequence_parallel=False, self_check="never"
    )
    trainer = parity.quiet_trainer(strategy=strategy, devices=2, max_steps=2)
    latest, step = Recorder(), strategy.training_step

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with recording() as recorder:
            result = step(*args, **kwargs)
        latest.calls = recorder.calls
        return result

    strategy.training_step = recorded  # type: ignore[method-assign]
    trainer.fit(Finetuned(recipe), DataLoader(Rows(data(recipe)), batch_size=16))
    assert not [call for call in latest.calls if call.name != "all_reduce"]
    return Counter(call.numel for call in latest.calls)


@pytest.mark.slow
def test_a_block_costs_as_many_collectives_as_without_adapters() -> None:
    layers, micro_batches = 3, 2
    hidden = 8 * models.SEQUENCE * models.COMMON["hidden_size"]
    adapted = recipe_of(Cell(), EVERYWHERE)
    plain = run_ranks(count_on_rank, 2, Recipe(layers=layers))
    found = run_ranks(count_on_rank, 2, replace(adapted, layers=layers))
    # Nothing before the first block is trained, so its input needs no gradient: one less for each
    # micro-batch.
    assert [counts.pop(hidden) for counts in plain] == [
        micro_batches * 4 * layers + 2 * micro_batches
    ] * 2
    assert [counts.pop(hidden) for counts in found] == [
        micro_batches * 4 * layers + micro_batches
    ] * 2
    # Beside that only the sum of partial gradients (adapters that are whole), once a step.
    assert [sum(counts.values()) for counts in found] == [
        sum(counts.values()) + 1 for counts in plain
    ]


def dropout_on_rank(recipe: Recipe, layout: str) -> Part:
    return fit_on_rank(
        recipe,
        Rows(data(recipe)),
        Finetuned(recipe),
        layout=layout,
        micro_batch_size=4,
        schedule="1F1B",
    )


@pytest.mark.full
def test_dropout_of_adapters_is_the_same_on_all_ranks_that_hold_their_input() -> None:
    """Column-parallel layers with adapters see one mask, however many ranks share them;
    row-parallel ones a mask of their part."""
    columns = EVERYWHERE | {"target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"]}
    losses = {}
    for layout, ranks, rate in (("tp2", 2, 0.5), ("tp2_pp2", 4, 0.5), ("tp2", 2, 0.0)):
        recipe = recipe_of(Cell(), columns | {"lora_dropout": rate}, steps=2)
        parts = run_ranks(dropout_on_rank, ranks, recipe, layout)
        assert parity.assemble(parts)[1] == 0.0, "replicas drift"
        losses[layout, rate] = torch.tensor(parts[0].losses)
    first = losses["tp2", 0.5]
    assert torch.allclose(losses["tp2_pp2", 0.5], first, rtol=1e-5, atol=0)
    assert not torch.allclose(losses["tp2", 0.0], first, rtol=1e-3, atol=0)
    everywhere = recipe_of(Cell(), EVERYWHERE | {"lora_dropout": 0.5}, steps=2)
    assert parity.assemble(run_ranks(dropout_on_rank, 2, everywhere, "tp2"))[1] == 0.0


def save_on_rank(recipe: Recipe, path: str) -> None:
    from lightning_3d.strategy import Lightning3DStrategy

    strategy = Lightning3DStrategy("tp2_pp2", micro_batch_size=4, zero_stage=1, seed=recipe.seed)
    trainer = parity.quiet_trainer(
        strategy=strategy, devices=4, max_steps=recipe.steps, gradient_clip_val=recipe.clip
    )
    trainer.fit(Finetuned(recipe), datamodule=parity.Data(Rows(data(recipe)), recipe.global_batch))
    trainer.save_checkpoint(path)


@pytest.mark.slow
def test_adapters_of_a_checkpoint_are_merged_on_one_process(tmp_path: Path) -> None:
    recipe = recipe_of(Cell(), EVERYWHERE, steps=2)
    run_ranks(save_on_rank, 4, recipe, str(tmp_path / "lora.ckpt"))
    state = {
        name.removeprefix("model."): value
        for name, value in load_full_state_dict(tmp_path / "lora.ckpt").items()
    }
    model: Any = initial_model(replace(recipe, seed=1))
    model.load_state_dict(state, strict=True)
    expected = train(recipe).weights
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, expected[f"model.{name}"], rtol=0, atol=5e-5), name
    batch = {"input_ids": data(recipe)["input_ids"][:2]}
    logits = model.eval()(**batch).logits
    assert torch.allclose(model.merge_and_unload()(**batch).logits, logits, rtol=0, atol=1e-5)
    adapters = get_peft_model_state_dict(initial_model(recipe), state_dict=state)
    assert len(adapters) == 4 * 7 * 2 and all("lora_" in name for name in adapters)


def test_values_on_meta_are_those_of_peft() -> None:
    """A is drawn as PEFT draws it, B is zero, a module that is saved whole begins as a copy."""
    model: Any = initial_model(recipe_of(Cell(), QUERIES | {"modules_to_save": ["lm_head"]}))
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    bound = layer.in_features**-0.5  # kaiming_uniform_ with a = sqrt(5)
    assert 0.9 * bound < layer.lora_A.default.weight.abs().max() <= bound
    assert not layer.lora_B.default.weight.any()
    assert 0.015 < layer.base_layer.weight.std() < 0.025  # of the model's own initializer
    assert torch.equal(
        model.base_model.model.lm_head.modules_to_save.default.weight,
        model.base_model.model.lm_head.original_module.weight,
    )


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["tp2_pp2_dp2", "pp2_dp2", "tp2_dp4", "dp4", "pp4_dp2"])
def test_every_mode(layout: str, mode: str) -> None:
    """With the data of 4 steps: in those of 5 an adapter has an element with hardly a gradient, of
    which AdamW makes 2e-5 from rounding. In float64 both agree to 1e-15."""
    check(EVERYWHERE, layout, "1F1B", mode, steps=4)


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", ["zero0", "zero1", "zero2 eager", "zero3"])
def test_every_schedule(schedule: str, mode: str) -> None:
    check(EVERYWHERE, "tp2_pp2_dp2", schedule, mode)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2_pp2", "tp4"])
@pytest.mark.parametrize("model", models.FAMILIES)
def test_every_family(model: str, layout: str) -> None:
    check(EVERYWHERE, layout, "1F1B", "zero0", model, dtype="float64")


def change_after_fit(recipe: Recipe, change: str, layout: str) -> None:
    """Fit, change the model as PEFT's users do, and go on with the same Trainer."""
    from lightning_3d.strategy import Lightning3DStrategy

    module = Finetuned(recipe, initial_model(recipe))
    strategy = Lightning3DStrategy(layout, micro_batch_size=4)
    trainer = parity.quiet_trainer(
        strategy=strategy, devices=strategy.layout.world_size, max_steps=1
    )  # type: ignore[union-attr]
    loader = DataLoader(
        Rows(data(recipe)), batch_size=recipe.global_batch // strategy.data_parallel_size
    )
    trainer.fit(module, loader)
    model: Any = module.model
    if change == "merged in place":
        model.merge_and_unload()
    elif change == "merged":
        module.model = model.merge_and_unload()
    else:
        model.add_adapter("second", LoraConfig(**QUERIES))
        model.set_adapter("second")
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, loader)


CHANGES = [
    (
        "merged in place",
        "tp2",
        r"The layer '.*q_proj' was replaced after it was sharded for tp2.*load_full_state_dict",
    ),
    ("merged", "dp2", "The model was replaced after it was sharded.*merge_and_unload"),
    (
        "second adapter",
        "dp2",
        r"lora_A.second.weight' was added to the module after it was sharded.*before the first fit",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "layout", "message"), by_default(CHANGES, 0, 2), ids=lambda value: str(value)[:16]
)
def test_changes_after_a_fit_are_refused_by_name(change: str, layout: str, message: str) -> None:
    recipe = recipe_of(Cell(), QUERIES, 2, in_memory=True)
    with pytest.raises(Lightning3DError, match=message):
        run_ranks(change_after_fit, 2, recipe, change, layout)


@pytest.mark.parametrize(
    ("kind", "tp", "pp", "message"),
    [
        ("PREFIX_TUNING", 2, 1, "tp > 1 splits the model.*Use LoRA, or tp=1"),
        ("P_TUNING", 1, 2, "pp > 1"),
        ("ADALORA", 1, 2, "PEFT's ADALORA"),
        ("LORA", 2, 2, None),
    ],
)
def test_tuners_of_the_whole_model(kind: str, tp: int, pp: int, message: str | None) -> None:
    from types import SimpleNamespace

    from lightning_3d.compat.peft_layers import refuse_tuners

    root = torch.nn.Module()
    root.peft_config = {
        "default": SimpleNamespace(peft_type=kind, is_prompt_learning=kind.endswith("TUNING"))
    }
    refuse_tuners(root, 1, 1)
    if message is None:
        return refuse_tuners(root, tp, pp)
    with pytest.raises(Lightning3DError, match=message):
        refuse_tuners(root, tp, pp)
