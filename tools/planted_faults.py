"""Plant faults in a copy of this checkout, one at a time, and see whether the default tests find
them.

    python tools/planted_faults.py                  all faults of faults_to_plant.py; the tests that are named there should find them
    python tools/planted_faults.py --list           the faults, and the tests
    python tools/planted_faults.py --check          whether every fault still fits the code; runs no test
    python tools/planted_faults.py --only NAME ...  some of them
    python tools/planted_faults.py --shard 1/4      every fourth of them
    python tools/planted_faults.py --resume         go on after an interruption: faults with a result for this code are not planted again
    python tools/planted_faults.py --everything     what the named tests do not find: all default tests, then all tests marked `full`

A fault is found when a test fails, or hangs, that passes without it: each test that fails is run
once more on the unchanged copy. Results are kept in .planted_faults.jsonl, for a hash of the code.
Of 59 faults the default tests must find 57, else the exit code is 1.
"""  # noqa: E501

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults_to_plant import FAULTS, Fault

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE, TESTS, RESULTS = "lightning_3d", "tests", ".planted_faults.jsonl"
MOST_MISSED = 2
"""Faults that no default test needs to find; tests marked `full` find them."""

NAMED, DEFAULT, FULL = "named tests", "default tests", "full tests"
_STATE_VARIABLE = "PLANTED_FAULTS_STATE"
_USAGE_ERROR, _INTERRUPTED = 2, 130
_FAILED, _BROKEN_OFF = 1, 2
"""Exit codes of pytest: tests failed; it stopped, at a file that cannot be imported for example."""


class Refused(Exception):
    """What the user can repair, in one line."""


# Faults and the code


def pattern(code: str) -> re.Pattern[str]:
    """A regular expression for code, whatever its white space."""
    return re.compile(r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", code))))


def source_of(fault: Fault, root: Path) -> Path:
    """The file that a fault changes.

    Raises:
        Refused: the code that it replaces does not stand there exactly once.
    """
    place = root / PACKAGE / fault.place
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    found = [(file, len(pattern(fault.old).findall(file.read_text("utf-8")))) for file in files]
    count = sum(number for _, number in found)
    if count != 1:
        where = (
            f"{PACKAGE}/{fault.place}" if files else f"{PACKAGE}/{fault.place}, which is not there"
        )
        raise Refused(
            f"{fault.name}: the code `{fault.old}` stands {count} times in {where}, not once"
        )
    return next(file for file, number in found if number)


def changed(fault: Fault, file: Path) -> str:
    """The text of the file with the fault in it.

    Raises:
        Refused: it is the same text, or no Python.
    """
    before = file.read_text("utf-8")
    after = pattern(fault.old).sub(lambda match: fault.new, before)
    if after == before:
        raise Refused(f"{fault.name} changes nothing")
    try:
        compile(after, str(file), "exec")
    except SyntaxError as error:
        raise Refused(
            f"{fault.name}: {file.name} is no Python any more: line {error.lineno}, {error.msg}"
        ) from error
    return after


def problems(faults: Sequence[Fault], root: Path) -> Iterator[str]:
    """Why faults can no longer be planted, or the tests that should find them are no default tests:
    a line each."""
    names = [fault.name for fault in faults]
    yield from (
        f"{name} is there twice"
        for name in sorted({name for name in names if names.count(name) > 1})
    )
    for fault in faults:
        try:
            changed(fault, source_of(fault, root))
        except Refused as error:
            yield str(error)
        for test in fault.tests:
            wrong = _no_default_test(root / TESTS, test)
            if wrong is not None:
                yield f"{fault.name}: {TESTS}/{test} {wrong}"


def _no_default_test(tests: Path, test: str) -> str | None:
    """What is wrong with a node id; None: it is a test, or a file, that runs by default."""
    path, _, function = test.partition("::")
    if not (tests / path).is_file():
        return "is not there"
    tree = ast.parse((tests / path).read_text("utf-8"))
    marks = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    if function:
        found = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == function.partition("[")[0]
        ]
        if not found:
            return "is not there"
        marks += found[0].decorator_list
    # Not the arguments of `parametrize`, each of which may be marked.
    sources = [ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) for mark in marks]
    return (
        "is marked full"
        if any(re.search(r"\bmark\.full\b", source) for source in sources)
        else None
    )


