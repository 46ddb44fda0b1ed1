"""Search path that offers the config groups of lightning_3d to every Hydra app on this machine.

They come after the app's own groups, so the app's file is used if both have a file of the same
name.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_3d.app.config.files import conf_folder


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
