"""Where the checkpoints of a run are: in its folder, outside of it, next to those of other runs,
and after the folder was moved."""

import json
from pathlib import Path

import pytest
from command_line import run_commands
from quick_runs import FAULTY, QUICK, losses

from lightning_3d.app.runs.checkpoints import (
    newest_checkpoint,
    note_places,
    own_checkpoints,
    refuse_others,
    run_id,
)
from lightning_3d.errors import ConfigError


def save(folder: Path, step: int, run: str = "") -> Path:
    path = folder / f"step_{step}.ckpt"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(
        json.dumps({"global_step": step} | ({"run": run} if run else {}))
    )
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def callbacks(where: Path, **more: object) -> dict[str, dict[str, object]]:
    return {"saver": {"_target_": "lightning_3d.PeriodicCheckpoint", "dirpath": str(where), **more}}


def test_own_checkpoints_are_those_in_the_folder_and_elsewhere_those_with_the_id_of_the_run(
    tmp_path: Path,
) -> None:
    run, disk, earlier = tmp_path / "run", tmp_path / "disk", tmp_path / "earlier"
    run.mkdir()
    assert newest_checkpoint(run) is None
    own = run_id(run)
    assert own == run_id(run)
    note_places(run, [str(earlier)])
    note_places(run, [str(disk), str(run / "inside")])
    paths = [
        save(run / "checkpoints", 1),
        save(run / "inside", 2),
        save(earlier, 3, own),
        save(disk, 4, own),
    ]
    save(disk, 5, "another")
    save(disk, 6)
    assert [found.path for found in own_checkpoints(run)] == paths[::-1]
    run.rename(tmp_path / "moved")
    assert [found.steps for found in own_checkpoints(tmp_path / "moved")] == [4, 3, 2, 1]


def test_a_place_that_only_the_configuration_names_is_read_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        f"callbacks: {{none: null, saver: {{dirpath: {tmp_path / 'disk'}}}}}"
    )
    mine = save(tmp_path / "disk", 4, run_id(run))
    assert newest_checkpoint(run) == str(mine)


@pytest.mark.parametrize(
    ("step", "resumed", "refused"), [(4, None, True), (4, 4, False), (6, 4, True), (2, None, True)]
)
def test_checkpoints_of_another_run_are_not_replaced_unless_they_are_the_past(
    step: int, resumed: int | None, refused: bool, tmp_path: Path
) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    save(disk, step, "another")
    start = None if resumed is None else str(disk / f"step_{resumed}.ckpt")
    if resumed not in (None, step):
        save(disk, 4, run_id(run))
    refuse_others(run, callbacks(run / "checkpoints"), start)
    # such names never collide
    refuse_others(run, callbacks(disk, enable_version_counter=True), start)
    if refused:
        with pytest.raises(
            ConfigError, match=rf"step_{step}\.ckpt.*callbacks\.saver\.dirpath={disk}/run\."
        ):
            refuse_others(run, callbacks(disk), start)
    else:
        refuse_others(run, callbacks(disk), start)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_resumes_from_a_folder_elsewhere_and_another_run_leaves_it_alone(
    tmp_path: Path,
) -> None:
    """By `trainer.restarts`, by `trainer.auto_resume`, and by `run --resume` after the run folder
    was moved."""
    disk = tmp_path / "disk"
    length = [
        "trainer.max_steps=4",
        "trainer.checkpoint_every_n_steps=2",
        "trainer.keep_last=1",
        "trainer.val_check_interval=4",
    ]

    def train(name: str, *more: str) -> list[str]:
        return ["train", *QUICK, *length, f"hydra.run.dir={tmp_path / name}", *more]

    elsewhere = f"callbacks.checkpoint.dirpath={disk}"
    fault = [*FAULTY, "+callbacks.faulty.step=3", "trainer.restarts=1"]
    resumes = ["trainer.auto_resume=true"]
    lines = [train("whole"), train("run", elsewhere, *fault), train("run", elsewhere, *resumes)]
    whole, failed, again = run_commands(lines, timeout=400, warm=True)
    assert whole.code == 0 and failed.code == 1, failed.output
    assert f"starting the ranks again from {disk}/step_2.ckpt" in failed.output, failed.output
    assert (
        f"checkpoint: {disk}/step_2.ckpt (step 2)" in failed.output
        and "trainer.auto_resume=true" in failed.output
    )
    assert again.code == 0 and f"resuming from {disk}/step_2.ckpt" in again.output, again.output
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert sorted(path.name for path in disk.iterdir()) == ["step_4.ckpt"]
    before = contents(disk)
    changing = ("train.log", ".lock", "rank_1.log")
    kept = {
        path: text for path, text in contents(tmp_path / "run").items() if path.name not in changing
    }
    # checkpoints that no disk can hold
    many = ["trainer.max_steps=100000000", "trainer.keep_last=100000000"]
    [refused] = run_commands([train("run", elsewhere, *resumes, *many)], timeout=400, warm=True)
    assert refused.code == 2 and "do not fit" in refused.output, refused.output
    now = contents(tmp_path / "run")
    assert {path: now.get(path) for path in kept} == kept, (
        "a refused attempt leaves the run as it was"
    )
    (tmp_path / "run").rename(tmp_path / "moved")
    lines = [
        train("other", elsewhere),
        ["inspect", str(tmp_path / "moved")],
        ["run", str(tmp_path / "moved" / "config.yaml")],
        ["run", str(tmp_path / "moved" / "config.yaml"), "--resume"],
    ]
    other, inspected, repeated, resumed = run_commands(lines, timeout=400, warm=True)
    assert other.code == 2 and f"callbacks.checkpoint.dirpath={disk / 'other'}" in other.output, (
        other.output
    )
    assert not (tmp_path / "other").exists()
    assert inspected.code == 0 and f"{disk}/step_4.ckpt" in inspected.output, inspected.output
    assert repeated.code == 2 and "--resume" in repeated.output, repeated.output
    assert resumed.code == 0 and f"resuming from {disk}/step_4.ckpt" in resumed.output, (
        resumed.output
    )
    assert contents(disk) == before
