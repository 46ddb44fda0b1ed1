"""The last lines of a run that ended early, and that the command which they name resumes it."""

import csv
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from command_line import run_commands
from hydra.core.override_parser.overrides_parser import OverridesParser
from quick_runs import FAULTY, QUICK

from lightning_3d.app.config.override_words import hydra_value, quoted
from lightning_3d.app.runs.checkpoints import note_places, run_id
from lightning_3d.app.runs.ending import CommandLine, last_lines
from lightning_3d.app.runs.status import RunStatus


@pytest.mark.parametrize(
    "text",
    [
        "/runs/a",
        "/my runs/it's",
        r"/back\\slash's",
        "/a=b,c",
        "[x]{y}",
        '/"q"',
        "/1",
        "s3://bucket/run",
        "/ü",
    ],
)
def test_hydra_reads_a_value_as_it_was(text: str) -> None:
    assert (
        OverridesParser.create().parse_override(f"hydra.run.dir={hydra_value(text)}").value()
        == text
    )


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("trainer.resume=/a/epoch=0-step=10.ckpt", "/a/epoch=0-step=10.ckpt"),
        ("+a.b=it=1", "it=1"),
        ("a=1e-3", 1e-3),
        ("a='b=c'", "b=c"),
        ("a={b:c}", {"b": "c"}),
        ("a=/b=c,/b=d", ["'/b=c'", "'/b=d'"]),
        ("a=range(start=1,stop=3)", ["1", "2"]),
    ],
)
def test_a_value_with_an_equals_sign_needs_no_quotes(word: str, value: object) -> None:
    read = OverridesParser.create().parse_override(quoted(word))
    assert (
        [str(one) for one in read.sweep_string_iterator()]
        if read.is_sweep_override()
        else read.value()
    ) == value


def test_the_command_keeps_what_was_given_but_where_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/runs/a b")
    given = [
        "parallelism=dp2",
        "data.path='my file'",
        "hydra.run.dir=x",
        "trainer.resume=y",
        "++trainer.auto_resume=false",
    ]
    monkeypatch.setattr(sys, "argv", ["train.py"])
    train, run = CommandLine.of_train(given), CommandLine.of_run()
    kept = ["python", "train.py", "parallelism=dp2", "data.path='my file'"]
    assert shlex.split(train.resume(folder)) == [
        *kept,
        "hydra.run.dir='/runs/a b'",
        "trainer.auto_resume=true",
    ]
    monkeypatch.setattr(sys, "argv", ["/bin/lightning-3d"])
    run = CommandLine.of_run()
    assert run.resume(folder) == "lightning-3d run '/runs/a b/config.yaml' --resume"


def checkpoint(path: Path, step: int, run: str = "") -> Path:
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"global_step": step, "run": run}))
    return path


def test_the_newest_checkpoint_is_looked_for_where_callbacks_write(tmp_path: Path) -> None:
    config, run = {"trainer": {"max_steps": 9}}, tmp_path / "run"
    began = RunStatus.begun()
    run.mkdir()
    assert last_lines(run, config, began.after(1), None, None) == [
        "lightning_3d: the run failed before the first step ended",
        "  checkpoint: none",
    ]
    own = checkpoint(run / "checkpoints" / "step_4.ckpt", 4)
    checkpoint(tmp_path / "fast" / "step_8.ckpt", 8, "another run")
    note_places(run, [str(tmp_path / "fast")])
    assert last_lines(run, config, began.after(1), None, None)[1] == f"  checkpoint: {own} (step 4)"
    other = checkpoint(tmp_path / "fast" / "step_6.ckpt", 6, run_id(run))
    assert (
        last_lines(run, config, began.after(1), None, None)[1] == f"  checkpoint: {other} (step 6)"
    )
    lines = last_lines(
        tmp_path / "run", config, began.after(143), CommandLine(("train.py",), ()), "torchrun"
    )
    assert (
        lines[0].startswith("lightning_3d: the run was stopped by SIGTERM")
        and "with torchrun as before" in lines[2]
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_printed_command_resumes_an_interrupted_run(tmp_path: Path) -> None:
    """After Ctrl-C in a run with names that a shell and Hydra both have to be told; then the same
    by `run` from its folder."""
    folder = tmp_path / "it's my run"
    where = "hydra.run.dir=" + hydra_value(str(folder))
    length = [
        "trainer.max_steps=400",
        "model.name='a \"b\" c'",
        *FAULTY,
        "+callbacks.faulty.how=interrupt",
        "+callbacks.faulty.step=3",
    ]
    [interrupted] = run_commands(
        [["train", *[word for word in QUICK if "max_steps" not in word], *length, where]],
        timeout=300,
        warm=True,
    )
    assert interrupted.code == 130 and "Traceback" not in interrupted.output, interrupted.output
    stopped, saved, command = re.search(
        r"stopped by SIGINT after step (\d+) of 400\n  checkpoint: (.*) \(step \d+\)\n  resume:"
        r" python -m lightning_3d (.*)\n",
        interrupted.output,
    ).groups()  # type: ignore[union-attr]
    assert saved == str(folder / "checkpoints" / f"step_{stopped}.ckpt")
    last = int(stopped) + 4
    sooner = [
        f"trainer.max_steps={last}",
        f"trainer.val_check_interval={last}",
        "~callbacks.faulty",
    ]
    lines = [[*shlex.split(command), *sooner], ["run", str(folder / "config.yaml"), "--resume"]]
    resumed, again = run_commands(lines, timeout=300, warm=True)
    assert resumed.code == 0 and f"resuming from {saved}" in resumed.output, resumed.output
    with (folder / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, last + 1))
    assert (
        again.code == 0
        and f"resuming from {folder / 'checkpoints' / f'step_{last}.ckpt'}" in again.output
    ), again.output
