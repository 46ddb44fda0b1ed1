"""Packages that the options of the group `logger` need. Imports none of them, nor torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.app.runs.wandb_access import require_access
from lightning_3d.errors import ConfigError, install


@dataclass(frozen=True)
class _Package:
    """What a logger needs.

    Attributes:
        name: name of the package, for the message.
        extra: extra of this package that installs it.
        modules: modules of which one must exist.
    """

    name: str
    extra: str
    modules: tuple[str, ...]


_PACKAGES = {
    "AimLogger": _Package("aim", "aim", ("aim",)),
    "CometLogger": _Package("comet-ml", "comet", ("comet_ml",)),
    "MLFlowLogger": _Package("mlflow", "mlflow", ("mlflow",)),
    "TensorBoardLogger": _Package("tensorboard", "tensorboard", ("tensorboard", "tensorboardX")),
}
"""By the name of the class. `wandb_access` checks Weights & Biases, which also needs a key."""

TRACKERS = ("AimLogger", "CometLogger", "MLFlowLogger")
"""Loggers that keep the configuration of a run next to its numbers."""


def require_loggers(loggers: Mapping[str, Any] | None) -> None:
    """Refuse a logger of the group `logger` whose package is not installed, or that has no access
    to Weights & Biases.

    Raises:
        ConfigError: with the command that installs the package.
    """
    for name, entry in (loggers or {}).items():
        package = _PACKAGES.get(str((entry or {}).get("_target_")).rpartition(".")[2])
        if package is not None and not any(map(_exists, package.modules)):
            raise ConfigError(
                f"The logger {name} needs the package {package.name}. {install(package.extra)}, or"
                " use another logger."
            )
    require_access(loggers)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a placeholder in sys.modules without a spec
        return False
