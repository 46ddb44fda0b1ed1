"""Check a composed configuration for the machine that will run it. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_3d.app.config.compose import plain
from lightning_3d.app.config.objective import REQUIRED as TEACHER_REQUIRED
from lightning_3d.app.config.plan_run import RunPlan, plan_run
from lightning_3d.app.planner.advice import PlannerAdvice
from lightning_3d.app.runs.resumed_keys import groups_of, require_resumable
from lightning_3d.errors import ConfigError, LayoutError, listed, plural
from lightning_3d.models.pretrained_config import REQUIRED, TAKEN
from lightning_3d.ranks.environment import OutsideRank


class CheckedMachine(Enum):
    """Machine for which a run is checked."""

    THIS = auto()
    """This machine, now."""
    NODES = auto()
    """The nodes of its cluster, which see the files of this machine. Their number may be
    unknown."""
    COUNTED_NODES = auto()
    """Nodes of a cluster that must have a known number of nodes and GPUs."""
    REMOTE_NODES = auto()
    """Counted nodes that do not see the files of this machine."""
    NONE = auto()
    """No machine: only the shapes of the run are needed, neither its GPUs nor its data."""


def check_for(
    config: DictConfig,
    machine: CheckedMachine = CheckedMachine.THIS,
    outside: OutsideRank | None = None,
) -> RunPlan:
    """Check a configuration for a machine, which need not be this one. The configuration is not
    changed.

    Args:
        outside: this process as a rank that torchrun or SLURM started; only for
            `CheckedMachine.THIS`.

    Raises:
        Lightning3DError: what `lightning-3d train trainer.dry=true` reports; for nodes also missing
            keys, a cluster of unknown size, and ranks that cannot be split equally over the nodes.
    """
    if machine in _NODES:
        _require_complete(config)
    plan = _plan(_as_seen_from(config, machine), outside)
    require_resumable(plan.run.trainer.resume, groups_of(plan))
    if machine in _NODES:
        _check_nodes(plan, machine)
    return plan


def check_shapes(overrides: Sequence[str]) -> tuple[dict[str, Any], RunPlan]:
    """Compose a job and check it for no machine.

    Returns:
        The complete configuration, as it would be frozen, and the plan of the run.

    Raises:
        Lightning3DError: as `check_for`.
    """
    from lightning_3d.app.config.compose import compose

    config = _as_seen_from(compose(overrides), CheckedMachine.NONE)
    plan = _plan(config, None)
    return plan.freeze(plain(config)), plan


_NODES = (CheckedMachine.NODES, CheckedMachine.COUNTED_NODES, CheckedMachine.REMOTE_NODES)


def _plan(config: DictConfig, outside: OutsideRank | None) -> RunPlan:
    """Run `plan_run`, and refuse a group with several names, which only Hydra's overrides show."""
    for override in OmegaConf.select(config, "hydra.overrides.task") or ():
        if override.startswith("parallelism=["):
            raise ConfigError(
                f"{override} names several layouts, but a run uses one. To run each of them, use -m"
                " parallelism=A,B."
            )
    return plan_run(config, outside, PlannerAdvice())


def _as_seen_from(config: DictConfig, machine: CheckedMachine) -> DictConfig:
    """Return a copy of the configuration without the parts that cannot be checked here; for this
    machine, the configuration itself."""
    if machine is CheckedMachine.THIS:
        return config
    config = copy.deepcopy(config)
    with read_write(config), open_dict(config):
        if config.get("trainer") is not None:
            config.trainer.dry = True  # before the rest: a dry run needs no GPUs and no data here
        if machine is CheckedMachine.NONE:
            config.run_folder = ""  # nothing is written
        _leave_out_files(config, machine)
    return config


def _leave_out_files(config: DictConfig, machine: CheckedMachine) -> None:
    """Remove from a configuration the files that the machine does not need, or that only the nodes
    can see and check.

    Raises:
        ConfigError: the architecture of the model is in one of them.
    """
    data, model = config.get("data"), config.get("model")
    if machine is CheckedMachine.NONE and data is not None and data.get("name") is not None:
        for key in OmegaConf.missing_keys(data):  # with the name of the group in front
            data[key.rpartition(".")[2]] = None
    if machine is not CheckedMachine.REMOTE_NODES:
        return
    if config.get("trainer") is not None:
        config.trainer.resume = None
    objective = config.get("objective")
    if (
        objective is not None
        and objective.get("teacher")
        and not Path(str(objective.teacher)).expanduser().is_dir()
    ):
        objective.teacher = TEACHER_REQUIRED
    if model is None or model.get("pretrained") is None:
        return
    if model.get("name") != TAKEN:
        model.pretrained = None
    elif not Path(str(model.pretrained)).expanduser().is_dir():
        raise ConfigError(
            f"model=pretrained needs the folder model.pretrained={model.pretrained} on this machine"
            " to check the run, but it does not exist here. Name the model instead"
            " (model=llama3_1_8b model.pretrained=PATH); then only the nodes need the folder."
        )


def _require_complete(config: DictConfig) -> None:
    """Raise ConfigError if a key is missing that a check for other machines would accept: a run
    that is launched needs it now."""
    data = config.get("data")
    # with the name of the group in front
    missing = sorted(OmegaConf.missing_keys(data)) if isinstance(data, DictConfig) else []
    missing += (
        ["model.pretrained"] if OmegaConf.select(config, "model.pretrained") == REQUIRED else []
    )
    if missing:
        raise ConfigError(
            f"{listed(missing)} must be given, for example {missing[0]}=... on the command line."
        )


def _check_nodes(plan: RunPlan, machine: CheckedMachine) -> None:
    """Raise ConfigError or LayoutError if the ranks do not fit on the nodes."""
    cluster, ranks = plan.run.cluster, plan.layout.world_size
    if machine is not CheckedMachine.NODES and cluster.gpus_per_node is None:
        raise ConfigError(
            f"The size of the cluster {cluster.name} is unknown. Use a cluster with a known number"
            f" of nodes and GPUs, such as cluster=h100_{max(1, ranks // 8)}x8, or nodes without"
            " GPUs, such as cluster=local_cpu cluster.nodes=2."
        )
    if ranks % cluster.nodes:
        counts = [count for count in range(1, ranks + 1) if ranks % count == 0]
        raise LayoutError(
            f"Layout {plan.layout} has {plural(ranks, 'rank')}, which cannot be split equally over"
            f" {plural(cluster.nodes, 'node')}. Set cluster.nodes to {listed(counts, last='or')}."
        )
