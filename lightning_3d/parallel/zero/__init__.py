"""The data-parallel backend: gradients, optimizer state and the optimizer's step over data-parallel
ranks.

One backend (`backend`) has three parts: a store of parameters (`parameter_store`,
`sharded_parameters`), a reducer of gradients (`reducer`) and a stepper that runs the optimizer
(`plain_stepper`, `deepspeed_stepper`). `compose` chooses the parts for each ZeRO stage. DeepSpeed
is imported only at stages above 0, which takes a second; `shape_only_engine` takes its place in dry
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_3d.compat import deepspeed as deepspeed_compat
from lightning_3d.errors import ConfigError
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.zero.backend import DataParallelBackend
from lightning_3d.parallel.zero.compose import Composition
from lightning_3d.parallel.zero.overlapped_gather import GatheredParameters
from lightning_3d.parallel.zero.parameter_store import ParameterStore, WholeParameters
from lightning_3d.parallel.zero.shape_only_engine import ShapeOnly
from lightning_3d.parallel.zero.sharded_parameters import ShardedParameters

if TYPE_CHECKING:
    from torch import nn

    from lightning_3d.parallel.mesh import Mesh
    from lightning_3d.parallel.sharding import ShardSpec

BUCKET_BYTES = 32 * 2**20
"""Bytes of one all-reduce of gradients: large enough that its latency does not count, small enough
that copying the next bucket overlaps with it."""

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
    equal_copies: bool = False,
) -> DataParallelBackend:
    """Make the backend of a ZeRO stage.

    Args:
        zero: resolved options.
        mesh: process groups.
        specs: where each parameter that is trained lies in the whole model, by its name in the
            module that `prepare` gets.
        stages: for each pipeline stage on this rank its parameters, in the order in which the
            forward uses them. None: one stage with all.
        precision: "fp32", "fp64", "bf16" (bf16 parameters with fp32 master weights) or "bf16_mixed"
            (fp32 parameters).
        bucket_bytes: upper bound of the bytes of one reduction of gradients, except for a single
            larger parameter; with `zero.overlap_gather` also of one message of new parameters.
        shape_only: tensors have no values (dry runs): without DeepSpeed.
        equal_copies: kernels of two tensor-parallel ranks may round differently, as on GPUs, so
            copies of a parameter take the gradient of the first one.

    Raises:
        ConfigError: a stage above 0 in double precision.
    """
    if zero.stage > 0 and precision == "fp64":
        raise ConfigError(
            f"zero_stage={zero.stage} cannot train in double precision: DeepSpeed's master weights"
            " are float32. Use zero_stage=0 for float64, or precision 32-true."
        )
    store: ParameterStore = WholeParameters()
    if zero.stage == 3:
        store = ShardedParameters(mesh, specs, zero)
    elif zero.overlap_gather:
        store = GatheredParameters(bucket_bytes)
    composition = Composition(
        zero, bucket_bytes, ShapeOnly if shape_only else deepspeed_compat, equal_copies
    )
    return DataParallelBackend(mesh, specs, store, composition, stages=stages, precision=precision)
