"""Which step of a fit is traced when nobody asks for one."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_3d import Lightning3DStrategy
from lightning_3d.app.training.timeline import Timeline


def traced_steps(strategy: Any, steps: range, max_steps: int, batches: int = 1) -> list[int]:
    """Steps that are asked for, numbered from 0, in a fit that does `steps` of `batches`
    batches."""
    asked: list[int] = []
    place: Any = SimpleNamespace(strategy=strategy, global_step=steps.start, max_steps=max_steps)
    if isinstance(strategy, Lightning3DStrategy):
        strategy.trace_next_step = lambda: asked.append(place.global_step)  # type: ignore[method-assign]
    timeline, module = Timeline("timeline.json"), Any
    timeline.on_train_start(place, module)  # type: ignore[arg-type]
    for step in steps:
        place.global_step = step
        for batch in range(batches):
            timeline.on_train_batch_start(place, module, None, batch)  # type: ignore[arg-type]
    return asked


@pytest.mark.parametrize(
    ("steps", "max_steps", "batches", "traced"),
    [
        (range(10), 10, 1, [2]),
        (range(10), -1, 1, [2]),
        (range(10), 10, 3, [2]),
        (range(2), 2, 1, [1]),
        (range(1), 1, 1, [0]),
        (range(50, 60), 60, 1, [52]),
        (range(59, 60), 60, 1, [59]),
    ],
)
def test_one_step_of_a_fit_is_traced(
    steps: range, max_steps: int, batches: int, traced: list[int]
) -> None:
    assert traced_steps(Lightning3DStrategy("tp1"), steps, max_steps, batches) == traced


def test_a_strategy_that_traces_by_itself_is_left_alone() -> None:
    assert traced_steps(Lightning3DStrategy("tp1", trace_every_n_steps=4), range(10), 10) == []


def test_other_strategies_cannot_trace() -> None:
    assert traced_steps(Trainer(accelerator="cpu", logger=False).strategy, range(10), 10) == []
