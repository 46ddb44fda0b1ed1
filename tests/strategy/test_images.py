"""Models that read images: the tower is on the first stage, and the images of a batch reach it."""

import copy

import pytest
from image_models import ROWS, STEPS, ImageModule, TextFirst, rows_of, train_plain
from parity import QUIET, Data, Noise, Part, Rows, StepValues, assert_same_run, quiet_trainer
from ranks import run_ranks
from reference import Run
from sweeps import by_default

from lightning_3d.errors import PlanError
from lightning_3d.layout import Layout

CASES = [
    ("llava", "pp2", 0),
    ("llava", "tp2", 0),
    ("llava", "dp2", 3),
    ("gemma3", "pp2", 0),
    ("gemma3", "tp2", 0),
    ("gemma3", "dp2", 3),
    ("qwen2_vl", "pp2", 0),
    ("qwen2_vl", "tp2_pp2", 0),
    ("qwen2_vl", "dp2", 3),
    ("qwen3_vl", "tp2", 0),
    ("gemma4", "pp2", 0),
    ("gemma4", "tp2", 0),
    ("gemma4", "dp2", 3),
]


def train(
    kind: str,
    layout: str,
    zero: int,
    module: type[ImageModule] = ImageModule,
    self_check: str = "auto",
) -> Part:
    from lightning_3d.strategy import Lightning3DStrategy

    strategy = Lightning3DStrategy(
        layout, micro_batch_size=2, zero_stage=zero, self_check=self_check
    )
    values, ours = StepValues(), module(kind)
    degrees = Layout.parse(layout)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=degrees.world_size,
        max_steps=STEPS,
        max_epochs=1,
        callbacks=[values],
    )
    trainer.fit(ours, datamodule=Data(Rows(rows_of(kind)), ROWS // degrees.dp))
    weights = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    return Part(values.losses, values.grad_norms, weights, copy.deepcopy(dict(strategy.specs)))


def noise(kind: str, expected: Run) -> Noise:
    """What the last bit of the weights changes: Gemma 4's norms magnify it."""
    other = train_plain(kind, rounding=2**-24)
    relative = (
        max(
            abs(one - two) / one
            for one, two in zip(getattr(expected, values), getattr(other, values), strict=True)
        )
        for values in ("losses", "grad_norms")
    )
    return Noise(
        *relative,
        max(
            (value - other.weights[name]).abs().max().item()
            for name, value in expected.weights.items()
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "zero"), by_default(CASES, 0, 7))
def test_images_train_as_on_one_process(kind: str, layout: str, zero: int) -> None:
    parts = run_ranks(train, Layout.parse(layout).world_size, kind, layout, zero, timeout=180)
    expected = train_plain(kind)
    assert_same_run(parts, expected, noise=noise(kind, expected) if kind == "gemma4" else QUIET)


@pytest.mark.slow
def test_blocks_of_a_later_stage_that_need_the_tower_are_refused() -> None:
    with pytest.raises(
        PlanError, match="Self-check: Qwen3VLForConditionalGeneration as rewritten for pp2"
    ):
        run_ranks(train, 2, "qwen3_vl", "pp2", 0, timeout=180)


@pytest.mark.slow
def test_images_that_the_self_check_has_not_seen_are_refused() -> None:
    with pytest.raises(
        PlanError, match="This batch has pixel_values, but the first one had no such input"
    ):
        # not remembered from a run with images
        run_ranks(train, 2, "llava", "pp2", 0, TextFirst, "always", timeout=180)
