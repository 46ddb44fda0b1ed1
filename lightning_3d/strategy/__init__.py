"""`Lightning3DStrategy`, which builds the model of a rank from the packages below and runs its
steps."""

from lightning_3d.strategy.lightning_cli import lightning_3d
from lightning_3d.strategy.recorded.script import play_role
from lightning_3d.strategy.strategy import Lightning3DStrategy

__all__ = ["Lightning3DStrategy", "lightning_3d"]

play_role()
