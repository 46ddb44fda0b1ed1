"""The classes that Hydra finds here; they live in `lightning_3d.app.config`."""

from lightning_3d.app.config.search_path import Lightning3DSearchPath
from lightning_3d.app.config.sources import ClusterSource, LayoutSource, RecipeSource

__all__ = ["ClusterSource", "LayoutSource", "Lightning3DSearchPath", "RecipeSource"]
