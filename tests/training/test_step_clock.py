"""The clock of a step reads nothing while batches accumulate, so that a GPU need not wait for the
host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_3d.app.training import step_clock
from lightning_3d.app.training.step_clock import StepClock


class Last:
    """Numbers of a batch, which note that they are read."""

    def __init__(self, loss: float, tokens: float, read: list[float]) -> None:
        self._loss, self.tokens, self._read = loss, tokens, read
        self.grad_norm = 0.5

    @property
    def loss(self) -> float:
        self._read.append(self._loss)
        return self._loss


@pytest.mark.parametrize(("device", "seconds"), [("cuda", 9.0), ("cpu", 1.0 + 2.0 + 3.0)])
def test_numbers_are_read_at_the_end_of_the_step(
    device: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches take 1, 2 and 3 seconds, with 1 and 2 between them, in which a GPU may compute."""
    times = iter([0.0, 1.0, 2.0, 4.0, 6.0, 9.0] if device == "cpu" else [0.0, 9.0])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(times))
    read: list[float] = []
    strategy = SimpleNamespace(root_device=torch.device(device), last_step=None)
    trainer: Any = SimpleNamespace(strategy=strategy, global_step=0, optimizers=[])
    clock, numbers = StepClock(), None
    for place, (loss, tokens) in enumerate([(1.0, 10.0), (2.0, 30.0), (4.0, 40.0)]):
        clock.start(trainer)
        strategy.last_step = Last(loss, tokens, read)
        trainer.global_step = int(place == 2)
        assert numbers is None and read == []
        numbers = clock.stop(trainer, {}, {})
    assert read == [1.0, 2.0, 4.0] and numbers is not None
    assert (numbers.step, numbers.loss, numbers.grad_norm, numbers.tokens) == (
        1,
        (10 + 60 + 160) / 80,
        0.5,
        80.0,
    )
    assert numbers.seconds == seconds
