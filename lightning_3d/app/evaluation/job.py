"""The job around an evaluation: checks, ranks, exit code. torch is imported after all checks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_3d.app.config.compose import compose, plain
from lightning_3d.app.config.plan_run import RunPlan, plan_run
from lightning_3d.app.evaluation.subject import Subject
from lightning_3d.app.planner.advice import PlannerAdvice
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.job import be_rank, start_ranks
from lightning_3d.errors import ConfigError, Lightning3DError, listed
from lightning_3d.layout.layout import Layout
from lightning_3d.models.pretrained_config import TAKEN
from lightning_3d.options.schema import defaults_of
from lightning_3d.options.zero import ZeroArguments
from lightning_3d.ranks.boards import connect_board
from lightning_3d.ranks.environment import OutsideRank, print_once, set_master_address
from lightning_3d.ranks.reporter import FailureReporter


@dataclass(frozen=True)
class EvaluationJob:
    """A checked evaluation.

    Attributes:
        subject: the model.
        plan: the checked run of its configuration.
        config: composed configuration.
    """

    subject: Subject
    plan: RunPlan
    config: DictConfig

    def describe(self) -> str:
        """Describe model and layout in one line."""
        plan = self.plan
        where = "GPUs" if plan.accelerator == "gpu" else "CPU"
        return f"{self.subject.path}: {plan.layout.name} on {where}, {plan.precision}"

    def about(self) -> dict[str, str]:
        """Return model, layout and precision, for a file of results."""
        return {
            "model": str(self.subject.path),
            "layout": self.plan.layout.name,
            "precision": self.plan.precision,
        }


def check(
    subject: Subject, overrides: Sequence[str], outside: OutsideRank | None, *, reads_data: bool
) -> EvaluationJob:
    """Check everything that can be checked before ranks are started.

    Args:
        reads_data: whether validation sets are read.

    Raises:
        Lightning3DError: as `lightning-3d train` raises it for the layout, the model and the data.
    """
    config = compose_evaluation(subject, overrides, reads_data=reads_data)
    with open_dict(config):
        config.run_folder = tempfile.gettempdir()  # of nothing; the ranks get a folder of their own
    plan = plan_run(config, outside, PlannerAdvice(), trains=False)
    if reads_data and outside is None:
        check_files(config.data)
    return EvaluationJob(subject, plan, config)


def run(
    evaluation: EvaluationJob, job: Callable[..., None], request: Any, outside: OutsideRank | None
) -> int:
    """Run `job(config, checkpoint, request)` on every rank, and return the exit code.

    Args:
        job: function of a module, which calls `prepare_rank` first.
        request: what to do; pickled for ranks that are fresh interpreters.
    """
    plan = evaluation.plan
    for warning in plan.warnings:
        print_once(f"lightning_3d: {warning}", outside, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="lightning_3d_") as folder:
        with open_dict(evaluation.config):
            evaluation.config.run_folder = folder
        frozen = plan.freeze(plain(evaluation.config))
        arguments = (frozen, evaluation.subject.checkpoint, request)
        if outside is not None:
            set_master_address(outside)
            board = connect_board(
                outside.rank, outside.world_size, frozen["trainer"]["rendezvous_timeout"]
            )
            reporter = FailureReporter(board, outside.rank, outside.world_size)
            return be_rank(outside, lambda: job(*arguments), reporter, plan.layout.world_size)[0]
        outcome = start_ranks(job, arguments, plan, frozen, Path(folder) / "logs")
        if outcome.message is not None:
            print(outcome.message, file=sys.stderr, flush=True)
            _show_logs(Path(folder) / "logs", outcome.exit_code)
        return outcome.exit_code


def _show_logs(logs: Path, exit_code: int) -> None:
    """Keep the output of the ranks of an evaluation that failed, and print where it is."""
    if exit_code == Lightning3DError.exit_code or not logs.is_dir():
        return
    kept = Path(tempfile.mkdtemp(prefix="lightning_3d_logs_"))
    for file in logs.glob("rank_*.log"):
        file.rename(kept / file.name)
    print(f"lightning_3d: the output of the ranks is in {kept}", file=sys.stderr)


# The configuration of an evaluation: that of the run, changed by overrides.

AUTO = "auto"

_CHOOSABLE = ("data", "parallelism", "cluster", "precision")
_OF_THE_MODEL = ("_target_", "plan", "pipeline_module", "self_check", "cp_kind", "micro_batch_size")
"""Keys of `parallelism` that belong to the model more than to the layout: another layout keeps
them."""

_NO_TRAINING: dict[str, dict[str, Any]] = {
    "trainer": {
        "max_steps": 1,
        "val_check_interval": 1,
        "max_time": None,
        "resume": None,
        "auto_resume": False,
        "restarts": 0,
        "extra": {},
        "evaluate_every": None,
        "checkpoint_every_n_steps": None,
        "trace_every_n_steps": None,
        "average_decay": None,
    },
    "optimizer": {"scheduler": None, "groups": None},
}
_NO_OPTIMIZER = defaults_of(ZeroArguments)


def compose_evaluation(
    subject: Subject, overrides: Sequence[str], *, reads_data: bool
) -> DictConfig:
    """Compose the configuration of an evaluation.

    A group that an override names (`data=tokens`) replaces that of the run; other overrides change
    keys of it. A folder of Transformers has no run: the defaults of `lightning-3d train` take its
    place, on one rank.

    Args:
        reads_data: whether validation sets are read.

    Raises:
        ConfigError: an override cannot be used here. HydraException, OmegaConfBaseException:
            `explain` says what is wrong.
    """
    given = _parse(overrides)
    keys = {str(override.key_or_group) for override in given}
    config = OmegaConf.create(
        _of_folder(subject, given) if subject.run is None else _of_run(subject.run, given)
    )
    with open_dict(config):
        _leave_out_training(config)
        _take_weights(config, subject)
        if reads_data:
            _complete_data(config, keys)
        else:
            _leave_out_data(config)
    return config


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides, and refuse those that are not GROUP=NAME or KEY=VALUE of a group that an
    evaluation reads."""
    given = OverridesParser.create().parse_overrides(overrides=list(overrides))
    for override in given:
        key, line = override.key_or_group, override.input_line
        if override.is_delete() or override.is_sweep_override():
            raise ConfigError(
                f"An evaluation takes GROUP=NAME and KEY=VALUE, with one value; got {line}."
            )
        if "." not in key and key not in (*_CHOOSABLE, "seed", "force"):
            hint = " The model comes from the checkpoint." if key == "model" else ""
            raise ConfigError(
                f"{line} has no meaning for an evaluation. It takes the groups"
                f" {listed(_CHOOSABLE)}, and keys.{hint}"
            )
    return given


