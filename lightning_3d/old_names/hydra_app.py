"""Earlier name of `lightning_3d.cli.train.BeforeRun`. Hydra configurations of runs from earlier versions use it."""

from lightning_3d.cli.train import BeforeRun

__all__ = ["BeforeRun"]
