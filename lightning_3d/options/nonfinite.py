"""The option `nonfinite`: the reaction to a loss or gradient norm that is not finite. Imports no
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_3d.errors import ConfigError, did_you_mean, listed

if TYPE_CHECKING:
    pass


STOP, SKIP, IGNORE = "stop", "skip", "ignore"
NONFINITE = (STOP, SKIP, IGNORE)


def check_nonfinite(option: str, value: object) -> None:
    """Refuse anything but `NONFINITE`.

    Raises:
        ConfigError: with the option and its value.
    """
    if value not in NONFINITE:
        raise ConfigError(
            f"{option} must be {listed(NONFINITE, last='or')}; got"
            f" {value!r}.{did_you_mean(str(value), NONFINITE)}"
        )