def _of_folder(subject: Subject, given: Sequence[Override]) -> dict[str, Any]:
    lines = [str(override.input_line) for override in given]
    chosen = {override.key_or_group for override in given}
    path = str(subject.path).replace("\\", "\\\\").replace("'", "\\'")
    first = ["model=pretrained", f"model.pretrained='{path}'"]
    first += [] if "parallelism" in chosen else ["parallelism=dp1"]
    first += [] if "parallelism.micro_batch_size" in chosen else ["parallelism.micro_batch_size=1"]
    return _composed([*first, *lines])


def _of_run(run: Mapping[str, Any], given: Sequence[Override]) -> dict[str, Any]:
    chosen = {
        override.key_or_group: str(override.input_line)
        for override in given
        if override.key_or_group in _CHOOSABLE
    }
    config = {key: value for key, value in run.items() if key != "hydra"}
    if chosen:
        composed = _composed(list(chosen.values()))
        kept = {key: run["parallelism"][key] for key in _OF_THE_MODEL if key in run["parallelism"]}
        config |= {group: composed[group] for group in chosen}
        config["parallelism"] = {**config["parallelism"], **kept}
    changed = OmegaConf.create(config)
    for override in given:
        if override.key_or_group not in _CHOOSABLE:
            OmegaConf.update(changed, override.key_or_group, override.value(), force_add=True)
    return plain(changed)


