"""The option `self_check`. Pure: no torch."""

from __future__ import annotations

from lightning_3d.errors import ConfigError, did_you_mean, listed

MODES = ("auto", "always", "never")


def check_mode(mode: str) -> str:
    """Return `mode` if it is one of `MODES`.

    Raises:
        ConfigError: an unknown mode.
    """
    if mode not in MODES:
        raise ConfigError(
            f"self_check must be {listed(MODES, last='or')}; got"
            f' "{mode}".{did_you_mean(str(mode), MODES)}'
        )
    return mode
