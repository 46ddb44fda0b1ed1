"""Private APIs by which Lightning launches a user's own script and initializes the process
group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_3d.compat.torch import settle_gloo_at_exit
from lightning_3d.errors import ConfigError, plural
from lightning_3d.ranks.children import Children

if TYPE_CHECKING:
    from lightning_3d.ranks.loopback import GlooInterface


def subprocess_launcher(cluster_environment: Any, num_processes: int, num_nodes: int) -> Any:
    """Make the launcher that runs the user's script once per local rank; None where the cluster
    already started the ranks.

    `_SubprocessScriptLauncher` is not public (Lightning 2.6), but DDPStrategy uses it. Its `launch`
    is overridden, because the observer that it starts kills rank 0 when a child fails, and the
    children that it starts outlive rank 0. The attribute `children` watches them instead; it is
    None before the launch.

    Raises:
        ConfigError: several ranks in a notebook; from `launch`: the ranks cannot connect at
            MASTER_ADDR and MASTER_PORT, or an earlier Trainer of this process has another number of
            ranks.
    """
    from lightning.fabric.strategies.launchers.subprocess_script import (
        _basic_subprocess_cmd,
        _hydra_subprocess_cmd,
    )
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    from lightning_3d.ranks.process_ties import die_with
    from lightning_3d.ranks.rendezvous import hold_meeting_point
    from lightning_3d.ranks.reporter import PARENT_VARIABLE

    class Launcher(_SubprocessScriptLauncher):
        children: Children | None = None
        meeting_point: Any = None
        # `_refuse_interactive` has already refused what is not, and says what works
        is_interactive_compatible = True

        def launch(
            self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
        ) -> Any:
            self.cluster_environment.validate_settings(
                num_devices=num_processes, num_nodes=num_nodes
            )
            if self.children is None:  # not again for a second fit, or a test after it
                # children must inherit it, else they round differently
                _set_num_threads_if_needed(num_processes=num_processes)
                _require_same_ranks(num_nodes * num_processes)
                # else an earlier Trainer has connected this process, and its server has the port
                if not dist.is_initialized():
                    self.meeting_point = hold_meeting_point(cluster_environment, num_nodes)
                children = Children(
                    cluster_environment.node_rank() * num_processes, num_nodes * num_processes
                )
                children.start(self._start_scripts)
                self.children = children
            return function(*args, **kwargs)

        def _start_scripts(self) -> list[subprocess.Popen]:
            self._check_can_spawn_children()
            # with LOCAL_RANK set, a later Trainer with more devices would take itself for one of
            # many
            if num_processes * num_nodes == 1:
                return []
            place = {
                "MASTER_ADDR": cluster_environment.main_address,
                "MASTER_PORT": str(cluster_environment.main_port),
            }
            place |= {
                "NODE_RANK": str(cluster_environment.node_rank()),
                "WORLD_SIZE": str(num_processes * num_nodes),
            }
            os.environ.update(place, LOCAL_RANK=str(cluster_environment.local_rank()))
            self.procs = []
            for local_rank in range(1, num_processes):
                command, folder = _basic_subprocess_cmd(), None
                if _in_hydra_job():
                    command, folder = _hydra_subprocess_cmd(local_rank)
                environment = {
                    **os.environ,
                    "LOCAL_RANK": str(local_rank),
                    PARENT_VARIABLE: str(os.getpid()),
                }
                tie = partial(die_with, os.getpid())
                self.procs.append(
                    subprocess.Popen(command, env=environment, cwd=folder, preexec_fn=tie)
                )
            return self.procs

    if cluster_environment.creates_processes_externally:
        return None
    _refuse_interactive(num_processes * num_nodes)
    return Launcher(cluster_environment, num_processes, num_nodes)


def _require_same_ranks(ranks: int) -> None:
    """Refuse a Trainer if an earlier one has connected this process with another number of ranks.
    Raises ConfigError."""
    if dist.is_initialized() and dist.get_world_size() != ranks:
        raise ConfigError(
            f"This Trainer needs {plural(ranks, 'rank')}, but an earlier Trainer of this script has"
            f" {dist.get_world_size()}. Each rank runs the script from its beginning, so all"
            " Trainers of a script need the same number of devices and nodes. Or write two"
            " scripts."
        )


def _refuse_interactive(ranks: int) -> None:
    """Refuse to start several ranks from a notebook or a Python prompt, which have no script that
    the other ranks could run.

    Raises:
        ConfigError: with what works.
    """
    if ranks > 1 and hasattr(sys, "ps1"):
        raise ConfigError(
            f"This Trainer needs {ranks} ranks, and each rank runs the script from its beginning. A"
            " notebook or an interactive session has no script. Write the code to a script and run"
            " it: in a notebook, begin the cell with %%writefile mine.py, then run"
            f" !{sys.executable} mine.py. With devices=1, the Trainer works here."
        )


def _in_hydra_job() -> bool:
    """Return whether this script is a Hydra job. Hydra may not be installed."""
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    return hydra_config is not None and hydra_config.HydraConfig.initialized()


def connect_process_group(
    strategy: Any, timeout: Any, join_seconds: float, interface: GlooInterface
) -> Callable[[], Any]:
    """Set this process's rank in the cluster environment and initialize the default process group.

    `_init_dist_connection` and `_get_default_process_group_backend_for_device` are not public
    (Lightning 2.6); DDPStrategy uses both. DDPStrategy also resets the random number generators
    here; this returns the function that does, and the caller decides.

    Unlike DDPStrategy's, the group is not bound to a device. NCCL communicators of a bound group
    are created eagerly, and each serializes all messages of a rank: a send of a middle pipeline
    stage would wait for the receives posted before it. Unbound, every pair of ranks has its own
    communicator (torch 2.11 to 2.13, `ProcessGroupNCCL::pointToPoint`).

    Args:
        join_seconds: time for all ranks to join.
        interface: of gloo; ranks that are all on one machine listen on its loopback interface.

    Raises:
        RendezvousError: ranks have not joined in time. ConfigError: an earlier Trainer of this
            process has another number of ranks.
    """
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device,
        _init_dist_connection,
    )
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from lightning_3d.ranks.loopback import share_loopback
    from lightning_3d.ranks.meeting_store import connect_store, store_outlives_ranks
    from lightning_3d.ranks.rendezvous import explained_errors

    environment = strategy.cluster_environment
    _require_same_ranks(strategy.num_nodes * strategy.num_processes)
    environment.set_global_rank(strategy.node_rank * strategy.num_processes + strategy.local_rank)
    environment.set_world_size(strategy.num_nodes * strategy.num_processes)
    for decorator in (rank_zero_only, fabric_rank_zero_only):
        setattr(decorator, "rank", strategy.global_rank)  # noqa: B010  an attribute that its type does not declare
    device = strategy.root_device
    backend = _get_default_process_group_backend_for_device(device)
    settle_gloo_at_exit()
    place: dict[str, Any] = {}
    if strategy.world_size > 1:
        os.environ.setdefault("MASTER_ADDR", environment.main_address)
        os.environ.setdefault("MASTER_PORT", str(environment.main_port))
        # names ranks that do not join
        store = connect_store(strategy.global_rank, strategy.world_size, join_seconds)[0]
        if strategy.num_nodes == 1 and share_loopback(
            store, strategy.global_rank, strategy.world_size, join_seconds
        ):
            interface.choose_loopback()
        # otherwise torch 2.13 would read the addresses of ranks that no longer exist
        if store_outlives_ranks():
            place["store"] = store
    with explained_errors(strategy.global_rank):
        _init_dist_connection(environment, backend, timeout=timeout, **place)
    return reset_seed
