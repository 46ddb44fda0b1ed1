"""Shapes of the operations that a profile measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.app.planner.architecture import Architecture


@dataclass(frozen=True)
class Shapes:
    """Shapes to measure.

    Attributes:
        config: fields of a Transformers configuration.
        model: sizes of the model.
        attention: Transformers' name of the attention kernel; None for its default.
        precision: fp32, fp64 or bf16.
        degrees: degrees of tensor parallelism whose products are measured.
        micro_batch: sequences of a micro-batch.
        seq: tokens of a sequence.
        repeats: repetitions of each operation.
        float32_matmul: argument of `torch.set_float32_matmul_precision`; None leaves torch's
            setting.
    """

    config: Mapping[str, Any]
    model: Architecture
    attention: str | None
    precision: str
    degrees: tuple[int, ...]
    micro_batch: int
    seq: int
    repeats: int
    float32_matmul: str | None = None
