"""The classes that Hydra finds here; they live in `lightning_3d.app.config`."""

from lightning_3d.app.config.compose import (
    ClusterSource,
    LayoutSource,
    Lightning3DSearchPath,
    RecipeSource,
)

__all__ = ["ClusterSource", "LayoutSource", "Lightning3DSearchPath", "RecipeSource"]
