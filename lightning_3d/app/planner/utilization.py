"""Model FLOPs utilization (MFU) of a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.layout.layout import Layout
from lightning_3d.models.families import read_spec
from lightning_3d.options.precision import multiplies_in_tf32

_RATES = {"bf16": "bf16", "bf16_mixed": "bf16", "fp8": "fp8", "fp32": "fp32"}
"""Key of `cluster.peak_flops` for each precision."""


def full_speed(config: Mapping[str, Any]) -> float | None:
    """Return the tokens per second at which forward and backward (without recomputation, see
    `ModelSpec.flops_per_token`) would use the peak rate of all ranks. Tokens/s divided by this is
    the MFU.

    None on a CPU, for unknown GPUs or model families, and with LoRA, where most weights have no
    gradient.

    Args:
        config: complete and resolved, as `RunPlan.freeze` returns it.
    """
    if (
        config["cluster"]["accelerator"] != "gpu"
        or (config["model"].get("lora") or {}).get("r") is not None
    ):
        return None
    known = config["cluster"].get("peak_flops") or {}
    kind = _RATES.get(config["precision"]["name"])
    if kind == "fp32" and multiplies_in_tf32(config["trainer"].get("float32_matmul_precision")):
        kind = "tf32"
    rate = known.get(kind) if kind is not None else None
    spec = read_spec(config["model"]["config"], config["model"].get("mtp_layers"))
    if rate is None or spec.shapes is None:
        return None
    layout = Layout.parse(config["parallelism"]["layout"])
    return float(rate) * layout.world_size / spec.flops_per_token(config["data"]["sequence_length"])
