"""ZeRO stages that shard gradients equal one process, under every schedule.

``pytest`` runs a pairwise covering set of two modes, ``pytest -m full`` all.
"""

import zlib
from typing import Any

import parity
import pytest
from covering import covering_set
from parity import SCHEDULES, Cell

LAYOUTS = {"pp2_dp2": (1, 2, 2), "tp2_pp2_dp2": (2, 2, 2), "pp4_dp2": (1, 4, 2), "tp2_dp4": (2, 1, 4), "dp8": (1, 1, 8)}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1 scattered": (1, {"zero_reduce_scatter": True}),
    "zero2": (2, {"zero_reduce": "step"}),
    "zero2 scattered": (2, {"zero_reduce": "step", "zero_reduce_scatter": True}),
    "zero2 eager": (2, {"zero_reduce": "micro_batch"}),
    "zero2 eager to owners": (2, {"zero_reduce": "micro_batch", "zero_reduce_scatter": True}),
}
PAIRED = ("zero2 scattered", "zero2 eager")  # the others differ from these only in what test_zero.py looks at
Factors = tuple[str, str, str]


def valid() -> list[Factors]:
    """Without a pipeline all schedules are the same."""
    return [
        (layout, schedule, mode)
        for layout, (_, pp, _) in LAYOUTS.items()
        for schedule in (SCHEDULES if pp > 1 else ("1F1B",))
        for mode in MODES
    ]


def cell(factors: Factors) -> Cell:
    layout, schedule, mode = factors
    tp, pp, dp = LAYOUTS[layout]
    stage, options = MODES[mode]
    return Cell("qwen2", tp, pp, dp, schedule, stage, options=tuple(sorted(options.items())))


def pairs() -> list[Factors]:
    paired = [row for row in valid() if row[2] in PAIRED]
    ranks = {row: cell(row).world_size + zlib.crc32(str(row).encode()) / 2**32 for row in paired}
    return list(covering_set(paired, 2, ranks.__getitem__))


@pytest.mark.parametrize("factors", pairs(), ids="-".join)
def test_pairs(factors: Factors) -> None:
    parity.check(cell(factors))


@pytest.mark.full
@pytest.mark.parametrize("factors", [row for row in valid() if row not in pairs()], ids="-".join)
def test_all(factors: Factors) -> None:
    parity.check(cell(factors))
