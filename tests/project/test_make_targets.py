"""Each default test is run by exactly one of `make test` and `make test-slow`, and continuous
integration runs both."""

import itertools
import re
import shlex
import subprocess
import tomllib

from command_line import REPOSITORY

MARKS = ("slow", "full", "faults", "cuda", "gpu")


def expression(target: str) -> str:
    """The marks that a target of the Makefile selects."""
    commands = subprocess.run(
        ["make", "--dry-run", target], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout
    words = shlex.split(next(line for line in commands.splitlines() if "-m pytest" in line))
    return words[words.index("-m", words.index("pytest")) + 1]


def selected(marks: str) -> set[tuple[bool, ...]]:
    """Which combinations of marks a test may have to be selected."""
    every = itertools.product([False, True], repeat=len(MARKS))
    return {values for values in every if eval(marks, {}, dict(zip(MARKS, values, strict=True)))}


def test_every_default_test_is_in_one_of_both() -> None:
    options = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"][
        "ini_options"
    ]["addopts"]
    words = shlex.split(options)
    quick, slow = selected(expression("test")), selected(expression("test-slow"))
    assert quick and slow and not quick & slow
    assert quick | slow == selected(words[words.index("-m") + 1])


def test_continuous_integration_runs_both() -> None:
    lines = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert {"make test", "make test-slow"} <= {re.sub(r"\s+", " ", line.strip()) for line in lines}
