"""`tools/messages.py` lists every message that a user can see."""

import sys
from pathlib import Path

import pytest
from command_line import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

from messages import Message, main, messages

ERRORS = '''"""This module is a docstring, which is no message."""

import argparse
import logging
import warnings

log = logging.getLogger(__name__)
USAGE = """\\
tool [--fast]

Does a thing.
"""
REASONS = {"pp": "is more than the model has blocks."}
"""A string below a constant, which is no message either."""


class SizeError(ValueError):
    """A size that cannot be."""


class DeepError(SizeError):
    """Another one."""


class Missing(DeepError):
    """Its name does not say that it is an error."""


def check(size: int, name: str, sizes: list[int]) -> None:
    if size < 1:
        raise SizeError(
            f"{name} must be at least 1, not {size}."
            " Use 1."
        )
    if size > 8:
        raise Missing(_too_large(size) + f" Of {len(sizes)} sizes, this is the largest.")
    if size == 3:
        refuse("Three is not a power of two.")
    where = "in this block"
    if size == 4:
        raise SizeError(f"{name} {where}")
    raise ValueError("one" if size else f"none of {sizes[0]} is left")


def _too_large(size: int) -> str:
    """A docstring again, with a capital and a period."""
    return f"{size} is more than eight."


def refuse(reason: str) -> None:
    raise SizeError(reason)


def command() -> None:
    parser = argparse.ArgumentParser(description="Check sizes.")
    parser.add_argument("--size", metavar="N", help="the size of a block")
    print("The size is", parser.parse_args().size)
    print("-----")
    warnings.warn(f"{parser} is old.", stacklevel=2)
    log.warning("%s could not be read", "x")
    log.info("read")
    kept = {"key": "a.b.c", "sql": r"\\d+ words of a pattern (a|b)?"}
    kept["why"] = "This sentence is shown by nothing that can be seen here."
'''
YAML = """# A whole run. See the documentation
# for more.
size: 1   # of a block; null:
          # all of them
text: "a # in a word#is no comment"
help:
  header: |
    Trains a model.
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "lightning_3d" / "inner").mkdir(parents=True)
    (tmp_path / "conf").mkdir()
    (tmp_path / "lightning_3d" / "inner" / "check.py").write_text(ERRORS)
    (tmp_path / "conf" / "base.yaml").write_text(YAML)
    return tmp_path


def test_every_message_is_listed_once_with_its_kind(root: Path) -> None:
    found = [(each.kind, each.how, each.text) for each in messages(root, ["lightning_3d"])]
    assert sorted(found) == sorted(
        [
            ("help", "", "tool [--fast]\n\nDoes a thing.\n"),
            ("error", "SizeError", "{name} must be at least 1, not {size}. Use 1."),
            ("error", "Missing", "{…} Of {…} sizes, this is the largest."),
            ("error", "Missing", "{size} is more than eight."),
            ("error", "SizeError", "Three is not a power of two."),
            ("error", "SizeError", "in this block"),
            ("error", "ValueError", "one"),
            ("error", "ValueError", "none of {…} is left"),
            ("help", "ArgumentParser", "Check sizes."),
            ("help", "add_argument", "the size of a block"),
            ("output", "print", "The size is {…}"),
            ("warning", "warn", "{parser} is old."),
            ("warning", "warning", "%s could not be read"),
            ("output", "info", "read"),
            ("text", "", "is more than the model has blocks."),
            ("text", "", "This sentence is shown by nothing that can be seen here."),
        ]
    )


def test_the_place_is_the_line_of_the_text(root: Path) -> None:
    path = "lightning_3d/inner/check.py"
    lines = ERRORS.splitlines()
    for each in messages(root, ["lightning_3d"]):
        assert each.path == path and each.place == f"{path}:{each.line}"
    (first,) = [each for each in messages(root, ["lightning_3d"]) if each.text.endswith("Use 1.")]
    assert "must be at least 1" in lines[first.line - 1]


def test_the_comments_of_the_configuration_are_help(root: Path) -> None:
    assert messages(root, ["conf"]) == [
        Message(
            "conf/base.yaml", 1, "help", "comment", "A whole run. See the documentation for more."
        ),
        Message("conf/base.yaml", 3, "help", "comment", "of a block; null: all of them"),
        Message("conf/base.yaml", 8, "help", "yaml", "Trains a model."),
    ]


def test_a_name_in_braces_is_no_word(root: Path) -> None:
    message = Message("a.py", 1, "error", "E", "{told} has {x.y} of 3. This is {…} two.")
    assert message.words == "{…} has {…} of 3. This is {…} two." and message.longest == 5


def printed(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> list[str]:
    assert main(["--root", str(root), *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_options(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = "lightning_3d/inner/check.py:"
    warned = 1 + next(number for number, line in enumerate(ERRORS.splitlines()) if "is old" in line)
    assert printed(capsys, root, "--kind", "warning", "--grep", "old") == [
        f"{place}{warned}  warning (warn)",
        "    {parser} is old.",
    ]
    assert [
        line
        for line in printed(capsys, root, "--folder", "conf")
        if not line.startswith((" ", "conf/"))
    ] == []
    assert printed(capsys, root, "--folder", "lightning_3d/in") == []
    assert [line for line in printed(capsys, root, "--long", "8") if line[0] == " "] == [
        "    This sentence is shown by nothing that can be seen here.",
    ]
    some = printed(capsys, root, "--random", "3", "--seed", "4", "--markdown")
    assert some[:2] == ["| place | kind | message |", "| --- | --- | --- |"] and len(some) == 5
    assert printed(capsys, root, "--random", "3", "--seed", "4", "--markdown") == some
    assert any(
        printed(capsys, root, "--random", "3", "--seed", str(seed), "--markdown") != some
        for seed in range(5, 9)
    )
    table = printed(
        capsys, root, "--folder", "lightning_3d", "--grep", "Does a thing", "--markdown"
    )
    assert table[2:] == [f"| `{place}8` | help | tool [--fast]<br><br>Does a thing. |"]


@pytest.mark.slow
def test_the_package_is_listed() -> None:
    """Among them one of each kind, however the modules are called."""
    found = messages()
    texts = {
        kind: [each.text for each in found if each.kind == kind]
        for kind in ("error", "warning", "output", "help")
    }
    assert len(texts["error"]) > 500 and len(texts["help"]) > 200
    assert any("parallelism" in text for text in texts["help"]) and any(
        "checkpoint" in text for text in texts["output"]
    )
    places = [(each.path, each.line, each.text) for each in found]
    assert len(set(places)) == len(places), "each once"
