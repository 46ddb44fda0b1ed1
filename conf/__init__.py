"""The Hydra config groups of lightning_3d. Installed as `lightning_3d.conf`."""