def _composed(lines: Sequence[str]) -> dict[str, Any]:
    """Compose a configuration without a run folder: an evaluation writes none."""
    config = compose(lines)
    with open_dict(config):
        config.run_folder = ""
    return plain(config)


def _leave_out_training(config: DictConfig) -> None:
    """Set the keys of training to values with which nothing is trained, logged or saved.

    ZeRO 1 and 2 shard only what training needs. Stage 3 shards the weights, so it stays.
    """
    for group, values in _NO_TRAINING.items():
        config[group].update(values)
    config.logger, config.callbacks, config.force = {}, {}, True
    config.parallelism.elastic = False
    if config.parallelism.get("zero_stage") != 3:
        config.parallelism.update(_NO_OPTIMIZER)


def _take_weights(config: DictConfig, subject: Subject) -> None:
    """Let the model of a checkpoint read its weights from there, not from the folder that its run
    started from."""
    if subject.run is not None:
        config.model.pretrained = None
        config.model.name = (
            "checkpoint" if config.model.get("name") == TAKEN else config.model.get("name")
        )


def _complete_data(config: DictConfig, keys: set[str]) -> None:
    """Evaluate whole validation sets, in batches that the layout can split; sets to train on need
    not be given."""
    data, parallelism = config.data, config.parallelism
    data.batch_ramp = None
    if "data.val_sequences" not in keys:
        data.val_sequences = None
    if "trainer.limit_val_batches" not in keys:
        config.trainer.limit_val_batches = None
    if (
        data.get("name") == "tokens"
        and OmegaConf.is_missing(data, "train_path")
        and data.get("val_path")
    ):
        data.train_path = data.val_path
    if data.get("name") == "blend" and not OmegaConf.is_missing(data, "sources"):
        _complete_sources(
            [source for source in data.sources.values() if isinstance(source, DictConfig)]
        )
    if "data.global_batch_size" not in keys and parallelism.layout != AUTO:
        data.global_batch_size = _batch(config)


def _leave_out_data(config: DictConfig) -> None:
    """Put the sizes of a batch in place of the data. A row is the shortest that the layout can
    split: longer ones are padded to that."""
    layout = (
        Layout()
        if config.parallelism.layout == AUTO
        else Layout.parse(str(config.parallelism.layout))
    )
    config.data = {
        "name": None,
        "sequence_length": max(2, 2 * layout.cp * layout.tp),
        "global_batch_size": 1,
    }
    config.data.global_batch_size = _batch(config)


def _complete_sources(sources: Sequence[DictConfig]) -> None:
    """Give sources what a blend to train on needs. Where no source has files to train on, those to
    validate take their place."""
    trained = [source for source in sources if source.get("train_path") is not None]
    for source in trained:
        if source.get("weight") is None and source.get("tokens") is None:
            source.weight = 1
    for source in sources if not trained else ():
        if source.get("val_path") is not None:
            source.train_path = source.val_path
        if not source.get("weight") and not source.get("tokens"):
            source.weight, source.tokens = 1, None


def _batch(config: DictConfig) -> int:
    """Round the global batch of the run up to one that the layout can split into enough
    micro-batches."""
    layout = (
        Layout()
        if config.parallelism.layout == AUTO
        else Layout.parse(str(config.parallelism.layout))
    )
    rows = int(config.parallelism.get("micro_batch_size") or 1)
    unit = layout.dp * rows * (2 * layout.pp * layout.vp if layout.pp > 1 else 1)
    return -(-int(config.data.global_batch_size) // unit) * unit
