"""What a command shows of its progress."""

import io
import os
import time
from itertools import count
from pathlib import Path

import pytest

from lightning_3d.app.cli.main import main
from lightning_3d.ranks import progress
from lightning_3d.ranks.progress import VARIABLE, shown, task


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("RANK", raising=False)


def work(total: float | None, unit: str = "files") -> None:
    with task("reading", total, unit) as advance:
        for _ in range(4):
            advance(1)


def test_nothing_is_shown_in_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    work(4)
    assert capsys.readouterr() == ("", "")


def test_a_pipe_gets_a_line_at_the_start_and_one_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = count(0, 6)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with shown():
        work(4)
        work(None)
    out, error = capsys.readouterr()
    lines = ["reading ...", "reading: 50% after 12 s", "reading: 100% after 24 s"]
    assert error.splitlines() == [
        *lines,
        "reading ...",
        "reading: 2 files after 12 s",
        "reading: 4 files after 24 s",
    ]
    assert out == ""


def test_a_terminal_gets_a_bar_that_reaches_its_end_and_disappears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with shown(), task("reading", 4, "files") as advance:
        for done in (1, 3):
            time.sleep(0.15)  # tqdm draws at most every 0.1 s
            advance(done)
    text = terminal.getvalue()
    assert "reading:   0%" in text and "reading: 100%" in text and "4/4" in text
    assert text.endswith("\r") and not text.split("\r")[-2].strip()


def test_a_terminal_is_told_of_a_task_of_unknown_length(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with shown(), task("importing torch"):
        assert "importing torch ..." in terminal.getvalue()


@pytest.mark.parametrize(("name", "value"), [(VARIABLE, "0"), ("RANK", "1")])
def test_who_turned_it_off_and_other_ranks_see_nothing(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with shown():
        work(4)
    assert capsys.readouterr() == ("", "")
    assert os.environ.get(VARIABLE) == ("0" if name == VARIABLE else None)


def test_a_command_says_what_it_does_before_it_imports_what_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "interrupted_model.py").write_text(
        "import sys\nprint('imported', file=sys.stderr)\nraise KeyboardInterrupt\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["draft-plan", "interrupted_model:Model"]) == 130
    assert capsys.readouterr() == ("", "importing torch and interrupted_model ...\nimported\n")


@pytest.mark.slow
def test_what_a_command_prints_is_without_its_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "plan",
        "model=llama3_1_8b",
        "cluster=h100_1x8",
        "data.global_batch_size=64",
        "data.sequence_length=4096",
    ]
    assert main([*line, "--out", str(tmp_path)]) == 0
    out, error = capsys.readouterr()
    assert error == "searching layouts for 8 GPUs ...\n"
    assert (
        out.startswith("llama3_1_8b on h100_1x8: 64 sequences") and "..." not in out.splitlines()[0]
    )
