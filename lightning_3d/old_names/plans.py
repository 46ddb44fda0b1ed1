"""Earlier name of `lightning_3d.Cut`: `from lightning_3d.plans import Cut`."""

from lightning_3d.models.parallel_plan import Cut

__all__ = ["Cut"]
