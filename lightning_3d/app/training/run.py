"""One rank of a training run: builds data, module, strategy and Trainer from the configuration, and
fits."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_3d.app.planner.utilization import full_speed
from lightning_3d.app.training.callbacks.evaluate_every import EvaluateEvery
from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.objective import make_module
from lightning_3d.app.training.objects import check_object, make_object, make_objects
from lightning_3d.app.training.optimizers import try_optimizer
from lightning_3d.app.training.run_record import RunRecord, same_run
from lightning_3d.app.training.wandb_logger import WandbLogger
from lightning_3d.compat.deepspeed import import_deepspeed
from lightning_3d.compat.lightning_loggers import append_to_csv_files
from lightning_3d.errors import ConfigError, Lightning3DError, did_you_mean
from lightning_3d.options.precision import PRECISIONS
from lightning_3d.options.reliability import STOP, Reliability
from lightning_3d.ranks.environment import outside_rank
from lightning_3d.strategy.exponential_average import ExponentialAverage
from lightning_3d.strategy.strategy import Lightning3DStrategy


def train(config: dict[str, Any]) -> None:
    """Train on this rank: fit, with a validation and a checkpoint at the last step.

    Args:
        config: complete and resolved configuration, from `RunPlan.freeze`.

    Raises:
        Lightning3DError: data or model are wrong; before the first step.
    """
    prepare(config)
    module = make_module(config)
    data = make_data(config)
    trainer = make_trainer(config)
    exit_code = 1
    try:
        trainer.fit(module, datamodule=data, ckpt_path=config["trainer"]["resume"])
        exit_code = 0
    finally:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.close(exit_code)


def prepare(config: Mapping[str, Any]) -> None:
    """Silence announcements, check that torch can use the GPUs, set how exactly they multiply, and
    seed the generators of this rank."""
    quiet()
    if config["cluster"]["accelerator"] == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"This machine has GPUs, but torch {torch.__version__} cannot use them. Install a build"
            " with CUDA, or run on the CPU with cluster=local_cpu."
        )
    if (name := config["trainer"].get("float32_matmul_precision")) is not None:
        torch.set_float32_matmul_precision(name)
    seed_everything(config["seed"], verbose=False)


def make_data(config: Mapping[str, Any]) -> LightningDataModule:
    """Build the data module, with the arguments that it takes from other groups."""
    return make_data_module(
        config["data"], vocab_size=config["model"]["config"]["vocab_size"], seed=config["seed"]
    )


def check_named(config: Mapping[str, Any]) -> None:
    """Check the classes and the arguments that a configuration names, as building them would,
    before anything is built.

    Raises:
        ConfigError: a class does not exist, may not be named there, or does not accept its
            arguments.
    """
    try_optimizer(config["optimizer"])
    check_object("parallelism", _strategy_entry(config))
    for group, entries in (
        ("callbacks", with_full_speed(config)),
        ("logger", config["logger"] or {}),
    ):
        for name, entry in entries.items():
            if entry is not None:
                check_object(f"{group}.{name}", entry)
    _check_extra(config["trainer"]["extra"])


def make_strategy(config: Mapping[str, Any]) -> Lightning3DStrategy:
    """Build the strategy from the groups `parallelism` and `precision`."""
    strategy = make_object("parallelism", _strategy_entry(config))
    assert isinstance(strategy, Lightning3DStrategy)
    return strategy


def _strategy_entry(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group `parallelism`, with the arguments of the strategy that other groups set."""
    more = {"seed": config["seed"], "fp8": config["precision"]["name"] == "fp8"}
    every = config["trainer"].get("trace_every_n_steps")
    more |= {"trace_every_n_steps": every} if every is not None else {}
    nonfinite = config["trainer"].get("nonfinite", STOP)
    more |= {"nonfinite": nonfinite} if nonfinite != STOP else {}
    if "collective_timeout" in config["trainer"]:
        more["timeout"] = timedelta(seconds=config["trainer"]["collective_timeout"])
    more["reliability"] = {
        field.name: config["trainer"][field.name]
        for field in fields(Reliability)
        if field.name in config["trainer"]
    }
    more |= {"checkpoint_check_space": False} if config.get("force") else {}
    return {**config["parallelism"], **more}


