"""Adds the config groups of lightning_3d to the search path of every Hydra app on this machine.

They come after the app's own, which therefore win where both have a file of the same name.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_3d.config_files import conf_folder


class Lightning3DSearchPath(SearchPathPlugin):
    """Groups as files, layouts by name, recipes."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="lightning_3d", path=f"file://{conf_folder()}")
        search_path.append(provider="lightning_3d-layouts", path="layout://")
        search_path.append(provider="lightning_3d-recipes", path="recipe://")
