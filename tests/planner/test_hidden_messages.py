"""How far computation hides the messages of ZeRO, by formulas with rates at which only products and
messages take time."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.constants import OURS
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import ONE, Efficiency, Machine
from lightning_3d.app.planner.stack import Overlap, Stack
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.layout import Layout

HIDDEN, TOKENS, RANKS, BLOCKS = 1024, 4096, 8, 3
WEIGHTS = 12 * HIDDEN**2
"""Of a block: queries, keys, values and output, and an MLP that is four times as wide; norms are
less than a thousandth."""

OPERATIONS = 1e15
FORWARD = 2 * TOKENS * WEIGHTS / OPERATIONS
"""Seconds of the forward of a block; its backward takes twice as long."""


def machine(link: float) -> Machine:
    """A node on which memory, attention and starts cost nothing."""
    rates = inf, inf, OPERATIONS, OPERATIONS, OPERATIONS, link, inf
    free = Efficiency(matmul=1.0, attention=inf, memory=1.0, link=1.0, kernel=0.0)
    return Machine("", 1, RANKS, *rates, 0.0, 0.0, free, protocols=ONE)


def exposed(link: float, changes: dict[str, Any], stack: Stack = OURS) -> float:
    """Exposed seconds of messages of a block for one micro-batch, forward and backward."""
    model = Architecture.plain(
        layers=BLOCKS,
        hidden=HIDDEN,
        heads=8,
        kv_heads=8,
        vocab=8,
        ffn=4 * HIDDEN,
        gated=False,
        tied=True,
    )
    job = Job(model, Layout(dp=RANKS), TOKENS, 2 * RANKS, 1, stack=stack, **changes)
    return step_of(job, machine(link)).communication / (2 * BLOCKS)


@pytest.mark.parametrize(
    ("changes", "gathered", "sent"),
    [
        ({"zero": 3, "reduce": "step"}, 2, 0),
        ({"zero": 3, "reduce": "micro_batch"}, 2, 4),
        ({"zero": 2, "reduce": "micro_batch"}, 0, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("link", [450e9, 40e9, 10e9])
def test_messages_of_a_block_hide_behind_four_fifths_of_its_passes(
    changes: dict[str, Any], gathered: int, sent: int, link: float
) -> None:
    """A tenth of a message is never hidden. Both passes gather the weights (`gathered` bytes of
    each), and the backward reduces their gradients (`sent` bytes of each). The fastest link hides
    all that it may, the slowest hides less in both passes."""
    gather, reduction = (7 / 8 * size * WEIGHTS / link for size in (gathered, sent))
    forward = max(0.1 * gather, gather - 0.8 * FORWARD)
    backward = max(0.1 * (gather + reduction), gather + reduction - 0.8 * 2 * FORWARD)
    assert exposed(link, changes) == pytest.approx(forward + backward, rel=2e-3)


def test_nothing_hides_on_cores_that_do_both() -> None:
    stack = replace(OURS, overlap=Overlap(False, False, False, blocks=False))
    whole = 7 / 8 * (2 * 2 + 4) * WEIGHTS / 450e9
    assert exposed(450e9, {"zero": 3, "reduce": "micro_batch"}, stack) == pytest.approx(
        whole, rel=2e-3
    )
