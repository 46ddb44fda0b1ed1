"""Configurations as Hydra composes them, and the recipes."""

from collections import Counter
from functools import lru_cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_3d.app.config.files import conf_folder, recipes_folder
from lightning_3d.app.config.plan_run import RunPlan, plan_run
from lightning_3d.app.planner.advice import PlannerAdvice


def composed(*overrides: str, folder: Path | None = None, with_hydra: bool = False) -> DictConfig:
    with initialize_config_dir(str(folder or conf_folder()), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=with_hydra)


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (conf_folder() / group).glob("*.yaml"))


RECIPES = sorted(file.stem for file in recipes_folder().glob("*.yaml"))
ON_GPUS = [name for name in RECIPES if not name.endswith("cpu")]


def dry(*overrides: str) -> tuple[DictConfig, RunPlan]:
    """A configuration and what it means, as far as this machine can say."""
    config = composed(*overrides, "trainer.dry=true")
    return config, plan_run(config, None, PlannerAdvice())


def dry_peak(*words: str) -> Counter[str]:
    """Bytes by category of rank 0 of a dry run at its peak."""
    from lightning_3d.app.cli.dryrun import job_of
    from lightning_3d.app.dryrun.run import dry_run
    from lightning_3d.app.runs.check import check_shapes

    config, plan = check_shapes(words)
    return dry_run(job_of(config, plan), 0).usage.peak


@lru_cache
def recipe(name: str) -> tuple[DictConfig, RunPlan]:
    """A recipe as it is, composed once; not to be changed."""
    return dry(f"recipe={name}")
