"""Run the tests that are marked `full` in shards that can be interrupted, and sum them up: `make
test-full`.

    make test-full                 all shards, one after another
    make test-full SHARD=3/12      the third of twelve shards
    make test-full AGAIN=1         also what was run before; AGAIN=failed: what has failed
    make test-full ARGS="-k zero"  with options of pytest
    python tools/test_full.py --list   the shards, with the time that they took when it is known

The result of each test is kept in .test-full/ as soon as it is known, in a folder for the state of
the source code: its commit, and a hash of what was changed since. A test that has a result there is
not run again. So an interrupted shard continues where it stopped, and results of several machines
can be put into one folder. A shard is a run of neighbouring tests, because neighbours share
references and ranks; each takes about the same time, as far as it was measured before on this
machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHARDS = 12
FOLDER = ".test-full"
MARK = "full"
UNKNOWN_SECONDS = 5.0
"""What a test is taken to need before any was measured."""
OUTCOMES = ("passed", "failed", "skipped")

_STATE_VARIABLE = "TEST_FULL_STATE"
_USAGE_ERROR, _INTERRUPTED = 2, 130
_PATIENCE_SECONDS = 60.0


class Refused(Exception):
    """What the user can repair, in one line."""


# As a plugin of pytest, in the process that runs a shard


@dataclass(frozen=True)
class Result:
    """How a test ended.

    Attributes:
        test: its node id.
        outcome: one of OUTCOMES.
        seconds: of setup, call and teardown.
        text: why it failed or was skipped.
    """

    test: str
    outcome: str
    seconds: float
    text: str = ""


class Recorder:
    """Writes a line when a test begins and one when it ends, so that a test that kills the process
    is known by name.

    Args:
        wanted: node ids of the tests to run; None: all that are marked, which are written down and
            not run.
        out: a file that lines are appended to.
    """

    def __init__(self, wanted: list[str] | None, out: Path) -> None:
        self._wanted = set(wanted) if wanted is not None else None
        self._out = out
        self._seconds: Counter[str] = Counter()
        self._outcomes: dict[str, tuple[str, str]] = {}

    def _write(self, line: dict[str, Any]) -> None:
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self._wanted is None:
            return
        others = [item for item in items if item.nodeid not in self._wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.nodeid in self._wanted]

    def pytest_collection_finish(self, session: Any) -> None:
        if self._wanted is None:
            for item in session.items:
                self._write({"test": item.nodeid})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"begun": nodeid})

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] += report.duration
        before = self._outcomes.get(report.nodeid, ("passed", ""))
        if report.outcome != "passed" and before[0] != "failed":
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._outcomes[report.nodeid] = (report.outcome, why[-4000:])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, text = self._outcomes.get(nodeid, ("passed", ""))
        self._write(asdict(Result(nodeid, outcome, round(self._seconds[nodeid], 3), text)))


def pytest_configure(config: Any) -> None:
    """Start recording: `-p test_full`, in a process that `_pytest` started."""
    state = json.loads(Path(os.environ[_STATE_VARIABLE]).read_text("utf-8"))
    config.pluginmanager.register(
        Recorder(state["wanted"], Path(state["out"])), "test_full_recorder"
    )


def _pytest(
    root: Path,
    arguments: Sequence[str],
    wanted: list[str] | None,
    out: Path,
    *,
    quiet: bool = False,
) -> int:
    """Run pytest with the recorder and return its exit code, negative after a signal. An
    interruption is passed on to it.

    Raises:
        KeyboardInterrupt: after pytest has ended.
    """
    # a file, because thousands of node ids are too long for a command line or a variable
    state = out.with_suffix(".state")
    state.write_text(json.dumps({"wanted": wanted, "out": str(out)}), "utf-8")
    paths = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {_STATE_VARIABLE: str(state), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-p", "test_full", "-m", MARK, *arguments]
    streams: dict[str, Any] = (
        {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
    )
    # In a process group of its own: a Ctrl-C in a terminal would otherwise reach it twice, and a
    # second one skips the teardown of tests.
    process = subprocess.Popen(
        command, cwd=root, env=variables, stdin=subprocess.DEVNULL, process_group=0, **streams
    )
    try:
        said, _ = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    finally:
        state.unlink(missing_ok=True)
    if quiet and process.returncode not in (0, 5):
        sys.stdout.write(said.decode(errors="replace"))
    return process.returncode


# The folder of results


def version(root: Path) -> str:
    """The commit, and a hash of what was changed since: the name of the folder of results.

    Raises:
        Refused: not in a checkout of git.
    """
    commit = _git(root, "rev-parse", "HEAD").decode().strip()[:12]
    changes = hashlib.sha256(_git(root, "diff", "--binary", "HEAD"))
    others = [
        name
        for name in _git(root, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0")
        if name
    ]
    for name in others:
        changes.update(name + b"\0" + (root / os.fsdecode(name)).read_bytes())
    clean = not others and not _git(root, "diff", "--name-only", "HEAD")
    return commit if clean else f"{commit}-{changes.hexdigest()[:8]}"


def _git(root: Path, *words: str) -> bytes:
    try:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(
            f"{root} is not a checkout of git with a commit: results are kept for each commit."
        ) from error


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of results; the last one may have been cut off by the end of its
    process."""
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


