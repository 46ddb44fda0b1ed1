"""Losses that jump, and those that do not."""

from __future__ import annotations

import math
import random

import pytest

from lightning_3d.health.loss_spikes import LEAST, LossSpikes


def falling(step: int, noise: random.Random) -> float:
    return 6 * (1 + step) ** -0.07 + noise.gauss(0, 0.1)


def test_no_false_alarm_in_ten_thousand_steps() -> None:
    noise, spikes = random.Random(0), LossSpikes(10.0)
    assert not any(spikes.judge(falling(step, noise)) for step in range(10_000))


def test_f42_jump_is_found_and_the_next_one_too() -> None:
    noise, spikes = random.Random(0), LossSpikes(10.0)
    found = [
        step
        for step in range(300)
        if spikes.judge(falling(step, noise) + (3.0 if step in (100, 101, 200) else 0.0))
    ]
    assert found == [100, 101, 200]


def test_f42_a_loss_that_stays_high_is_the_new_usual() -> None:
    spikes = LossSpikes(10.0)
    for _ in range(50):
        assert spikes.judge(1.0) is None
    assert sum(spikes.judge(2.0) is not None for _ in range(100)) == LEAST
    assert spikes.judge(4.0) is not None


def test_rounding_and_falling_losses_are_no_jump() -> None:
    spikes = LossSpikes(10.0)
    for step in range(50):
        assert spikes.judge(1.0 + 1e-6 * (step % 2)) is None
    assert (
        spikes.judge(0.2) is None and spikes.judge(math.nan) is None and spikes.judge(1.005) is None
    )


@pytest.mark.parametrize("known", [LEAST - 1, LEAST])
def test_some_losses_must_be_known(known: int) -> None:
    spikes = LossSpikes(10.0)
    for _ in range(known):
        spikes.judge(1.0)
    assert (spikes.judge(5.0) is not None) == (known == LEAST)
