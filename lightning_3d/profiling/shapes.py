"""Shapes of the operations that a profile measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.planner.architecture import Architecture


@dataclass(frozen=True)
class Shapes:
    """What is measured.

    Attributes:
        config: fields of a Transformers configuration.
        model: its sizes.
        degrees: of tensor parallelism whose products are measured.
        micro_batch, seq: rows and tokens of a micro-batch.
        repeats: of each operation.
    """

    config: Mapping[str, Any]
    model: Architecture
    attention: str | None
    precision: str
    degrees: tuple[int, ...]
    micro_batch: int
    seq: int
    repeats: int
