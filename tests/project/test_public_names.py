"""The names that scripts import and configurations name stay what they are while the modules behind
them are imported."""

import inspect
import pkgutil
import sys
from importlib import import_module
from typing import Any

import pytest
from starts import in_fresh_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def kind(value: Any) -> str:
    """Name the kind of a public name's value: "class", "function" or, by mistake, "module"."""
    return "class" if inspect.isclass(value) else type(value).__name__


def kinds_of_public_names() -> dict[str, str]:
    package = import_module("lightning_3d")
    return {name: kind(getattr(package, name)) for name in package.__all__ if name != "__version__"}


def kinds_after_all_imports() -> dict[str, str]:
    """Import all modules of a freshly imported package, then name the kinds. For a process of its
    own."""
    for name in [name for name in sys.modules if name.split(".")[0] == "lightning_3d"]:
        del sys.modules[name]
    package = import_module("lightning_3d")
    for module in pkgutil.walk_packages(package.__path__, "lightning_3d."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    return kinds_of_public_names()


def test_importing_modules_changes_no_public_name() -> None:
    """A module with the name of a public function replaces it in the package as soon as the module
    is imported."""
    found = in_fresh_process(kinds_after_all_imports)
    assert found == kinds_of_public_names()
    assert set(found.values()) == {"class", "function"}
