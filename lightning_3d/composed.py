"""What Hydra composed, checked and as plain data. Imports no torch."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_3d.config import RunPlan, plan_run
from lightning_3d.errors import ConfigError
from lightning_3d.launch import OutsideRank
from lightning_3d.prediction import Advice


def check(config: DictConfig, outside: OutsideRank | None) -> RunPlan:
    """`plan_run`, and what only Hydra knows: a group that was given several names."""
    for override in OmegaConf.select(config, "hydra.overrides.task") or ():
        if override.startswith("parallelism=["):
            raise ConfigError(f"{override} names several layouts; a run has one. Use -m parallelism=A,B to run each.")
    return plan_run(config, outside, Advice())


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration without interpolations and without Hydra's own part, as dicts and lists."""
    task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    content = OmegaConf.to_container(task, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}
