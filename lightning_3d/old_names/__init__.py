"""Modules under the names that documentation and saved runs of earlier versions use: `lightning_3d.plans`, `lightning_3d.hydra_app`.

`lightning_3d/__init__.py` puts this folder at the end of the package's search path.
"""
