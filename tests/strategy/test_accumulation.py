"""`accumulate_grad_batches`: several small batches are one step, as one large batch is."""

from typing import Any

import parity
import pytest
from counting import recording
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default
from torch.utils.data import DataLoader

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dp2", {"micro_batch_size": 1}),
    ("tp2_pp2", {"micro_batch_size": 1, "zero": 1}),
    ("pp2_dp2", {"micro_batch_size": 1, "schedule": "ZBVZeroBubble", "zero": 2, "zero_reduce": "micro_batch"}),
    ("pp2_dp2", {"micro_batch_size": 1, "zero": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(("layout", "strategy"), by_default(LAYOUTS, 2, 3), ids=str)
def test_several_batches_are_one_step(layout: str, strategy: dict[str, Any], accumulate: int) -> None:
    parity.assert_same_training("llama", layout, accumulate=accumulate, **strategy)


def reductions(accumulate: int, zero_stage: int) -> list[int]:
    """Elements that each batch sends over the data-parallel ranks in all-reduces."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(steps=4)
    strategy = Lightning3DStrategy("dp2", zero_stage=zero_stage)
    trainer = quiet_trainer(
        strategy=strategy, devices=2, limit_train_batches=6, max_epochs=1, accumulate_grad_batches=accumulate
    )
    sent: list[int] = []
    step = strategy.training_step

    def recorded(*args: Any) -> Any:
        with recording() as recorder:
            result = step(*args)
        sent.append(sum(call.numel for call in recorder.calls if call.name == "all_reduce"))
        return result

    strategy.training_step = recorded  # type: ignore[method-assign]
    trainer.fit(Module(recipe), DataLoader(Rows(data(recipe)), batch_size=2))
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_gradients_are_reduced_once_for_each_step(zero_stage: int) -> None:
    [every, _] = run_ranks(reductions, 2, 1, zero_stage)
    [third, _] = run_ranks(reductions, 2, 3, zero_stage)
    assert [sent < 100 for sent in third] == [True, True, False] * 2  # the loss and checks of the data are small
    assert all(sent > 1000 for sent in every) and third[2] > 1000
