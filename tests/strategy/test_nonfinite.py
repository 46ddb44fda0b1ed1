"""A loss or a gradient norm that is not finite: the run stops on all ranks before the weights
change, or skips the step, or goes on."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import models
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from parity import PRECISIONS, Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from saving import check_checkpoints
from sweeps import by_default
from torch import Tensor

from lightning_3d.engine.nonfinite import Found, StepGuard
from lightning_3d.errors import ConfigError, NonFiniteError
from lightning_3d.layout import Layout
from lightning_3d.options.options import Options
from lightning_3d.ranks.failure import Failure

BATCH, STEPS = 4, 4
BAD = 1
"""The batch, counted from 0, that one data-parallel rank's loss is not finite in."""

CELLS: list[tuple[str, dict[str, Any]]] = [
    ("pp2", {}),
    ("dp2", {"zero_stage": 1, "dtype": "bfloat16", "clip": None}),
    ("dp2", {"zero_stage": 2, "zero_reduce": "micro_batch"}),
    ("dp2", {"zero_stage": 3, "dtype": "bfloat16"}),
    ("tp2", {"dtype": "bfloat16"}),
    ("dp2", {"zero_stage": 1, "zero_offload": "optimizer"}),
    ("dp2", {"zero_stage": 3, "zero_gather": "micro_batch", "clip": None}),
    ("dp2_ep2", {"model": "deepseek_v3", "moe_bias_update": 0.01}),
    ("dp2", {"zero_stage": 1, "accumulate": 2}),
    ("tp2_pp2_dp2", {"schedule": "ZBVZeroBubble", "zero_stage": 2}),
    # With a fused optimizer the device decides, and the host looks at the numbers when it has
    # launched the optimizer.
    ("dp2", {"zero_stage": 1, "dtype": "bfloat16", "fused": True}),
    ("pp2", {"fused": True}),
    ("tp2", {"dtype": "bfloat16", "fused": True}),
    (
        "dp2",
        {"zero_stage": 2, "zero_reduce": "micro_batch", "zero_overlap_gather": True, "fused": True},
    ),
    ("dp2", {"zero_stage": 3, "dtype": "bfloat16", "clip": None, "fused": True}),
    ("dp2_ep2", {"model": "deepseek_v3", "moe_bias_update": 0.01, "fused": True}),
    ("dp2", {"accumulate": 2, "fused": True}),
    ("dp1", {"accumulate": 4}),  # the first batch of four is the bad one
    ("dp1", {"accumulate": 4, "fused": True}),
]


class Scaled(Module):
    """Its loss is multiplied by a number that comes with each row: 1, or NaN."""

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        batch = dict(batch)
        scale = batch.pop("scale")
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        return loss * scale.mean().to(loss.dtype)


class Fused(Scaled):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        return torch.optim.AdamW(
            self.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )


def rows(recipe: Recipe, scale: float | None, *, without: bool = False) -> Rows:
    """The rows of all batches.

    Args:
        scale: of the first row of the bad batch, which the first data-parallel rank reads; None:
            all of its targets are left out.
        without: the bad batch is not there.
    """
    batch = data(recipe) | {"scale": torch.ones(recipe.steps * BATCH)}
    first, last = BAD * BATCH, (BAD + 1) * BATCH
    if scale is None:
        batch["labels"][first:last] = models.IGNORE
    else:
        batch["scale"][first] = scale
    kept = [row for row in range(recipe.steps * BATCH) if not (without and first <= row < last)]
    return Rows({key: value[kept] for key, value in batch.items()})


@dataclass
class Left:
    """What a fit leaves on a rank: the error's text, steps that began, losses, norms, weights and
    optimizer state by step, and launches of the optimizer."""

    error: str = ""
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    launches: int = 0
    warned: list[str] = field(default_factory=list)


