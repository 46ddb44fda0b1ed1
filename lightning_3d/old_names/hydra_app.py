"""`lightning_3d.hydra_app.BeforeRun` stands in the Hydra configurations of runs that were made before `lightning_3d.cli.train`."""

from lightning_3d.cli.train import BeforeRun

__all__ = ["BeforeRun"]
