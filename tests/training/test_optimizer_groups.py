"""Parameter groups by name pattern and schedules: what every layout trains, one process trains with
groups that are made by hand."""

import math
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from parity import (
    Data,
    Part,
    Rows,
    StepValues,
    differences,
    limits,
    micro_batch_rows,
    quiet_trainer,
)
from ranks import run_ranks
from reference import Recipe, Run, compare, data, train
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_3d.app.training.module import CausalLM
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout

STEPS = 4
EPS = 1e-8
GROUPS = [
    {"pattern": "lm_head.*", "lr_scale": 0.1},  # tied to the embedding, which is on another stage
    {
        "pattern": "re:model\\.layers\\.\\d\\.self_attn\\.(q|k)_proj\\.weight",
        "lr": 1e-3,
        "weight_decay": 0.3,
    },
    {"pattern": ["model.layers.[23].*", "model.norm.*"], "lr_scale": 2},
]
OPTIMIZER = {
    "name": "adamw",
    "lr": 3e-4,
    "betas": [0.9, 0.999],
    "eps": EPS,
    "weight_decay": 0.1,
    "no_decay": ["norm", "bias", "embedding"],
    "groups": GROUPS,
    "scheduler": {
        "name": "wsd",
        "warmup_steps": 2,
        "cooldown_steps": 2,
        "cooldown_shape": "sqrt",
        "decay_steps": STEPS,
    },
}
FACTORS = [0.5, 1.0, 1.0, 1 - math.sqrt(0.5), 0.0]
"""Of the learning rate in each step: warm-up, constant, and a decay from step 2 to step 4."""


