"""The groups `debug` and `hparams_search`: what they set, who overrides them, and that their runs
run."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_commands
from composed_configs import composed, options
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf
from quick_runs import QUICK, losses

from lightning_3d.app.config.explain import explain
from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.training.run import make_trainer
from lightning_3d.errors import ConfigError

ON_CPU = ["cluster=local_cpu", "parallelism=tp1"]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("option", options("debug"))
def test_debugging_is_short_and_keeps_the_layout(option: str) -> None:
    plan = plan_run(composed(f"debug={option}", "parallelism=tp2_pp2"))
    assert plan.layout.name == "tp2_pp2" and plan.run.trainer.max_steps <= 60


def test_the_command_line_overrides_debugging_and_debugging_a_recipe() -> None:
    config = composed(
        "recipe=llama_tiny_8xcpu", "debug=default", "trainer.max_steps=4", "logger=csv"
    )
    assert (
        config.trainer.max_steps,
        config.trainer.limit_val_batches,
        config.callbacks.checkpoint,
    ) == (4, 2, None)
    assert list(config.logger) == ["csv"] and config.parallelism.self_check == "always"
    assert not composed("recipe=llama_tiny_8xcpu", "debug=default").logger


@pytest.mark.parametrize("group", ["recipe", "debug", "hparams_search"])
def test_an_option_that_would_be_a_key_is_refused(group: str) -> None:
    with pytest.raises(
        ConfigError, match=f"The group {group} sets keys of the whole run.*@package _global_"
    ):
        plan_run(composed(f"+{group}.seed=3"))


def test_an_option_that_does_not_exist_is_refused_with_those_that_do() -> None:
    (result,) = run_commands([["train", "debug=profile"]])
    assert result.code == 2 and result.output.startswith(
        'lightning_3d: There is no debug "profile". Did you mean "profiler"?'
    )


def test_objects_among_the_arguments_of_the_trainer_are_built(tmp_path: Path) -> None:
    config = composed("debug=profiler", *ON_CPU, "callbacks=none", f"run_folder={tmp_path}")
    content: Any = OmegaConf.to_container(
        OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]), resolve=True
    )
    frozen = plan_run(config).freeze(content)
    assert type(make_trainer(frozen).profiler).__name__ == "SimpleProfiler"
    frozen["trainer"]["extra"]["profiler"]["_target_"] = "nowhere.Profiler"
    with pytest.raises(
        ConfigError, match=r"trainer.extra.profiler._target_=nowhere.Profiler names code of nowhere"
    ):
        make_trainer(frozen)
    frozen["trainer"]["extra"]["profiler"]["_target_"] = "lightning.pytorch.profilers.Nothing"
    with pytest.raises(
        ConfigError,
        match=r"Cannot create trainer.extra.profiler \(lightning.pytorch.profilers.Nothing\)",
    ):
        make_trainer(frozen)


def test_what_the_trainer_refuses_is_one_message(tmp_path: Path) -> None:
    config = composed(*ON_CPU, "callbacks=none", f"run_folder={tmp_path}")
    content: Any = OmegaConf.to_container(
        OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]), resolve=True
    )
    frozen = plan_run(config).freeze(content)
    frozen["trainer"]["extra"]["val_check_interval"] = "8"
    with pytest.raises(
        ConfigError,
        match="Lightning's Trainer refuses .*: Invalid time format for `val_check_interval`: '8'",
    ):
        make_trainer(frozen)
    del frozen["trainer"]["extra"]["val_check_interval"]
    metrics = "lightning_3d.MetricsCSV"
    frozen["callbacks"] = {
        name: {"_target_": metrics, "path": f"{tmp_path}/{name}.csv"} for name in "ab"
    }
    with pytest.raises(
        ConfigError,
        match=(
            "Lightning's Trainer refuses .*: Found more than one stateful callback of type"
            " `MetricsCSV`"
        ),
    ):
        make_trainer(frozen)


@pytest.mark.slow
@pytest.mark.parametrize("option", options("hparams_search"))
def test_a_search_varies_keys_that_exist(option: str) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    config = composed(f"hparams_search={option}", with_hydra=True)
    assert (
        config.hydra.mode.name == "MULTIRUN" and "optuna_sweeper" in config.hydra.sweeper._target_
    )
    for key, values in config.hydra.sweeper.params.items():
        assert OmegaConf.select(config, key) is not None, key
        drawn = re.search(r"\(?([\w.-]+), ?[^()]*\)+$", values)
        assert drawn, values
        plan_run(composed(f"{key}={drawn[1]}"))


def test_a_search_without_optuna_names_the_command_that_installs_it() -> None:
    error = MissingConfigException("not found", "hydra/sweeper/optuna", ["basic"])
    assert str(explain(error)).endswith('Install it with pip install "lightning-3d[optuna]".')
    other = MissingConfigException("not found", "hydra/sweeper/ax", ["basic"])
    assert str(explain(other)) == 'There is no hydra/sweeper "ax". Available: basic.'


# Whole runs

SMALL = [word for word in QUICK if not word.startswith("trainer.")]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_each_option_trains(tmp_path: Path) -> None:
    names = options("debug")
    lines = [
        ["train", f"debug={name}", *SMALL, f"hydra.run.dir={tmp_path / name}"] for name in names
    ]
    results = dict(zip(names, run_commands(lines, timeout=800, warm=True), strict=True))
    steps = {name: len(losses(tmp_path / name)) for name in names if results[name].code == 0}
    assert steps == {"default": 10, "fdr": 1, "limit": 30, "overfit": 60, "profiler": 20}, results
    first, last = (float(losses(tmp_path / "overfit")[index]) for index in (0, -1))
    assert last < 0.8 * first, "the same three batches"
    checkpoints = {name for name in names if (tmp_path / name / "checkpoints").exists()}
    assert checkpoints == {"limit"}
    tables = sorted((tmp_path / "profiler").glob("*profile*"))
    assert len(tables) == 2 and all(
        "run_training_batch" in table.read_text() for table in tables
    ), tables
    assert (tmp_path / "default" / "timeline.json").is_file()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_search_finds_the_smallest_loss_of_its_trials(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    line = [
        "train",
        "hparams_search=optuna",
        *QUICK,
        *ON_CPU,
        "hydra.sweeper.n_trials=2",
        f"hydra.sweep.dir={tmp_path / 's'}",
    ]
    (done,) = run_commands([line], timeout=800, warm=True)
    assert done.code == 0, done.output
    with (tmp_path / "s" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    best = yaml.safe_load((tmp_path / "s" / "optimization_results.yaml").read_text())
    assert len(rows) == 2 and best["best_value"] == min(float(row["val_loss"]) for row in rows)
    assert best["best_params"].keys() == {
        "optimizer.lr",
        "optimizer.weight_decay",
        "optimizer.scheduler.warmup_steps",
    }
