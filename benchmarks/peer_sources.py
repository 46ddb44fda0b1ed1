"""Sources of peers that are not on a package index: fetched at one commit, or taken from a folder.
Nothing of them is kept here."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A public Git repository at one commit.

    Attributes:
        name: also the folder of its package.
    """

    name: str
    url: str
    commit: str


PICOTRON = Source(
    "picotron",
    "https://github.com/huggingface/picotron",
    "59714b1bf25541dbeb6f5a721ed15f6d0768e786",
)
MEGATRON = Source(
    "megatron", "https://github.com/NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
)


def source_folder(source: Source, given: Path | None, scratch: Path) -> Path:
    """Return a folder that contains the package of `source`.

    Args:
        given: a checkout, used as it is, or a Git directory (bare, or the `.git` of a checkout)
            that has the commit. None: the commit is fetched from the public repository.
        scratch: an empty folder for the source if it is not a checkout.

    Raises:
        SystemExit: the source is not there, or cannot be fetched.
    """
    if given is not None and (given / source.name).is_dir():
        return given
    if given is None:
        repository = scratch / "repository"
        _git("init", "--quiet", "--bare", str(repository))
        _git(
            "--git-dir", str(repository), "fetch", "--quiet", "--depth=1", source.url, source.commit
        )
    else:
        repository = given
    checkout = scratch / source.name
    checkout.mkdir()
    _git(
        "--git-dir",
        str(repository),
        "archive",
        "--output",
        str(scratch / "source.tar"),
        source.commit,
    )
    subprocess.run(["tar", "-xf", str(scratch / "source.tar"), "-C", str(checkout)], check=True)
    return checkout


def _git(*arguments: str) -> None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