class Results:
    """What is known of the tests of one version.

    Args:
        folder: FOLDER / VERSION; made when it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / ".gitignore").write_text("*\n")

    def file(self, shard: Shard) -> Path:
        return self.folder / f"{shard.number}-of-{shard.of}.jsonl"

    def read(self) -> dict[str, Result]:
        """The results by node id, over all shards."""
        lines = (line for file in sorted(self.folder.glob("*.jsonl")) for line in _lines(file))
        return {line["test"]: Result(**line) for line in lines if "outcome" in line}

    def forget(self, tests: Iterable[str]) -> None:
        """Remove the results of these tests, so that they are run again."""
        gone = set(tests)
        for file in self.folder.glob("*.jsonl"):
            kept = [
                line for line in _lines(file) if line.get("test", line.get("begun")) not in gone
            ]
            file.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")

    def unfinished(self, shard: Shard) -> list[str]:
        """Tests of a shard that have begun and have no result."""
        done = self.read()
        return [
            line["begun"]
            for line in _lines(self.file(shard))
            if "begun" in line and line["begun"] not in done
        ]


# Shards


@dataclass(frozen=True)
class Shard:
    """Shard `number` of `of`, counted from 1, and its tests."""

    number: int
    of: int
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.number}/{self.of}"


def _short(test: str) -> str:
    """The node id without folders: the time of a test is known after its file has moved."""
    path, _, name = test.partition("::")
    return f"{Path(path).name}::{name}"


def weights(tests: Sequence[str], seconds: dict[str, float]) -> list[float]:
    """Expected seconds of each test: those measured, else the mean of its file, else of all
    files."""
    of_file: dict[str, list[float]] = {}
    for short, value in seconds.items():
        of_file.setdefault(short.partition("::")[0], []).append(value)
    everywhere = sum(seconds.values()) / len(seconds) if seconds else UNKNOWN_SECONDS
    means = {file: sum(values) / len(values) for file, values in of_file.items()}
    return [
        seconds.get(short, means.get(short.partition("::")[0], everywhere))
        for short in map(_short, tests)
    ]


def shards(tests: Sequence[str], count: int, seconds: dict[str, float]) -> list[Shard]:
    """Split the tests, in their order, into parts of about the same time. Each test is in exactly
    one."""
    expected = [max(value, 1e-3) for value in weights(tests, seconds)]
    parts: list[list[str]] = [[] for _ in range(count)]
    total, before = sum(expected), 0.0
    for test, value in zip(tests, expected, strict=True):
        parts[min(count - 1, int((before + value / 2) / total * count))].append(test)
        before += value
    return [Shard(number, count, tuple(part)) for number, part in enumerate(parts, 1)]


def plan(
    root: Path, results: Results, count: int, arguments: Sequence[str], durations: Path
) -> list[Shard]:
    """The shards of this version: the same at every call, also after more tests were measured.

    Raises:
        Refused: the tests cannot be collected.
    """
    key = f"{count}-{hashlib.sha256(repr(tuple(arguments)).encode()).hexdigest()[:8]}"
    kept = results.folder / f"plan-{key}.json"
    if kept.is_file():
        return [
            Shard(number, count, tuple(part))
            for number, part in enumerate(json.loads(kept.read_text("utf-8")), 1)
        ]
    # two processes may begin two shards at the same time
    listed = results.folder / f"collected-{key}-{os.getpid()}"
    code = _pytest(root, ["--collect-only", "-q", *arguments], None, listed, quiet=True)
    tests = [line["test"] for line in _lines(listed)]
    listed.unlink(missing_ok=True)
    if code not in (0, 5):
        raise Refused(f"pytest cannot collect the tests (exit code {code}).")
    if not tests:
        raise Refused(
            "No test is marked"
            f" {MARK!r}{' and selected by ' + ' '.join(arguments) if arguments else ''}."
        )
    seconds = json.loads(durations.read_text("utf-8")) if durations.is_file() else {}
    made = shards(tests, count, seconds)
    written = kept.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps([shard.tests for shard in made]), "utf-8")
    written.replace(kept)
    return made


def run_shard(root: Path, shard: Shard, results: Results, arguments: Sequence[str]) -> None:
    """Run the tests of a shard that have no result. A test that ends the process of pytest has
    failed, and the rest is run without it.

    Raises:
        Refused: pytest ended without running a test.
        KeyboardInterrupt: results until then are kept.
    """
    for test in results.unfinished(shard):
        results.forget([test])  # it was interrupted
    while pending := [test for test in shard.tests if test not in (done := results.read())]:
        count = f"{len(shard.tests)} test{'s' * (len(shard.tests) != 1)}"
        before = f", {len(shard.tests) - len(pending)} of them done before" if done else ""
        print(f"shard {shard.name}: {count}{before}", flush=True)
        files = dict.fromkeys(test.partition("::")[0] for test in pending)
        code = _pytest(root, [*arguments, *files], pending, results.file(shard))
        if code in (0, 1, 5):
            return  # with -x in the arguments, some may be left
        killed = results.unfinished(shard)
        if not killed:
            raise Refused(
                f"pytest ended with exit code {code} before it ran a test of shard {shard.name}."
            )
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        with results.file(shard).open("a", encoding="utf-8") as file:
            for test in killed:
                file.write(
                    json.dumps(
                        asdict(
                            Result(
                                test, "failed", 0.0, f"The process of the test ended with {how}."
                            )
                        )
                    )
                    + "\n"
                )


def remember(results: Results, durations: Path) -> None:
    """Keep how long the tests took, for the shards of later versions."""
    known = json.loads(durations.read_text("utf-8")) if durations.is_file() else {}
    known |= {
        _short(result.test): result.seconds
        for result in results.read().values()
        if result.outcome != "skipped"
    }
    durations.write_text(json.dumps(known, indent=0, sort_keys=True), "utf-8")


# What is printed


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def summary(made: Sequence[Shard], done: dict[str, Result]) -> Iterator[str]:
    """A line per shard and one for all; then each failed test, and the skipped ones by reason."""
    yield f"{'shard':>7}  {'passed':>6}  {'failed':>6}  {'skipped':>7}  {'not run':>7}  {'time':>8}"
    rows = [(shard.name, shard.tests) for shard in made]
    rows += (
        [("all", tuple(test for shard in made for test in shard.tests))] if len(made) > 1 else []
    )
    for name, tests in rows:
        have = [done[test] for test in tests if test in done]
        counts = Counter(result.outcome for result in have)
        passed, failed, skipped = (counts[outcome] for outcome in OUTCOMES)
        time_taken = clock(sum(result.seconds for result in have))
        yield (
            f"{name:>7}  {passed:>6}  {failed:>6}  {skipped:>7}  {len(tests) - len(have):>7} "
            f" {time_taken:>8}"
        )
    have = [(shard, done[test]) for shard in made for test in shard.tests if test in done]
    for shard, result in have:
        if result.outcome == "failed":
            lines = [
                line for line in result.text.splitlines() if line.startswith("E ")
            ] or result.text.splitlines()
            yield (
                f"FAILED (shard {shard.name})"
                f" {result.test}{': ' + lines[0].removeprefix('E ').strip()[:300] if lines else ''}"
            )
    reasons: dict[str, list[str]] = {}
    for _, result in have:
        if result.outcome == "skipped":
            reasons.setdefault(result.text.removeprefix("Skipped: "), []).append(result.test)
    for reason, tests in reasons.items():
        yield f"SKIPPED {len(tests)} ({reason}): {', '.join(tests)}"


def listing(
    made: Sequence[Shard], seconds: dict[str, float], done: dict[str, Result]
) -> Iterator[str]:
    """The shards with the time that they are expected to take."""
    known = sum(_short(test) in seconds for shard in made for test in shard.tests)
    for shard in made:
        finished = sum(test in done for test in shard.tests)
        yield (
            f"{shard.name:>7}  {len(shard.tests):>5} tests, {finished} done,"
            f" {clock(sum(weights(shard.tests, seconds)))} expected"
        )
    guess = "" if known else f"; {UNKNOWN_SECONDS:g} s each is a guess"
    yield (
        f"{sum(len(shard.tests) for shard in made)} tests, of which {known} were measured"
        f" before{guess}"
    )


def selected(text: str | None) -> tuple[int | None, int]:
    """The shard of `3/12` and the number of shards; None for all of them.

    Raises:
        Refused: it is not such a text.
    """
    if not text:
        return None, SHARDS
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise Refused(f"SHARD must be K/N with K from 1 to N, for example SHARD=3/12; got {text}.")
    return int(match[1]), int(match[2])


def _run(options: argparse.Namespace) -> int:
    root = Path(os.fsdecode(_git(Path.cwd(), "rev-parse", "--show-toplevel").rstrip(b"\n")))
    number, count = selected(options.shard)
    folder = root / FOLDER
    results, durations = Results(folder / version(root)), folder / "durations.json"
    made = plan(root, results, count, options.pytest, durations)
    chosen = [shard for shard in made if number in (None, shard.number)]
    if options.list:
        seconds = json.loads(durations.read_text("utf-8")) if durations.is_file() else {}
        print(*listing(chosen, seconds, results.read()), sep="\n")
        return 0
    if options.again:
        done = results.read()
        tests = [test for shard in chosen for test in shard.tests if test in done]
        results.forget(
            test for test in tests if options.again != "failed" or done[test].outcome == "failed"
        )
    begin, interrupted = time.monotonic(), False
    try:
        for shard in chosen:
            run_shard(root, shard, results, options.pytest)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        remember(results, durations)
    done = results.read()
    print(
        f"\nResults of the tests marked {MARK}, in {results.folder.relative_to(root)} (this run"
        f" took {clock(time.monotonic() - begin)}):"
    )
    print(*summary(chosen, done), sep="\n", flush=True)
    if interrupted:
        print("Interrupted; the same command continues.")
        return _INTERRUPTED
    tests = [test for shard in chosen for test in shard.tests]
    return 0 if all(test in done and done[test].outcome != "failed" for test in tests) else 1


def main(arguments: list[str]) -> int:
    """Run the command and return the exit code: 0, 1 after a failed test or with tests that were
    not run, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="tools/test_full.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--shard", metavar="K/N", default="", help=f"only this shard; default: all of {SHARDS}"
    )
    parser.add_argument(
        "--again",
        nargs="?",
        const="1",
        default="",
        help="run all again; failed: only what has failed",
    )
    parser.add_argument("--list", action="store_true", help="print the shards and run nothing")
    parser.add_argument("pytest", nargs="*", metavar="-- OPTIONS", help="options of pytest")
    # a background process ignores SIGINT, and so would pytest
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return _run(parser.parse_args(arguments))
    except Refused as error:
        print(f"test_full: {error}", file=sys.stderr)
        return _USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
