"""A configuration file writes into the run folder only."""

from __future__ import annotations

import copy
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_3d.cli.main import main
from lightning_3d.config.compose import compose
from lightning_3d.config.plan_run import check_keys
from lightning_3d.config.written_paths import ALLOW_VARIABLE, check_frozen_paths, leaves_folder
from lightning_3d.errors import ConfigError
from lightning_3d.runs.check import check_shapes
from lightning_3d.training.job import run_rank


@pytest.fixture(autouse=True)
def nothing_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "")


@pytest.fixture(scope="module")
def default() -> DictConfig:
    return compose(["logger=csv"])


PROFILER = {"_target_": "lightning.pytorch.profilers.SimpleProfiler", "filename": "a"}
OUTSIDE: dict[str, dict[str, Any]] = {
    "checkpoints": {"callbacks.checkpoint.dirpath": "/elsewhere"},
    "checkpoints at a URL": {"callbacks.checkpoint.dirpath": "s3://theirs/run"},
    "checkpoints in the working folder": {"callbacks.checkpoint.dirpath": "checkpoints"},
    "checkpoints above": {"callbacks.checkpoint.dirpath": "${run_folder}/../../x"},
    "names of checkpoints": {"callbacks.checkpoint.filename": "../../step_{step}"},
    "next to the run folder": {"callbacks.checkpoint.dirpath": "${run_folder}2/x"},
    "metrics": {"callbacks.metrics.path": "metrics.csv"},
    "routers": {"callbacks.routers.path": "~/routers.csv"},
    "the timeline": {"callbacks.timeline.path": "file:///etc/x"},
    "without a name": {"callbacks.mine": {"_target_": "lightning_3d.training.callbacks.MetricsCSV", "_args_": ["Makefile"]}},
    "a logger": {"logger.csv.save_dir": "."},
    "a logger's name": {"logger.csv.name": "../../x"},
    "a logger's server": {"logger.mine": {"_target_": "lightning.pytorch.loggers.MLFlowLogger", "tracking_uri": "http://theirs"}},
    "the Trainer": {"trainer.extra.default_root_dir": "/elsewhere"},
    "a profiler": {"trainer.extra.profiler": {**PROFILER, "dirpath": "prof"}},
    "the cache": {"data.cache_dir": "/elsewhere"},
    "the run folder": {"run_folder": "/elsewhere"},
}


def changed(config: DictConfig, changes: dict[str, Any]) -> DictConfig:
    config = copy.deepcopy(config)
    with open_dict(config):
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
    return config


@pytest.mark.parametrize("changes", OUTSIDE.values(), ids=OUTSIDE)
def test_f22_a_file_writes_into_the_run_folder(changes: dict[str, Any], default: DictConfig) -> None:
    with pytest.raises(ConfigError, match=r"outside the run folder\. Use \$\{run_folder\}/\w|run_folder must be"):
        check_keys(changed(default, changes))


def test_places_in_the_run_folder_are_allowed(default: DictConfig) -> None:
    inside = {
        "callbacks.checkpoint.dirpath": "${run_folder}/mine/checkpoints",
        "callbacks.checkpoint.filename": "mine/step_{step}",
        "trainer.extra.profiler": {**PROFILER, "dirpath": "${run_folder}"},
        "trainer.extra.default_root_dir": "${run_folder}",
    }
    check_keys(changed(default, inside))


@pytest.mark.slow
def test_what_the_command_line_names_is_allowed_there_and_in_jobs_of_a_sweep() -> None:
    words = ["callbacks.checkpoint.dirpath=s3://mine/run", "+callbacks.mine={_target_: lightning_3d.PeriodicCheckpoint, dirpath: /mine}"]
    check_keys(compose([*words, "data=instructions", "data.path=x", "data.cache_dir=cache"]))
    assert os.environ[ALLOW_VARIABLE].splitlines() == ["s3://mine/run", "/mine", "cache", str(Path("cache").absolute())]
    check_keys(changed(compose([]), {"callbacks.checkpoint.dirpath": "s3://mine/run/deep"}))
    for other in ("s3://mine/run2", "s3://mine/run/../x", "/min"):
        with pytest.raises(ConfigError, match="outside the run folder"):
            check_keys(changed(compose([]), {"callbacks.checkpoint.dirpath": other}))


