"""Files set Hydra's own part of a configuration too: it is checked before Hydra makes anything of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_3d.cli.main import main
from lightning_3d.config.compose import compose
from lightning_3d.config.hydra_part import check_hydra, check_search_path
from lightning_3d.config.targets import ALLOW_VARIABLE
from lightning_3d.errors import ConfigError

Compose = Callable[..., DictConfig]


@pytest.fixture(autouse=True)
def nothing_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "")


@pytest.fixture(scope="module")
def default() -> DictConfig:
    return compose([])


@pytest.fixture
def of_a_file(default: DictConfig) -> Compose:
    def with_part(part: dict[str, Any], **others: Any) -> DictConfig:
        config = copy.deepcopy(default)
        OmegaConf.set_readonly(config.hydra, False)
        with open_dict(config):
            for key, value in {**{f"hydra.{key}": value for key, value in part.items()}, **others}.items():
                OmegaConf.update(config, key, value, force_add=True)
        return config

    return with_part


EVIL = {"_target_": "evil.touch"}
CODE: dict[str, dict[str, Any]] = {
    "a callback": {"callbacks.x": EVIL},
    "a callback in a callback": {"callbacks.x": {"_target_": "hydra.experimental.callback.Callback", "deep": [EVIL]}},
    "a function of this package": {"callbacks.x": {"_target_": "lightning_3d.ranks.supervisor.launch"}},
    "a class that a known module has imported": {"callbacks.x": {"_target_": "lightning_3d.cli.train.Path"}},
    "a helper of Hydra": {"callbacks.x": {"_target_": "hydra.utils.call", "config": EVIL}},
    "an interpolation": {"callbacks.x": "${oc.create:{_target_:evil.touch}}"},
    "an interpolation that depends on the run folder": {"callbacks.x": "${oc.select:hydra.runtime.output_dir,{a:1}}${x}"},
    "an escaped interpolation": {"callbacks.x": {"_target_": "lightning_3d.cli.train.BeforeRun", "a": r"\${oc.create:{_target_:evil.x}}"}},
    "a launcher": {"launcher._target_": "evil.Launcher"},
    "a launcher that is none": {"launcher._target_": "lightning_3d.runs.sweep.local_engine.LocalEngine"},
    "a launcher that is a word": {"launcher": "${hydra.job.name}"},
    "a sweeper that is a word": {"sweeper": "${hydra.job.name}"},
    "callbacks that are a number": {"callbacks": "${hydra.verbose}x"},
    "a callback that is a number": {"callbacks.x": 3},
    "shell lines": {"launcher": {"_target_": "hydra_plugins.lightning_3d_launcher.slurm.Lightning3DSlurmLauncher", "setup": ["touch x"]}},
    "a line in a job script": {"launcher.partition": "gpu\ntouch x"},
    "a sweeper": {"sweeper._target_": "evil.Sweeper"},
    "a sampler": {"sweeper.sampler": EVIL},
    "a function of Optuna's sweeper": {"sweeper.custom_search_space": "evil.touch"},
    "a handler": {"job_logging.handlers.x": {"class": "evil.touch"}},
    "a factory": {"job_logging.handlers.x": {"()": "evil.touch"}},
    "a formatter": {"hydra_logging.formatters.x": {"()": "ext://evil.touch"}},
    "a queue": {"job_logging.handlers.x": {"class": "logging.FileHandler", "queue": "evil.touch"}},
    "a listening socket": {"job_logging.handlers.x": {"class": "logging.config.listen"}},
    "an object": {"job_logging.handlers.x": {"class": "logging.StreamHandler", "stream": "ext://evil.x"}},
    "a handler from elsewhere": {"job_logging.handlers": "${oc.create:{x:{class:evil.touch}}}"},
    "a format that reads objects": {"job_logging.formatters.x": {"style": "{", "format": "{args.__class__}"}},
    "an environment of one word": {"job.env_set": "${hydra.job.name}"},
    "the environment": {"job.env_set.LD_PRELOAD": "/tmp/evil.so"},
    "a forged command line": {"overrides.task": ["+callbacks.x._target_=evil.touch"]},
}


@pytest.mark.parametrize("part", CODE.values(), ids=CODE)
def test_f22_hydras_part_of_a_file_runs_no_code(part: dict[str, Any], of_a_file: Compose) -> None:
    with pytest.raises(ConfigError, match="hydra"):
        check_hydra(of_a_file(part), [])


def test_f22_what_is_checked_is_what_is_made(of_a_file: Compose) -> None:
    """An interpolation may have another value when Hydra uses it."""
    config = of_a_file({"job_logging.handlers.console.level": "${chosen}", "run.dir": "runs/${oc.select:hydra.job.num,/x}"}, chosen="INFO")
    check_hydra(config, [])
    assert config.hydra.run.dir == "runs/0", "as it was checked, and not as it would be without a number"
    with open_dict(config):
        config.chosen = {"()": "evil.touch"}
        config.hydra.runtime.output_dir = "/runs/a"
    assert config.hydra.job_logging.handlers.console.level == "INFO"
    assert config.hydra.job_logging.handlers.file.filename == "/runs/a/train.log"


PATHS: dict[str, dict[str, Any]] = {
    "the run folder": {"run.dir": "/etc/x"},
    "up": {"run.dir": "a/../../x"},
    "home": {"run.dir": "~/x"},
    "a sweep": {"sweep.dir": "/etc"},
    "a job of a sweep": {"sweep.subdir": "../../${hydra.job.num}"},
    "a job of a sweep, by its number": {"sweep.subdir": "${oc.select:x.${hydra.job.num},..}"},
    "Hydra's files": {"output_subdir": "../../sub"},
    "the name of the log": {"job.name": "../../log"},
    "a log": {"job_logging.handlers.file.filename": "/etc/x.log"},
    "a log above": {"job_logging.handlers.file.filename": "${hydra.runtime.output_dir}/../x.log"},
    "a study": {"sweeper.storage": "sqlite:////etc/x.db"},
    "files of submitit": {"launcher.submitit_folder": "/etc/x"},
}


@pytest.mark.parametrize("part", PATHS.values(), ids=PATHS)
def test_f22_hydras_part_of_a_file_writes_into_the_run_folder(part: dict[str, Any], of_a_file: Compose) -> None:
    with pytest.raises(ConfigError, match=r"leaves|outside the run folder|may only contain"):
        check_hydra(of_a_file(part), [])


def test_what_the_command_line_says_is_allowed() -> None:
    words = [
        *("hydra.output_subdir=../sub", "hydra.run.dir=/runs/a", "hydra.job.name=a/b", "hydra.job_logging.handlers.file.filename=/logs/a"),
        *("+hydra.job.env_set.OMP_NUM_THREADS=1", "+hydra.callbacks.mine._target_=mine.Mine", "+hydra.launcher.setup=[module load cuda]"),
        "+hydra.job_logging.handlers.mine.class=mine.Handler",
    ]
    check_hydra(compose(words), words)


@pytest.mark.parametrize("word", ["seed=1", "hydra/job_logging=none", "hydra/launcher=slurm", "hydra/launcher=basic"])
def test_what_comes_with_hydra_is_allowed(word: str) -> None:
    check_hydra(compose([word]), [word])


def test_f22_packages_of_a_search_path_are_not_imported() -> None:
    check_search_path(["file:///mine", "pkg://lightning_3d/conf"])
    check_search_path(None)
    with pytest.raises(ConfigError, match="hydra.searchpath=evil names code of evil"):
        check_search_path(["pkg://evil"])


@pytest.mark.parametrize("where", ["callbacks", "searchpath", "overrides", "logging"])
def test_f22_a_config_folder_runs_no_code(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, name = tmp_path / "ran", f"evil_{where}"  # each is imported for the first time
    package = tmp_path / "code" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"from pathlib import Path\ndef touch(*a, **k): Path({str(ran)!r}).touch()\ntouch()\n")
    monkeypatch.syspath_prepend(str(package.parent))
    part = {
        "callbacks": f"hydra: {{callbacks: {{x: {{_target_: {name}.touch}}}}}}",
        "searchpath": f"hydra: {{searchpath: [pkg://{name}]}}",
        "overrides": f"hydra: {{overrides: {{task: ['+callbacks.x._target_={name}.touch']}}}}",
        "logging": f"hydra: {{hydra_logging: {{handlers: {{x: {{(): {name}.touch}}}}}}}}",
    }[where]
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "theirs.yaml").write_text(f"defaults: [config, _self_]\n{part}\n")
    arguments = ["--config-dir", str(tmp_path / "conf"), "--config-name", "theirs", "trainer.dry=true", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lightning_3d: hydra.") and said.count("\n") == 1
    assert not ran.exists() and not (tmp_path / "run").exists()