def by_hand(model: nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """One parameter in each group, with the values that the patterns above mean."""
    groups = []
    for name, parameter in model.named_parameters():
        late = name.startswith(("model.layers.2.", "model.layers.3.", "model.norm."))
        if name == "model.embed_tokens.weight":
            lr, decay = 3e-5, 0.0
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            lr, decay = 1e-3, 0.3
        else:
            lr, decay = (
                6e-4 if late else 3e-4,
                0.0 if "norm" in name or name.endswith("bias") else 0.1,
            )
        groups.append({"params": [parameter], "lr": lr, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, eps=EPS)
    return optimizer, LambdaLR(optimizer, lambda step: FACTORS[step])


class Configured(CausalLM):
    """The module of `train.py`. In float64 its norms keep double precision."""

    def configure_model(self) -> None:
        super().configure_model()
        if torch.get_default_dtype() == torch.float64:
            models.keep_double(self.model)


def module(layers: int) -> Configured:
    fields = models.COMMON | models.FAMILIES["qwen2"][1] | {"num_hidden_layers": layers}
    return Configured({"config": {"model_type": "qwen2", **fields}}, OPTIMIZER)


class SaveAt(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(
    recipe: Recipe, checkpoint: str, resume: str | None, **strategy: Any
) -> tuple[Part, dict[str, tuple[float, float]]]:
    """Train, and return what this rank has, with the first learning rate and the decay of each of
    its parameters."""
    from lightning_3d.strategy import Lightning3DStrategy

    plan, values, causal_lm = (
        Lightning3DStrategy(**strategy, seed=recipe.seed),
        StepValues(),
        module(recipe.layers),
    )
    assert plan.layout is not None
    precision = {"float64": "64-true"}.get(recipe.dtype, "32-true")
    callbacks = [values, SaveAt(checkpoint, 2)] if checkpoint else [values]
    options = {"max_steps": STEPS, "max_epochs": 1, "gradient_clip_val": recipe.clip}
    trainer = quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        precision=precision,
        **options,
        callbacks=callbacks,
    )
    rows = Data(Rows(data(recipe)), recipe.global_batch // plan.layout.dp)
    trainer.fit(causal_lm, datamodule=rows, ckpt_path=resume)
    groups = zip(trainer.optimizers[0].param_groups, plan.built.group_names, strict=True)
    found = {
        name: (group["initial_lr"], group["weight_decay"])
        for group, names in groups
        for name in names
    }
    weights = {name: parameter.detach().clone() for name, parameter in causal_lm.named_parameters()}
    return Part(values.losses, values.grad_norms, weights, dict(plan.specs)), found


def run(
    recipe: Recipe, layout: str, checkpoint: str = "", resume: str | None = None, **strategy: Any
) -> list[Any]:
    size = Layout.parse(layout)
    strategy |= {
        "layout": layout,
        "micro_batch_size": micro_batch_rows(size.dp, size.pp, recipe.global_batch),
    }
    return run_ranks(fit, size.world_size, recipe, checkpoint, resume, **strategy, timeout=180)


def assert_same(parts: list[Part], recipe: Recipe, first: int = 0) -> None:
    """Compare the steps from `first` on with one process."""
    whole = train(recipe, optimizers=by_hand)
    noise = compare(train(recipe, recipe.global_batch, by_hand), whole)
    expected = Run(whole.losses[first:], whole.grad_norms[first:], whole.weights)
    error, drift = differences(parts, expected)
    assert drift == 0.0 and error.within(limits(recipe.dtype, noise)), f"{error} {noise}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "zero", "dtype"),
    [
        ("tp2_pp2", 0, "float64"),
        pytest.param("tp2_pp2_dp2", 0, "float64", marks=pytest.mark.full),
        pytest.param("tp2_pp2_dp2", 1, "float32", marks=pytest.mark.full),
        pytest.param("tp2_pp2_dp2", 2, "float32", marks=pytest.mark.full),
        pytest.param("tp2_pp2_dp2", 3, "float32", marks=pytest.mark.full),
    ],
)
def test_groups_and_a_schedule_in_a_layout(layout: str, zero: int, dtype: str) -> None:
    recipe = Recipe("qwen2", 4, dtype, steps=STEPS)
    results = run(recipe, layout, zero_stage=zero)
    assert_same([part for part, _ in results], recipe)


@pytest.mark.slow
def test_groups_of_a_checkpoint_in_another_layout(tmp_path: Path) -> None:
    """The second stage has the embedding under another name, and parameters of other groups than
    the first."""
    recipe = Recipe("qwen2", 4, steps=STEPS)
    checkpoint = f"{tmp_path}/step_2"
    run(recipe, "pp2", checkpoint, zero_stage=0)
    results = run(recipe, "tp2_dp2", resume=checkpoint, zero_stage=1)
    assert_same([part for part, _ in results], recipe, first=2)
    for _, found in results:
        assert found["model.model.embed_tokens.weight"] == (pytest.approx(3e-5), 0.0)
        assert found["model.model.layers.0.self_attn.k_proj.weight"] == (1e-3, 0.3)
        assert found["model.model.layers.3.self_attn.v_proj.bias"] == (6e-4, 0.0)
        assert found["model.model.layers.1.mlp.up_proj.weight"] == (3e-4, 0.1)


@pytest.mark.parametrize(
    "given", [{}, {"no_decay": ["norm"]}, {"no_decay": []}, {"no_decay": None}], ids=str
)
def test_a_configuration_without_no_decay_has_the_default_of_all_recipes(
    given: dict[str, Any],
) -> None:
    """Norms, biases and embeddings are not decayed; an empty list decays everything."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    causal_lm = CausalLM(
        {"config": {"model_type": "qwen2", **fields}},
        {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, **given},
    )
    causal_lm.configure_model()
    made = causal_lm.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    found = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    kinds = {"embed_tokens": "embedding", "norm": "norm", "bias": "bias"}
    kept = given.get("no_decay", ["norm", "bias", "embedding"]) or []
    for name, parameter in causal_lm.named_parameters():
        kind = next((kind for word, kind in kinds.items() if word in name), "matrix")
        assert found[id(parameter)] == (0.0 if kind in kept else 0.1), name


def refusal(groups: list[dict[str, Any]]) -> str:
    """Message with which a model of a family that only Transformers knows is refused."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    causal_lm = CausalLM(
        {"config": {"model_type": "olmo", **fields}}, {**OPTIMIZER, "groups": groups}
    )
    with torch.device("meta"), pytest.raises(ConfigError) as refused:
        causal_lm.configure_model()
    return str(refused.value)


def test_a_pattern_without_parameters() -> None:
    message = refusal([{"pattern": "*.q_prj.weight", "lr": 1e-3}])
    assert (
        'optimizer.groups[0]: the pattern "*.q_prj.weight" matches no trained parameter' in message
    )
    assert "The nearest names are model.layers.0.self_attn.q_proj.weight, " in message
    assert '"layers.*"' in refusal([{"pattern": ["*.q_proj.*", "layers.*"], "lr": 1e-3}])


def test_a_group_whose_parameters_others_have() -> None:
    message = refusal(
        [{"pattern": "model.*", "lr": 1e-3}, {"pattern": "*.q_proj.weight", "lr": 1e-4}]
    )
    assert (
        "optimizer.groups[1] has no parameters: earlier groups match everything that"
        " *.q_proj.weight matches." in message
    )


def test_frozen_parameters_match_nothing() -> None:
    pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": ["q_proj"]}
    fields = models.COMMON | models.FAMILIES["llama"][1] | {"num_hidden_layers": 2}
    config = {"config": {"model_type": "llama", **fields}, "lora": lora}
    causal_lm = CausalLM(
        config, {**OPTIMIZER, "groups": [{"pattern": "*.lora_B.*", "lr_scale": 16}]}
    )
    causal_lm.configure_model()
    assert {
        name.rpartition("lora_")[2][0]: group.options
        for group in causal_lm._groups
        for name in group.names
    } == {
        "A": {"weight_decay": 0.1},
        "B": {"weight_decay": 0.1, "lr": 16 * 3e-4},
    }
    causal_lm = CausalLM(
        config, {**OPTIMIZER, "groups": [{"pattern": "*.up_proj.weight", "lr_scale": 16}]}
    )
    with pytest.raises(ConfigError, match="matches no trained parameter"):
        causal_lm.configure_model()
