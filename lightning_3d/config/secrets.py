"""Keys and passwords have no place in a configuration, which a run saves and sends to its loggers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_3d.errors import ConfigError

_SECRET_KEY = re.compile(
    r"(?i)(.*(api_?key|access_?key|private_?key|secret|password|passwd|credentials?).*|(hf|hub|api|auth|access|bearer)?_?token)"
)
_URL_WITH_PASSWORD = re.compile(r"(?i)\b[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@")
_GROUPS_WITH_TOKENS = ("model", "data")
"""Groups in which a token is a word of a vocabulary."""


def check_secrets(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that has a key, a token or a password in it. The message does not repeat it.

    Raises:
        ConfigError: with what to do instead.
    """
    for key, value in _texts(config):
        name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
        if _URL_WITH_PASSWORD.search(value):
            raise ConfigError(
                f"{key} has a password in its URL. A run saves its configuration, so the password would be readable in its folder. Leave it"
                " out of the URL, and give it to the library that opens the URL by an environment variable or a file of its own."
            )
        if value and _SECRET_KEY.fullmatch(name) and key.partition(".")[0] not in _GROUPS_WITH_TOKENS:
            raise ConfigError(
                f"{key} looks like a secret. A run saves its configuration, so it would be readable in its folder. Leave it out, and set"
                " the environment variable that the library reads, such as COMET_API_KEY, WANDB_API_KEY or HF_TOKEN."
            )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) for every text in a configuration."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _texts(entry, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _texts(entry, f"{key}[{index}]")
    elif isinstance(value, str):
        yield key, value
