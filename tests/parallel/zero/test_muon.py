"""Muon with AdamW in a layout computes what `torch.optim.Muon` and `torch.optim.AdamW` compute on one process."""

import functools
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from parity import TOLERANCES, Data, Part, Rows, StepValues, differences, micro_batch_rows, quiet_trainer
from ranks import run_ranks
from reference import Noise, Recipe, Run, data, train
from torch import nn

from lightning_3d.layout import Layout
from lightning_3d.training.module import CausalLM

STEPS = 5
LR, ADAMW_LR, DECAY = 3e-4, 1e-4, 0.1
OPTIMIZER: dict[str, Any] = {
    "name": "muon",
    "lr": LR,
    "adamw_lr": ADAMW_LR,
    "adamw": [],
    "momentum": 0.9,
    "nesterov": True,
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": DECAY,
    "no_decay": ["norm", "bias", "embedding"],
    "groups": None,
}


class ByTorch(torch.optim.Optimizer):
    """torch's Muon for the matrices of the blocks and its AdamW for the rest. Each expert is a matrix of its own."""

    def __init__(self, model: nn.Module, rule: str = "match_rms_adamw") -> None:
        super().__init__(list(model.parameters()), {})
        matrices, decayed, others = [], [], []
        self.slices: list[tuple[nn.Parameter, nn.Parameter, int]] = []
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                self.slices += [(nn.Parameter(parameter.detach()[index]), parameter, index) for index in range(len(parameter))]
            elif ".layers." in name and parameter.ndim == 2:
                matrices.append(parameter)
            else:
                (decayed if name == "lm_head.weight" else others).append(parameter)
        muon = [*matrices, *(own for own, _, _ in self.slices)]
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        self.muon = torch.optim.Muon(muon, lr=LR, weight_decay=DECAY, momentum=0.9, adjust_lr_fn=rule)
        self.adamw = torch.optim.AdamW(groups, lr=ADAMW_LR, betas=(0.9, 0.999), eps=1e-8)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for own, whole, index in self.slices:
            assert whole.grad is not None
            own.grad = whole.grad[index]
        self.muon.step()
        self.adamw.step()


@functools.cache
def expected(recipe: Recipe, rule: str = "match_rms_adamw") -> Run:
    return train(recipe, optimizers=lambda model: (ByTorch(model, rule), None))  # type: ignore[return-value]


class Configured(CausalLM):
    """The module of `train.py`. In float64 its norms keep double precision."""

    def configure_model(self) -> None:
        super().configure_model()
        if torch.get_default_dtype() == torch.float64:
            models.keep_double(self.model)


def module(recipe: Recipe, optimizer: dict[str, Any]) -> Configured:
    kind, own = {**models.FAMILIES, **models.MIXTURES}[recipe.model]
    fields = models.COMMON | own | {"num_hidden_layers": recipe.layers}
    return Configured({"config": {"model_type": recipe.model, **fields}}, optimizer)


class SaveAt(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(recipe: Recipe, optimizer: dict[str, Any], checkpoint: str, resume: str | None, **strategy: Any) -> tuple[Part, int]:
    """Train, and return what this rank has, with the number of elements of its momenta."""
    from lightning_3d.strategy import Lightning3DStrategy

    plan, values, causal_lm = Lightning3DStrategy(**strategy, seed=recipe.seed), StepValues(), module(recipe, optimizer)
    assert plan.layout is not None
    callbacks = [values, SaveAt(checkpoint, 2)] if checkpoint else [values]
    trainer = quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        precision={"float64": "64-true"}.get(recipe.dtype, "32-true"),
        max_steps=STEPS,
        max_epochs=1,
        gradient_clip_val=recipe.clip,
        callbacks=callbacks,
    )
    rows = Data(Rows(data(recipe)), recipe.global_batch // plan.layout.dp)
    trainer.fit(causal_lm, datamodule=rows, ckpt_path=resume)
    weights = {name: parameter.detach().clone() for name, parameter in causal_lm.named_parameters()}
    shards = plan.built.backend.optimizer_shards()
    momenta = sum(shard.values["momentum_buffer"].numel() for shard in shards if "momentum_buffer" in shard.values)  # type: ignore[union-attr]
    return Part(values.losses, values.grad_norms, weights, dict(plan.specs)), momenta


def run(recipe: Recipe, layout: str, *, checkpoint: str = "", resume: str | None = None, rule: str = "match_rms_adamw", **more: Any) -> Any:
    size = Layout.parse(layout)
    strategy = {"layout": layout, "micro_batch_size": micro_batch_rows(size.dp, size.pp, recipe.global_batch), **more}
    optimizer = {**OPTIMIZER, "adjust_lr_fn": rule}
    return run_ranks(fit, size.world_size, recipe, optimizer, checkpoint, resume, **strategy, timeout=180)


def assert_same(results: list[tuple[Part, int]], recipe: Recipe, first: int = 0, rule: str = "match_rms_adamw") -> None:
    """Compare the steps from `first` on with torch's optimizers."""
    whole = expected(recipe, rule)
    error, drift = differences([part for part, _ in results], Run(whole.losses[first:], whole.grad_norms[first:], whole.weights))
    relative, absolute = TOLERANCES[recipe.dtype]
    assert drift == 0.0
    print(recipe.model, recipe.dtype, error)
    assert error.within(Noise(relative, relative, absolute)), f"{error}"


FULL = pytest.mark.full
CASES = [
    pytest.param("llama", "tp2", 0, "float64"),
    pytest.param("mixtral", "dp2_ep2", 0, "float64"),
    pytest.param("phi3", "tp2_dp2", 1, "float32"),
    *(
        pytest.param(model, layout, 0, "float64", marks=FULL)
        for model in ("llama", "phi3", "mixtral", "qwen2_moe")
        for layout in ("tp2", "pp2", "dp2", "tp4", "tp2_dp2", "cp2", "tp2_pp2")
    ),
    *(pytest.param("mixtral", layout, 0, "float64", marks=FULL) for layout in ("dp2_ep2", "dp4_ep2", "tp2_dp2_ep2", "tp2_ep2")),
    *(
        pytest.param(model, layout, zero, "float32", marks=FULL)
        for model in ("llama", "mixtral")
        for layout in ("dp2", "tp2_dp2", "pp2_dp2")
        for zero in (1, 2, 3)
    ),
    *(pytest.param("mixtral", layout, zero, "float32", marks=FULL) for layout in ("dp2_ep2", "dp4_ep2") for zero in (1, 2, 3)),
]


@pytest.mark.parametrize(("model", "layout", "zero", "dtype"), CASES)
def test_equals_the_optimizers_of_torch(model: str, layout: str, zero: int, dtype: str) -> None:
    recipe = Recipe(model, 2, dtype, steps=STEPS)
    assert_same(run(recipe, layout, zero_stage=zero), recipe)