def state_of(strategy: Any) -> dict[str, Tensor]:
    """Copies of this rank's weights and of what its optimizer keeps."""
    shards = [*strategy.built.backend.weight_shards(), *strategy.built.backend.optimizer_shards()]
    state = {
        f"{s.name} {key} {s.start}": torch.as_tensor(value).clone()
        for s in shards
        for key, value in s.values.items()
    }
    module = strategy.lightning_module
    whole = dict(module.named_buffers()) if strategy.zero.stage == 3 else module.state_dict()
    # hooks see whole parameters, or may not read those of experts
    with torch._C.DisableTorchFunction():
        return state | {name: value.detach().clone() for name, value in whole.items()}


class Watch(pl.Callback):
    """Keeps what a fit does."""

    def __init__(self) -> None:
        self.left = Left()

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.left.states.append(state_of(trainer.strategy))
        built = trainer.strategy.built  # type: ignore[attr-defined]
        launch = built.step_optimizer

        def counted() -> None:
            self.left.launches += 1
            launch()

        built.step_optimizer = counted

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step = trainer.strategy.last_step  # type: ignore[attr-defined]
        if step.grad_norm is not None:
            self.left.losses.append(step.loss)
            self.left.norms.append(step.grad_norm)
            self.left.skipped.append(step.skipped)
            self.left.states.append(state_of(trainer.strategy))

    def on_exception(self, trainer: pl.Trainer, *args: Any) -> None:
        self.left.steps = trainer.global_step
        self.left.states.append(state_of(trainer.strategy))


def train(
    layout: str,
    how: str,
    scale: float | None = math.nan,
    *,
    without: bool = False,
    callbacks: list[pl.Callback] | None = None,
    model: str = "llama",
    dtype: str = "float32",
    clip: float | None = 0.3,
    accumulate: int = 1,
    fused: bool = False,
    **options: Any,
) -> Left:
    """Fit on this rank."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(model, 4, steps=STEPS, global_batch=BATCH)
    strategy = Lightning3DStrategy(layout, **{"micro_batch_size": 1, **options}, nonfinite=how)
    assert strategy.layout is not None
    watch = Watch()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=strategy.layout.world_size,
        precision=PRECISIONS[dtype],
        max_epochs=1,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        callbacks=[watch, *(callbacks or [])],
        enable_checkpointing=bool(callbacks),
    )
    left = watch.left
    with pytest.warns() as warned:
        try:
            module = (Fused if fused else Scaled)(recipe)
            trainer.fit(
                module,
                datamodule=Data(
                    rows(recipe, scale, without=without), BATCH // strategy.layout.dp // accumulate
                ),
            )
            left.steps = trainer.global_step
        except NonFiniteError as error:
            left.error = str(error)
    left.warned = [str(one.message) for one in warned]
    return left


def assert_same(states: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the last bit."""
    assert states.keys() == expected.keys()
    different = [name for name, value in states.items() if not torch.equal(value, expected[name])]
    assert not different


def world_size(layout: str) -> int:
    return Layout.parse(layout).world_size


@pytest.mark.parametrize(("layout", "options"), by_default(CELLS, 0, 3, 10, 18), ids=str)
def test_a_step_that_is_not_finite_stops_all_ranks_before_the_weights_change(
    layout: str, options: dict[str, Any]
) -> None:
    parts = run_ranks(train, world_size(layout), layout, "stop", **options)
    where = (
        f" (not finite on data-parallel rank 0 of {Layout.parse(layout).dp})"
        if "dp2" in layout
        else ""
    )
    for left in parts:
        assert left.error.startswith(
            f"Step 2: the loss is nan and the gradient norm is nan{where}. "
        )
        assert "The first that is not finite is the gradient of the output of model" in left.error
        assert "The optimizer did not take this step" in left.error
        assert (
            "the weights are still those after step 1" in left.error
            and "lower learning rate (now 0.0003)" in left.error
        )
        assert (
            "trainer.nonfinite=skip" in left.error
            and "Look at the data of this step." in left.error
        )
        assert (left.steps, left.launches, len(left.losses)) == (
            1,
            2 if "fused" in options else 1,
            1,
        )
        assert_same(left.states[-1], left.states[1])
    assert len({left.error for left in parts}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), by_default(CELLS, 0, 2, 3, 7, 10, 11, 18), ids=str)
