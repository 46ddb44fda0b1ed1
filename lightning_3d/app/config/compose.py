"""Composition of a configuration by Hydra. Imports no torch."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.plugin import Plugin
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from lightning_3d.app.config.files import conf_folder, recipes_folder
from lightning_3d.layout.layout import DEGREES
from lightning_3d.options.options import OPEN


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


# Search path that offers the config groups of lightning_3d to every Hydra app on this machine.


class Lightning3DSearchPath(SearchPathPlugin):
    """Plugin that adds groups from files, layouts and clusters by name, and recipes.

    Hydra may find this plugin although it was registered by hand; it then adds them only once.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        there = {element.provider for element in search_path.get_path()}
        for provider, path in (
            ("lightning_3d", f"file://{conf_folder()}"),
            ("lightning_3d-layouts", "layout://"),
            ("lightning_3d-clusters", "cluster://"),
            ("lightning_3d-recipes", "recipe://"),
        ):
            if provider not in there:
                search_path.append(provider=provider, path=path)


# Config sources that make a configuration from every layout name (`layout://`), from every number
# of nodes (`cluster://`), and from recipes.


class NamedConfigs(ConfigSource):
    """Configurations of one group, made from their names. Subclasses define the accepted names and
    their content."""

    group: ClassVar[str]

    @abstractmethod
    def accepts(self, name: str) -> bool:
        """Check whether this source has a configuration of this name. Other names are left to other
        sources."""

    @abstractmethod
    def make(self, name: str) -> tuple[str | dict[str, Any], dict[str, str | None]]:
        """Return (content, header) of an accepted name, as a file would have them."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return names for `--help`, messages and shell completion."""

    def load_config(self, config_path: str) -> ConfigResult:
        name = self._name(config_path)
        if name is None:
            raise ConfigLoadError(f"There is no {self.scheme()} {config_path}.")
        content, header = self.make(name)
        path = f"{self.scheme()}://{self.path}"
        return ConfigResult(
            provider=self.provider, path=path, config=OmegaConf.create(content), header=header
        )

    def _name(self, config_path: str) -> str | None:
        group, _, name = _bare(config_path).rpartition("/")
        return name if group == self.group and self.accepts(name) else None

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return _bare(config_path) in ("", self.group)

    def is_config(self, config_path: str) -> bool:
        return self._name(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if _bare(config_path) == self.group:
            return self.names() if results_filter != ObjectType.GROUP else []
        return [self.group] if results_filter != ObjectType.CONFIG else []


def _bare(config_path: str) -> str:
    return config_path.strip("/").removesuffix(".yaml")


class LayoutSource(NamedConfigs):
    """Source of `parallelism=tp4_pp2_dp4` and every other layout, based on `parallelism/base`;
    `auto` leaves keys to the planner."""

    group = "parallelism"

    @staticmethod
    def scheme() -> str:
        return "layout"

    def accepts(self, name: str) -> bool:
        return name == "auto" or looks_like_layout(name)

    def make(self, name: str) -> tuple[dict[str, Any], dict[str, str | None]]:
        left_open = dict.fromkeys(OPEN) if name == "auto" else {}
        return {"defaults": ["base", "_self_"], "layout": name, **left_open}, {"package": None}

    def names(self) -> list[str]:
        return ["auto", "dp8", "pp4_dp2", "tp2_pp2_dp2", "tp8_pp4_dp8"]


def looks_like_layout(name: str) -> bool:
    """Check whether a name is meant as a layout: parts of letters and a number, at least one of
    them an axis.

    Wrong layouts count too (`tp2_xp2`, `tp0`, `tp2_tp2`): an error inside a config source becomes a
    long traceback, so they compose, and the check after composition refuses them.
    """
    parts = re.findall(r"(?:^|_)([A-Za-z]+)-?\d+(?=_|$)", name)
    return len(parts) == len(name.split("_")) and any(part in DEGREES for part in parts)


class ClusterSource(NamedConfigs):
    """Source of `cluster=h100_32x8`: 32 nodes with 8 GPUs each, of the kind in the file
    `cluster/h100`, which another app may provide.

    Impossible numbers (`h100_0x8`) compose too, and the check after composition refuses them.
    """

    group = "cluster"
    _PATTERN = re.compile(r"(?P<kind>[A-Za-z]\w*)_(?P<nodes>[0-9]{1,12})x(?P<gpus>[0-9]{1,12})")

    @staticmethod
    def scheme() -> str:
        return "cluster"

    def accepts(self, name: str) -> bool:
        # local clusters are one node with all GPUs of this machine, so their names have no numbers
        return self._PATTERN.fullmatch(name) is not None and not name.startswith("local")

    def make(self, name: str) -> tuple[dict[str, Any], dict[str, str | None]]:
        found = self._PATTERN.fullmatch(name)
        assert found is not None
        numbers = {"nodes": int(found["nodes"]), "gpus_per_node": int(found["gpus"])}
        shown = f"{found['kind']}_${{.nodes}}x${{.gpus_per_node}}"
        return {"defaults": [found["kind"], "_self_"], "name": shown, **numbers}, {"package": None}

    def names(self) -> list[str]:
        return ["a100_80gb_32x8", "gb200_18x4", "h100_32x8", "h200_16x8"]


class RecipeSource(NamedConfigs):
    """Source of `recipe=NAME`, from the files of `recipes/`, which is outside the folder of the
    groups."""

    group = "recipe"

    @staticmethod
    def scheme() -> str:
        return "recipe"

    def accepts(self, name: str) -> bool:
        return name in self.names()

    def make(self, name: str) -> tuple[str, dict[str, str | None]]:
        text = (recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8")
        return text, self._get_header_dict(text)

    def names(self) -> list[str]:
        return sorted(file.stem for file in recipes_folder().glob("*.yaml"))
