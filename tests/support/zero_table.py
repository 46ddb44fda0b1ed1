"""Writes benchmarks/zero_parity.md: every ZeRO mode under every schedule, measured against one
process.

    python tests/support/zero_table.py

About half an hour on two busy cores. What is refused stands in the table with the reason.
"""

import contextlib
import os
import platform
from pathlib import Path

import deepspeed
import parity
import torch
import transformers
from parity import SCHEDULES, Measured
from zero_modes import LAYOUTS, MODES, cell

from lightning_3d.errors import LayoutError
from lightning_3d.strategy import Lightning3DStrategy

TARGET = Path(__file__).parents[2] / "benchmarks" / "zero_parity.md"
PLAIN = {"zero0": (0, {}), "zero1": (1, {})}  # beside the modes that the tests of their own cover


def refusal(layout: str, schedule: str, mode: str) -> str | None:
    stage, options = MODES[mode]
    try:
        Lightning3DStrategy(layout, schedule=schedule, zero_stage=stage, **options)
    except LayoutError as error:
        return str(error)
    return None


def entry(measured: Measured) -> str:
    """The largest error of a loss and of a gradient norm (relative) and of a weight (absolute)."""
    error = measured.error
    text = f"{error.loss:.0e} {error.grad_norm:.0e} {error.weight:.0e}"
    return text if measured.ok else f"**{text}**"


def rows() -> list[str]:
    lines = []
    for layout, (_, pp, _) in LAYOUTS.items():
        for mode in MODES:
            found = []
            for schedule in SCHEDULES:
                if pp == 1 and schedule != "1F1B":
                    found.append("")
                elif refusal(layout, schedule, mode) is not None:
                    found.append("refused")
                else:
                    found.append(entry(parity.measure(cell((layout, schedule, mode)))))
                    print(layout, schedule, mode, found[-1], flush=True)
            lines.append(f"| {layout} | {mode} | {' | '.join(found)} |")
    return lines


def main() -> None:
    MODES.update({**PLAIN, **MODES})
    versions = (
        f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, Transformers"
        f" {transformers.__version__}"
    )
    order = sorted(
        MODES, key=lambda mode: (mode.split()[0], mode not in PLAIN, list(MODES).index(mode))
    )
    modes = {mode: MODES[mode] for mode in order}
    MODES.clear()
    MODES.update(modes)
    reason = refusal("pp2_dp2", "ZBVZeroBubble", "zero3 by block")
    text = f"""# ZeRO modes against one process

Written by `python tests/support/zero_table.py` ({versions}, {platform.machine()}, {os.cpu_count()} cores, gloo).

This page shows how exactly each ZeRO mode reproduces training on one process, under every schedule. The model is a Qwen2, trained for 20
steps with AdamW at 3e-4 and gradient clipping, in float32. The reference is a plain PyTorch loop over the same micro-batches on one
process.

Each entry has the largest errors of a step's loss (relative), of its gradient norm (relative), and of a final weight (absolute). The limits
are 1e-5, 1e-5 and 5e-5. Entries above a limit are bold. Without a pipeline all schedules are the same, so only one column is filled.

Modes reduce and gather once per step, with all-reduces, unless their name says otherwise:

- "scattered": `zero_reduce_scatter=true`
- "eager": `zero_reduce=micro_batch`
- "eager to owners": `zero_reduce=micro_batch` and `zero_reduce_scatter=true`
- "by block": `zero_gather=micro_batch`

Entries marked "refused" stop with this error: {reason}

| layout | mode | {" | ".join(SCHEDULES)} |
| --- | --- |{" --- |" * len(SCHEDULES)}
"""  # noqa: E501
    TARGET.write_text(text + "\n".join(rows()) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
