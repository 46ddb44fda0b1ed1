"""Checkpoints from the command line: what is in them, and how damaged ones are refused."""

import csv
import json
import re
import signal
from pathlib import Path

import pytest
from command_line import run_commands
from plain_checkpoints import flip_bit
from quick_runs import QUICK

from lightning_3d.checkpoint import read_manifest

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def train(folder: Path, steps: int, *more: str) -> list[str]:
    length = [
        f"trainer.max_steps={steps}",
        f"trainer.val_check_interval={steps}",
        "trainer.checkpoint_every_n_steps=2",
    ]
    return ["train", *QUICK, *length, f"hydra.run.dir={folder}", *more]


def test_f28_f30_damaged_checkpoints_are_refused_in_one_line(tmp_path: Path) -> None:
    [first] = run_commands([train(tmp_path / "a", 4)], timeout=400)
    assert first.code == 0, first.output
    last = tmp_path / "a" / "checkpoints" / "step_4.ckpt"
    assert (
        json.loads((last / "trainer.json").read_text())["config"]["data"]["sequence_length"] == 32
    )
    flip_bit(last / "__0_0.distcp")
    link = tmp_path / "last.ckpt"
    link.symlink_to(tmp_path / "nothing")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    lines = [
        train(tmp_path / "c", 6, f"trainer.resume={link}"),
        train(tmp_path / "d", 6, f"trainer.resume={unfinished}"),
        train(tmp_path / "b", 6, f"trainer.resume={last}"),
        train(
            tmp_path / "e",
            6,
            f"trainer.resume={last}",
            "parallelism.checkpoint_fall_back=true",
            "parallelism=tp2",
        ),
    ]
    pointer, not_finished, damaged, fallen_back = run_commands(lines, timeout=600)
    for result, words in (
        (damaged, [str(last), "__0_0.distcp has changed since it was saved"]),
        (pointer, [str(link), "points to", "which does not exist"]),
        (not_finished, [str(unfinished), "no manifest.json"]),
    ):
        assert result.code == 2 and "Traceback" not in result.output, result.output
        assert all(word in result.output for word in words), result.output
        assert (
            len([line for line in result.output.splitlines() if line.startswith("lightning_3d:")])
            == 1
        )
    assert not pointer.torch and not not_finished.torch, "seen before torch is imported"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "e", "last.ckpt", "unfinished"]
    assert fallen_back.code == 0 and "step_2.ckpt (step 2) instead" in fallen_back.output, (
        fallen_back.output
    )
    assert read_manifest(tmp_path / "e" / "checkpoints" / "step_6.ckpt")["layout"] == "tp2"


def test_f51_sigterm_saves_the_last_step(tmp_path: Path) -> None:
    faulty = {"_target_": "faulty.FailAtStep", "rank": 1, "step": 3, "how": "end"}
    ending = [f"+callbacks.faulty.{key}={value}" for key, value in faulty.items()]
    line = train(tmp_path / "a", 400)
    again = ["trainer.auto_resume=true", "trainer.max_steps=8", "trainer.val_check_interval=8"]
    ended, resumed = run_commands([[*line, *ending], [*line, *again]], timeout=400)
    assert ended.code == 128 + signal.SIGTERM and "Traceback" not in ended.output, ended.output
    folder = tmp_path / "a" / "checkpoints"
    assert (
        re.search(rf"resuming from {folder}/step_([3-9]).ckpt", resumed.output)
        and resumed.code == 0
    ), resumed.output
    assert "not empty" not in resumed.output, "the run's own checkpoints need no warning"
    with (tmp_path / "a" / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == list(range(1, 9)), "no step is lost, none is there twice"
