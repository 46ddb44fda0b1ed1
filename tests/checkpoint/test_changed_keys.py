"""Keys that are changed where a run resumes a checkpoint: the table in docs/checkpoints.md, row by
row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from command_line import REPOSITORY
from composed_configs import composed, options
from lightning.pytorch.callbacks import EarlyStopping, Timer
from omegaconf import OmegaConf, open_dict, read_write
from quick_runs import QUICK
from ranks import run_ranks

from lightning_3d.app.config.compose import compose, hydra_config, plain
from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.runs.check import check_for
from lightning_3d.app.runs.metrics_file import read_rows
from lightning_3d.app.runs.resumed_keys import differences, refused_changes, require_resumable
from lightning_3d.app.training.run import train
from lightning_3d.app.training.run_record import follow_configuration
from lightning_3d.app.training.schedules import make_scheduler
from lightning_3d.checkpoint import describe_optimizer, restore_hyper_parameters
from lightning_3d.errors import ConfigError, Lightning3DError

SAVED, STEPS = 3, 6
RUN = [
    *(word for word in QUICK if not word.startswith(("parallelism=", "trainer.max_steps="))),
    "cluster=local_cpu",
    f"trainer.max_steps={STEPS}",
    f"trainer.checkpoint_every_n_steps={SAVED}",
    "optimizer.scheduler.warmup_steps=4",
    "sample.prompt=null",
]
TO_ROUNDING = 1e-5


@dataclass(frozen=True)
class Row:
    patterns: list[str]
    verdict: str
    examples: list[str]

    @property
    def is_refused(self) -> bool:
        return self.verdict.startswith("refused")

    @property
    def keeps_results(self) -> bool:
        return "same results" in self.verdict


def table() -> list[Row]:
    text = (
        (REPOSITORY / "docs" / "checkpoints.md")
        .read_text()
        .partition("## What may change")[2]
        .partition("\n## ")[0]
    )
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [
        Row(re.findall("`([^`]+)`", keys), verdict, re.findall("`([^`]+)`", "".join(more)))
        for keys, verdict, *more in cells
    ]


ROWS = table()
EXAMPLES = [(row, example) for row in ROWS for example in row.examples]


def row_of(key: str) -> Row:
    return next(row for row in ROWS if any(fnmatchcase(key, pattern) for pattern in row.patterns))


def keys_in(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from keys_in(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def with_value(key: str, value: Any) -> dict[str, Any]:
    inner: Any = value
    for name in reversed(key.split(".")):
        inner = {name: inner}
    return {"optimizer": {}, "model": {}, **inner}


@lru_cache
def every_key() -> frozenset[str]:
    """The keys of a run, with those of all optimizers and kinds of data."""
    whole = OmegaConf.to_container(composed(), resolve=False)
    assert isinstance(whole, dict)
    found = set(keys_in({str(key): value for key, value in whole.items() if key != "hydra"}))
    for group in ("data", "optimizer"):
        for name in options(group):
            found |= set(
                keys_in(
                    yaml.safe_load((conf_folder() / group / f"{name}.yaml").read_text()),
                    f"{group}.",
                )
            )
    return frozenset(found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.patterns[0])
def test_what_is_refused_is_what_the_table_says(row: Row) -> None:
    keys = {pattern.replace("*", "x") for pattern in row.patterns} | {
        key for key in every_key() if row_of(key) is row
    }
    for key in keys:
        if key == "model.lora.x" or (key.startswith("model.lora.") and key != "model.lora.r"):
            before, now = (
                {"optimizer": {}, "model": {"lora": {"r": 2, key.rpartition(".")[2]: value}}}
                for value in (3, 4)
            )
        else:
            before, now = with_value(key, "a"), with_value(key, "b")
        assert bool(refused_changes(before, now)) == row_of(key).is_refused, key
        assert not refused_changes(before, before)


def test_a_value_that_gives_an_optimizer_other_states_is_refused() -> None:
    for key, before, now in (
        ("momentum", 0.9, 0),
        ("amsgrad", None, True),
        ("betas", [0.9, 0.99], None),
        ("nesterov", None, True),
    ):
        refused = refused_changes({"optimizer": {key: before}}, {"optimizer": {key: now}})
        assert bool(refused) == (key in ("momentum", "amsgrad")), key
    assert not refused_changes(
        {"optimizer": {"name": "adamw"}}, {"optimizer": {"_target_": "torch.optim.AdamW"}}
    )


def test_a_key_that_is_off_in_a_new_version_is_no_difference() -> None:
    before = {
        "model": {"lora": {"r": None}},
        "optimizer": {"betas": [0.9, 0.95]},
        "data": {"name": "tokens"},
    }
    now = {
        "model": {"lora": {"r": None, "alpha": 16}},
        "optimizer": {"betas": (0.9, 0.95)},
        "data": {"name": "tokens", "packing": None},
    }
    assert refused_changes(before, now) == []
    assert [key for key, _, _ in differences(before, now)] == ["model.lora.alpha"]


def test_arguments_of_callbacks_win_over_their_saved_state() -> None:
    stop, timer = EarlyStopping("val_loss", patience=5), Timer(duration={"seconds": 9})
    saved = {"wait_count": 2, "patience": 1}
    checkpoint: dict[str, Any] = {
        "callbacks": {stop.state_key: saved, timer.state_key: {"time_elapsed": {"train": 8.0}}}
    }
    entry = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val_loss"}
    same: dict[str, Any] = {"optimizer": {}, "trainer": {"max_steps": 4}}
    before, now = (
        {**same, "callbacks": {"stop": {**entry, "patience": patience}}} for patience in (1, 5)
    )
    trainer: Any = SimpleNamespace(callbacks=[stop, timer])
    follow_configuration(trainer, checkpoint, now, now, {"stop": stop})
    assert saved == {"wait_count": 2, "patience": 1}, "nothing has changed since"
    follow_configuration(trainer, checkpoint, before, now, {"stop": stop})
    assert checkpoint["callbacks"] == {stop.state_key: {"wait_count": 2, "patience": 5}}, (
        "and trainer.max_time counts from each start"
    )


@pytest.mark.parametrize("kind", ["own", "StepLR", "none"])
def test_a_changed_schedule_is_at_the_step_of_the_checkpoint(kind: str) -> None:
    scheduler: dict[str, Any] = {"name": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1}
    if kind == "StepLR":
        scheduler = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5}
    steps = {"trainer": {"max_steps": 8}}
    before, now = (
        {**steps, "optimizer": {"lr": lr, "scheduler": scheduler if kind != "none" else None}}
        for lr in (1.0, 3.0)
    )
    saved, saved_schedule = made(before)
    for _ in range(5):
        saved.step()
        for one in saved_schedule:
            one.step()
    checkpoint: dict[str, Any] = {
        "global_step": 5,
        "optimizer_states": [describe_optimizer(saved, [["weight"]])],
        "lr_schedulers": [one.state_dict() for one in saved_schedule],
    }
    optimizer, schedule = made(now)
    strategy = SimpleNamespace(optimizer_state=lambda one: describe_optimizer(one, [["weight"]]))
    configs = [SimpleNamespace(scheduler=one) for one in schedule]
    trainer: Any = SimpleNamespace(
        callbacks=[], optimizers=[optimizer], lr_scheduler_configs=configs, strategy=strategy
    )
    follow_configuration(
        trainer, checkpoint, {**before, "callbacks": {}}, {**now, "callbacks": {}}, {}
    )
    restore_hyper_parameters(optimizer, checkpoint["optimizer_states"][0])
    for one, state in zip(schedule, checkpoint["lr_schedulers"], strict=True):
        one.load_state_dict(state)
    for _ in range(3):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(3 * saved.param_groups[0]["lr"])
        for stepped in (saved, optimizer, *saved_schedule, *schedule):
            stepped.step()


def made(config: dict[str, Any]) -> tuple[torch.optim.Optimizer, list[Any]]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config["optimizer"]["lr"])
    schedule = config["optimizer"]["scheduler"]
    return optimizer, (
        []
        if schedule is None
        else [make_scheduler(optimizer, schedule, config["trainer"]["max_steps"])]
    )


# What follows runs in rank processes.


def fit(folder: str, words: list[str]) -> Any:
    """Rows of a run: loss, gradient norm, learning rate and validation loss of each step. Its
    refusal, if it is refused."""
    config = compose(words)
    with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
        config.hydra.runtime.output_dir = folder
    try:
        with hydra_config(config):
            frozen = check_for(config).freeze(plain(config))
        Path(folder).mkdir(exist_ok=True)
        train(frozen)
    except Lightning3DError as error:
        return error
    names = ("step", "loss", "grad_norm", "lr", "val_loss")
    return [
        [float(row[name] or "nan") for name in names]
        for row in read_rows(Path(folder) / "metrics.csv")
    ]


def fit_each(folder: str, run: list[str], changes: list[str]) -> list[Any]:
    """The rows of an undisturbed run, and those of one that resumes it in the middle for each
    change."""
    resume = f"trainer.resume={folder}/whole/checkpoints/step_{SAVED}.ckpt"
    return [
        fit(f"{folder}/{number}", [*run, resume, change]) for number, change in enumerate(changes)
    ]


def fit_all(folder: str, run: list[str], changes: list[str]) -> list[Any]:
    return [fit(f"{folder}/whole", run), *fit_each(folder, run, changes)]


def agree(found: Any, expected: Any, tolerance: float) -> bool:
    pairs = zip(
        (value for row in found for value in row),
        (value for row in expected for value in row),
        strict=False,
    )
    equal = (one == pytest.approx(other, rel=tolerance, abs=0, nan_ok=True) for one, other in pairs)
    return len(found) == len(expected) and all(equal)


def judge(rows: list[Row], changes: list[str], found: list[Any]) -> None:
    whole, again, *others = found
    assert agree(again, whole[SAVED:], 0.0), "without a change, the run is the undisturbed one"
    for row, change, result in zip(rows, changes, others, strict=True):
        if row.is_refused:
            assert isinstance(result, ConfigError), change
        else:
            assert not isinstance(result, Exception), (change, result)
            assert agree(result, whole[SAVED:], TO_ROUNDING) == row.keeps_results, (change, result)


@pytest.mark.slow
def test_changed_keys_take_effect_or_are_refused(tmp_path: Path) -> None:
    rows, changes = [row for row, _ in EXAMPLES], [change for _, change in EXAMPLES]
    [found] = run_ranks(
        fit_all,
        1,
        str(tmp_path),
        [*RUN, "parallelism=dp1"],
        ["seed=0", *changes],
        timeout=300,
        process_group=False,
    )
    judge(rows, changes, found)
    rates = [row[3] for row in found[2 + changes.index("optimizer.lr=1e-4")]]
    assert rates == pytest.approx([row[3] / 10 for row in found[0][SAVED:]]), (
        "the same schedule of a tenth of the learning rate"
    )
    with pytest.raises(ConfigError, match="trainer.max_steps"):
        require_resumable(
            f"{tmp_path}/whole/checkpoints/step_{STEPS}.ckpt", {"trainer": {"max_steps": STEPS - 1}}
        )


@pytest.mark.slow
def test_groups_may_change_where_stages_have_different_ones(tmp_path: Path) -> None:
    run = [
        *RUN,
        "parallelism=pp2",
        "parallelism.schedule=GPipe",
        'optimizer.groups=[{pattern: "*.layers.0.*", lr_scale: 0.1}]',
    ]
    changes = [
        "optimizer.groups=null",
        "optimizer.weight_decay=0",
        'optimizer.groups=[{pattern: "*.layers.1.*", lr_scale: 0.1}]',
    ]
    found = run_ranks(
        fit_all, 2, str(tmp_path), run, ["seed=0", *changes], timeout=240, process_group=False
    )[0]
    judge([row_of("optimizer.groups")] * len(changes), changes, found)
    [one] = run_ranks(
        fit_each,
        1,
        str(tmp_path),
        [*RUN, "parallelism=dp1"],
        ["optimizer.groups=null"],
        process_group=False,
    )
    assert agree(one[0], found[2], TO_ROUNDING), "as in another layout"
