"""What a pattern matches in a backend of fsspec.

`glob` of fsspec takes a folder that cannot be listed for an empty one, so that files would be
missed in silence. It also lists folders that do not match. Pure Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import translate
from functools import cache
from typing import Any

ANY_FOLDERS = "**"
SIGNS = re.compile(r"[*?\[]")
"""The signs of a pattern."""


def matches(system: Any, pattern: str) -> dict[str, bool]:
    """List what matches a path in a backend; True for folders.

    As in `glob.glob`, `**` stands for any folders, and a sign matches no dot at the beginning of a
    name. One request for each folder that matches the beginning of the pattern.

    Raises:
        Exception: a folder cannot be listed, of the class that the backend chooses. One that does
            not exist is empty.
    """
    parts = pattern.split("/")
    first = next(place for place, part in enumerate(parts) if SIGNS.search(part))
    return dict(
        _below(_Folders(system), "".join(f"{part}/" for part in parts[:first]), parts[first:])
    )


class _Folders:
    """Folders of a backend, each of which is listed once."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self._listed: dict[str, dict[str, bool]] = {}

    def entries(self, folder: str) -> dict[str, bool]:
        """Return the names in a folder; True for folders. The folder ends with a slash, unless it
        is the root of a store without one."""
        if folder not in self._listed:
            try:
                listed = self._system.ls(folder.rstrip("/") or folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                listed = []
            found = {info["name"].rstrip("/"): info["type"] == "directory" for info in listed}
            self._listed[folder] = {
                path.rpartition("/")[2]: kind
                for path, kind in found.items()
                if path.strip("/") != folder.strip("/")
            }
        return self._listed[folder]


def _below(folders: _Folders, folder: str, parts: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield what the parts of a pattern match below a folder."""
    part, rest = parts[0], parts[1:]
    if rest and SIGNS.search(part) is None:  # its folder may be one that may not be listed
        yield from _below(folders, f"{folder}{part}/", rest)
        return
    if part == ANY_FOLDERS and rest:
        yield from _below(folders, folder, rest)
    for name, is_folder in folders.entries(folder).items():
        if _fits(name, part):
            path = f"{folder}{name}"
            if part == ANY_FOLDERS and is_folder:
                yield from _below(folders, f"{path}/", parts)
            if not rest:
                yield path, is_folder
            elif part != ANY_FOLDERS and is_folder:
                yield from _below(folders, f"{path}/", rest)


def _fits(name: str, part: str) -> bool:
    hidden = name.startswith(".") and not part.startswith(".") and SIGNS.search(part) is not None
    return not hidden and _expression(part).match(name) is not None


@cache
def _expression(part: str) -> re.Pattern[str]:
    return re.compile(translate(part))
