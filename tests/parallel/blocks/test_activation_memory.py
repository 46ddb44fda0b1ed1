"""How many micro-batches' activations a rank holds at a time, in bytes of live tensors."""

from typing import Any

import lightning.pytorch as pl
import pytest
from memory import LiveBytes
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from torch.utils.data import DataLoader

ROWS = 16  # of a micro-batch: its activations are much larger than the parameters of a stage
STAGES = 4


class Peak(pl.Callback):
    """The most bytes that were alive in the latest training batch."""

    def __init__(self) -> None:
        self.bytes = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self._memory = LiveBytes()
        self._memory.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self._memory.__exit__(None, None, None)
        self.bytes = self._memory.peak


def peak(schedule: str, micro_batches: int) -> int:
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(layers=STAGES, steps=2, global_batch=ROWS * micro_batches)
    strategy = Lightning3DStrategy(f"pp{STAGES}", schedule=schedule, micro_batch_size=ROWS)
    callback = Peak()
    trainer = quiet_trainer(strategy=strategy, devices=STAGES, max_steps=2, callbacks=[callback])
    trainer.fit(Module(recipe), DataLoader(Rows(data(recipe)), batch_size=recipe.global_batch))
    return callback.bytes


@pytest.mark.slow
def test_micro_batches_in_flight() -> None:
    """GPipe holds all of a batch, 1F1B on stage s of p at most p - s."""
    four, eight = (run_ranks(peak, STAGES, "GPipe", count) for count in (4, 8))
    one_f_one_b = run_ranks(peak, STAGES, "1F1B", 8)
    for stage in range(STAGES):
        activations = (eight[stage] - four[stage]) / 4  # of one micro-batch
        beside = four[stage] - 4 * activations
        in_flight = (one_f_one_b[stage] - beside) / activations
        # Beside them there are the backward's own tensors and messages on their way, which GPipe's
        # peak has not.
        assert in_flight == pytest.approx(STAGES - stage, abs=0.75)
