"""A configuration may only name code of known packages, unless the user says so."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.profilers import SimpleProfiler
from omegaconf import OmegaConf, open_dict

from lightning_3d.app.cli.main import main
from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys, plan_run
from lightning_3d.app.config.targets import ALLOW_VARIABLE, allowed, check_targets
from lightning_3d.app.runs.check import check_shapes
from lightning_3d.app.training.objects import make_object, strategy_class
from lightning_3d.app.training.run import quiet
from lightning_3d.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "")


HOSTILE = {
    "a command": "os.system",
    "a process": "subprocess.Popen",
    "any text": "builtins.eval",
    "Hydra's own helper": "hydra.utils.call",
    "a function of torch": "torch.hub.load",
    "no name": "os.system('true')",
    "not a text": 5,
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    "where",
    [
        {"callbacks": {"mine": {}}},
        {"logger": {"mine": {}}},
        {"parallelism": {}},
        {"trainer": {"extra": {"profiler": {}}}},
        {"model": {"config": {"deep": [{}]}}},
        {
            "callbacks": {
                "mine": {
                    "_target_": "lightning.pytorch.callbacks.LearningRateMonitor",
                    "log_momentum": {},
                }
            }
        },
    ],
    ids=["callback", "logger", "strategy", "profiler", "list", "argument"],
)
def test_f22_a_frozen_configuration_cannot_run_what_it_likes(
    name: Any, where: dict[str, Any]
) -> None:
    config = check_shapes([])[0]
    where = copy.deepcopy(where)
    _put(where, name)
    with pytest.raises(
        ConfigError, match="names code of|dotted name of a class|must be|has no key"
    ):
        plan_run(OmegaConf.merge(OmegaConf.create(config), where))


def _put(where: Any, name: Any) -> None:
    """Put a `_target_` into the innermost empty mapping."""
    for value in where.values() if isinstance(where, dict) else where:
        if value == {}:
            value["_target_"] = name
        elif isinstance(value, (dict, list)):
            _put(value, name)


@pytest.mark.parametrize(
    ("key", "entry", "match"),
    [
        (
            "callbacks.mine",
            {"_target_": "lightning_3d.app.training.run.os.system", "command": "true"},
            "Cannot create|must name a class",
        ),
        (
            "callbacks.mine",
            {"_target_": "lightning_3d.ranks.supervisor.launch"},
            "must name a class that is a Callback",
        ),
        (
            "callbacks.mine",
            {"_target_": "lightning.pytorch.cli.LightningCLI"},
            "must name a class that is a Callback",
        ),
        (
            "logger.mine",
            {"_target_": "lightning.pytorch.callbacks.Timer"},
            "must name a class that is a Logger",
        ),
        (
            "trainer.extra.profiler",
            {"_target_": "lightning.pytorch.cli.LightningCLI"},
            "must name a class that is a Callback or",
        ),
        (
            "parallelism",
            {"_target_": "lightning.pytorch.callbacks.Timer"},
            "must be Lightning3DStrategy",
        ),
        (
            "callbacks.mine",
            {
                "_target_": "lightning.pytorch.callbacks.Timer",
                "duration": {"_target_": "lightning_3d.ranks.supervisor.launch"},
            },
            "must name a class that is a",
        ),
    ],
)
def test_f22_known_packages_are_no_way_around(key: str, entry: dict[str, Any], match: str) -> None:
    check_targets({key: entry})
    with pytest.raises(ConfigError, match=match):
        make_object(key, entry)


def test_a_class_that_does_not_exist_is_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    quiet()
    with pytest.raises(ConfigError, match="Cannot create callbacks.mine"):
        make_object("callbacks.mine", {"_target_": "lightning_3d.nowhere.Timeline"})
    assert capfd.readouterr() == ("", "")


HIDDEN = "${oc.select:seed,${oc.create:{_target_:torch.load}}}"


@pytest.mark.parametrize(
    "where", [{"duration": HIDDEN}, {"duration": {"deep": [HIDDEN]}}], ids=["argument", "deep"]
)
def test_f22_a_name_cannot_appear_when_the_object_is_made(where: dict[str, Any]) -> None:
    """Hydra resolves interpolations once more then, so a text can become a `_target_` that nobody
    has checked."""
    with pytest.raises(
        ConfigError, match="callbacks.mine.duration.* must not contain an escaped interpolation"
    ):
        make_object("callbacks.mine", {"_target_": "lightning.pytorch.callbacks.Timer", **where})


def test_f22_parameters_of_a_sweep_in_a_file_are_not_typed() -> None:
    word = "+callbacks.mine._target_=statistics.mean"
    config = compose([word])
    check_keys(config)
    assert allowed() == ["statistics.mean"]
    os.environ[ALLOW_VARIABLE] = ""
    with open_dict(config):
        config.hydra.sweeper.params = {"+callbacks.mine._target_": "statistics.mean"}
    with pytest.raises(ConfigError, match="names code of statistics"):
        check_keys(config)


def test_what_belongs_there_is_made() -> None:
    timer = make_object(
        "callbacks.timer",
        {
            "_target_": "lightning.pytorch.callbacks.Timer",
            "duration": {"_target_": "datetime.timedelta", "hours": 2},
        },
    )
    assert timer._duration == 7200
    assert isinstance(
        make_object(
            "trainer.extra.profiler", {"_target_": "lightning.pytorch.profilers.SimpleProfiler"}
        ),
        SimpleProfiler,
    )
    assert strategy_class("lightning_3d.Lightning3DStrategy").__name__ == "Lightning3DStrategy"


@pytest.mark.parametrize("name", ["torch.optim.NAdam", "torchao.optim.AdamW8bit"])
def test_optimizers_of_torch_and_torchao_may_be_named_anywhere(name: str) -> None:
    check_targets({"optimizer": {"_target_": name}})
    assert not allowed()
    with pytest.raises(ConfigError, match=f"names code of {name.partition('.')[0]}"):
        check_targets({"optimizer": {"_target_": name.replace(".optim.", ".other.")}})


def test_the_user_allows_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"mine": {"_target_": "mine.callbacks.Mine"}}
    with pytest.raises(
        ConfigError,
        match=(
            f"set the environment variable {ALLOW_VARIABLE}=mine, or give mine._target_ on the"
            " command line"
        ),
    ):
        check_targets(entry)
    monkeypatch.setenv(ALLOW_VARIABLE, "other, mine")
    check_targets(entry)
    with pytest.raises(ConfigError, match="names code of miner"):
        check_targets({"mine": {"_target_": "miner.Mine"}})


@pytest.mark.parametrize(
    "word", ["+callbacks.mine._target_=mine.Mine", "+callbacks.mine={_target_:mine.Mine,every:3}"]
)
def test_what_the_command_line_names_is_allowed_there_and_in_the_ranks(word: str) -> None:
    check_shapes([word])
    assert allowed() == ["mine.Mine"], "in the environment, which ranks inherit"
    with pytest.raises(ConfigError, match="names code of mine"):
        check_targets({"logger": {"_target_": "mine.Other"}})


def test_a_configuration_cannot_allow_itself(tmp_path: Path) -> None:
    config = check_shapes([])[0] | {
        "hydra": {"overrides": {"task": ["+callbacks.mine._target_=os.system"]}}
    }
    config["run_folder"] = str(tmp_path / "old")
    config["callbacks"]["mine"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'ran'}"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["run", str(tmp_path / "config.yaml"), "--folder", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "ran").exists() and not (tmp_path / "new").exists()
