"""Write the output of a launcher as YAML, and hand it to the program that submits it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lightning_3d.errors import ConfigError


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such a text (`|`), so that a script stays readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _represent_text)


def as_yaml(*documents: Mapping[str, Any]) -> str:
    """Write one or several documents, with their keys in the given order."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True
    )


def hand_to(command: Sequence[str], text: str) -> int:
    """Run a program with a text as its standard input. Returns 0 if it succeeded, else 1.

    Raises:
        ConfigError: the program is not installed.
    """
    _require(command[0])
    return 1 if subprocess.run(command, input=text, text=True, check=False).returncode else 0


def hand_file_to(command: Sequence[str], text: str, *, suffix: str, package: str) -> int:
    """Run a program with the path of a temporary file as its last argument. Its standard input
    stays free for its questions.

    The file is in the current folder, because the programs resolve relative paths in it from there.

    Args:
        suffix: end of the file's name.
        package: package of pip that installs the program.

    Returns:
        0 if the program succeeded, else 1.

    Raises:
        ConfigError: the program is not installed, or the current folder is not writable.
    """
    _require(command[0], f" with pip install {package}")
    try:
        number, path = tempfile.mkstemp(dir=".", prefix="launch-", suffix=suffix)
    except OSError as error:
        raise ConfigError(
            f"{command[0]} needs a file in the current folder, which cannot be written: {error}."
            " Start this command in another folder."
        ) from error
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        return 1 if subprocess.run([*command, path], check=False).returncode else 0
    finally:
        os.unlink(path)


def _require(program: str, how: str = "") -> None:
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not installed on this machine. Install it{how}, or add --dry to print"
            " what would be submitted."
        )
