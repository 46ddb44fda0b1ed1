"""The version of this package, importable from anywhere below `lightning_3d` without a cycle."""

__version__ = "0.1.0"