def make_trainer(config: Mapping[str, Any], more: Sequence[Callback] = ()) -> Trainer:
    """Build Lightning's Trainer for ranks that are already running. `more` are callbacks in
    addition to those of the configuration."""
    options = config["trainer"]
    _check_extra(options["extra"])
    # Of Lightning's ModelCheckpoint. A run that would replace checkpoints of another one was
    # refused before.
    warnings.filterwarnings("ignore", message="Checkpoint directory .* is not empty")
    entries = {name: entry for name, entry in with_full_speed(config).items() if entry is not None}
    named: dict[str, Callback] = dict(zip(entries, make_objects("callbacks", entries), strict=True))
    callbacks: list[Callback] = [*named.values(), *more]
    if (decay := options.get("average_decay")) is not None:
        callbacks.append(ExponentialAverage(decay))
    if (every := options.get("evaluate_every")) is not None:
        callbacks.append(EvaluateEvery(every))
    append_to_csv_files()
    loggers: list[Logger] = make_objects("logger", same_run(config))
    place = outside_rank()  # ranks that this package started have torchrun's variables too
    local_size = place.local_world_size if place is not None else 1
    arguments = {
        "accelerator": config["cluster"]["accelerator"],
        "devices": local_size,
        "num_nodes": place.nodes if place is not None else 1,
        "strategy": make_strategy(config),
        "precision": PRECISIONS[config["precision"]["name"]],
        "max_steps": options["max_steps"],
        "max_epochs": -1,
        "max_time": options["max_time"],
        "val_check_interval": options["val_check_interval"],
        "check_val_every_n_epoch": None,
        "limit_val_batches": options["limit_val_batches"],
        "num_sanity_val_steps": 0,
        "gradient_clip_val": options["gradient_clip_val"],
        "log_every_n_steps": options["log_every_n_steps"],
        "logger": loggers or False,
        "callbacks": [*callbacks, RunRecord(config, named)],
        "default_root_dir": config["run_folder"],
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
        "enable_model_summary": False,
    }
    extra = {key: _extra(key, value) for key, value in options["extra"].items()}
    try:
        return Trainer(**{**arguments, **extra})
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        if isinstance(error, Lightning3DError):
            raise
        raise ConfigError(
            "Lightning's Trainer refuses the callbacks or the options of this configuration:"
            f" {error}"
        ) from error


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse keys of `trainer.extra` that are no arguments of Lightning's Trainer, and classes that
    its values cannot name."""
    accepted = [name for name in signature(Trainer.__init__).parameters if name != "self"]
    for key, value in extra.items():
        if key not in accepted:
            near = (
                did_you_mean(key, accepted)
                or " Use one of the arguments of lightning.pytorch.Trainer."
            )
            raise ConfigError(
                f"trainer.extra.{key} is not an argument of Lightning's Trainer.{near}"
            )
        if _is_object(value):
            check_object(f"trainer.extra.{key}", value)


def _extra(key: str, value: Any) -> Any:
    """Return a value of `trainer.extra`; one with a `_target_`, such as a profiler, is built."""
    return make_object(f"trainer.extra.{key}", value) if _is_object(value) else value


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def with_full_speed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group `callbacks`, with `full_speed` added to `MetricsCSV`, for the MFU."""
    speed = full_speed(config)
    return {
        name: (
            {"full_speed": speed, **entry}
            if entry and str(entry.get("_target_")).endswith(".MetricsCSV")
            else entry
        )
        for name, entry in config["callbacks"].items()
    }


def preload(config: Mapping[str, Any]) -> None:
    """Import what a rank otherwise imports when it first needs it, so that ranks forked afterwards
    have it.

    DeepSpeed only on CPU: for GPUs its import asks CUDA for devices, which must wait until
    Lightning has chosen this rank's.
    """
    quiet()
    model_type = config["model"]["config"]["model_type"]
    names = [
        f"transformers.models.{model_type}.modeling_{model_type}",
        "torch.distributed.pipelining.schedules",
    ]
    sharded = config["parallelism"]["zero_stage"] > 0
    try:
        if sharded and config["cluster"]["accelerator"] == "cpu":
            # before the backend, which would import it for any device that it finds
            import_deepspeed(torch.device("cpu"))
        if sharded:
            names.append("lightning_3d.parallel.zero")
    except ImportError as error:
        _log_skipped("deepspeed", error)
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            _log_skipped(name, error)


def _log_skipped(name: str, error: ImportError) -> None:
    """Record what `preload` could not import. The rank that needs it says so."""
    logging.getLogger(__name__).debug("not preloaded: %s (%s)", name, error)


def quiet() -> None:
    """Silence announcements of Lightning and DeepSpeed; the run itself prints what matters."""
    for name in (
        "lightning.pytorch",
        "lightning.fabric",
        "lightning_utilities",
        "compilers",
        "DeepSpeed",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    # of a class that does not exist: the error says it too
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)
    # Who starts the ranks is the user's choice; the last warning was printed before they were
    # started.
    known = ("The `srun` command is available.*", ".*does not have many workers.*", "A step has .*")
    shown_anyway = "No checkpoint is written after a failure.*"
    # a ModelCheckpoint with other intervals than in the run that is resumed
    harmless = "Be aware that when using `ckpt_path`.*"
    for message in (*known, shown_anyway, harmless):
        warnings.filterwarnings("ignore", message=message)
