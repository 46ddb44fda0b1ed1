"""Config sources: `layout://` makes a configuration of every layout name, `cluster://` of every number of nodes,
`recipe://` shows the recipes as group `recipe`.

Hydra calls the methods with keywords, so parameters keep the names of its base class.
"""

from __future__ import annotations

import re

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from lightning_3d.config_files import recipes_folder
from lightning_3d.layout import DEGREES

LAYOUT_GROUP = "parallelism"
CLUSTER_GROUP = "cluster"
RECIPE_GROUP = "recipe"
EXAMPLES = ["dp8", "pp4_dp2", "tp2_pp2_dp2", "tp8_pp4_dp8"]
CLUSTER_EXAMPLES = ["a100_80gb_32x8", "gb200_18x4", "h100_32x8", "h200_16x8"]


def looks_like_layout(name: str) -> bool:
    """Whether a name is meant as a layout: parts of letters and a number, at least one of them an axis.

    Wrong ones too (`tp2_xp2`, `tp0`, `tp2_tp2`): an error inside a config source becomes a long traceback, so they
    compose, and the check after composition refuses them. Other names are left to the files of other sources.
    """
    parts = re.findall(r"(?:^|_)([A-Za-z]+)-?\d+(?=_|$)", name)
    return len(parts) == len(name.split("_")) and any(part in DEGREES for part in parts)


def _bare(config_path: str) -> str:
    return config_path.strip("/").removesuffix(".yaml")


class LayoutSource(ConfigSource):
    """`parallelism=tp4_pp2_dp4` and every other layout, on top of `parallelism/base`."""

    @staticmethod
    def scheme() -> str:
        return "layout"

    def load_config(self, config_path: str) -> ConfigResult:
        name = self._layout(config_path)
        if name is None:
            raise ConfigLoadError(f"{config_path} is no layout name")
        config = OmegaConf.create({"defaults": ["base", "_self_"], "layout": name})
        return ConfigResult(provider=self.provider, path=f"{self.scheme()}://{self.path}", config=config, header={"package": None})

    def _layout(self, config_path: str) -> str | None:
        group, _, name = _bare(config_path).rpartition("/")
        return name if group == LAYOUT_GROUP and looks_like_layout(name) else None

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return _bare(config_path) in ("", LAYOUT_GROUP)

    def is_config(self, config_path: str) -> bool:
        return self._layout(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if _bare(config_path) == LAYOUT_GROUP:
            return EXAMPLES if results_filter != ObjectType.GROUP else []
        return [LAYOUT_GROUP] if results_filter != ObjectType.CONFIG else []


class ClusterSource(ConfigSource):
    """`cluster=h100_32x8`: 32 nodes with 8 GPUs each, of the kind in the file `cluster/h100`, which may be another app's.

    Numbers that no cluster has (`h100_0x8`) compose too, and the check after composition refuses them.
    """

    @staticmethod
    def scheme() -> str:
        return "cluster"

    def load_config(self, config_path: str) -> ConfigResult:
        found = self._counted(config_path)
        if found is None:
            raise ConfigLoadError(f"{config_path} is no kind of node with numbers")
        numbers = {"nodes": int(found["nodes"]), "gpus_per_node": int(found["gpus"])}
        name = f"{found['kind']}_${{.nodes}}x${{.gpus_per_node}}"
        config = OmegaConf.create({"defaults": [found["kind"], "_self_"], "name": name, **numbers})
        return ConfigResult(provider=self.provider, path=f"{self.scheme()}://{self.path}", config=config, header={"package": None})

    def _counted(self, config_path: str) -> re.Match[str] | None:
        group, _, name = _bare(config_path).rpartition("/")
        found = re.fullmatch(r"(?P<kind>[A-Za-z]\w*)_(?P<nodes>[0-9]{1,12})x(?P<gpus>[0-9]{1,12})", name)
        # This machine is one node, of as many GPUs as there are.
        return found if group == CLUSTER_GROUP and found and not found["kind"].startswith("local") else None

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return _bare(config_path) in ("", CLUSTER_GROUP)

    def is_config(self, config_path: str) -> bool:
        return self._counted(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if _bare(config_path) == CLUSTER_GROUP:
            return CLUSTER_EXAMPLES if results_filter != ObjectType.GROUP else []
        return [CLUSTER_GROUP] if results_filter != ObjectType.CONFIG else []


class RecipeSource(ConfigSource):
    """`recipe=NAME` from the files of `recipes/`, which lie outside the folder of the groups."""

    @staticmethod
    def scheme() -> str:
        return "recipe"

    def load_config(self, config_path: str) -> ConfigResult:
        name = self._recipe(config_path)
        if name is None:
            raise ConfigLoadError(f"{config_path} is no recipe")
        text = (recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8")
        header = self._get_header_dict(text)
        return ConfigResult(provider=self.provider, path=f"{self.scheme()}://{self.path}", config=OmegaConf.create(text), header=header)

    def _recipe(self, config_path: str) -> str | None:
        group, _, name = _bare(config_path).rpartition("/")
        return name if group == RECIPE_GROUP and name in _recipes() else None

    def available(self) -> bool:
        return recipes_folder().is_dir()

    def is_group(self, config_path: str) -> bool:
        return _bare(config_path) in ("", RECIPE_GROUP)

    def is_config(self, config_path: str) -> bool:
        return self._recipe(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if _bare(config_path) == RECIPE_GROUP:
            return _recipes() if results_filter != ObjectType.GROUP else []
        return [RECIPE_GROUP] if results_filter != ObjectType.CONFIG else []


def _recipes() -> list[str]:
    return sorted(file.stem for file in recipes_folder().glob("*.yaml"))
