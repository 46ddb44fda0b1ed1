"""The data-parallel backend: gradients, optimizer state and the optimizer's step over data-parallel ranks.

One interface (`base`), two implementations: stage 0 is our own reduction with the plain optimizer (`bucketed`), stage 1
lets DeepSpeed shard the optimizer's state (`deepspeed`, imported only when it is asked for: that takes a second).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.zero.base import BUCKET_BYTES, DataParallelBackend

if TYPE_CHECKING:
    from lightning_3d.mesh import Mesh
    from lightning_3d.sharding import ShardSpec

__all__ = ["BUCKET_BYTES", "DataParallelBackend", "check_stage", "make_backend"]


def check_stage(stage: int) -> None:
    """Refuse a ZeRO stage that does not exist or is not available yet. Raises LayoutError."""
    if stage in (2, 3):
        raise LayoutError(f"zero_stage={stage} is not available yet. Use 1, which shards the optimizer's state, or 0.")
    if stage not in (0, 1):
        raise LayoutError(f"zero_stage={stage!r} does not exist; use 0 or 1.")


def make_backend(
    stage: int, mesh: Mesh, specs: Mapping[str, ShardSpec], *, precision: str = "fp32", bucket_bytes: int = BUCKET_BYTES
) -> DataParallelBackend:
    """The backend of a ZeRO stage.

    Args:
        stage: 0 or 1.
        mesh: process groups.
        specs: where each parameter that is trained lies in the whole model, by its name in the module that `prepare`
            gets.
        precision: "fp32", "fp64", "bf16" (bf16 parameters with fp32 master weights) or "bf16_mixed" (fp32 parameters).
        bucket_bytes: upper bound of the bytes of one all-reduce of gradients, except for a single larger parameter.

    Raises:
        LayoutError: a stage that does not exist or is not available yet. ConfigError: stage 1 in double precision.
    """
    check_stage(stage)
    if stage == 0:
        from lightning_3d.zero.bucketed import BucketedBackend

        return BucketedBackend(mesh, specs, bucket_bytes=bucket_bytes, precision=precision)
    if precision == "fp64":
        raise ConfigError(
            "zero_stage=1 cannot keep double precision: DeepSpeed's master weights are float32. Use zero_stage=0 for"
            " float64, or precision 32-true."
        )
    from lightning_3d.zero.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(mesh, specs, bucket_bytes=bucket_bytes, precision=precision)
