"""Lists the packages, which pyproject.toml cannot: those found, and the two mapped folders. All else is there."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["lightning_3d", "lightning_3d.*", "hydra_plugins.*"]),
        "lightning_3d.conf",
        "lightning_3d.recipes",
    ]
)
