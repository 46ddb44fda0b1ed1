"""The place of this process among ranks that torchrun or SLURM started, and messages that one of
them prints. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import ConfigError, Lightning3DError
from lightning_3d.ranks.rendezvous import CHOSEN_VARIABLE


def refuse(error: Lightning3DError, outside: OutsideRank | None = None) -> int:
    """Print the message of an error, once for all ranks, and return the exit code."""
    print_once(f"lightning_3d: {error}", outside, file=sys.stderr)
    return error.exit_code


def print_once(text: str, outside: OutsideRank | None, file: Any = None) -> None:
    """Print, unless this is a rank other than 0."""
    if outside is None or outside.rank == 0:
        print(text, file=file, flush=True)


_USED_VARIABLE = "LIGHTNING_3D_RANKS"
_NOT_IN_SLURM_STEP = ("bash", "interactive")


@dataclass(frozen=True)
class OutsideRank:
    """This process as a rank that torchrun or SLURM started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str

    @property
    def nodes(self) -> int:
        # the last node of an elastic run may have ranks without work
        return -(-self.world_size // self.local_world_size)


def outside_rank(environment: Mapping[str, str] = os.environ) -> OutsideRank | None:
    """Read from the environment which rank torchrun or SLURM (srun) started this process as; None
    if it was started by hand.

    Raises:
        ConfigError: a variable is not a whole number.
    """
    try:
        if "RANK" in environment and "WORLD_SIZE" in environment:
            world = int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_WORLD_SIZE", world))
            return OutsideRank(
                int(environment["RANK"]),
                int(environment.get("LOCAL_RANK", 0)),
                world,
                local,
                "torchrun",
            )
        in_step = (
            "SLURM_STEP_ID" in environment
            and environment.get("SLURM_JOB_NAME") not in _NOT_IN_SLURM_STEP
        )
        if in_step and "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
            nodes = int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", 1)))
            world = int(environment["SLURM_NTASKS"])
            local_rank = int(environment.get("SLURM_LOCALID", 0))
            local = int(environment.get("LOCAL_WORLD_SIZE", max(1, world // nodes)))
            return OutsideRank(int(environment["SLURM_PROCID"]), local_rank, world, local, "slurm")
    except ValueError as error:
        raise ConfigError(
            "The launcher's environment variables (RANK, WORLD_SIZE, ...) must be whole numbers:"
            f" {error}."
        ) from error
    return None


def leave_out_spare(outside: OutsideRank, used: int) -> None:
    """Tell this process and the libraries in it, through the environment, that the run has its
    first `used` ranks only."""
    os.environ[_USED_VARIABLE] = str(used)
    os.environ["LOCAL_WORLD_SIZE"] = str(outside.local_world_size)
    if outside.launcher == "slurm":
        os.environ["SLURM_NTASKS"] = str(used)
        os.environ["SLURM_STEP_NUM_NODES"] = str(-(-used // outside.local_world_size))
    else:
        os.environ["WORLD_SIZE"] = str(used)


def ranks_with_work() -> int | None:
    """Return the number of ranks of an elastic run that leaves some out; None for any other run."""
    used = os.environ.get(_USED_VARIABLE)
    return int(used) if used is not None else None


def set_master_address(outside: OutsideRank) -> None:
    """Set MASTER_ADDR and MASTER_PORT if the launcher did not: ranks of SLURM derive them from the
    job.

    Raises:
        ConfigError: srun was started with options that Lightning does not support.
    """
    if outside.launcher == "slurm" and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        from lightning.fabric.plugins.environments import SLURMEnvironment

        try:
            cluster = SLURMEnvironment()
        except RuntimeError as error:  # options of srun that Lightning does not support
            raise ConfigError(str(error)) from error
        # a step may have fewer nodes than its job
        if nodes := os.environ.get("SLURM_STEP_NODELIST"):
            os.environ.setdefault("MASTER_ADDR", cluster.resolve_root_node_address(nodes))
        if "MASTER_PORT" not in os.environ:
            os.environ[CHOSEN_VARIABLE] = str(cluster.main_port)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = (
            cluster.main_address,
            str(cluster.main_port),
        )
