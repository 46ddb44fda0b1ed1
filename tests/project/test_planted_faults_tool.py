"""`tools/planted_faults.py`: its list fits the code, and it tells faults that tests find from those
that they do not."""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

from faults_to_plant import FAULTS, Fault
from planted_faults import (
    RESULTS,
    Copy,
    Refused,
    Result,
    changed,
    chosen,
    enough,
    first_failure,
    main,
    problems,
    source_of,
    summary,
)

CODE = """
def add(a: int, b: int) -> int:
    total = a
    total += b
    return total


def twice(a: int) -> int:
    return 2 * a
"""
TEST = """
import pytest
from lightning_3d.numbers import add, twice

def test_add(): assert add(1, 2) == 3
class RankTimeout(TimeoutError): pass
def test_waits():
    if add(0, 0): raise RankTimeout("2 ranks wait")
def test_broken(): assert add(1, 1) == 0
@pytest.mark.full
def test_twice(): assert twice(2) == 4
"""
ADD = Fault(
    "add-nothing",
    "Nothing is added.",
    "numbers.py",
    "total = a total += b",
    "total = a",
    ("t/test_a.py::test_add",),
)
HANG = replace(ADD, name="add-waits", new="total = 1", tests=("t/test_a.py::test_waits",))
TWICE = Fault("twice-three-times", "Three times.", "", "2 * a", "3 * a", ("t/test_a.py::test_add",))
BROKEN = replace(TWICE, name="broken", tests=("t/test_a.py::test_broken",))


def test_every_fault_fits_the_code_and_names_default_tests() -> None:
    assert list(problems(FAULTS, REPOSITORY)) == []
    assert len(FAULTS) >= 40


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "lightning_3d/__init__.py": "",
        "lightning_3d/numbers.py": CODE,
        "tests/t/test_a.py": TEST,
        "pytest.ini": "[pytest]\nmarkers = full: long\naddopts = -m 'not full'\n",
        ".gitignore": f"__pycache__\n{RESULTS}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.full
def test_what_is_found_and_what_is_not(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = checkout / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    faults = (ADD, HANG, TWICE, BROKEN)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert main([], faults, checkout) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "[1/4] add-nothing: found by named tests: tests/t/test_a.py::test_add fails ("
    )
    assert "assert 1 == 3" in lines[0]
    assert lines[1].startswith(
        "[2/4] add-waits: found by named tests: tests/t/test_a.py::test_waits hangs ("
    )
    assert lines[2].startswith("[3/4] twice-three-times: NOT found (")
    assert lines[3].startswith("[4/4] broken: NOT found (") and lines[3].endswith(
        "test_broken fails without the fault too"
    )
    counts = (
        "2 found by default tests (1 of them by a test that hangs), 0 by full tests only, 2 by no"
        " test that was run; 0 not planted"
    )
    assert lines[4] == f"4 faults: {counts}"
    assert lines[5].startswith("not found by default tests: twice-three-times: Three times.")
    assert (checkout / "lightning_3d" / "numbers.py").read_text() == CODE and not list(
        copies.iterdir()
    )

    (checkout / RESULTS).write_text(
        "".join(line + "\n" for line in (checkout / RESULTS).read_text().splitlines()[:2])
        + '{"fault": "twi'
    )
    found = (*faults[:2], replace(TWICE, full=("t/test_a.py::test_twice",)))
    assert main(["--resume"], found, checkout) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0].startswith(
        "[1/1] twice-three-times: found by full tests: tests/t/test_a.py::test_twice fails"
    )
    assert lines[2].endswith("(tests/t/test_a.py::test_twice finds it)")


def test_an_interrupted_copy_is_removed(checkout: Path) -> None:
    copy = Copy(checkout)
    source = copy.path / "lightning_3d" / "numbers.py"
    with pytest.raises(KeyboardInterrupt), copy, copy.planted(ADD):
        assert "total += b" not in source.read_text()
        raise KeyboardInterrupt
    assert not copy.path.exists()


def test_what_runs_into_the_limit_hangs(checkout: Path) -> None:
    with Copy(checkout) as copy:
        failure = first_failure(copy, ["tests/t/test_a.py::test_add"], 0.01)
    assert failure is not None and failure.hang and failure.test == "tests/t/test_a.py::test_add"


def test_code_is_found_whatever_its_white_space_and_file(checkout: Path) -> None:
    file = checkout / "lightning_3d" / "deep" / "other.py"
    file.parent.mkdir()
    (checkout / "lightning_3d" / "numbers.py").rename(file)
    file.write_text(CODE.replace("return 2 * a", "return (\n        2\n        * a\n    )"))
    assert source_of(TWICE, checkout) == file and "3 * a" in changed(TWICE, file)
    file.write_text(CODE + CODE)
    with pytest.raises(
        Refused,
        match=r"twice-three-times: the code `2 \* a` stands 2 times in lightning_3d/, not once",
    ):
        source_of(TWICE, checkout)


def test_a_stale_list_is_told(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = (
        replace(ADD, old="total -= b"),
        replace(TWICE, new="3 *", tests=("t/test_a.py::test_twice",)),
        replace(HANG, tests=("t/test_b.py", "t/test_a.py::test_none")),
    )
    assert main(["--check"], faults, checkout) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "stands 0 times" in lines[0] and "is no Python any more" in lines[1]
    assert lines[2].endswith("tests/t/test_a.py::test_twice is marked full")
    assert [line.split()[-3:] for line in lines[3:5]] == [["is", "not", "there"]] * 2 and lines[
        5
    ] == "3 faults; problems: 5"
    assert main([], faults, checkout) == 2 and "--check shows" in capsys.readouterr().err


def test_faults_are_chosen_by_name_and_shard() -> None:
    names = [fault.name for fault in FAULTS]
    assert [fault.name for fault in chosen(FAULTS, names[3:5], "")] == names[3:5]
    assert sorted(
        fault.name for number in (1, 2, 3) for fault in chosen(FAULTS, [], f"{number}/3")
    ) == sorted(names)
    for only, shard, says in (
        (["nothing"], "", "no fault nothing"),
        ([], "4/3", "for example 1/4; got 4/3"),
    ):
        with pytest.raises(Refused, match=says):
            chosen(FAULTS, only, shard)


def test_two_of_all_may_be_missed_by_default_tests() -> None:
    results = {fault.name: Result(fault.name, "v", "named tests") for fault in FAULTS}
    cases = (
        (2, "", False, True),
        (3, "full tests", True, False),
        (2, "full tests", True, True),
        (1, "", True, False),
    )
    for count, by, everything, expected in cases:
        missed = {fault.name: Result(fault.name, "v", by) for fault in FAULTS[:count]}
        assert enough(FAULTS, results | missed, everything=everything) is expected
    [line] = summary(FAULTS, results)
    assert line.startswith(f"{len(FAULTS)} faults: {len(FAULTS)} found by default tests (0 of them")
