"""Verifies scripts in processes that are all forks of one, which has imported everything: seconds
for each instead of half a minute.

    python verified_here.py KIND...     verifies planted faults, and prints what differs from what they must give
"""  # noqa: E501

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401  imported once, for all
from faulty_scripts import script
from planted_scripts import PLANTED, Planted

from lightning_3d.app.verification import two_runs
from lightning_3d.layout.layout import Layout
from lightning_3d.ranks.role import RANKS, Role
from lightning_3d.strategy.recorded.script import play_role


class Forks:
    """Takes the place of the process that verify starts for a role."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids

    def wait(self) -> int:
        """Wait until all have ended, and return the exit code of the first one that failed."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._pids]
        return next((code for code in codes if code), 0)

    def poll(self) -> int:
        return 0


def forked(run: Callable[[], Any], output: Path) -> int:
    """Fork a process that runs a function, whose result or error gives its exit code."""
    pid = os.fork()
    if pid:
        return pid
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        code = run() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _starting(ranks: int) -> Callable[[Sequence[str], Role], Forks]:
    def start(words: Sequence[str], role: Role) -> Forks:
        role.own.mkdir(parents=True)
        count = ranks if role.name == RANKS else 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])

        def run(rank: int) -> None:
            os.environ.update(role.environment())
            if count > 1:
                os.environ.update(
                    LOCAL_RANK=str(rank),
                    NODE_RANK="0",
                    WORLD_SIZE=str(count),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                )
            play_role()
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")

        return Forks(
            [forked(lambda rank=rank: run(rank), role.own / "output.txt") for rank in range(count)]
        )

    return start


def problem_of(planted: Planted) -> str:
    """Verify a script with a planted fault. Returns what is wrong with what it says; empty for
    nothing."""
    with tempfile.TemporaryDirectory() as folder:
        mine, output = Path(folder, "mine.py"), Path(folder, "output.txt")
        mine.write_text(script(planted.text))
        two_runs._start = _starting(Layout.parse(planted.layout).world_size)  # type: ignore[assignment]
        pid = forked(lambda: two_runs.verify_script([str(mine), planted.layout], 2), output)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = output.read_text()
    first = next((line for line in said.splitlines() if line.startswith("first difference: ")), "")
    is_named = planted.first in first and f"looks like: {planted.looks_like}." in said
    return "" if code == 1 and is_named else f"{planted.kind}: exit code {code}\n{said}"


def main() -> int:
    problems = [
        problem
        for planted in PLANTED
        if planted.kind in sys.argv[1:] and (problem := problem_of(planted))
    ]
    print("\n".join(problems))
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())