def test_a_skipped_step_is_as_if_its_batch_had_been_left_out(
    layout: str, options: dict[str, Any]
) -> None:
    parts = run_ranks(train, world_size(layout), layout, "skip", **options)
    expected = run_ranks(train, world_size(layout), layout, "stop", without=True, **options)
    for left, other in zip(parts, expected, strict=True):
        assert left.skipped == [False, True, False, False] and other.skipped == [False] * 3
        assert (left.steps, left.launches, other.launches) == (
            STEPS,
            4 if "fused" in options else 3,
            3,
        )
        assert_same(left.states[2], left.states[1])
        assert left.norms[2:] == other.norms[1:] and math.isnan(left.norms[1])
        assert_same(left.states[-1], other.states[-1])
    [said] = [text for text in parts[0].warned if text.startswith("Step 2: ")]
    assert said.endswith("The optimizer skips this step (skipped so far: 1).")


def test_ignore_steps_as_with_any_other_gradient() -> None:
    for left in run_ranks(train, 2, "dp2", "ignore"):
        assert (left.error, left.steps, left.skipped) == ("", STEPS, [False] * STEPS)
        assert all(
            value.isnan().any()
            for name, value in left.states[-1].items()
            if name.endswith("q_proj.weight")
        )


def test_a_batch_without_targets_is_no_failure() -> None:
    """Its loss is NaN by definition, and its gradients are zeros."""
    for left in run_ranks(train, 2, "dp2", "stop", None):
        assert (left.error, left.steps) == ("", STEPS)
        assert [math.isnan(loss) for loss in left.losses] == [False, True, False, False]


def test_an_infinite_loss_stops_too() -> None:
    [left] = run_ranks(train, 1, "dp1", "stop", math.inf)
    assert left.error.startswith("Step 2: the loss is inf and the gradient norm is")


# Checkpoints


