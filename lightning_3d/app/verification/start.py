"""Run a user's script as `python` does, with its Trainers changed and recorded.

`python -m lightning_3d.app.verification.start mine.py ARGUMENTS`, or `-m MODULE` in the place of
the script.
"""

from __future__ import annotations

import os
import runpy
import sys

import lightning_3d.strategy  # noqa: F401  it changes and records Trainers, if this process has a role
from lightning_3d.errors import Lightning3DError


def main() -> None:
    try:
        _run(sys.argv[1:])
    except Lightning3DError as error:
        if sys.excepthook is not sys.__excepthook__:  # ranks that are connected say it once
            raise
        print(f"lightning_3d: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
