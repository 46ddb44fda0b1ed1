"""Adds the config groups of lightning_3d to the search path of every Hydra app on this machine.

They come after the app's own, which therefore win where both have a file of the same name.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_3d.config.files import conf_folder


class Lightning3DSearchPath(SearchPathPlugin):
    """Groups as files, layouts and clusters by name, recipes. Found by Hydra and registered by hand, it adds them once."""

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
