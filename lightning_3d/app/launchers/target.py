"""A run to launch: a composed and checked configuration as nodes, ranks and a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from lightning_3d.app.runs.check import CheckedMachine, check_for
from lightning_3d.errors import ConfigError


@dataclass(frozen=True)
class LaunchTarget:
    """A run on the nodes of its cluster.

    Attributes:
        name: default name of the job: lower-case letters, digits and dashes.
        nodes: number of nodes.
        ranks_per_node: ranks on each node; times `nodes` they are the ranks of the layout.
        gpus_per_node: GPUs of each node; 0 where ranks run on CPU cores.
        overrides: overrides of the run, as the user gave them.
        folder: run folder; None unless the user names it.
        gpu: name of the GPUs, as their vendor writes it; None where it is unknown.
    """

    name: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    overrides: tuple[str, ...]
    folder: str | None
    gpu: str | None = None

    def arguments(self, folder: str | None = None) -> list[str]:
        """Return the arguments of `lightning-3d` on the nodes: the same overrides.

        Args:
            folder: run folder of a run that resumes when it is restarted; None: the overrides alone
                decide.
        """
        added = []
        if folder is not None:
            added = [] if self.folder is not None else [f"hydra.run.dir={folder}"]
            if not any(
                line.lstrip("+").startswith("trainer.auto_resume=") for line in self.overrides
            ):
                added.append("trainer.auto_resume=true")
        return ["train", *self.overrides, *added]


def find_target(overrides: Sequence[str], machine: CheckedMachine) -> LaunchTarget:
    """Compose and check the configuration for the nodes of its cluster, which this machine need not
    be one of.

    Args:
        machine: nodes, and what is known of them.

    Raises:
        Lightning3DError: see `check_for`.
    """
    from lightning_3d.app.config.compose import compose

    config = compose(overrides)
    if config.get("trainer") is not None and config.trainer.get("dry"):
        raise ConfigError(
            "trainer.dry=true would train nothing on the nodes. To check a launch, use lightning-3d"
            " launch KIND --dry."
        )
    plan = check_for(config, machine)
    ranks, nodes, gpus = (
        plan.layout.world_size,
        int(config.cluster.nodes),
        config.cluster.gpus_per_node or 0,
    )
    folder = [
        line.partition("=")[2].strip("'\"")
        for line in overrides
        if line.lstrip("+").startswith("hydra.run.dir=")
    ]
    return LaunchTarget(
        name=_name(config, plan.layout.name),
        nodes=nodes,
        ranks_per_node=ranks // nodes,
        gpus_per_node=gpus if plan.accelerator == "gpu" else 0,
        overrides=tuple(overrides),
        folder=folder[-1] if folder else None,
        gpu=config.cluster.get("gpu"),
    )


def _name(config: DictConfig, layout: str) -> str:
    recipe = OmegaConf.select(config, "hydra.runtime.choices.recipe")
    words = str(recipe) if recipe is not None else f"{config.model.get('name') or 'run'}-{layout}"
    return as_name(words)


def as_name(words: str) -> str:
    """Turn words into a name that every launcher accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")
