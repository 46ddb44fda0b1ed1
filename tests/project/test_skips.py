"""Skipped tests are named at the end of a session, and fail it where continuous integration asks
for that."""

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment
from skips import NO_BROWSER, VARIABLE

PASSES = "def test_passes():\n    pass\n"
BROWSER = f"def test_page():\n    pytest.skip('{NO_BROWSER}; `make browser` installs it')\n"
OTHER = (
    "@pytest.mark.skipif(True, reason='needs a cluster')\n@pytest.mark.parametrize('n', [1,"
    " 2])\ndef test_other(n):\n    pass\n"
)


def session(folder: Path, *tests: str, strict: bool) -> tuple[int, list[str]]:
    """The exit code and the printed lines of a pytest session with these tests."""
    (folder / "test_it.py").write_text("\n\n".join(("import pytest", *tests)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "skips",
        "-c",
        "/dev/null",
        "--rootdir",
        str(folder),
        "test_it.py",
    ]
    variables = environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1") | {VARIABLE: "1" if strict else ""}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("strict", [True, False])
def test_skipped_tests_are_counted_and_named_last(tmp_path: Path, strict: bool) -> None:
    code, output = session(tmp_path, PASSES, BROWSER, OTHER, strict=strict)
    start = output.index("3 tests were skipped:")
    assert output[start + 1] == f"  {NO_BROWSER}; `make browser` installs it: test_it.py::test_page"
    assert (
        output[start + 2]
        == "  needs a cluster: test_it.py::test_other[1], test_it.py::test_other[2]"
    )
    *verdict, closing = output[start + 3 :]
    assert closing.startswith("1 passed, 3 skipped")
    assert code == (1 if strict else 0)
    assert verdict == (
        [f"{VARIABLE} is set: the session fails, because 2 of them should have run."]
        if strict
        else []
    )


def test_a_missing_browser_never_fails_a_session(tmp_path: Path) -> None:
    code, output = session(tmp_path, PASSES, BROWSER, strict=True)
    assert code == 0 and "1 test was skipped:" in output


def test_a_session_without_skips_says_nothing_of_them(tmp_path: Path) -> None:
    code, output = session(tmp_path, PASSES, strict=True)
    assert code == 0 and "skipped" not in "\n".join(output)


def test_a_file_that_is_skipped_as_a_whole_counts(tmp_path: Path) -> None:
    code, output = session(tmp_path, "pytest.importorskip('no_such_module')", PASSES, strict=True)
    assert code == 1 and "1 test was skipped:" in output
