"""What is launched: the composed and checked configuration as nodes, ranks and a command line."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_3d.config.plan_run import RunPlan
from lightning_3d.errors import ConfigError, LayoutError, listed
from lightning_3d.models.pretrained_config import REQUIRED, TAKEN
from lightning_3d.runs.check import check

_NOT_FOR_A_LAUNCH = {
    "-m": "a launch is one run",
    "--multirun": "a launch is one run",
    "--help": "`lightning-3d launch --help` explains launches, `lightning-3d train --help` the configuration",
    "--cfg": "`lightning-3d train --cfg job` shows the configuration",
    "-c": "`lightning-3d train --cfg job` shows the configuration",
    "--info": "`lightning-3d train --info` shows it",
}


@dataclass(frozen=True)
class Target:
    """A run on the nodes of its cluster.

    Attributes:
        name: what the job is called unless the user names it: lower-case letters, digits and dashes.
        nodes, ranks_per_node: their product is the ranks of the layout.
        gpus_per_node: 0 where ranks run on CPU cores.
        overrides: of the run, as the user gave them.
        folder: of the run, where the user names it.
    """

    name: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    overrides: tuple[str, ...]
    folder: str | None

    def arguments(self, folder: str | None = None) -> list[str]:
        """Arguments of `lightning-3d` on the nodes: the same overrides.

        Args:
            folder: of a run that goes on where it was when it is started again; None leaves folder and start to the overrides.
        """
        added = []
        if folder is not None:
            added = [] if self.folder is not None else [f"hydra.run.dir={folder}"]
            if not any(line.lstrip("+").startswith("trainer.auto_resume=") for line in self.overrides):
                added.append("trainer.auto_resume=true")
        return ["train", *self.overrides, *added]


def find_target(overrides: Sequence[str], *, counted: bool, elsewhere: bool) -> Target:
    """Compose and check the configuration for the machines of its cluster, which this machine need not be one of.

    Args:
        counted: whether the cluster must say how many nodes it has and what is in them.
        elsewhere: whether the nodes see other files than this machine.

    Raises:
        Lightning3DError: as `lightning-3d train trainer.dry=true` would, and where nodes are not known.
    """
    _refuse_options(overrides)
    from lightning_3d.config.compose import compose

    config = compose(overrides)
    if config.get("trainer") is not None and config.trainer.get("dry"):
        raise ConfigError("trainer.dry=true starts nothing on the nodes either. Use lightning-3d launch KIND --dry.")
    plan = check_for_nodes(config, counted=counted, elsewhere=elsewhere)
    ranks, nodes, gpus = plan.layout.world_size, int(config.cluster.nodes), config.cluster.gpus_per_node or 0
    folder = [line.partition("=")[2].strip("'\"") for line in overrides if line.lstrip("+").startswith("hydra.run.dir=")]
    return Target(
        name=_name(config, plan.layout.name),
        nodes=nodes,
        ranks_per_node=ranks // nodes,
        gpus_per_node=gpus if plan.accelerator == "gpu" else 0,
        overrides=tuple(overrides),
        folder=folder[-1] if folder else None,
    )


def check_for_nodes(config: DictConfig, *, counted: bool = True, elsewhere: bool = False) -> RunPlan:
    """Check a configuration for the nodes of its cluster, which this machine need not be one of.

    Raises:
        Lightning3DError: as `find_target` does.
    """
    _require_complete(config)
    config = copy.deepcopy(config)
    with read_write(config), open_dict(config):
        config.trainer.dry = True
        if elsewhere:
            _leave_out_files(config)
    plan = check(config, None)
    cluster = plan.run.cluster
    if counted and cluster.gpus_per_node is None:
        raise ConfigError(
            f"The cluster {cluster.name} does not say how many nodes it has and what is in them. Name one by number, such as"
            f" cluster=h100_{max(1, plan.layout.world_size // 8)}x8, or nodes without GPUs: cluster=local_cpu cluster.nodes=2."
        )
    ranks = plan.layout.world_size
    if ranks % cluster.nodes:
        raise LayoutError(
            f"Layout {plan.layout} has {ranks} ranks, which {cluster.nodes} nodes cannot share equally. Set cluster.nodes to"
            f" {listed([count for count in range(1, ranks + 1) if ranks % count == 0], last='or')}."
        )
    return plan


def _refuse_options(overrides: Sequence[str]) -> None:
    for line in overrides:
        option = line.partition("=")[0]
        if option in _NOT_FOR_A_LAUNCH:
            raise ConfigError(f"{option} is no option of a launch: {_NOT_FOR_A_LAUNCH[option]}.")
        if option.startswith("-"):
            raise ConfigError(f"{option} is no option of a launch. It takes --dry, launch.KEY=VALUE and the overrides of the run.")


def _require_complete(config: DictConfig) -> None:
    """A check for other machines lets files be named later; a run that is launched needs them now."""
    data = config.get("data")
    missing = sorted(OmegaConf.missing_keys(data)) if isinstance(data, DictConfig) else []  # with the name of the group in front
    missing += ["model.pretrained"] if OmegaConf.select(config, "model.pretrained") == REQUIRED else []
    if missing:
        raise ConfigError(f"{listed(missing)} must be given, for example {missing[0]}=... on the command line.")


def _leave_out_files(config: DictConfig) -> None:
    """Take out of a configuration the files that only the nodes see; they are checked there.

    Raises:
        ConfigError: the architecture is in one of them.
    """
    config.trainer.resume = None
    if config.get("model") is None or config.model.get("pretrained") is None:
        return
    if config.model.get("name") == TAKEN and not Path(str(config.model.pretrained)).expanduser().is_dir():
        raise ConfigError(
            f"model=pretrained takes the architecture from {config.model.pretrained}, which this machine does not have, so nothing can be"
            " checked. Name the model (model=llama3_1_8b model.pretrained=PATH), whose folder is looked at on the nodes."
        )
    if config.model.get("name") != TAKEN:
        config.model.pretrained = None


def _name(config: DictConfig, layout: str) -> str:
    recipe = OmegaConf.select(config, "hydra.runtime.choices.recipe")
    words = str(recipe) if recipe is not None else f"{config.model.get('name') or 'run'}-{layout}"
    return as_name(words)


def as_name(words: str) -> str:
    """Words as a name that SLURM and Kubernetes take."""
    name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")
