"""ZeRO stages that shard gradients equal one process, under every schedule.

``pytest`` runs some modes with some schedules and layouts, ``pytest -m full`` all.
"""

import models
import parity
import pytest
from parity import SCHEDULES
from zero_modes import LAYOUTS, MODES, Factors, cell

from lightning_3d.errors import LayoutError
from lightning_3d.layout.schedules import find_schedule
from lightning_3d.strategy import Lightning3DStrategy

PAIRED = {  # by default, with these schedules; the others differ in what test_zero.py sees
    "zero2 eager": ("InterleavedZeroBubble", "DualPipeV"),
    "zero3": ("GPipe", "ZBVZeroBubble"),
    "zero3 by block, eager": ("LoopedBFS",),
}
LARGE = [("tp2_pp2_dp2", "1F1B", "zero3 by block, eager"), ("pp4_dp2", "1F1B", "zero3")]


def valid() -> list[Factors]:
    """Without a pipeline all schedules are the same."""
    return [
        (layout, schedule, mode)
        for layout, (_, pp, _) in LAYOUTS.items()
        for schedule in (SCHEDULES if pp > 1 else ("1F1B",))
        for mode in MODES
        if not is_refused(schedule, mode)
    ]


def is_refused(schedule: str, mode: str) -> bool:
    return (
        MODES[mode][1].get("zero_gather") == "micro_batch"
        and find_schedule(schedule).split_backward
    )


def pairs() -> list[Factors]:
    """Each of the paired modes with some schedules on the smallest layout, and once on a larger
    one."""
    return [
        ("pp2_dp2", schedule, mode) for mode, schedules in PAIRED.items() for schedule in schedules
    ] + LARGE


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_refused_by_name(schedule: str, mode: str) -> None:
    stage, options = MODES[mode]
    if not is_refused(schedule, mode):
        Lightning3DStrategy("pp2_dp2", schedule=schedule, zero_stage=stage, **options)
        return
    with pytest.raises(
        LayoutError,
        match=f"zero_gather=micro_batch frees .* {schedule} computes .* Use zero_gather=step",
    ):
        Lightning3DStrategy("pp2_dp2", schedule=schedule, zero_stage=stage, **options)


@pytest.mark.parametrize(
    "factors",
    [
        *pairs()[:-2],
        pytest.param(pairs()[-2], marks=pytest.mark.slow),
        pytest.param(pairs()[-1], marks=pytest.mark.full),
    ],
    ids="-".join,
)
def test_pairs(factors: Factors) -> None:
    parity.check(cell(factors))


@pytest.mark.full
@pytest.mark.parametrize("factors", [row for row in valid() if row not in pairs()], ids="-".join)
def test_all(factors: Factors) -> None:
    parity.check(cell(factors))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2_dp2", "pp2_dp2"])
@pytest.mark.parametrize("model", models.MODELS)
def test_every_family_block_by_block(model: str, layout: str) -> None:
    parity.assert_same_training(
        model, layout, zero=3, zero_reduce="micro_batch", zero_gather="micro_batch"
    )
