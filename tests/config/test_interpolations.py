"""Interpolations of a configuration file: what they lead to has the type of the key, and a broken
one ends in one message."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_3d.app.cli.main import main
from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys, plan_run
from lightning_3d.app.runs.check import check_shapes
from lightning_3d.app.training.run import make_trainer
from lightning_3d.errors import ConfigError


@pytest.fixture(scope="module")
def default() -> DictConfig:
    return compose([])


def changed(config: DictConfig, key: str, value: Any) -> DictConfig:
    config = copy.deepcopy(config)
    with open_dict(config):
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


@pytest.mark.parametrize(
    "key", ["model", "data", "callbacks", "logger", "trainer", "plan", "trainer.extra"]
)
def test_a_number_in_the_place_of_a_group_is_refused(key: str, default: DictConfig) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key} must be a group of keys, as in {key}.KEY=...; got 0"
    ):
        check_keys(changed(default, key, "${seed}"))


def test_a_number_in_the_place_of_a_list_is_refused(default: DictConfig) -> None:
    with pytest.raises(ConfigError, match=r"parallelism.order must be a list; got 0"):
        check_keys(changed(default, "parallelism.order", "${seed}"))
    check_keys(changed(default, "parallelism.order", ["tp", "cp", "pp", "dp"]))


def test_a_key_that_a_file_lacks_has_its_default_in_ranks() -> None:
    """A complete configuration of someone else may lack keys that ranks read."""
    config = check_shapes(["cluster=local_cpu", "parallelism=dp1"])[0] | {"run_folder": "/runs/a"}
    for key in ("seed", "logger", "callbacks", "force"):
        del config[key]
    for key in ("max_time", "extra", "gradient_clip_val"):
        del config["trainer"][key]
    frozen = plan_run(OmegaConf.create(config)).freeze(config)
    assert (frozen["seed"], frozen["logger"], frozen["callbacks"], frozen["force"]) == (
        0,
        {},
        {},
        False,
    )
    assert (
        frozen["trainer"] | {"max_time": None, "extra": {}, "gradient_clip_val": None}
        == frozen["trainer"]
    )
    assert make_trainer(frozen).max_steps == config["trainer"]["max_steps"]


def test_f22_a_run_without_a_folder_is_refused(default: DictConfig) -> None:
    """Where it is empty, no path would be inside or outside."""
    config = changed(
        changed(default, "run_folder", ""), "callbacks.checkpoint.dirpath", "/elsewhere"
    )
    with pytest.raises(ConfigError, match="run_folder must be"):
        check_keys(config)
    check_keys(changed(config, "trainer.dry", True))


def test_what_is_resolved_too_early_ends_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "data=instructions",
        "data.path=x",
        "+data.cache_dir=${run_folder}/cache",
        "cluster=local_cpu",
        "parallelism=dp1",
    ]
    assert main(["train", *words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lightning_3d: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "value", ["${no.such.key}", "${no_such_resolver:1}", "${oc.decode:'{a: [1'}", "${trainer}"]
)
def test_a_broken_interpolation_of_a_group_is_refused(value: str, default: DictConfig) -> None:
    with pytest.raises(ConfigError):
        check_keys(changed(default, "trainer", value))


FILES = {
    "a group": "trainer: ${seed}",
    "a group that is nowhere": "model: ${nowhere}",
    "a log of Hydra": "hydra: {hydra_logging: {version: 7}}",
    "a level of Hydra's log": "hydra: {hydra_logging: {root: {level: NOISE}}}",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_a_file_with_it_ends_in_one_message(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.yaml").write_text(f"defaults: [config, _self_]\n{text}\n")
    arguments = [
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "theirs",
        "trainer.dry=true",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    assert (
        main(["train", *(arguments if "trainer" not in text else [*arguments[:4], arguments[-1]])])
        == 2
    )
    said = capsys.readouterr().err
    assert said.startswith("lightning_3d: ") and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
