"""Loggers whose package is missing are refused with the command that installs it, before anything
is started."""

import importlib
import importlib.util
import inspect
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import REPOSITORY, assert_refused, run_commands
from composed_configs import composed, options
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import OmegaConf

from lightning_3d.app.runs.logger_packages import require_loggers
from lightning_3d.app.training.run_record import RunRecord
from lightning_3d.errors import ConfigError

MODULES = {"aim": "aim", "comet": "comet_ml", "mlflow": "mlflow", "tensorboard": "tensorboard"}
CLASSES: dict[str, Any] = {
    "comet": CometLogger,
    "csv": CSVLogger,
    "mlflow": MLFlowLogger,
    "tensorboard": TensorBoardLogger,
}
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


def entries(option: str) -> dict[str, Any]:
    """The group `logger` as a run has it."""
    group = OmegaConf.to_container(
        composed(f"logger={option}", "run_folder=/runs/1").logger, resolve=True
    )
    assert isinstance(group, dict)
    return {str(name): entry for name, entry in group.items()}


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    hidden = {*MODULES.values(), "tensorboardX", "wandb"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in hidden else find(name, *more),
    )


@pytest.mark.parametrize("option", options("logger"))
def test_each_option_works_without_packages_or_names_the_one_it_needs(
    option: str, nothing_installed: None
) -> None:
    if option in ("csv", "none"):
        require_loggers(entries(option))
        return
    with pytest.raises(
        ConfigError, match=rf'{option} needs the package .*pip install "lightning-3d\[{option}\]"'
    ):
        require_loggers(entries(option))
    assert option in EXTRAS


@pytest.mark.parametrize("option", MODULES)
def test_an_installed_package_is_found(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MODULES[option]).mkdir()
    (tmp_path / MODULES[option] / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    require_loggers(entries(option))


def test_a_logger_of_the_user_is_left_alone(nothing_installed: None) -> None:
    require_loggers(None)
    require_loggers({"mine": {"_target_": "mine.Logger"}, "removed": None})


@pytest.mark.parametrize("option", CLASSES)
def test_keys_are_arguments_of_the_class(option: str) -> None:
    entry = entries(option)[option]
    names = inspect.signature(CLASSES[option].__init__).parameters
    # Comet's own, by keyword
    known = {*names, "name", "offline_directory"} if option == "comet" else {*names}
    assert (
        entry["_target_"].endswith(f".{CLASSES[option].__name__}")
        and entry.keys() - {"_target_"} <= known
    )


@pytest.mark.parametrize("variable", ["MLFLOW_TRACKING_URI", "COMET_API_KEY", "WANDB_API_KEY"])
def test_no_secret_is_written_to_the_configuration(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://user:secret@tracking:5000")
    assert "secret" not in str(entries(variable.partition("_")[0].lower()))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="mlflow is installed")
def test_the_command_line_refuses_before_torch() -> None:
    (result,) = run_commands([["train", "logger=mlflow", "cluster=local_cpu", "parallelism=tp1"]])
    assert_refused(
        result, ["The logger mlflow needs the package mlflow", 'pip install "lightning-3d[mlflow]"']
    )
    assert not result.torch and len(result.output.splitlines()) == 1


class Kept(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.kept += args


def test_trackers_get_the_configuration_of_the_run() -> None:
    trackers: list[Kept] = [
        type(name, (Kept,), {})() for name in ("MLFlowLogger", "CometLogger", "AimLogger", "Other")
    ]
    trackers.append(type("Mine", (type(trackers[0]),), {})())  # a subclass of one
    trainer: Any = SimpleNamespace(loggers=trackers, is_global_zero=True)
    RunRecord({"seed": 3}).setup(trainer, None, "fit")  # type: ignore[arg-type]
    assert [tracker.kept for tracker in trackers] == [
        [{"seed": 3}],
        [{"seed": 3}],
        [{"seed": 3}],
        [],
        [{"seed": 3}],
    ]