# The copy


class Copy:
    """A copy of a checkout in a temporary folder, which is removed at the end however that comes.
    The checkout stays as it is.

    It has the files that git knows and those that it does not ignore, as they are on the disk.
    """

    def __init__(self, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="planted_faults_"))
        self._stamp = int(time.time())
        try:
            for name in files_of(root):
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """While the fault is in the copy."""
        file = source_of(fault, self.path)
        before = file.read_text("utf-8")
        try:
            self._write(file, changed(fault, file))
            yield
        finally:
            self._write(file, before)

    def _write(self, file: Path, text: str) -> None:
        """Python compiles a file again when its time, in seconds, or its size is another one."""
        file.write_text(text, "utf-8")
        self._stamp += 2
        os.utime(file, (self._stamp, self._stamp))

    def variables(self) -> dict[str, str]:
        """The environment of processes that import the copy, wherever they run."""
        mine = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
        }
        return mine | {
            "PYTHONPATH": os.pathsep.join([str(self.path), str(Path(__file__).resolve().parent)])
        }

    def require_imported(self) -> None:
        """Refuse an environment in which tests would import another copy of the package."""
        words = [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
        done = subprocess.run(
            words,
            cwd=tempfile.gettempdir(),
            env=self.variables(),
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.stdout.startswith(str(self.path)):
            raise Refused(
                f"the copy in {self.path} is not what Python imports: {done.stdout or done.stderr}".strip()  # noqa: E501
            )


def files_of(root: Path) -> list[str]:
    """Files of a checkout that git knows or does not ignore. Raises Refused where there is no
    checkout."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(words, cwd=root, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(f"{root} is no checkout of git") from error
    return sorted(
        name for name in os.fsdecode(listed).split("\0") if name and (root / name).is_file()
    )


def versions(faults: Sequence[Fault], root: Path) -> dict[str, str]:
    """By name of a fault: a hash of the fault, the code, its configuration and the tests. A result
    counts as long as it is the same."""
    code = hashlib.sha256()
    for name in files_of(root):
        if name.endswith((".py", ".toml", ".yaml", ".json")) and not name.startswith(
            ("tools/", "docs/", "benchmarks/")
        ):
            code.update(name.encode() + b"\0" + (root / name).read_bytes())
    return {
        fault.name: hashlib.sha256(repr(fault).encode() + code.digest()).hexdigest()[:12]
        for fault in faults
    }


# Tests. In the process that runs them, this module is a plugin of pytest.


def _note(line: dict[str, Any]) -> None:
    with Path(os.environ[_STATE_VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _note({"begun": nodeid})


def pytest_runtest_logreport(report: Any) -> None:
    _note_failure(report)


def pytest_collectreport(report: Any) -> None:
    _note_failure(report)


def _note_failure(report: Any) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _note(
            {
                "failed": report.nodeid,
                "message": crash.message if crash is not None else str(report.longrepr),
            }
        )


@dataclass(frozen=True)
class Failure:
    """A test that failed, or a file that cannot be imported; `hang` where it ran into a time
    limit."""

    test: str
    message: str
    hang: bool = False


def first_failure(copy: Copy, words: Sequence[str], limit: float) -> Failure | None:
    """Run tests of the copy until one fails.

    Args:
        words: options of pytest and node ids. limit: seconds after which the test that runs has
            hung.

    Raises:
        Refused: pytest finds no such tests.
    """
    state = copy.path / ".planted_faults_state"
    state.write_text("")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "planted_faults",
        "-p",
        "no:cacheprovider",
        "-x",
        "-q",
        *words,
    ]
    process = subprocess.Popen(
        command,
        cwd=copy.path,
        env=copy.variables() | {_STATE_VARIABLE: str(state)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that ranks can be ended with it
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return Failure(_latest(state, words), f"nothing after {limit:g} s", hang=True)
    finally:
        _end(process)
    failed = [line for line in _lines(state) if "failed" in line]
    if failed:
        message = failed[0]["message"].strip().partition("\n")[0]
        return Failure(
            failed[0]["failed"],
            message,
            hang=re.search(r"\bRankTimeout\b|\bTimeout\b.*>", message) is not None,
        )
    if process.returncode == 0:
        return None
    text = output.decode(errors="replace").strip()
    if process.returncode in (_FAILED, _BROKEN_OFF) or process.returncode < 0:
        return Failure(_latest(state, words), text.rpartition("\n")[2])
    raise Refused(
        f"pytest ends with exit code {process.returncode}: {' '.join(text.splitlines()[-3:])}"
    )


def _latest(state: Path, words: Sequence[str]) -> str:
    """The test that began last; the last of those that were asked for where none has begun."""
    begun = [line["begun"] for line in _lines(state) if "begun" in line]
    return begun[-1] if begun else words[-1] if words else TESTS


def _end(process: subprocess.Popen[bytes]) -> None:
    """End pytest, and what is left of the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file; the last one may have been cut off by the end of its process."""
    lines = []
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


# Results


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Attributes:
        by: which tests found it: NAMED, DEFAULT or FULL; empty where none did.
        test: the one that failed. message: how; where nothing was found, why.
    """

    fault: str
    version: str
    by: str
    test: str = ""
    message: str = ""
    hang: bool = False
    seconds: float = 0.0

    @property
    def by_default(self) -> bool:
        return self.by in (NAMED, DEFAULT)

    def describe(self) -> str:
        how = "hangs" if self.hang else "fails"
        if self.by:
            return (
                f"found by {self.by}: {self.test} {how} ({self.seconds:.0f} s):"
                f" {self.message[:120]}"
            )
        return f"NOT found ({self.seconds:.0f} s){': ' + self.message if self.message else ''}"


class Planter:
    """Plants faults in a copy and runs the tests that should find them.

    Args:
        everything: also run all tests where the named ones find nothing. limit: seconds for the
            named tests of a fault.
    """

    def __init__(self, copy: Copy, *, limit: float, everything: bool) -> None:
        self._copy, self._limit, self._everything = copy, limit, everything
        self._passes: dict[str, bool] = {}

    def plant(self, fault: Fault, version: str) -> Result:
        begin, doubt = time.monotonic(), ""
        for by, words, limit in self._attempts(fault):
            try:
                with self._copy.planted(fault):
                    failure = first_failure(self._copy, words, limit)
                if failure is None:
                    continue
                if self._passes_without(failure.test, ["-m", "full"] if by == FULL else []):
                    seconds = round(time.monotonic() - begin, 1)
                    return Result(
                        fault.name,
                        version,
                        by,
                        failure.test,
                        failure.message,
                        failure.hang,
                        seconds,
                    )
                doubt = f"{failure.test} fails without the fault too"
            except Refused as error:
                doubt = str(error)
        return Result(
            fault.name, version, "", message=doubt, seconds=round(time.monotonic() - begin, 1)
        )

    def _attempts(self, fault: Fault) -> Iterator[tuple[str, list[str], float]]:
        yield NAMED, [f"{TESTS}/{test}" for test in fault.tests], self._limit
        if self._everything:
            yield DEFAULT, [], 3600.0
        if fault.full:
            yield FULL, ["-m", "full", *(f"{TESTS}/{test}" for test in fault.full)], 3600.0
        if self._everything:
            yield FULL, ["-m", "full"], 12 * 3600.0

    def _passes_without(self, test: str, words: Sequence[str]) -> bool:
        """Whether a test passes on the unchanged copy, with the same options of pytest."""
        if test not in self._passes:
            self._passes[test] = first_failure(self._copy, [*words, test], self._limit) is None
        return self._passes[test]


def summary(faults: Sequence[Fault], results: dict[str, Result]) -> Iterator[str]:
    """Counts, and what no default test found."""
    done = [results[fault.name] for fault in faults if fault.name in results]
    hangs = sum(result.hang for result in done)
    yield (
        f"{len(faults)} faults: {sum(result.by_default for result in done)} found by default tests"
        f" ({hangs} of them by a test that hangs), {sum(result.by == FULL for result in done)} by"
        f" full tests only, {sum(not result.by for result in done)} by no test that was run;"
        f" {len(faults) - len(done)} not planted"
    )
    for fault in faults:
        result = results.get(fault.name)
        if result is not None and not result.by_default:
            yield (
                f"not found by default tests: {fault.name}: {fault.what}"
                f" {f'({result.test} finds it)' if result.by else result.message}"
            )


def enough(faults: Sequence[Fault], results: dict[str, Result], *, everything: bool) -> bool:
    """Whether default tests find all of the planted faults but MOST_MISSED, and full tests those,
    where they were run."""
    missed = [
        results[fault.name]
        for fault in faults
        if fault.name in results and not results[fault.name].by_default
    ]
    return len(missed) <= MOST_MISSED and not (
        everything and any(not result.by for result in missed)
    )


def chosen(faults: Sequence[Fault], only: Sequence[str], shard: str) -> list[Fault]:
    """Those of these names, or of a shard K/N: every N-th, from the K-th on. Raises Refused for
    others."""
    unknown = [name for name in only if name not in {fault.name for fault in faults}]
    if unknown:
        raise Refused(f"there is no fault {unknown[0]}; --list shows their names")
    kept = [fault for fault in faults if not only or fault.name in only]
    if not shard:
        return kept
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise Refused(f"--shard must be K/N with K from 1 to N, for example 1/4; got {shard}")
    return kept[int(match[1]) - 1 :: int(match[2])]


def _plant_all(options: argparse.Namespace, faults: Sequence[Fault], root: Path) -> int:
    for problem in problems(faults, root):
        raise Refused(f"{problem}. Repair the list; --check shows all that is wrong with it")
    now, file = versions(faults, root), options.results or root / RESULTS
    known = {
        line["fault"]: Result(**line)
        for line in _lines(file)
        if line.get("version") == now.get(line["fault"])
    }
    wanted = chosen(faults, options.only, options.shard)
    todo = [fault for fault in wanted if not (options.resume and fault.name in known)]
    interrupted = False
    try:
        with Copy(root) as copy:
            copy.require_imported()
            planter = Planter(copy, limit=options.limit, everything=options.everything)
            for number, fault in enumerate(todo, 1):
                print(f"[{number}/{len(todo)}] {fault.name}: ", end="", flush=True)
                result = known[fault.name] = planter.plant(fault, now[fault.name])
                with file.open("a", encoding="utf-8") as results:
                    results.write(json.dumps(asdict(result)) + "\n")
                print(result.describe(), flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print()
    print(*summary(faults, known), sep="\n", flush=True)
    if interrupted:
        print("Interrupted; --resume goes on.")
        return _INTERRUPTED
    return 0 if enough(faults, known, everything=options.everything) else 1


def main(
    arguments: Sequence[str], faults: Sequence[Fault] = FAULTS, root: Path = REPOSITORY
) -> int:
    """Run the command and return the exit code: 0, 1 where too many faults were not found, 2 for
    wrong arguments or a stale list."""
    parser = argparse.ArgumentParser(
        prog="tools/planted_faults.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--list", action="store_true", help="print the faults and the tests that should find them"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only see whether every fault fits the code; runs no test",
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="only these faults")
    parser.add_argument(
        "--shard", metavar="K/N", default="", help="only every N-th fault, from the K-th on"
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out faults that have a result for this code"
    )
    parser.add_argument(
        "--everything",
        action="store_true",
        help="where the named tests find nothing, run all default tests, then full",
    )
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=float,
        default=900.0,
        help="for the named tests of a fault; default: 900",
    )
    parser.add_argument("--results", metavar="FILE", type=Path, help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)
    if options.list:
        for fault in faults:
            print(
                f"{fault.name}: {fault.what}",
                *(f"    {TESTS}/{test}" for test in fault.tests),
                sep="\n",
            )
        return 0
    try:
        if options.check:
            found = list(problems(faults, root))
            print(*found, f"{len(faults)} faults; problems: {len(found)}", sep="\n")
            return 1 if found else 0
        return _plant_all(options, faults, root)
    except Refused as error:
        print(f"planted_faults: {error}", file=sys.stderr)
        return _USAGE_ERROR


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