def test_paths_with_commas_are_passed_on_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "/a, /b/")
    check_keys(compose(["callbacks.checkpoint.dirpath='/mine/lr=1,wd=2'"]))
    assert os.environ[ALLOW_VARIABLE] == "/a\n/b\n/mine/lr=1,wd=2\n"
    for allowed in ("/a/x", "/b", "/mine/lr=1,wd=2/deep"):
        check_frozen_paths({"run_folder": "/run", "callbacks": {"checkpoint": {"dirpath": allowed}}})
    for other in ("/mine/lr=1", "wd=2"):
        with pytest.raises(ConfigError, match="outside the run folder"):
            check_frozen_paths({"run_folder": "/run", "callbacks": {"checkpoint": {"dirpath": other}}})


def test_f22_ranks_check_paths_again() -> None:
    """They may depend on the name of the run folder, which `lightning-3d train` chooses after the first check."""
    frozen = {"run_folder": "/runs/a", "callbacks": {"checkpoint": {"dirpath": "/elsewhere"}}}
    with pytest.raises(ConfigError, match=r"callbacks\.checkpoint\.dirpath=/elsewhere of a configuration file would be written outside"):
        run_rank(frozen)


def test_what_the_command_line_names_relative_to_the_run_folder_is_allowed_in_ranks() -> None:
    check_keys(compose(["callbacks.checkpoint.dirpath=${run_folder}/../mine"]))
    check_frozen_paths({"run_folder": "/runs/a", "callbacks": {"checkpoint": {"dirpath": "/runs/a/../mine"}}})


def test_f22_a_frozen_configuration_writes_into_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = check_shapes(["cluster=local_cpu", "trainer.dry=true"])[0]
    for entry in config["callbacks"].values():
        for key in {"path", "dirpath"} & set(entry):
            entry[key] = f"{tmp_path}/theirs{entry[key]}"
    config["run_folder"] = f"{tmp_path}/theirs"
    path = tmp_path / "theirs" / "config.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(config))
    assert main(["run", str(path)]) == main(["run", str(path), "--folder", str(tmp_path / "mine")]) == 0
    (tmp_path / "moved.yaml").write_text(yaml.safe_dump(config))
    assert main(["run", str(tmp_path / "moved.yaml")]) == 2, "its run_folder is where its author wants it"
    assert "--folder" in capsys.readouterr().err
    config["callbacks"]["checkpoint"]["dirpath"] = "/elsewhere"
    path.write_text(yaml.safe_dump(config))
    assert main(["run", str(path)]) == 2
    assert "callbacks.checkpoint.dirpath=/elsewhere of a configuration file would be written outside" in capsys.readouterr().err


def test_every_path_of_a_class_that_may_be_named_is_known() -> None:
    """Arguments that are paths, by their annotation or name, count as such unless they are relative to another one."""
    import lightning.pytorch.loggers
    import lightning.pytorch.profilers  # noqa: F401

    from lightning_3d.training import callbacks, router_log, timeline, wandb_logger  # noqa: F401
    from lightning_3d.training.objects import _OF_THE_TRAINER

    found = set()
    classes = [*_OF_THE_TRAINER]
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        if kind.__module__.startswith(("lightning.", "lightning_3d.")):
            parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
            found |= {one.name for one in parameters if "Path" in str(one.annotation) or one.name.endswith(("dir", "path", "folder"))}
    assert {"dirpath", "save_dir", "path"} <= found
    assert all(leaves_folder("relative", f"callbacks.x.{name}", "/run") for name in found), sorted(found)
