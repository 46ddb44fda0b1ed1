"""Relative paths of a run, which later commands read in another folder."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from lightning_3d.app.config.compose import compose, plain
from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.config.stored_paths import absolute, absolute_paths
from lightning_3d.app.runs.folder import RunFolder
from lightning_3d.app.runs.resumed_keys import refused_changes
from lightning_3d.storage.user_cache import default_cache, home


def test_paths_become_absolute_and_names_and_urls_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "train"):
        (tmp_path / name).mkdir()
    config = {
        "data": {
            "train_path": ["toks", "s3://a/b"],
            "val_path": None,
            "tokenizer": "gpt2",
            "path": "mine",
            "split": "train",
        },
        "callbacks": {
            "checkpoint": {"dirpath": "ck", "filename": "step_{step}"},
            "metrics": {"path": "m.csv"},
            "none": None,
        },
        "objective": {"teacher": "mine"},
        "profile": "mine",
        "seed": 1,
    }
    assert absolute_paths(config) == {
        "data": config["data"]
        | {
            "train_path": [f"{tmp_path}/toks", "s3://a/b"],
            "path": f"{tmp_path}/mine",
        },  # type: ignore[operator]
        "callbacks": {
            "checkpoint": {"dirpath": f"{tmp_path}/ck", "filename": "step_{step}"},
            "metrics": {"path": f"{tmp_path}/m.csv"},
            "none": None,
        },
        "objective": {"teacher": f"{tmp_path}/mine"},
        "profile": f"{tmp_path}/mine",
        "seed": 1,
    }


def test_a_pattern_matches_the_same_files_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "odd[1]"
    folder.mkdir()
    (folder / "a.bin").touch()
    monkeypatch.chdir(folder)
    from glob import glob

    assert glob(absolute("*.bin")) == [str(folder / "a.bin")]


def test_a_run_is_stored_with_absolute_paths_and_resumes_with_the_typed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "data=tokens",
        "data.train_path=toks",
        "data.sequence_length=32",
        "parallelism=dp2",
        "cluster=local_cpu",
    ]
    config = compose([*words, "callbacks.checkpoint.dirpath=ck"])
    plan = plan_run(config)
    config.run_folder = str(tmp_path / "run")
    frozen = plan.freeze(plain(config))
    assert (
        frozen["data"]["train_path"] == f"{tmp_path}/toks"
        and frozen["callbacks"]["checkpoint"]["dirpath"] == f"{tmp_path}/ck"
    )
    folder = RunFolder.claim(tmp_path / "run", numbered=False)
    folder.write_config("data: {train_path: " + frozen["data"]["train_path"] + "}\n")
    assert RunFolder.reopen(folder.path, {"data": {"train_path": "toks"}}).path == folder.path
    assert not refused_changes(frozen, {"data": plain(config)["data"]})


def test_a_user_without_a_home_folder_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(number: int) -> object:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert home().parent == tmp_path and home().is_dir()
    assert default_cache().is_relative_to(home()) and os.environ["HOME"] == str(home())
