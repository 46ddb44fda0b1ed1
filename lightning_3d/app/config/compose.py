"""Composition of a configuration by Hydra. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin
from omegaconf import DictConfig, OmegaConf

from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.config.search_path import Lightning3DSearchPath
from lightning_3d.app.config.sources import ClusterSource, LayoutSource, RecipeSource


def plain(config: DictConfig) -> dict[str, Any]:
    """Convert a configuration to dicts and lists, with interpolations resolved and without Hydra's
    own part."""
    task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    content = OmegaConf.to_container(task, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def register_sources(others: Sequence[type[Plugin]] = ()) -> None:
    """Register the config sources and the search path of this package, and `others`, with Hydra.

    Hydra finds plugins by walking their folders, which fails if an editable install maps names
    instead.
    """
    # Hydra loads the modules of plugins a second time
    found = {plugin.__name__ for plugin in Plugins.instance().discover()}
    ours: list[type[Plugin]] = [
        LayoutSource,
        ClusterSource,
        RecipeSource,
        Lightning3DSearchPath,
        *others,
    ]
    for plugin in ours:
        if plugin.__name__ not in found:
            Plugins.instance().register(plugin)


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration of a command line, with Hydra's own part, as `lightning-3d train`
    gets it.

    Raises:
        HydraException, OmegaConfBaseException: `explain` says what is wrong.
    """
    register_sources()
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return hydra.compose("config", overrides=list(overrides), return_hydra_config=True)


@contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Let interpolations such as ${hydra:job.num} read this configuration."""
    before: Any = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(config)
        yield
    finally:
        HydraConfig.instance().cfg = before
