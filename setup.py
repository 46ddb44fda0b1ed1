"""Lists the packages, which pyproject.toml cannot: those found, and the two mapped folders. All
else is there."""

from setuptools import find_namespace_packages, setup
from setuptools.command.editable_wheel import editable_wheel

FOUND = find_namespace_packages(include=["lightning_3d", "lightning_3d.*", "hydra_plugins.*"])


class Editable(editable_wheel):
    """An editable install puts the checkout on the path, where the two folders are found beside the
    package.

    With folders mapped to names setuptools would map all names instead, and Hydra finds plugins by
    walking the folders of the path.
    """

    def finalize_options(self) -> None:
        self.distribution.packages, self.distribution.package_dir = FOUND, {"": "."}
        super().finalize_options()


setup(
    packages=[*FOUND, "lightning_3d.conf", "lightning_3d.recipes"],
    cmdclass={"editable_wheel": Editable},
)
