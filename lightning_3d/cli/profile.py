"""`lightning-3d profile`: measures operations of a model on this machine's ranks, for the planner. torch is imported after all checks."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_3d.cli.exit_codes import guarded
from lightning_3d.compat.imports import quiet_imports
from lightning_3d.errors import ConfigError
from lightning_3d.profiling.shapes import Shapes
from lightning_3d.ranks.environment import OutsideRank, print_once, set_master_address
from lightning_3d.ranks.supervisor import can_fork, cores, launch

if TYPE_CHECKING:
    from lightning_3d.config.run_config import RunConfig


OPTIONS = ("out", "ranks", "repeats")

USAGE = """\
lightning-3d profile [--out FILE.json] [--ranks N] [--repeats N] [OVERRIDES]

Measures on this machine what operations of a model cost: matrix products of the shapes that the layout cuts, attention, operations bound by
memory, the optimizer, collectives of every kind and size inside of a node and between nodes, and a few of the model's blocks. Writes them
to a file that `lightning-3d plan ... profile=FILE.json` and `parallelism=auto` read instead of the planner's constants.

  lightning-3d profile model=llama3_1_8b data.sequence_length=4096 parallelism=tp4 parallelism.micro_batch_size=1
  torchrun --nnodes 2 --nproc-per-node 8 ... -m lightning_3d profile model=llama3_1_8b    with what lies between the nodes

  --out FILE    profile.json unless given
  --ranks N     on this machine; all of its GPUs unless given, 2 where it has none
  --repeats N   of each operation; 10 unless given
"""


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run the command and return the exit code.

    Args:
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are to be started here.
    """
    if set(arguments) & {"--help", "-h"}:
        print_once(USAGE.rstrip(), outside)
        return 0
    return guarded(lambda: _run(arguments, outside), told=(OSError,), silent=outside is not None and outside.rank > 0)


def _read(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    from lightning_3d.cli.options import read_options

    options, overrides = read_options(arguments, OPTIONS, "profile")
    for name in ("ranks", "repeats"):
        if name in options and not (options[name].isdigit() and int(options[name]) > 0):
            raise ConfigError(f"--{name} is {options[name]}; it must be a whole number of at least 1.")
    return options, overrides


def _run(arguments: Sequence[str], outside: OutsideRank | None) -> int:
    options, overrides = _read(arguments)
    path = Path(options.get("out", "profile.json")).absolute()
    if not path.parent.is_dir():
        raise ConfigError(f"There is no folder {path.parent} to write {path.name} to.")
    run_config, accelerator, ranks = _place(overrides, options.get("ranks"), outside)
    shapes = _shapes(run_config, accelerator, int(options.get("repeats", "10")))
    where = "GPUs" if accelerator == "gpu" else "CPU"
    print_once(f"measures on {ranks} rank{'s' * (ranks > 1)} on {where}, {shapes.precision}", outside)
    if outside is not None:
        set_master_address(outside)
        _rank(shapes, accelerator, str(path))
        return 0
    if accelerator == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    quiet_imports()
    fork = accelerator == "cpu"
    if fork:
        from lightning_3d.training.run import preload

        preload({"model": {"config": shapes.config}, "parallelism": {"zero_stage": 0}})
        fork = can_fork()
    with tempfile.TemporaryDirectory() as logs:
        threads = int(os.environ["OMP_NUM_THREADS"]) if accelerator == "cpu" else None
        outcome = launch(_rank, (shapes, accelerator, str(path)), ranks, logs=Path(logs), fork=fork, threads=threads)
    if outcome.message is not None:
        print(outcome.message, file=sys.stderr, flush=True)
    if outcome.exit_code == 0:
        print(f"{path} is written; lightning-3d plan reads it with profile={path}")
    return outcome.exit_code


def _place(overrides: Sequence[str], ranks: str | None, outside: OutsideRank | None) -> tuple[RunConfig, str, int]:
    """(configuration, cpu or gpu, number of ranks)."""
    from lightning_3d.config.compose import compose
    from lightning_3d.config.machine import visible_gpus
    from lightning_3d.config.plan_run import check_keys
    from lightning_3d.models.pretrained_config import complete_model

    run = check_keys(compose([*overrides, "trainer.dry=true"]))
    run.model = complete_model(run.model, dry=True)
    there, wanted = visible_gpus(), run.cluster.accelerator
    local = outside.local_world_size if outside is not None else int(ranks or there or 2)
    if wanted == "gpu" and there < local:
        raise ConfigError(
            f"The cluster {run.cluster.name} has GPUs, and {local} ranks on this machine need as many, but it has {there}. Profile on one"
            " of its machines, or the CPU with cluster=local_cpu."
        )
    accelerator = "gpu" if wanted != "cpu" and there >= local else "cpu"
    return run, accelerator, outside.world_size if outside is not None else local


def _shapes(run: RunConfig, accelerator: str, repeats: int) -> Shapes:
    from lightning_3d.config.machine import choose_precision
    from lightning_3d.layout.layout import Layout
    from lightning_3d.layout.sizes import check_sizes
    from lightning_3d.models.families import read_spec
    from lightning_3d.planner.architecture import Architecture

    model = Architecture.from_spec(read_spec(run.model["config"]))
    seq, rows = run.data.get("sequence_length"), run.parallelism.micro_batch_size or 1
    check_sizes(**{"data.sequence_length": seq, "parallelism.micro_batch_size": rows})
    if seq is None:
        raise ConfigError("data.sequence_length must be given, in tokens.")
    if run.parallelism.layout == "auto":
        degrees = tuple(tp for tp in (1, 2, 4, 8) if model.heads % tp == 0 and max(model.ffn, model.expert_ffn) % tp == 0)
    else:
        degrees = tuple(sorted({1, Layout.parse(run.parallelism.layout).tp}))
    precision = choose_precision(run, accelerator)
    precision = "bf16" if precision in ("bf16_mixed", "fp8") else precision  # what of them is not bf16 keeps its constants
    return Shapes(run.model["config"], run.model.get("attn_implementation"), precision, degrees, rows, seq, repeats)


def _rank(shapes: Shapes, accelerator: str, path: str) -> None:
    """What every rank does; rank 0 writes the file, when it is complete."""
    quiet_imports()
    from lightning_3d.planner.profile_file import FORMAT
    from lightning_3d.profiling.operations import profile_rank

    content = profile_rank(shapes, accelerator)
    if int(os.environ["RANK"]) == 0:
        about = {"format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        beside = Path(f"{path}.part")
        beside.write_text(json.dumps(about | content, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
