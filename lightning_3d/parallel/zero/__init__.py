"""The data-parallel backend: gradients, optimizer state and the optimizer's step over data-parallel ranks.

One interface (`base`), three implementations: stage 0 is our own reduction with the plain optimizer (`bucketed`), at stages 1
and 2 DeepSpeed shards the optimizer's state (`deepspeed`, imported only when it is asked for: that takes a second), and at
stage 3 it trains what a rank keeps of the parameters (`sharded`). `shape_only` takes DeepSpeed's place in dry runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_3d.config.options.zero import ZeroOptions
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.zero.backend import BUCKET_BYTES, DataParallelBackend

if TYPE_CHECKING:
    from torch import nn

    from lightning_3d.parallel.mesh import Mesh
    from lightning_3d.parallel.sharding import ShardSpec

__all__ = ["BUCKET_BYTES", "DataParallelBackend", "make_backend"]


def make_backend(
    zero: ZeroOptions,
    mesh: Mesh,
    specs: Mapping[str, ShardSpec],
    *,
    stages: Sequence[Sequence[nn.Parameter]] | None = None,
    precision: str = "fp32",
    bucket_bytes: int = BUCKET_BYTES,
    shape_only: bool = False,
) -> DataParallelBackend:
    """The backend of a ZeRO stage.

    Args:
        zero: resolved options.
        mesh: process groups.
        specs: where each parameter that is trained lies in the whole model, by its name in the module that `prepare`
            gets.
        stages: of each pipeline stage on this rank its parameters, in the order in which the forward uses them; None: one
            stage with all.
        precision: "fp32", "fp64", "bf16" (bf16 parameters with fp32 master weights) or "bf16_mixed" (fp32 parameters).
        bucket_bytes: upper bound of the bytes of one reduction of gradients, except for a single larger parameter.
        shape_only: tensors have no values (dry runs): without DeepSpeed.

    Raises:
        ConfigError: a stage above 0 in double precision.
    """
    if zero.stage == 0:
        from lightning_3d.parallel.zero.replicated_backend import BucketedBackend

        return BucketedBackend(mesh, specs, zero=zero, stages=stages, bucket_bytes=bucket_bytes, precision=precision)
    if precision == "fp64":
        raise ConfigError(
            f"zero_stage={zero.stage} cannot keep double precision: DeepSpeed's master weights are float32. Use zero_stage=0 for"
            " float64, or precision 32-true."
        )
    kind = _shape_only(zero) if shape_only else _sharded(zero)
    return kind(mesh, specs, zero=zero, stages=stages, bucket_bytes=bucket_bytes, precision=precision)


def _sharded(zero: ZeroOptions) -> type[DataParallelBackend]:
    if zero.stage == 3:
        from lightning_3d.parallel.zero.sharded_backend import ShardedBackend

        return ShardedBackend
    from lightning_3d.parallel.zero.deepspeed_backend import DeepSpeedBackend

    return DeepSpeedBackend


def _shape_only(zero: ZeroOptions) -> type[DataParallelBackend]:
    from lightning_3d.parallel.zero.shape_only_backend import ShapeOnlyDeepSpeedBackend, ShapeOnlyShardedBackend

    return ShapeOnlyShardedBackend if zero.stage == 3 else ShapeOnlyDeepSpeedBackend
