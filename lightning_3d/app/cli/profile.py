"""`lightning-3d profile`: measure operations of a model on this machine, for the planner. torch is
imported after all checks."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_3d.app.cli.options import Command
from lightning_3d.app.config.machine import hide_gpus
from lightning_3d.app.profiling.shapes import Shapes
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.environment import OutsideRank, print_once, set_master_address
from lightning_3d.ranks.progress import task
from lightning_3d.ranks.supervisor import can_fork, cores, launch

if TYPE_CHECKING:
    from lightning_3d.app.config.run_config import CompleteRun

COMMAND = Command(
    "profile",
    "Measure the operations of a model on this machine: matrix products in the shapes of the"
    " layout, attention, memory-bound operations, the optimizer, and a few of the model's blocks."
    " Also measures collectives of every kind and size, within a node and between nodes. Writes a"
    " file for lightning-3d plan ... profile=FILE.json and parallelism=auto, which use it instead"
    " of the planner's constants.\n\nTo measure the network between nodes too, start it with"
    " torchrun: torchrun --nnodes 2 --nproc-per-node 8 ... -m lightning_3d profile"
    " model=llama3_1_8b",
    examples=[
        "model=llama3_1_8b data.sequence_length=4096 parallelism=tp4 parallelism.micro_batch_size=1"
    ],
)
COMMAND.option("--out", "FILE.json", "file to write; default: profile.json", default="profile.json")
COMMAND.count(
    "--ranks", "ranks on this machine; default: one for each GPU, 2 on a machine without GPUs"
)
COMMAND.count("--repeats", "repetitions of each operation; default: 10", default=10)


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run the command and return the exit code.

    Args:
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are started
            here.
    """
    return COMMAND.run(
        arguments, lambda options, overrides: _run(options, overrides, outside), outside=outside
    )


def _run(options: Namespace, overrides: Sequence[str], outside: OutsideRank | None) -> int:
    path = Path(options.out).absolute()
    if not path.parent.is_dir():
        raise ConfigError(
            f"--out must be a file in an existing folder; there is no folder {path.parent}."
        )
    run_config, accelerator, ranks = _place(overrides, options.ranks, outside)
    shapes = _shapes(run_config, accelerator, options.repeats)
    where = "GPUs" if accelerator == "gpu" else "CPU"
    print_once(
        f"measuring on {ranks} rank{'s' * (ranks > 1)} on {where}, {shapes.precision}", outside
    )
    if outside is not None:
        set_master_address(outside)
        _rank(shapes, accelerator, str(path))
        return 0
    if accelerator == "cpu":
        hide_gpus()
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    fork = accelerator == "cpu"
    if fork:
        with task("importing torch and Transformers"):
            from lightning_3d.app.training.run import preload

            preload({"model": {"config": shapes.config}, "parallelism": {"zero_stage": 0}})
        fork = can_fork()
    with tempfile.TemporaryDirectory() as logs:
        threads = int(os.environ["OMP_NUM_THREADS"]) if accelerator == "cpu" else None
        outcome = launch(
            _rank,
            (shapes, accelerator, str(path)),
            ranks,
            logs=Path(logs),
            fork=fork,
            threads=threads,
        )
    if outcome.message is not None:
        print(outcome.message, file=sys.stderr, flush=True)
    if outcome.exit_code == 0:
        print(f"Wrote {path}. To use it: lightning-3d plan profile={path} ...")
    return outcome.exit_code


def _place(
    overrides: Sequence[str], ranks: int | None, outside: OutsideRank | None
) -> tuple[CompleteRun, str, int]:
    """Decide where to measure: (configuration, cpu or gpu, number of ranks)."""
    from lightning_3d.app.config.compose import compose
    from lightning_3d.app.config.machine import visible_gpus
    from lightning_3d.app.config.plan_run import check_keys
    from lightning_3d.app.config.run_config import complete_run

    run = complete_run(check_keys(compose([*overrides, "trainer.dry=true"])), trains=False)
    there, wanted = visible_gpus(), run.cluster.accelerator
    local = outside.local_world_size if outside is not None else ranks or there or 2
    if wanted == "gpu" and there < local:
        raise ConfigError(
            f"The cluster {run.cluster.name} has GPUs, so {local} rank{'s' * (local > 1)}"
            f" need{'s' * (local == 1)} {local} GPU{'s' * (local > 1)} on this machine, which has"
            f" {there}. Profile on a machine of that cluster, or profile the CPU with"
            " cluster=local_cpu."
        )
    accelerator = "gpu" if wanted != "cpu" and there >= local else "cpu"
    return run, accelerator, outside.world_size if outside is not None else local


def _shapes(run: CompleteRun, accelerator: str, repeats: int) -> Shapes:
    from lightning_3d.app.config.machine import choose_precision
    from lightning_3d.app.planner.architecture import Architecture
    from lightning_3d.layout.layout import Layout
    from lightning_3d.layout.sizes import check_sizes
    from lightning_3d.options.precision import check_float32_matmul

    model = Architecture.from_spec(run.spec)
    seq, rows = run.data.get("sequence_length"), run.parallelism.micro_batch_size or 1
    check_sizes(**{"data.sequence_length": seq, "parallelism.micro_batch_size": rows})
    if seq is None:
        raise ConfigError(
            "data.sequence_length (in tokens) must be given, for example data.sequence_length=4096."
        )
    if run.parallelism.layout == "auto":
        degrees = tuple(
            tp
            for tp in (1, 2, 4, 8)
            if model.heads % tp == 0 and max(model.ffn, model.expert_ffn) % tp == 0
        )
    else:
        degrees = tuple(sorted({1, Layout.parse(run.parallelism.layout).tp}))
    precision = choose_precision(run, accelerator)
    # what of them is not bf16 keeps its constants
    precision = "bf16" if precision in ("bf16_mixed", "fp8") else precision
    sizes = degrees, rows, seq, repeats
    matmul = run.trainer.float32_matmul_precision
    check_float32_matmul("trainer.float32_matmul_precision", matmul)
    return Shapes(
        run.model["config"],
        model,
        run.model.get("attn_implementation"),
        precision,
        *sizes,
        float32_matmul=matmul,
    )


def _rank(shapes: Shapes, accelerator: str, path: str) -> None:
    """Measure in one rank. Rank 0 writes the file when all measurements are complete."""
    import torch

    from lightning_3d.app.planner.profile_file import FORMAT
    from lightning_3d.app.profiling.operations import profile_rank

    if shapes.float32_matmul is not None:
        torch.set_float32_matmul_precision(shapes.float32_matmul)
    content = profile_rank(shapes, accelerator)
    if int(os.environ["RANK"]) == 0:
        about = {"format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        about["float32_matmul_precision"] = torch.get_float32_matmul_precision()
        draft = Path(f"{path}.part")
        draft.write_text(json.dumps(about | content, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
