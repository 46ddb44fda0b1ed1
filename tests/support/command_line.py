"""Runs command lines of lightning-3d in one process, one after the other, and says how each ended.

A fresh interpreter costs a second, and importing torch and its friends five to nine; so one process
runs many command lines, in the way a sweep does, and where it does not matter when torch is
imported, that process is a warm one. What each prints is captured at the file descriptors, so that
the output of ranks is in it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

REPOSITORY = Path(__file__).parents[2]
OUTSIDE = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
)


@dataclass(frozen=True)
class Result:
    """How a command line ended.

    Attributes:
        output: standard output and error, in order.
        left: files and folders in the working directory afterwards.
        torch: whether torch had been imported when it ended.
    """

    code: int
    output: str
    seconds: float
    left: list[str]
    torch: bool


def environment(**more: str) -> dict[str, str]:
    """The environment of a fresh process: this one's, without a launcher's variables."""
    mine = {name: value for name, value in os.environ.items() if name not in OUTSIDE}
    paths = [
        str(REPOSITORY),
        str(REPOSITORY / "tests" / "support"),
        *filter(None, [mine.get("PYTHONPATH")]),
    ]
    return (
        mine
        | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        | more
    )


def run_commands(
    lines: list[list[str]], timeout: float = 240, warm: bool = False, **more: str
) -> list[Result]:
    """Run `lightning-3d ARGUMENTS` for each list of arguments, each in an empty working directory.

    Args:
        timeout: seconds for all.
        warm: in a process that has imported torch and its friends already, see
            `starts.in_fresh_process`.
        **more: variables of the environment.
    """
    if warm:
        from starts import in_fresh_process

        return in_fresh_process(run_here, lines, more, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.json"
        command = [sys.executable, __file__, str(answers), json.dumps(lines)]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(**more),
            timeout=timeout,
            check=False,
            capture_output=True,
            text=True,
        )
        if not answers.is_file():
            raise AssertionError(
                f"the process that runs command lines ended with {done.returncode}:\n{done.stderr}"
            )
        return [Result(**answer) for answer in json.loads(answers.read_text())]


def assert_refused(result: Result, says: list[str]) -> None:
    """Exit code 2, and one message without a traceback that contains all of these words."""
    assert result.code == 2, result.output
    messages = [
        line
        for line in result.output.splitlines()
        if line.startswith(("lightning_3d: ", "lightning-3d: "))
    ]
    assert len(messages) == 1, result.output
    assert "Traceback" not in result.output, result.output
    assert [words for words in says if words not in messages[0]] == [], messages[0]
    assert result.left == [], "nothing may be left behind"


def _main() -> None:
    answers, lines = Path(sys.argv[1]), json.loads(sys.argv[2])
    results = [asdict(_run(arguments)) for arguments in lines]
    answers.write_text(json.dumps(results))


def run_here(
    lines: list[list[str]], more: Mapping[str, str] = MappingProxyType({})
) -> list[Result]:
    """In this process, whose environment it changes."""
    os.environ.update(environment(**more))
    return [_run(arguments) for arguments in lines]


def _run(arguments: list[str]) -> Result:
    from lightning_3d.app.cli import main

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as captured:
        kept = os.dup(1), os.dup(2)
        sys.stdout.flush()
        os.dup2(captured.fileno(), 1)
        os.dup2(captured.fileno(), 2)
        os.chdir(folder)
        started = time.monotonic()
        try:
            code = main(arguments)
        finally:
            seconds = time.monotonic() - started
            sys.stdout.flush()
            sys.stderr.flush()
            os.chdir("/")
            for descriptor, number in zip(kept, (1, 2), strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
        captured.seek(0)
        left = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
        return Result(
            code, captured.read().decode(errors="replace"), seconds, left, "torch" in sys.modules
        )


if __name__ == "__main__":
    _main()
