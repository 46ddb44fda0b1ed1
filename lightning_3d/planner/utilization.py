"""Model FLOPs utilization (MFU) of a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.layout.layout import Layout
from lightning_3d.models.families import read_spec

_RATES = {"bf16": ("bf16",), "bf16_mixed": ("bf16",), "fp8": ("fp8",), "fp32": ("tf32", "fp32")}
"""Keys of `cluster.peak_flops` for each precision; the first known one counts."""


def full_speed(config: Mapping[str, Any]) -> float | None:
    """Return the tokens per second at which forward and backward (without recomputation, see `ModelSpec.flops_per_token`) would use the
    peak rate of all ranks. Tokens/s divided by this is the MFU.

    None on a CPU, for unknown GPUs or model families, and with LoRA, where most weights have no gradient.

    Args:
        config: complete and resolved, as `RunPlan.freeze` returns it.
    """
    if config["cluster"]["accelerator"] != "gpu" or (config["model"].get("lora") or {}).get("r") is not None:
        return None
    known = config["cluster"].get("peak_flops") or {}
    rate = next((known[name] for name in _RATES.get(config["precision"]["name"], ()) if known.get(name)), None)
    spec = read_spec(config["model"]["config"], config["model"].get("mtp_layers"))
    if rate is None or spec.shapes is None:
        return None
    layout = Layout.parse(config["parallelism"]["layout"])
    return float(rate) * layout.world_size / spec.flops_per_token(config["data"]["sequence_length"])
