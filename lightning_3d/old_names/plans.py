"""`from lightning_3d.plans import Cut`: today `from lightning_3d import Cut`."""

from lightning_3d.models.parallel_plan import Cut

__all__ = ["Cut"]
