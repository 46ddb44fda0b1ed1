"""Words of a command line as Hydra's grammar reads them. Imports nothing heavy."""

from __future__ import annotations

import re

_BARE = re.compile(r"[\w/.@%+-]+", re.ASCII)
_STRUCTURED = re.compile(r"[\s'\"\\(){}\[\]$]")


def hydra_value(text: str) -> str:
    """Write a string as a value of a Hydra override, quoted where Hydra's grammar would read
    something else."""
    if _BARE.fullmatch(text):
        return text
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"


def quoted(word: str) -> str:
    """Quote a value with =, such as the path `epoch=0-step=10.ckpt`, which Hydra's grammar does not
    accept as it is.

    Where commas separate the values of a sweep, each value is quoted.
    """
    key, _, value = word.partition("=")
    if "=" not in value or key.startswith("-") or _STRUCTURED.search(value):
        return word
    return f"{key}={','.join(hydra_value(one) if '=' in one else one for one in value.split(','))}"
