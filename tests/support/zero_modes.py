"""The ZeRO modes and the layouts in which every schedule is compared with one process."""

from typing import Any

from parity import Cell

LAYOUTS = {
    "pp2_dp2": (1, 2, 2),
    "tp2_pp2_dp2": (2, 2, 2),
    "pp4_dp2": (1, 4, 2),
    "tp2_dp4": (2, 1, 4),
    "dp8": (1, 1, 8),
}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1 scattered": (1, {"zero_reduce_scatter": True}),
    "zero2": (2, {"zero_reduce": "step"}),
    "zero2 scattered": (2, {"zero_reduce": "step", "zero_reduce_scatter": True}),
    "zero2 eager": (2, {"zero_reduce": "micro_batch"}),
    "zero2 eager to owners": (2, {"zero_reduce": "micro_batch", "zero_reduce_scatter": True}),
    "zero3": (3, {"zero_reduce": "step", "zero_gather": "step"}),
    "zero3 eager": (3, {"zero_reduce": "micro_batch", "zero_gather": "step"}),
    "zero3 by block": (3, {"zero_reduce": "step", "zero_gather": "micro_batch"}),
    "zero3 by block, eager": (3, {"zero_reduce": "micro_batch", "zero_gather": "micro_batch"}),
    "zero3 by block, eager to owners": (
        3,
        {"zero_reduce": "micro_batch", "zero_gather": "micro_batch", "zero_reduce_scatter": True},
    ),
}

Factors = tuple[str, str, str]
"""Names of a layout, a schedule and a mode."""


def cell(factors: Factors) -> Cell:
    layout, schedule, mode = factors
    tp, pp, dp = LAYOUTS[layout]
    stage, options = MODES[mode]
    return Cell("qwen2", tp, pp, dp, schedule, stage, options=tuple(sorted(options.items())))
