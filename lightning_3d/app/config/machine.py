"""The accelerator and the precision of a run on the machine at hand. Imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lightning_3d.app.config.cluster import ClusterConfig
from lightning_3d.app.config.run_config import RunConfig
from lightning_3d.errors import ConfigError, LayoutError, listed, plural
from lightning_3d.layout.layout import Layout, nearest_layouts
from lightning_3d.options.precision import (
    PRECISIONS,
    check_fp8_device,
    check_fp8_library,
    fp8_refused,
    listed_capability,
    unknown_precision,
)
from lightning_3d.ranks.environment import OutsideRank


def choose_accelerator(
    run: RunConfig, layout: Layout, outside: OutsideRank | None, whole: Layout | None = None
) -> tuple[str, tuple[str, ...]]:
    """Choose the accelerator of the ranks on this machine.

    Args:
        whole: layout of an elastic run with all ranks; None if it is `layout`.

    Returns:
        (cpu or gpu, warnings)

    Raises:
        LayoutError: the layout does not fill the cluster, or this machine has fewer GPUs than
            ranks.
        ConfigError: an impossible number of the cluster, or several nodes without a launcher that
            reaches them.
    """
    cluster = run.cluster
    cluster.check()
    _require_cluster(cluster, whole or layout)
    if run.trainer.dry and cluster.accelerator != "auto":
        return cluster.accelerator, ()
    if cluster.nodes > 1 and outside is None:
        raise ConfigError(
            f"The cluster {cluster.name} has {cluster.nodes} nodes, but this command can start"
            f" ranks on this node only. Start them with torchrun --nnodes {cluster.nodes}"
            f" --nproc-per-node {cluster.gpus_per_node} or with srun, or add trainer.dry=true to"
            " check the configuration only."
        )
    needed = outside.local_world_size if outside is not None else layout.world_size
    there = visible_gpus()
    if cluster.accelerator == "gpu" and there < needed:
        near = listed((other.name for other in nearest_layouts(layout, there)), last="or")
        layouts = f" Layouts for {plural(there, 'GPU')}: {near}." if near else ""
        raise LayoutError(
            f"{plural(needed, 'rank')} on this machine need{'s' * (needed == 1)}"
            f" {plural(needed, 'GPU')}, but this machine has {there}.{layouts} To run on the CPU,"
            " use cluster=local_cpu."
        )
    if cluster.accelerator == "auto" and 0 < there < needed:
        return "cpu", (
            f"This machine has {plural(there, 'GPU')} for {needed} ranks, so the run uses the CPU.",
        )
    return ("gpu" if cluster.accelerator != "cpu" and there >= needed else "cpu"), ()


def _require_cluster(cluster: ClusterConfig, layout: Layout) -> None:
    """Refuse a layout that does not use all of a cluster of known size."""
    if not cluster.gpus_per_node:
        return
    size = cluster.nodes * cluster.gpus_per_node
    if layout.world_size != size:
        near = listed((other.name for other in nearest_layouts(layout, size)), last="or")
        raise LayoutError(
            f"Layout {layout} has {plural(layout.world_size, 'rank')}, but the cluster"
            f" {cluster.name} has {plural(size, 'GPU')} ({plural(cluster.nodes, 'node')} with"
            f" {plural(cluster.gpus_per_node, 'GPU')}). Layouts for {plural(size, 'rank')}: {near}."
        )


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Count the NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES allows, without CUDA, which
    would make a fork impossible."""
    there = len(
        [device for device in devices.glob("nvidia[0-9]*") if device.name[6:].isdigit()]
    ) or len(gpu_names())
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return there
    names = [name.strip() for name in allowed.split(",")]
    named = names.index("-1") if "-1" in names else len([name for name in names if name])
    return min(there, named)


def hide_gpus() -> None:
    """Make this process and its children leave the GPUs of this machine alone, for a run on CPU. To
    be called before torch is imported.

    Some libraries initialize CUDA when they are imported (torchao, which Transformers imports).
    After that a process cannot fork, and each rank would hold some hundred MB of a GPU.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def gpu_names() -> list[str]:
    """Names of the GPUs that nvidia-smi lists; none where there is no nvidia-smi, or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    return [line.partition(": ")[2].partition(" (")[0] for line in lines]


def choose_precision(run: RunConfig, accelerator: str) -> str:
    """Choose the precision of a run.

    Returns:
        Name in `PRECISIONS`.

    Raises:
        ConfigError: an unknown name, or a precision that the cluster, its libraries or the ZeRO
            stage cannot run.
    """
    name, zero_stage = run.precision.name, run.parallelism.zero_stage
    if name == "auto":
        return "bf16" if accelerator == "gpu" else "fp32"
    if name not in PRECISIONS:
        raise unknown_precision(name)
    if name == "fp64" and zero_stage:
        raise ConfigError(
            f"precision=fp64 with ZeRO stage {zero_stage} would keep the master weights in fp32."
            " Use parallelism.zero_stage=0."
        )
    if name == "fp8":
        if run.cluster.lacks_fp8:
            lacking = f"the GPUs of the cluster {run.cluster.name} have none"
            raise fp8_refused(f"needs GPUs with float8 matrix products, such as H100; {lacking}")
        # for other machines than this
        planned = run.trainer.dry and run.cluster.accelerator != "auto"
        check_fp8_device(accelerator, None if planned else listed_capability())
        if not planned:
            check_fp8_library()
    return name


def check_attention(run: RunConfig, layout: Layout, accelerator: str) -> None:
    """Refuse an implementation of attention that cannot train on the accelerator. Context
    parallelism (cp) replaces it anyway.

    Raises:
        ConfigError: FlexAttention on the CPU, where torch has no backward of it.
    """
    if (
        run.model.get("attn_implementation") == "flex_attention"
        and accelerator == "cpu"
        and layout.cp == 1
    ):
        raise ConfigError(
            "model.attn_implementation=flex_attention has no backward on the CPU. Use"
            " model.attn_implementation=sdpa, which takes the same masks as tensors."
        )