class Breaks(pl.Callback):
    """After the first step a weight of one rank is not finite, as an overflow in the optimizer
    leaves it."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any
    ) -> None:
        if trainer.global_rank == trainer.world_size - 1 and trainer.global_step == 1:
            next(module.parameters()).data.view(-1)[0] = math.inf


def train_and_save(folder: str, layout: str, how: str, breaks: bool, **options: Any) -> Left:
    """With a checkpoint of every step, of the last one, and after an exception."""
    saver = ModelCheckpoint(
        Path(folder) / "checkpoints",
        filename="step_{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=1,
        save_top_k=-1,
        save_last=True,
        save_on_exception=True,
    )
    ended = OnExceptionCheckpoint(Path(folder) / "ended")
    return train(
        layout,
        how,
        1.0 if breaks else math.nan,
        callbacks=[*([Breaks()] if breaks else []), saver, ended],
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "zero"), by_default([("dp2", 3), ("dp1", 0)], 0))
def test_what_is_saved_when_a_run_stops_is_whole_and_good(
    layout: str, zero: int, tmp_path: Path
) -> None:
    """The save of the step before is still under way, in the background, when the step fails."""
    parts = run_ranks(
        train_and_save, world_size(layout), str(tmp_path), layout, "stop", False, zero_stage=zero
    )
    assert all(left.error.startswith("Step 2: ") for left in parts)
    assert check_checkpoints(tmp_path) == check_checkpoints(tmp_path, "ended/[!.]*") == 1
    assert sorted(path.name for path in tmp_path.glob("checkpoints/[!.]*")) == [
        "last.ckpt",
        "step_1.ckpt",
    ]


@pytest.mark.parametrize("how", by_default(["stop", "skip"], 0))
def test_weights_that_are_not_finite_are_not_saved(how: str, tmp_path: Path) -> None:
    parts = run_ranks(train_and_save, 2, str(tmp_path), "dp2", how, True, zero_stage=1)
    for left in parts:
        assert left.error.startswith(
            f"The checkpoint {tmp_path}/checkpoints/step_1.ckpt was not written: the weights are"
            " not finite"
        )
    assert check_checkpoints(tmp_path) == check_checkpoints(tmp_path, "ended/[!.]*") == 0


def test_ignore_saves_them(tmp_path: Path) -> None:
    [left] = run_ranks(train_and_save, 1, str(tmp_path), "dp1", "ignore", True)
    assert left.error == "" and check_checkpoints(tmp_path) == STEPS


# What decides, and what is said


def judged(guard: StepGuard, norm: float, *batches: tuple[float, float]) -> bool:
    guard.begin_step()
    for loss, weight in batches:
        guard.note(loss, weight, lost_here=False)
    return guard.accepts(norm)


def test_the_losses_of_all_batches_of_a_step_count() -> None:
    guard = StepGuard()
    assert judged(guard, 1.0, (2.0, 8.0), (3.0, 8.0))
    assert not judged(guard, 1.0, (math.nan, 8.0), (3.0, 8.0))
    assert judged(guard, 1.0, (math.nan, 0.0), (3.0, 8.0)), "a batch without targets has no loss"
    assert not judged(guard, math.inf, (2.0, 8.0))
    assert judged(StepGuard("ignore"), math.nan, (math.nan, 8.0))


def refused(
    guard: StepGuard,
    found: Found | None = None,
    layout: str = "dp2_pp2",
    precision: str = "32-true",
) -> str:
    judged(guard, math.nan, (3.0, 8.0))
    return guard.refuse(1, math.nan, found or Found(), Layout.parse(layout), 0.1, precision)


def test_the_message_names_what_is_known() -> None:
    with pytest.raises(
        NonFiniteError,
        match=(
            r"the loss is 3 and the gradient norm is nan \(gradients not finite on ranks 0 and 1"
            r" of 4\)"
        ),
    ):
        refused(StepGuard(), Found(ranks=(0, 1)))
    with pytest.raises(
        NonFiniteError,
        match="^Step 1: the loss is 3 and the gradient norm is nan. .* the initial ones",
    ):
        refused(StepGuard(), Found(ranks=(0, 1, 2, 3)))
    with pytest.raises(NonFiniteError, match="wider precision than bf16"):
        refused(StepGuard(), precision="bf16-true")
    with pytest.raises(NonFiniteError) as error:
        refused(StepGuard(), Found(weights=(0,)))
    assert "The weights have not been finite since an earlier step." in str(
        error.value
    ) and "data of this step" not in str(error.value)
    with pytest.raises(NonFiniteError, match="ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more of 16"):
        refused(StepGuard(), Found(data=tuple(range(10))), "dp16")


def test_a_run_that_only_skips_stops() -> None:
    guard = StepGuard("skip", 7)
    for _ in range(6):
        refused(guard)
    assert judged(guard, 1.0, (2.0, 8.0)), "one good step begins the count again"
    for _ in range(6):
        refused(guard)
    with pytest.raises(NonFiniteError, match="7 steps in a row were skipped"):
        refused(guard)


def test_another_way_is_refused() -> None:
    with pytest.raises(
        ConfigError, match='nonfinite must be stop, skip or ignore; got "skp". Did you mean "skip"?'
    ):
        Options("dp2", nonfinite="skp")


def test_the_failure_is_shown_without_a_traceback() -> None:
    failure = Failure.of(NonFiniteError("Step 3: the loss is nan."), 1)
    assert (failure.exit_code, failure.message(2)) == (1, "lightning_3d: Step 3: the loss is nan.")
