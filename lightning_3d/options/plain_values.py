"""Values of options with which the strategy computes what plain PyTorch computes. Pure: no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN_VALUES: Mapping[str, Any] = {
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "moe_aux_loss": None,
    "moe_z_loss": 0.0,
    "moe_bias_update": 0.0,
    "moe_capacity_factor": None,
}
"""Options that change what is computed and that plain PyTorch does not have, and the values that
turn them off."""
