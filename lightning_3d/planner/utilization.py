"""How much of what its devices can compute a run uses. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.layout.layout import Layout
from lightning_3d.models.families import read_spec

_RATES = {"bf16": ("bf16",), "bf16_mixed": ("bf16",), "fp8": ("fp8",), "fp32": ("tf32", "fp32")}
"""Of each precision the keys of `cluster.peak_flops` that tell its rate, the first that is known."""


def full_speed(config: Mapping[str, Any]) -> float | None:
    """Tokens a second at which forward and backward (without recomputation, see `ModelSpec.flops_per_token`) would take all of the peak
    rate of all ranks: tokens/s divided by this is the model FLOPs utilization, MFU.

    None on a CPU, and where the rate of the GPUs or the operations of the model are not known: with LoRA most weights have no gradient.

    Args:
        config: complete and resolved, as `RunPlan.freeze` returns it.
    """
    if config["cluster"]["accelerator"] != "gpu" or (config["model"].get("lora") or {}).get("r") is not None:
        return None
    known = config["cluster"].get("peak_flops") or {}
    rate = next((known[name] for name in _RATES.get(config["precision"]["name"], ()) if known.get(name)), None)
    spec = read_spec(config["model"]["config"])
    if rate is None or spec.shapes is None:
        return None
    layout = Layout.parse(config["parallelism"]["layout"])
    return float(rate) * layout.world_size / spec.flops_per_token(config["data"]["sequence_length"])
