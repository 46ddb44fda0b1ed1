"""How operations are timed on CPU cores."""

from __future__ import annotations

import pytest
import torch

from lightning_3d.app.profiling import operations


@pytest.mark.parametrize(
    ("times", "usual"), [([3.0], 3.0), ([1.0, 3.0], 1.0), ([1.0] * 5 + [2.0] * 4 + [100.0], 13 / 9)]
)
def test_the_longest_tenth_is_not_counted(times: list[float], usual: float) -> None:
    assert operations._usual_mean(times) == pytest.approx(usual)


def test_what_comes_before_an_operation_is_run_each_time_and_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def clock() -> float:
        done.append("clock")
        return float(len(done))

    monkeypatch.setattr(operations.time, "perf_counter", clock)
    meter = operations._Meter(torch.device("cpu"), 3)
    assert (
        list(meter._clock(lambda: done.append("action"), 3, lambda: done.append("before")))
        == [2.0] * 3
    )
    assert done == ["before", "clock", "action", "clock"] * 3
