"""The programs that take what the launchers write."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from lightning_3d.errors import ConfigError


def hand_to(command: Sequence[str], text: str) -> int:
    """Run a program with a text as its standard input and return its exit code.

    Raises:
        ConfigError: it is not installed.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed on this machine. Add --dry to print what it would be given.")
    return 1 if subprocess.run(command, input=text, text=True, check=False).returncode else 0
