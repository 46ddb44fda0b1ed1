"""Hand the output of a launcher to the program that submits it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from lightning_3d.errors import ConfigError


def hand_to(command: Sequence[str], text: str) -> int:
    """Run a program with a text as its standard input. Returns 0 if it succeeded, else 1.

    Raises:
        ConfigError: the program is not installed.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed on this machine. Install it, or add --dry to print what would be submitted.")
    return 1 if subprocess.run(command, input=text, text=True, check=False).returncode else 0
