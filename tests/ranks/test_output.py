"""Output that cannot be written ends no run: a full disk, a pipe that nobody reads, a descriptor
that was closed before the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment
from quick_runs import QUICK, losses

from lightning_3d.ranks.failure import is_lost_peer

SCRIPT = """
import os, sys
from lightning_3d.ranks.output import flush_output, survive_output
survive_output()
survive_output()
print("many words " * 10_000)
print("at once", flush=True)
os.write(1, b"by other means") if sys.argv[1] == "pipe" else None
flush_output()
print("the run goes on", file=open(sys.argv[2], "w"))
print("after")
"""


def run(how: str, shell: str, folder: Path) -> str:
    """Run the script with its output redirected by a shell, and return what it wrote to standard
    error."""
    (folder / "script.py").write_text(SCRIPT)
    words = f"{sys.executable} script.py {how} mark {shell}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", words],
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "mark").read_text() == "the run goes on\n"
    return done.stderr


@pytest.mark.parametrize(
    ("how", "shell"),
    [("disk", "> /dev/full"), ("pipe", "| true"), ("closed", ">&-"), ("all", "> /dev/full 2>&1")],
)
def test_a_run_survives_its_output(how: str, shell: str, tmp_path: Path) -> None:
    said = run(how, shell, tmp_path)
    assert (
        said.count("\n")
        == said.count("cannot write to stdout")
        == (1 if how in ("disk", "pipe") else 0)
    ), said


def test_output_that_can_be_written_is_whole(tmp_path: Path) -> None:
    """Also where another program has made the pipe non-blocking, as some terminals and Node.js
    do."""
    (tmp_path / "script.py").write_text("import os\nos.set_blocking(1, False)\n" + SCRIPT)
    command = [sys.executable, "script.py", "whole", "mark"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "many words " * 10_000 + "\nat once\nafter\n"


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    words = (
        "from lightning_3d.ranks.output import survive_output; survive_output(); print('\\u4e2d')"
    )
    ascii_only = environment() | {"PYTHONIOENCODING": "ascii"}
    assert (
        subprocess.run(
            [sys.executable, "-c", words], env=ascii_only, capture_output=True, check=True
        ).stdout
        == b"\\u4e2d\n"
    )


def test_a_broken_pipe_of_a_rank_is_no_lost_peer() -> None:
    assert not is_lost_peer(BrokenPipeError(32, "Broken pipe"))
    assert is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:534] Broken pipe"))


@pytest.mark.slow
def test_train_survives_its_output(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lightning_3d", "train", *QUICK, f"hydra.run.dir={tmp_path}"]
    with open("/dev/full", "w") as full:
        code = subprocess.run(
            command, env=environment(), stdout=writer, stderr=full, check=False, timeout=240
        ).returncode
    os.close(writer)
    assert code == 0 and len(losses(tmp_path)) == 2
