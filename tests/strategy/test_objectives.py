"""Steps that call the model several times (DPO, distillation, contrastive losses) train as on one
process, unmodified."""

from functools import lru_cache
from typing import Any

import objectives
import pytest
from parity import assert_same_run
from ranks import run_ranks
from reference import Run
from sweeps import by_default

from lightning_3d.layout import Layout

KINDS = ("dpo", "distillation", "contrastive")
LAYOUTS = ("dp2", "tp2", "pp2", "tp2_pp2", "pp2_dp2")
SCHEDULES = (
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("dpo", "pp2", {}),
    *(("contrastive", "pp2", {"schedule": schedule}) for schedule in SCHEDULES),
    *((kind, "dp2", {"zero_stage": 3}) for kind in KINDS),
    *(
        (kind, layout, {})
        for kind in KINDS
        for layout in LAYOUTS
        if (kind, layout) != ("dpo", "pp2")
    ),
    ("distillation", "pp2_dp2", {"schedule": "ZBVZeroBubble", "zero_stage": 3}),
    ("dpo", "tp2_pp2", {"schedule": "InterleavedZeroBubble", "sequence_parallel": True}),
    ("dpo", "pp2", {"recompute": "full"}),
]


@lru_cache
def expected(kind: str, dtype: str, dp: int) -> Run:
    return objectives.one_process(kind, dtype, dp, micro_batch_size=2)


@pytest.mark.parametrize(("kind", "layout", "options"), by_default(CASES, 0), ids=str)
def test_an_objective_trains_as_on_one_process(
    kind: str, layout: str, options: dict[str, Any]
) -> None:
    parsed, dtype = Layout.parse(layout), "float32" if options.get("zero_stage") else "float64"
    parts = run_ranks(
        objectives.fit, parsed.world_size, kind, dtype, layout, 2, **options, timeout=180
    )
    assert_same_run(parts, expected(kind, dtype, parsed.dp), dtype)
