"""One way to install an extra, in messages, configurations, examples and pages."""

import re
import subprocess
import tomllib

from command_line import REPOSITORY

from lightning_3d.errors import install

EXTRAS = set(
    tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
READ = ("*.md", "*.py", "*.yaml", "*.ipynb")
OWN_PROJECT = "template/"
"""A project of the user's, which is installed from its own folder."""


def pages() -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-files", *READ], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    names = [name for name in listed if not name.startswith((OWN_PROJECT, "tests/"))]
    return {name: (REPOSITORY / name).read_text("utf-8") for name in names}


def test_an_extra_is_installed_by_the_same_line_everywhere() -> None:
    found = {
        name: re.findall(r"""pip install (?:-\S+ )*([^\s,`|)]*\[[^\s,`|)]*)""", text)
        for name, text in pages().items()
    }
    wrong = {
        (name, words)
        for name, lines in found.items()
        for words in lines
        if name != "lightning_3d/errors.py"
        and not re.match(r"""\\?"lightning-3d\[(\w+)\]\\?"(?![\w\[])""", words)
    }
    assert sum(map(len, found.values())) > 15 and wrong == set()
    assert {
        extra
        for lines in found.values()
        for words in lines
        for extra in re.findall(r"\[(\w+)\]", words)
    } <= EXTRAS


def test_messages_use_the_extras_of_the_project() -> None:
    called = {
        extra for text in pages().values() for extra in re.findall(r"\binstall\('(\w+)'\)", text)
    }
    assert len(called) > 4 and called <= EXTRAS
    assert install("wandb") == 'Install it with pip install "lightning-3d[wandb]"'
