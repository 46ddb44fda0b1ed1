"""Fits that train a part of the parameters equal one process, whatever is frozen and wherever it
lies.

``pytest`` runs a few sets of parameters under ZeRO stages and schedules, ``pytest -m full`` all of
them and random ones.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import parity
import pytest
import torch
from finetuned import MODES, Finetuned
from parity import SCHEDULES, Cell, Part, Rows, assert_same_run, fit_on_rank, quiet_trainer
from ranks import run_ranks
from reference import Recipe, cut, data, initial_model, split, train, train_on
from sweeps import by_default
from torch.utils.data import DataLoader

from lightning_3d.errors import ConfigError

# Parts of the names of what is trained. The model has four blocks: with pp4, and on schedules with
# two stages per rank and pp2, each is a stage of its own.
SETS: dict[str, tuple[str, ...]] = {
    "norms": ("norm",),
    "head": ("lm_head",),
    "embedding": ("embed_tokens",),
    "last block": ("layers.3.",),
    "first block": ("embed_tokens", "layers.0."),
    "middle": ("layers.1.", "layers.2."),
    "ends": ("embed_tokens", "layers.0.", "layers.3.", "model.norm", "lm_head"),
    "biases": ("bias",),
    "one matrix": ("layers.2.self_attn.v_proj.weight",),
}
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def finetune_on_rank(recipe: Recipe, **strategy: Any) -> Part:
    return fit_on_rank(recipe, Rows(data(recipe)), Finetuned(recipe), **strategy)


def check(
    trained: tuple[str, ...],
    layout: str,
    schedule: str = "1F1B",
    mode: str = "zero0",
    model: str = "llama",
    steps: int = 6,
) -> None:
    """Finetune on ranks and on one process; what is frozen must not change by a bit."""
    degrees = {part[:2]: int(part[2:]) for part in layout.split("_")}
    stage, options = MODES[mode]
    cell = Cell(
        model, schedule=schedule, zero=stage, options=tuple(sorted(options.items())), **degrees
    )
    recipe = replace(cell.recipe, trained=trained, steps=steps)
    before = {
        f"model.{name}": parameter for name, parameter in initial_model(recipe).named_parameters()
    }
    assert any(p.requires_grad for p in before.values()) and not all(
        p.requires_grad for p in before.values()
    )
    parts = run_ranks(
        finetune_on_rank, cell.world_size, recipe, **parity.strategy_arguments(cell), timeout=180
    )
    expected = train(recipe)
    assert_same_run(parts, expected)
    whole, _ = parity.assemble(parts)
    for name, parameter in before.items():
        assert torch.equal(whole[name], parameter) != parameter.requires_grad, name


CHOSEN = [
    ("norms", "tp2_pp2_dp2", "1F1B", "zero0", "llama"),
    ("head", "tp2_pp2", "1F1B", "zero0", "llama"),
    ("embedding", "pp4_dp2", "1F1B", "zero2 eager", "llama"),
    ("embedding", "tp2_pp2_dp2", "GPipe", "zero3 by block, eager", "qwen2"),
    ("last block", "pp2_dp2", "ZBVZeroBubble", "zero1", "llama"),
    ("first block", "pp2_dp2", "DualPipeV", "zero2", "llama"),
    ("middle", "pp2_dp2", "InterleavedZeroBubble", "zero3", "llama"),
    ("ends", "pp4_dp2", "1F1B", "zero3 by block, eager", "llama"),
    ("biases", "tp2_dp2", "1F1B", "zero1 scattered", "qwen2"),
    # embedding and head are tied over stages, and frozen
    ("biases", "pp4_dp2", "1F1B", "zero3 by block, eager", "qwen2"),
    ("biases", "pp2_dp2", "1F1B", "zero3 by block, eager", "qwen2"),
    ("one matrix", "dp4", "1F1B", "zero2 eager", "llama"),
    ("one matrix", "pp4_dp2", "1F1B", "zero3 eager", "llama"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "layout", "schedule", "mode", "model"),
    by_default(CHOSEN, 4, 10),
    ids=lambda word: str(word).replace(" ", "_"),
)
def test_parts(trained: str, layout: str, schedule: str, mode: str, model: str) -> None:
    check(SETS[trained], layout, schedule, mode, model)


class ChosenByOptimizer(parity.Module):
    """Freezes nothing: the optimizer is given a part of the parameters."""

    def configure_model(self) -> None:
        super().configure_model()
        self.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        chosen = [
            p for name, p in self.named_parameters() if any(part in name for part in recipe.trained)
        ]
        return torch.optim.AdamW(chosen, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)


def choose_on_rank(recipe: Recipe, **strategy: Any) -> Part:
    return fit_on_rank(recipe, Rows(data(recipe)), ChosenByOptimizer(recipe), **strategy)


@pytest.mark.slow
@pytest.mark.parametrize("mode", by_default(["zero0", "zero2 eager", "zero3 by block, eager"], 1))
def test_parts_that_only_the_optimizer_chooses(mode: str) -> None:
    """What it was not given has gradients, which count nowhere."""
    stage, options = MODES[mode]
    recipe = Recipe(trained=SETS["last block"], steps=6)
    parts = run_ranks(
        choose_on_rank, 4, recipe, layout="pp2_dp2", micro_batch_size=2, zero_stage=stage, **options
    )
    assert_same_run(parts, train(recipe))


def random_case(seed: int) -> tuple[tuple[str, ...], str, str, str, str]:
    """Each parameter is trained with a probability that is itself random; layout, schedule and mode
    are drawn too."""
    draw = random.Random(seed)
    model = draw.choice(["llama", "qwen2", "qwen3", "gpt_neox", models.PLAIN])
    layout = draw.choice(["pp2_dp2", "tp2_pp2", "tp2_pp2_dp2", "pp4_dp2", "tp2_dp2", "dp4"])
    schedule = draw.choice(SCHEDULES) if "pp" in layout else "1F1B"
    mode = draw.choice([mode for mode in MODES if schedule not in SPLIT or "by block" not in mode])
    names = [name for name, _ in initial_model(Recipe(model)).named_parameters()]
    share = draw.choice([0.05, 0.3, 0.7])
    chosen = tuple(name for name in names if draw.random() < share)
    return chosen or (names[-1],), layout, schedule, mode, model


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_random_parts(seed: int) -> None:
    check(*random_case(seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 30))
def test_more_random_parts(seed: int) -> None:
    check(*random_case(seed))


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("trained", SETS)
def test_every_set_under_every_schedule(trained: str, schedule: str) -> None:
    modes = [mode for mode in MODES if schedule not in SPLIT or "by block" not in mode]
    mode = modes[(list(SETS).index(trained) + SCHEDULES.index(schedule)) % len(modes)]
    check(SETS[trained], "pp2_dp2", schedule, mode, "qwen2" if trained == "biases" else "llama")


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trained", SETS)
def test_every_set_in_every_mode(trained: str, mode: str) -> None:
    layout = ("pp4_dp2", "tp2_pp2_dp2")[(list(SETS).index(trained) + list(MODES).index(mode)) % 2]
    check(SETS[trained], layout, "1F1B", mode, "qwen2" if trained == "biases" else "llama")


class TrainsNothing(Finetuned):
    def __init__(self, recipe: Recipe, filtered: bool) -> None:
        super().__init__(recipe)
        self.filtered = filtered

    def configure_model(self) -> None:
        super().configure_model()
        self.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return (
            super().configure_optimizers()
            if self.filtered
            else torch.optim.AdamW(self.parameters())
        )


def fit_nothing(layout: str, filtered: bool) -> None:
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(steps=1)
    trainer = quiet_trainer(strategy=Lightning3DStrategy(layout), devices=2, max_steps=1)
    trainer.fit(TrainsNothing(recipe, filtered), DataLoader(Rows(data(recipe)), batch_size=8))


@pytest.mark.parametrize("filtered", [True, False])
def test_a_fit_that_trains_nothing_is_refused(filtered: bool) -> None:
    with pytest.raises(
        ConfigError, match="trains nothing: it has no parameter with requires_grad=True on any rank"
    ):
        run_ranks(fit_nothing, 2, "pp2", filtered)


def continue_on_rank(recipe: Recipe, path: str, mode: str, layout: str) -> Part:
    """Train an epoch, save, and go on for another from the checkpoint, with another module."""
    from lightning_3d.strategy import Lightning3DStrategy

    stage, options = MODES[mode]
    values = parity.StepValues()
    for epochs, checkpoint in ((1, None), (2, path)):
        strategy = Lightning3DStrategy(
            layout, micro_batch_size=2, zero_stage=stage, seed=0, **options
        )
        assert strategy.layout is not None
        trainer = quiet_trainer(
            strategy=strategy,
            devices=strategy.layout.world_size,
            max_epochs=epochs,
            callbacks=[values],
            gradient_clip_val=recipe.clip,
        )
        module = Finetuned(recipe)
        loader = parity.Data(Rows(data(recipe)), recipe.global_batch // strategy.layout.dp)
        trainer.fit(module, datamodule=loader, ckpt_path=checkpoint)
        if checkpoint is None:
            trainer.save_checkpoint(path)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return Part(values.losses, values.grad_norms, weights, dict(strategy.specs))


@pytest.mark.slow
@pytest.mark.parametrize("mode", by_default(["zero0", "zero1", "zero3"], 2))
def test_a_checkpoint_of_a_fit_with_a_frozen_stage(mode: str, tmp_path: Path) -> None:
    recipe = Recipe(trained=("layers.0.", "layers.1."), steps=3)  # nothing on the second stage
    parts = run_ranks(
        continue_on_rank, 4, recipe, str(tmp_path / "one.ckpt"), mode, "pp2_dp2", timeout=180
    )
    rows = data(recipe)
    epoch = [
        split(cut(rows, start, recipe.global_batch), 4)
        for start in range(0, 48, recipe.global_batch)
    ]
    assert_same_run(parts, train_on(recipe, epoch * 2))
