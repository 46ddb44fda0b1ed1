"""`make test-full`: shards are disjoint and whole, results are kept, an interrupted shard
continues, and the summary names what failed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import REPOSITORY

TOOL = REPOSITORY / "tools" / "test_full.py"
sys.path.insert(0, str(TOOL.parent))

from test_full import (  # noqa: E402
    FOLDER,
    Refused,
    Result,
    Results,
    Shard,
    clock,
    selected,
    shards,
    summary,
    version,
    weights,
)

CONFTEST = """
def pytest_runtest_setup(item):
    with open("ran", "a") as file:
        file.write(item.name + "\\n")
"""
TESTS = """
import os, pytest, time

pytestmark = pytest.mark.full

@pytest.mark.parametrize("n", range(4))
def test_good(n):
    pass

def test_bad():
    assert os.path.exists("repaired"), "this one fails"

def test_skipped():
    pytest.skip("needs a cluster")

def test_odd_name(): pass

@pytest.mark.parametrize("x", ["a::b [c] d/e.py"])
def test_name(x):
    pass
"""
DEADLY = """
import os, pytest

@pytest.mark.full
def test_before(): pass

@pytest.mark.full
def test_deadly(): os._exit(7)

@pytest.mark.full
def test_after(): pass

def test_not_marked(): pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with nine tests that are marked and one that is not."""
    files = {
        "pytest.ini": (
            "[pytest]\nmarkers = full: long\naddopts = -q -m 'not full' -p"
            " no:cacheprovider\ntestpaths = t\n"
        ),
        "conftest.py": CONFTEST,
        "t/test_a.py": TESTS,
        ".gitignore": "ran\nrepaired\n__pycache__\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(TOOL), *arguments]


def variables() -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return mine | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run(folder: Path, *arguments: str) -> tuple[int, list[str], list[str]]:
    """The exit code, what was printed, and the tests that ran."""
    (folder / "ran").unlink(missing_ok=True)
    done = subprocess.run(
        command(*arguments),
        cwd=folder,
        env=variables(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    ran = (folder / "ran").read_text().splitlines() if (folder / "ran").is_file() else []
    return done.returncode, (done.stdout + done.stderr).splitlines(), ran


def rows(output: list[str]) -> dict[str, list[str]]:
    """The columns of the summary by shard."""
    start = next(
        number
        for number, line in enumerate(output)
        if line.split()[:1] == ["shard"] and "passed" in line
    )
    found = {}
    for line in output[start + 1 :]:
        words = line.split()
        if words[0] != "all" and "/" not in words[0]:
            break
        found[words[0]] = words[1:5]
    return found


@pytest.mark.slow
def test_shards_are_run_once_and_summed_up(checkout: Path) -> None:
    code, output, first = run(checkout, "--shard", "1/2")
    assert code == 0 and rows(output) == {"1/2": ["4", "0", "0", "0"]}
    assert first == ["test_good[0]", "test_good[1]", "test_good[2]", "test_good[3]"]
    code, output, ran = run(checkout, "--shard", "1/2")
    assert (code, ran) == (0, []) and rows(output) == {"1/2": ["4", "0", "0", "0"]}, (
        "it is finished"
    )
    code, output, ran = run(checkout, "--shard", "2/2")
    assert code == 1 and rows(output) == {"2/2": ["2", "1", "1", "0"]}
    assert set(ran).isdisjoint(first) and "test_name[a::b [c] d/e.py]" in ran
    (failed,) = [line for line in output if line.startswith("FAILED (")]
    assert failed.startswith(
        "FAILED (shard 2/2) t/test_a.py::test_bad: AssertionError: this one fails"
    )
    assert "SKIPPED 1 (needs a cluster): t/test_a.py::test_skipped" in output
    (checkout / "repaired").touch()
    assert run(checkout, "--shard", "2/2", "--again", "failed")[::2] == (0, ["test_bad"])
    assert run(checkout, "--shard", "2/2", "--again")[::2] == (0, ran)
    assert run(checkout, "--shard", "1/2", "--again=")[::2] == (
        0,
        [],
    ), "AGAIN is empty where make was not given it"


@pytest.mark.full
def test_all_shards_use_what_was_run_of_this_version_only(checkout: Path) -> None:
    (checkout / "repaired").touch()
    done = [test for shard in ("1/12", "4/4") for test in run(checkout, "--shard", shard)[2]]
    assert len(done) == 3
    code, output, ran = run(checkout)
    assert code == 0 and len(ran) == 8 - len(done) and not set(done) & set(ran)
    found = rows(output)
    assert len(found) == 13 and found["all"] == ["7", "0", "1", "0"]
    (checkout / "t" / "test_a.py").write_text(TESTS + "\n")
    assert len(run(checkout)[2]) == 8, "the code is another"
    code, output, ran = run(checkout, "--list")
    assert (code, ran) == (0, []) and len(output) == 13
    assert output[-1] == "8 tests, of which 7 were measured before"


def test_a_test_that_ends_the_process_fails_and_the_rest_is_run(checkout: Path) -> None:
    (checkout / "t" / "test_a.py").write_text(DEADLY)
    code, output, ran = run(checkout, "--shard", "1/1")
    assert code == 1 and ran == ["test_before", "test_deadly", "test_after"]
    assert rows(output) == {"1/1": ["2", "1", "0", "0"]}
    assert (
        "FAILED (shard 1/1) t/test_a.py::test_deadly: The process of the test ended with exit"
        " code 7." in output
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_an_interrupted_shard_continues(checkout: Path, number: signal.Signals) -> None:
    waiting = (
        "def test_good(n):\n    if n == 2 and not os.path.exists('repaired'):\n       "
        " time.sleep(60)\n"
    )
    (checkout / "t" / "test_a.py").write_text(
        TESTS.replace("def test_good(n):\n    pass\n", waiting)
    )
    # as the shell starts a process in the background
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(
        command("--shard", "1/1"),
        cwd=checkout,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    signal.signal(signal.SIGINT, inherited)
    while not ((checkout / "ran").is_file() and "test_good[2]" in (checkout / "ran").read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 130 and output[-1] == "Interrupted; the same command continues."
    assert rows(output) == {"1/1": ["2", "0", "0", "6"]}
    (checkout / "repaired").touch()
    code, output, ran = run(checkout, "--shard", "1/1")
    assert code == 0 and ran[0] == "test_good[2]" and len(ran) == 6
    assert (
        rows(output) == {"1/1": ["7", "0", "1", "0"]}
        and "shard 1/1: 8 tests, 2 of them done before" in output
    )


@pytest.mark.slow
def test_options_of_pytest_are_passed_on(checkout: Path) -> None:
    code, output, ran = run(checkout, "--shard", "1/1", "--", "-k", "good and not 3")
    assert (code, ran) == (0, ["test_good[0]", "test_good[1]", "test_good[2]"])
    assert run(checkout, "--shard", "1/1", "--", "-k", "good")[2] == ["test_good[3]"], (
        "the others have results"
    )
    code, output, ran = run(checkout, "--shard", "1/1", "--", "-x")
    assert (code, ran) == (1, ["test_bad"]) and rows(output) == {"1/1": ["4", "1", "0", "3"]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--shard", "4/3"],
            "SHARD must be K/N with K from 1 to N, for example SHARD=3/12; got 4/3.",
        ),
        (
            ["--shard", "0/3"],
            "SHARD must be K/N with K from 1 to N, for example SHARD=3/12; got 0/3.",
        ),
        (["--", "-k", "nothing"], "No test is marked 'full' and selected by -k nothing."),
        (["--", "--no-such-option"], "pytest cannot collect the tests (exit code 4)."),
    ],
)
def test_wrong_arguments_are_refused(checkout: Path, arguments: list[str], says: str) -> None:
    code, output, ran = run(checkout, *arguments)
    assert (code, ran) == (2, []) and output[-1] == f"test_full: {says}"


def test_without_a_commit_there_is_nothing_to_keep_results_for(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is not a checkout of git with a commit"):
        version(tmp_path)


def test_the_version_is_that_of_the_files(checkout: Path) -> None:
    clean = version(checkout)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout
    assert len(clean) == 12 and head.startswith(clean)
    (checkout / "ran").write_text("ignored")
    assert version(checkout) == clean
    (checkout / "new.py").write_text("1")
    untracked = version(checkout)
    (checkout / "new.py").write_text("2")
    assert len({clean, untracked, version(checkout)}) == 3
    (checkout / "new.py").unlink()
    (checkout / "conftest.py").write_text("")
    assert version(checkout) not in (clean, untracked)


def test_shards_take_about_the_same_time_and_hold_each_test_once() -> None:
    tests = [f"tests/deep/test_{file}.py::test[{number}]" for file in "ab" for number in range(20)]
    seconds = {f"test_a.py::test[{number}]": 10.0 for number in range(10)}
    assert weights(tests, seconds)[10] == 10 and weights(tests, {"test_b.py::test[0]": 4.0})[0] == 4
    for count in (1, 3, 7, 40, 50):
        made = shards(tests, count, seconds)
        assert [shard.number for shard in made] == list(range(1, count + 1))
        assert [test for shard in made for test in shard.tests] == tests
    uneven = {f"test_a.py::test[{number}]": 1.0 for number in range(20)} | {
        f"test_b.py::test[{number}]": 3.0 for number in range(20)
    }
    loads = [sum(weights(shard.tests, uneven)) for shard in shards(tests, 4, uneven)]
    assert sum(loads) == 80 and max(loads) - min(loads) <= 3


def test_lines_that_were_cut_off_are_no_results(tmp_path: Path) -> None:
    results = Results(tmp_path / FOLDER / "abc")
    one = Shard(1, 1, ("t.py::a", "t.py::b"))
    lines = [
        json.dumps({"begun": "t.py::a"}),
        json.dumps({"test": "t.py::a", "outcome": "passed", "seconds": 1.0, "text": ""}),
    ]
    results.file(one).write_text(
        "\n".join([*lines, json.dumps({"begun": "t.py::b"}), '{"test": "t.py::b", "outc'])
    )
    assert results.read() == {"t.py::a": Result("t.py::a", "passed", 1.0)} and results.unfinished(
        one
    ) == ["t.py::b"]
    assert list(summary([one], results.read()))[1].split() == ["1/1", "1", "0", "0", "1", "0:00:01"]


def test_times_and_shards_are_read_and_written() -> None:
    assert clock(3725.4) == "1:02:05" and clock(59.6) == "0:01:00"
    assert selected("3/12") == (3, 12) and selected("") == (None, 12)


def test_make_passes_the_shard_on() -> None:
    words = ["make", "-n", "test-full", "SHARD=3/12", "AGAIN=failed", "ARGS=-x"]
    done = subprocess.run(
        words, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120
    )
    # make inside make names its folder
    said = [line for line in done.stdout.splitlines() if not line.startswith("make")]
    assert said[-1].endswith('tools/test_full.py --shard "3/12" --again="failed" -- -x')
