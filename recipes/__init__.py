"""Whole runs, one file each: `recipe=NAME`. Installed as `lightning_3d.recipes`."""
