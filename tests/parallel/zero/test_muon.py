"""Muon with AdamW in a layout computes what `torch.optim.Muon` and `torch.optim.AdamW` compute on
one process."""

import functools
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from parity import (
    QUIET,
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

from lightning_3d.app.training.module import CausalLM
from lightning_3d.layout import Layout

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
    """torch's Muon for the matrices of the blocks and its AdamW for the rest. Each expert is a
    matrix of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(list(model.parameters()), {})
        matrices, decayed, others = [], [], []
        self.slices: list[tuple[nn.Parameter, nn.Parameter, int]] = []
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                self.slices += [
                    (nn.Parameter(parameter.detach()[index]), parameter, index)
                    for index in range(len(parameter))
                ]
            elif ".layers." in name and parameter.ndim == 2:
                matrices.append(parameter)
            else:
                (decayed if name == "lm_head.weight" else others).append(parameter)
        muon = [*matrices, *(own for own, _, _ in self.slices)]
        groups = [
            {"params": decayed, "weight_decay": DECAY},
            {"params": others, "weight_decay": 0.0},
        ]
        self.muon = torch.optim.Muon(
            muon, lr=LR, weight_decay=DECAY, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(groups, lr=ADAMW_LR, betas=(0.9, 0.999), eps=1e-8)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for own, whole, index in self.slices:
            assert whole.grad is not None
            own.grad = whole.grad[index]
        self.muon.step()
        self.adamw.step()


@functools.cache
def expected(recipe: Recipe, micro_batch: int = 4) -> Run:
    return train(recipe, micro_batch, optimizers=lambda model: (ByTorch(model), None))  # type: ignore[return-value,arg-type]


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


def fit(
    recipe: Recipe, optimizer: dict[str, Any], checkpoint: str, resume: str | None, **strategy: Any
) -> tuple[Part, int]:
    """Train, and return what this rank has, with the number of elements of its momenta."""
    from lightning_3d.strategy import Lightning3DStrategy

    plan, values, causal_lm = (
        Lightning3DStrategy(**strategy, seed=recipe.seed),
        StepValues(),
        module(recipe, optimizer),
    )
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
    momenta = sum(
        shard.values["momentum_buffer"].numel()
        for shard in shards
        if "momentum_buffer" in shard.values
    )  # type: ignore[union-attr]
    return Part(values.losses, values.grad_norms, weights, dict(plan.specs)), momenta


def run(
    recipe: Recipe, layout: str, *, checkpoint: str = "", resume: str | None = None, **more: Any
) -> list[tuple[Part, int]]:
    size = Layout.parse(layout)
    strategy = {
        "layout": layout,
        "micro_batch_size": micro_batch_rows(size.dp, size.pp, recipe.global_batch),
        **more,
    }
    return run_ranks(
        fit, size.world_size, recipe, OPTIMIZER, checkpoint, resume, **strategy, timeout=180
    )


def assert_same(results: list[tuple[Part, int]], recipe: Recipe, first: int = 0) -> None:
    """Compare the steps from `first` on with torch's optimizers.

    In float32, gradients that are rounded differently now and then round a momentum to another
    bfloat16, which changes the whole update, on one process too. `test_muon_bits.py` compares
    without such noise.
    """
    whole = expected(recipe)
    noise = (
        compare(expected(recipe, recipe.global_batch), whole)
        if recipe.dtype == "float32"
        else QUIET
    )
    error, drift = differences(
        [part for part, _ in results],
        Run(whole.losses[first:], whole.grad_norms[first:], whole.weights),
    )
    assert drift == 0.0
    assert error.within(limits(recipe.dtype, noise)), f"{error} (noise of one process: {noise})"


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
    *(
        pytest.param("mixtral", layout, 0, "float64", marks=FULL)
        for layout in ("dp2_ep2", "dp4_ep2", "tp2_dp2_ep2", "tp2_ep2")
    ),
    *(
        pytest.param(model, layout, zero, "float32", marks=FULL)
        for model in ("llama", "mixtral")
        for layout in ("dp2", "tp2_dp2", "pp2_dp2")
        for zero in (1, 2, 3)
    ),
    *(
        pytest.param("mixtral", layout, zero, "float32", marks=FULL)
        for layout in ("dp2_ep2", "dp4_ep2")
        for zero in (1, 2, 3)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "zero", "dtype"), CASES)
def test_equals_the_optimizers_of_torch(model: str, layout: str, zero: int, dtype: str) -> None:
    recipe = Recipe(model, 2, dtype, steps=STEPS)
    assert_same(run(recipe, layout, zero_stage=zero), recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        (("tp2", 0), ("dp2_ep2", 0), "float64"),
        pytest.param(("pp2", 0), ("tp2", 0), "float64", marks=FULL),
        pytest.param(("dp2_ep2", 1), ("tp2", 2), "float32", marks=FULL),
        pytest.param(("tp2_dp2", 2), ("pp2", 0), "float32", marks=FULL),
        pytest.param(("pp2", 0), ("dp3", 1), "float32", marks=FULL),
    ],
    ids=str,
)
def test_a_checkpoint_in_another_layout(
    before: tuple[str, int], after: tuple[str, int], dtype: str, tmp_path: Path
) -> None:
    """Its momenta are those of whole parameters."""
    recipe = Recipe("mixtral", 2, dtype, steps=STEPS, global_batch=24 if after[0] == "dp3" else 16)
    run(recipe, before[0], checkpoint=f"{tmp_path}/step_2", zero_stage=before[1])
    assert_same(
        run(recipe, after[0], resume=f"{tmp_path}/step_2", zero_stage=after[1]), recipe, first=2
    )


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_rank_keeps_its_share_of_the_momenta(zero: int) -> None:
    recipe = Recipe("llama", 2, steps=STEPS)
    held = [momenta for _, momenta in run(recipe, "dp2", zero_stage=zero)]
    # q, o; k, v; gate, up, down of two layers
    matrices = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    assert sum(held) == (2 if zero == 0 else 1) * matrices
    assert max(held) == pytest.approx(matrices if zero == 0 else matrices / 2, rel=0.01)
