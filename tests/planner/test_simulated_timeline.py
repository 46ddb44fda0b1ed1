"""The list of actions that is played, against the trace of a real run whose actions are made
equally long by sleeping."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from torch.utils.data import DataLoader

from lightning_3d.app.planner.timeline import StageSeconds, play
from lightning_3d.layout.pipeline_orders import training_order

UNITS = {"forward": 1, "backward": 2, "input gradient": 1, "weight gradient": 1}
LETTERS = {"forward": "F", "backward": "B", "input gradient": "I", "weight gradient": "W"}
SECONDS = (0.04, 0.12, 0.36, 1.0)
"""That a unit takes. A busy machine makes actions begin late; there the next one is tried."""
MICRO_BATCHES = 8
STEP = 3


class Times(pl.Callback):
    """Makes actions last, from the end of the second step on, and keeps the events of the third."""

    def __init__(self, unit: float) -> None:
        self.unit = unit
        self.events: dict[int, Any] = {}

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == STEP - 1:
            recorder = trainer.strategy.engine.recorder
            span = recorder.span

            @contextmanager
            def lasting(kind: str, *where: Any) -> Iterator[None]:
                start = time.perf_counter()
                with span(kind, *where):
                    yield
                    time.sleep(
                        max(0.0, UNITS.get(kind, 0) * self.unit - (time.perf_counter() - start))
                    )

            recorder.span = lasting

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trace = trainer.strategy.last_step.trace
        if trace is not None:
            self.events = {each.rank: each.events for each in trace.ranks}


def traced(layout: str, ranks: int, schedule: str, unit: float) -> dict[int, Any]:
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(steps=STEP, layers=8, global_batch=MICRO_BATCHES)
    times = Times(unit)
    strategy = Lightning3DStrategy(
        layout, micro_batch_size=1, schedule=schedule, trace_every_n_steps=STEP
    )
    trainer = quiet_trainer(strategy=strategy, devices=ranks, max_steps=STEP, callbacks=[times])
    trainer.fit(Module(recipe), DataLoader(Rows(data(recipe)), batch_size=MICRO_BATCHES))
    return times.events


def largest_lag(schedule: str, vp: int, unit: float) -> float:
    """By how much the start or the end of any action differs from what is played, as a share of the
    step."""
    layout = "pp4" if vp == 1 else f"pp4_vp{vp}"
    events = run_ranks(traced, 4, layout, 4, schedule, unit, timeout=240, process_group=False)[0]
    order = training_order(schedule, 4, vp, MICRO_BATCHES)
    played = play(order, [StageSeconds(unit, 2 * unit, unit)] * 4 * vp, keep=True)
    actions = {
        (rank, event.stage, LETTERS[event.kind], event.micro_batch): event
        for rank, of_rank in events.items()
        for event in of_rank
        if event.kind in LETTERS
    }
    assert actions.keys() == {event[:4] for event in played.events}
    origin = min(event.start for event in actions.values())
    lags = [
        abs(found - origin - wanted)
        for *what, start, end in played.events
        for found, wanted in ((actions[tuple(what)].start, start), (actions[tuple(what)].end, end))
    ]
    return max(lags) / played.seconds


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("schedule", "vp"),
    [
        pytest.param("1F1B", 1, marks=pytest.mark.full),
        pytest.param("Interleaved1F1B", 2, marks=pytest.mark.full),
        ("ZBVZeroBubble", 2),
        pytest.param("GPipe", 1, marks=pytest.mark.full),
        pytest.param("InterleavedZeroBubble", 2, marks=pytest.mark.full),
        pytest.param("DualPipeV", 2, marks=pytest.mark.full),
        pytest.param("LoopedBFS", 2, marks=pytest.mark.full),
    ],
)
def test_a_real_run_does_what_is_played_when_it_is_played(schedule: str, vp: int) -> None:
    """Every action begins and ends within a tenth of the step of its time."""
    lags = []
    for unit in SECONDS:
        lags.append(largest_lag(schedule, vp, unit))
        print(f"{schedule}: {unit} s a unit, {lags[-1]:.1%} of the step late at most")
        if lags[-1] <= 0.1:
            return
    pytest.fail(
        f"The actions of {schedule} differ by {', '.join(f'{lag:.1%}' for lag in lags)} of the step"
        " from when they are played."
    )
