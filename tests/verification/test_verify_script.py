"""`lightning-3d verify SCRIPT`: right scripts are the same as plain Lightning, and each kind of fault is found and named."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import faulty_scripts as scripts
import pytest
from command_line import REPOSITORY, environment

from lightning_3d.cli.verify import split_script
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.role import script_words
from lightning_3d.verification.advice import COUNTED, GRADIENTS, PARTS, READING, ROWS, VALUES, WRITTEN

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Verified:
    """How a verification ended, and the files that it left in its folder."""

    code: int
    output: str
    left: list[str]


def verified(folder: Path, text: str, *words: str, command: tuple[str, ...] = ("-m", "lightning_3d", "verify"), **more: str) -> Verified:
    """Verify a script in an empty folder, with everything that it prints."""
    (folder / "mine.py").write_text(text)
    line = [sys.executable, *command, "mine.py", *words]
    done = subprocess.run(line, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=500, check=False)
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "mine.py")
    return Verified(done.returncode, done.stdout + done.stderr, left)


@pytest.mark.parametrize(
    ("line", "own", "script"),
    [
        (["mine.py", "--rows", "4"], [], ["mine.py", "--rows", "4"]),
        (["--steps", "2", "mine.py", "a"], ["--steps", "2"], ["mine.py", "a"]),
        (["mine.py", "a", "--steps=2", "b"], ["--steps=2"], ["mine.py", "a", "b"]),
        (["mine.py", "--steps", "2", "--", "--steps", "9"], ["--steps", "2"], ["mine.py", "--steps", "9"]),
        (["-m", "project.train", "x"], [], ["-m", "project.train", "x"]),
        (["parallelism=tp2", "data.file=x.py"], ["parallelism=tp2", "data.file=x.py"], []),
        (["--steps", "2", "parallelism=tp2"], ["--steps", "2", "parallelism=tp2"], []),
    ],
)
def test_words_of_a_script(line: list[str], own: list[str], script: list[str]) -> None:
    assert split_script(line) == (own, script)


def test_a_script_is_found_in_its_own_command_line() -> None:
    assert script_words(["python", "-u", "mine.py", "a", "b"], ["mine.py", "a", "b"]) == ["mine.py", "a", "b"]
    assert script_words(["python", "-m", "project.train", "a"], ["/project/train.py", "a"]) == ["-m", "project.train", "a"]
    with pytest.raises(ConfigError, match="needs a script"):
        script_words(["python", "-c", "pass"], ["-c"])


def test_a_right_script_with_random_numbers(tmp_path: Path) -> None:
    found = verified(tmp_path, scripts.script(scripts.RIGHT), "pp2", "--steps", "2", command=(), LIGHTNING_3D_VERIFY="1")
    assert found.code != 0 and "unrecognized" not in found.output
    assert found.left == []


LAYOUTS = ["dp2", "tp2", "tp2_pp2", "pp2_dp2"]
ZERO = '\nmore = {"zero_stage": 3}\n'


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_scripts(tmp_path: Path, layout: str) -> None:
    found = verified(tmp_path, scripts.script(scripts.RIGHT), layout, "--steps", "2")
    assert found.code == 0, found.output
    assert "same: " in found.output and "val_loss" not in found.left and found.left == []


FAULTS = [
    ("penalty", scripts.PENALTY, "pp2", "loss of step 1", PARTS),
    ("sum", scripts.SUM, "pp2", "loss of step 1", ROWS),
    ("clipped", scripts.CLIPPED, "tp2", "weight", WRITTEN),
    ("weights", scripts.WEIGHTS, "tp2", "weight", WRITTEN),
    ("buffer", scripts.BUFFER, "dp2", "buffer seen of step 1", COUNTED),
    ("logged", scripts.LOGGED, "pp2", "logged value spread of step 1", VALUES),
    ("data", scripts.DATA, "dp2", "several data-parallel ranks read the same rows", READING),
]
"""Kind, script, layout, what is named as the first difference, and what it looks like."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "text", "layout", "first", "looks_like"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_faults_are_named(tmp_path: Path, kind: str, text: str, layout: str, first: str, looks_like: str) -> None:
    found = verified(tmp_path, scripts.script(text), layout, "--steps", "2")
    assert found.code == 1, found.output
    named = next(line for line in found.output.splitlines() if line.startswith("first difference: "))
    assert first in named and f"looks like: {looks_like}" in found.output
    assert found.left == []
