"""The check of a whole run before anything is started. Imports no torch.

`plan_run` takes a composed configuration, refuses what the configuration alone shows to be wrong,
and fills in what it leaves open (schedule, accelerator, precision, number of micro-batches).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.app.config.blend_sources import check_sources
from lightning_3d.app.config.data_urls import check_data_urls
from lightning_3d.app.config.elastic import adapt
from lightning_3d.app.config.keys import (
    check_containers,
    check_data_counts,
    check_group_keys,
    check_type,
    data_options,
    explain_value,
)
from lightning_3d.app.config.machine import (
    check_attention,
    choose_accelerator,
    choose_precision,
    visible_gpus,
)
from lightning_3d.app.config.optimizer import MUON, adamw_patterns, check_optimizer, check_sharding
from lightning_3d.app.config.parameter_groups import (
    read_groups,
    require_matches,
    require_pattern_matches,
)
from lightning_3d.app.config.run_config import (
    GROUPS,
    MODEL_KEYS,
    START_METHODS,
    WHOLE_RUN_GROUPS,
    CompleteRun,
    RunConfig,
    TrainerConfig,
    complete_run,
)
from lightning_3d.app.config.save_interval import check_save_interval
from lightning_3d.app.config.scheduler import check_length, endless_warmup
from lightning_3d.app.config.secrets import check_secrets
from lightning_3d.app.config.stored_paths import absolute_paths
from lightning_3d.app.config.targets import check_targets
from lightning_3d.app.config.typed import typed_words
from lightning_3d.errors import CheckpointError, ConfigError, LayoutError, listed
from lightning_3d.layout.batch_ramp import BatchRamp
from lightning_3d.layout.batch_rules import (
    check_batch,
    check_ramp,
    few_micro_batches,
    largest_micro_batch,
)
from lightning_3d.layout.given_stages import AUTO, listed_stages
from lightning_3d.layout.layout import AXES, Layout, divisors
from lightning_3d.layout.model_rules import ModelSizes, check_model
from lightning_3d.layout.resolve import resolve_layout
from lightning_3d.layout.sizes import check_decay, check_number, check_sizes
from lightning_3d.models.context_limits import check_fields
from lightning_3d.models.document_limits import check_documents
from lightning_3d.models.families import FAMILIES
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.options.checkpoints import CheckpointOptions
from lightning_3d.options.experts import ExpertOptions
from lightning_3d.options.model import ModelOptions
from lightning_3d.options.optimizer import offload_refusal
from lightning_3d.options.own_model import OwnModelOptions
from lightning_3d.options.precision import check_float32_matmul
from lightning_3d.options.reliability import NONFINITE
from lightning_3d.options.schema import one_of
from lightning_3d.options.zero import NONE, ZeroOptions
from lightning_3d.ranks.environment import OutsideRank
from lightning_3d.storage.checkpoint_names import MANIFEST, how_to_convert, recover
from lightning_3d.storage.remote_path import RemotePath, place


class Advice(Protocol):
    """Questions to the planner, which lies above this package
    (`lightning_3d.app.planner.advice`)."""

    def choose(self, run: CompleteRun, precision: str) -> dict[str, Any]:
        """Choose values for the keys of `parallelism` that `parallelism=auto` leaves open."""

    def stages(
        self, run: CompleteRun, precision: str, layout: Layout, schedule: str, micro_batch: int
    ) -> list[int] | None:
        """Choose the number of blocks of each stage for `parallelism.stages=auto`; None: balanced
        by FLOPs and parameters."""

    def refuse(
        self, run: CompleteRun, precision: str, layout: Layout, schedule: str, micro_batch: int
    ) -> tuple[str, ...]:
        """Raise LayoutError for a layout that does not fit on the GPUs; return warnings about one
        that barely fits."""

    def refuse_here(
        self,
        run: CompleteRun,
        precision: str,
        layout: Layout,
        schedule: str,
        micro_batch: int,
        ranks: int,
    ) -> None:
        """Raise LayoutError if `ranks` ranks on the CPU cores of this machine need more memory than
        it has."""


@dataclass(frozen=True)
class RunPlan:
    """A checked run, in which everything that the configuration leaves open is filled in.

    Attributes:
        run: checked configuration.
        layout: layout, with `vp` as the schedule implies it.
        schedule: name of the pipeline schedule.
        zero: options of ZeRO.
        blocks: options of the model's blocks.
        micro_batch_size: rows of a micro-batch.
        micro_batches: micro-batches of one optimizer step on each data-parallel rank.
        accelerator: cpu or gpu.
        precision: name in `PRECISIONS`.
        warnings: messages for the user before the start.
        chosen: keys of `parallelism` that the planner filled in.
    """

    run: CompleteRun = field(repr=False, compare=False)
    layout: Layout
    schedule: str
    zero: ZeroOptions
    blocks: BlockOptions
    micro_batch_size: int
    micro_batches: int
    accelerator: str
    precision: str
    warnings: tuple[str, ...] = ()
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Mapping[str, Any]:
        """Group `model`, with the values that a pretrained folder adds."""
        return self.run.model

    def freeze(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration with the values that were filled in, and with absolute paths."""
        filled: dict[str, Mapping[str, Any]] = {
            "parallelism": {
                **self.chosen,
                "layout": self.layout.name,
                "elastic": self.run.parallelism.elastic,
                "schedule": self.schedule,
                "vp": self.layout.vp,
                "zero_reduce": self.zero.reduce,
                "zero_gather": self.zero.gather,
                "micro_batch_size": self.micro_batch_size,
            },
            "cluster": {"accelerator": self.accelerator},
            "precision": {"name": self.precision},
            "model": self.model,
        }
        given = config | {group: {**config[group], **values} for group, values in filled.items()}
        return absolute_paths(_with_defaults(given, self.run))

    def describe(self) -> str:
        """Describe the run in one line."""
        count = f"{self.micro_batches} micro-batch" + ("es" if self.micro_batches > 1 else "")
        micro = f"{count} of {self.micro_batch_size}"
        where = "GPUs" if self.accelerator == "gpu" else "CPU"
        words = [
            (
                f"{self.layout.name}: {self.layout.world_size}"
                f" rank{'s' * (self.layout.world_size > 1)} on {where}"
            ),
            self.schedule,
            self.zero.describe(),
        ]
        words += [self.blocks.describe()] if self.blocks.changes_blocks else []
        ramp = ramp_of(self.run.data)
        return ", ".join(
            [*words, self.precision, micro, *([f"batch ramp {ramp}"] if ramp.rows else [])]
        )


_LARGEST_SEED = 2**32 - 1
"""What NumPy, which Lightning seeds too, accepts."""
_RUN_FOLDER = "${hydra:runtime.output_dir}"
_LATER = "/run-folder"
"""Stands for the run folder of a configuration that does not name it yet."""


def plan_run(
    config: DictConfig,
    outside: OutsideRank | None = None,
    advice: Advice | None = None,
    *,
    trains: bool = True,
) -> RunPlan:
    """Check a composed configuration.

    Args:
        config: all groups; `hydra` is ignored.
        outside: this process as a rank of torchrun or SLURM; None when the ranks are still to be
            started.
        advice: the planner, for `parallelism=auto` and to refuse what does not fit.
        trains: whether the model is trained; an evaluation reads neither the objective nor the
            sample at the end of a run.

    Raises:
        LayoutError: the first fault found, if it is the layout's. The number of launched ranks is
            checked first.
        ConfigError: the first fault found, if it is another one.
    """
    run, chosen = _choose_layout(check_keys(config), advice, trains=trains)
    parallelism = run.parallelism
    configured, schedule = resolve_layout(
        parallelism.layout, parallelism.schedule, parallelism.vp, tuple(parallelism.order or AXES)
    )
    adapted = adapt(run, configured, schedule, outside)
    run, layout, parallelism = adapted.run, adapted.layout, adapted.run.parallelism
    zero = ZeroOptions.of(parallelism).resolve(schedule, layout.pp).over(layout)
    options = ModelOptions.read(parallelism, schedule)
    options.blocks.require_schedule(schedule, pp=layout.pp)
    OwnModelOptions.of(parallelism)  # checks them, as the next line does
    CheckpointOptions.of(parallelism)
    options.experts.require_nodes(layout)
    accelerator, warnings = choose_accelerator(run, layout, outside, adapted.whole)
    warnings = (*adapted.warnings, *warnings)
    precision = choose_precision(run, accelerator)
    check_attention(run, layout, accelerator)
    if not 0 <= run.seed <= _LARGEST_SEED:
        raise ConfigError(f"seed must be a whole number from 0 to {_LARGEST_SEED}; got {run.seed}.")
    _check_trainer(run.trainer)
    run.plan.check()
    if trains:
        run.objective.check()
        run.objective.check_run(run.model, run.data, dry=run.trainer.dry)
        run.sample.check(run.model, run.data)
    _check_classes(run)
    check_data_counts(run.data)
    check_data_urls(run.data)
    # after all cheap checks, because it reads the files of a pretrained model
    complete = complete_run(run, trains=trains)
    complete.ahead.check_run(run.objective.name, complete.data.get("sequence_length"))
    micro_batch_size, micro_batches = _check_model_and_batch(
        complete, layout, schedule, options.experts
    )
    _check_optimizer(complete, layout, zero)
    if complete.data.get("name") == "blend":
        check_sources(complete.data, complete.trainer.max_steps)
    if parallelism.stages == AUTO:
        stages = (
            advice.stages(complete, precision, layout, schedule, micro_batch_size)
            if advice is not None
            else None
        )
        complete = replace(complete, parallelism=replace(complete.parallelism, stages=stages))
        chosen = {**chosen, "stages": stages}
    if advice is not None and not run.force:
        here = outside.local_world_size if outside is not None else layout.world_size
        warnings += _check_memory(
            complete, advice, accelerator, here, (precision, layout, schedule, micro_batch_size)
        )
    endless = (
        endless_warmup(complete.optimizer.get("scheduler"), complete.trainer.max_steps)
        if trains
        else None
    )
    return RunPlan(
        run=complete,
        layout=layout,
        schedule=schedule,
        zero=zero,
        blocks=options.blocks,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        accelerator=accelerator,
        precision=precision,
        warnings=(
            *warnings,
            *filter(None, (few_micro_batches(layout, schedule, micro_batches), endless)),
        ),
        chosen=chosen,
    )


def _check_memory(
    run: CompleteRun,
    advice: Advice,
    accelerator: str,
    here: int,
    planned: tuple[str, Layout, str, int],
) -> tuple[str, ...]:
    """Refuse a run that does not fit. A dry run on the CPU may be meant for another machine, so it
    only gets a warning."""
    if accelerator == "gpu":
        return advice.refuse(run, *planned)
    try:
        advice.refuse_here(run, *planned, here)
    except LayoutError as error:
        if not run.trainer.dry:
            raise
        return (f"{error}".partition("\n")[0],)
    return ()


def _choose_layout(
    run: RunConfig, advice: Advice | None, *, trains: bool
) -> tuple[RunConfig, dict[str, Any]]:
    """Return (the run, the keys of `parallelism` that the planner filled in with
    `parallelism=auto`)."""
    parallelism = run.parallelism
    open_keys = [key for key in ("zero_stage", "recompute") if getattr(parallelism, key) is None]
    if parallelism.layout != "auto":
        if open_keys:
            raise ConfigError(
                f"parallelism.{open_keys[0]} must be given. Only with parallelism=auto does the"
                " planner choose it."
            )
        return run, {}
    if advice is None:
        raise ConfigError(
            "parallelism=auto works only on the command line. Name a layout, for example"
            " parallelism=dp8."
        )
    complete = complete_run(run, trains=trains)
    run.cluster.check()
    run.plan.check()
    for key in ("sequence_length", "global_batch_size"):
        check_sizes(**{f"data.{key}": run.data.get(key)})
        if run.data.get(key) is None:
            raise ConfigError(
                f"data.{key} must be given, because the planner needs it to choose a layout."
            )
    here = run.cluster.accelerator == "auto" and not visible_gpus()
    chosen = advice.choose(
        complete,
        choose_precision(run, "cpu" if here or run.cluster.accelerator == "cpu" else "gpu"),
    )
    return replace(complete, parallelism=replace(parallelism, **chosen)), chosen


def check_keys(config: DictConfig) -> RunConfig:
    """Convert a composed configuration to its typed form.

    Raises:
        ConfigError: an unknown key, a value of a wrong type, or a missing value.
    """
    try:
        run = _typed(config)
    except OmegaConfBaseException as error:
        raise explain_value(error) from error
    except (OverflowError, RecursionError) as error:
        raise ConfigError(
            f"A value of the configuration is too large or nested too deeply: {error}."
        ) from error
    content = asdict(run)
    check_targets(content, typed_words(config))
    check_secrets(content)
    if not run.run_folder and not run.trainer.dry:
        raise ConfigError(
            f"run_folder must be given: a run needs a folder. Add run_folder: {_RUN_FOLDER}."
        )
    check_group_keys("model", run.model, MODEL_KEYS)
    options = data_options(run.data.get("name"))
    check_group_keys(
        "data",
        run.data,
        (*options, "global_batch_size", "batch_ramp", "seed", "vocab_size") if options else (),
    )
    for key, value in run.data.items():
        check_type(f"data.{key}", value, options.get(key))
    return run


def _with_defaults(given: dict[str, Any], values: Any) -> dict[str, Any]:
    """Return a configuration with the keys that it lacks, from its typed form: ranks read all of
    them."""
    known = {
        entry.name: getattr(values, entry.name)
        for entry in fields(values)
        if entry.name not in ("spec", "lora", "ahead", "second")
    }
    groups = {
        key: _with_defaults(given.get(key, {}), value)
        for key, value in known.items()
        if is_dataclass(value)
    }
    return {**known, **given, **groups}


def _typed(config: DictConfig) -> RunConfig:
    """Return a composed configuration without interpolations, whose values have the types of
    `RunConfig`."""
    for group in (*GROUPS, "logger", "callbacks", "plan", "objective", "sample"):
        value = config.get(group)
        if value is None and group in GROUPS:
            raise ConfigError(
                f"The group {group} must be given, as {group}=... or in the defaults list of the"
                " configuration."
            )
        if value is not None and not isinstance(value, DictConfig):
            raise ConfigError(
                f"{group} must be a group of keys, as in {group}.KEY=...; got {value!r}."
            )
    for group in WHOLE_RUN_GROUPS:
        if group in config:
            raise ConfigError(
                f"The group {group} sets keys of the whole run, so the first line of its file must"
                " be  # @package _global_"
            )
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    folder = str(OmegaConf.to_container(config, resolve=False).get("run_folder") or "")  # type: ignore[union-attr]
    OmegaConf.update(plain, "run_folder", _LATER if "${" in folder else folder, force_add=True)
    merged = OmegaConf.merge(_schema(), plain)
    missing = sorted(OmegaConf.missing_keys(merged))
    # files of data may be named when the run is started
    if OmegaConf.select(merged, "trainer.dry"):
        for key in (name for name in missing if name.startswith("data.")):
            OmegaConf.update(merged, key, None)
        missing = [key for key in missing if not key.startswith("data.")]
    if missing:
        raise ConfigError(
            f"{listed(missing)} must be given, for example {missing[0]}=... on the command line."
        )
    run = OmegaConf.to_object(merged)
    assert isinstance(run, RunConfig)
    check_containers(run)
    return run


def _schema() -> DictConfig:
    """Return `RunConfig` for OmegaConf, which makes groups of frozen dataclasses read-only, also
    for a merge."""
    schema = OmegaConf.structured(RunConfig)
    groups = [schema]
    while groups:
        group = groups.pop()
        OmegaConf.set_readonly(group, False)
        groups += [entry for entry in group._content.values() if isinstance(entry, DictConfig)]
    return schema


_KEYS_OF_THE_RUN = {
    "strategy": "parallelism",
    "devices": "cluster.gpus_per_node",
    "num_nodes": "cluster.nodes",
    "accelerator": "cluster.accelerator",
    "precision": "precision",
}
"""Arguments of Lightning's Trainer that would replace what the checks of the run have seen, and the
keys to use instead."""


def _check_trainer(trainer: TrainerConfig) -> None:
    for key, own in _KEYS_OF_THE_RUN.items():
        if key in trainer.extra:
            raise ConfigError(
                f"trainer.extra.{key} would replace what this run is checked and planned with. Use"
                f" {own} instead."
            )
    steps = trainer.max_steps
    check_sizes(
        **{
            "trainer.max_steps": steps,
            "trainer.val_check_interval": trainer.val_check_interval,
            "trainer.evaluate_every": trainer.evaluate_every,
            "trainer.log_every_n_steps": trainer.log_every_n_steps,
            "trainer.keep_every_n_steps": trainer.keep_every_n_steps,
            "trainer.restarts_without_progress": trainer.restarts_without_progress,
            "trainer.trace_every_n_steps": trainer.trace_every_n_steps,
        }
    )
    if steps % trainer.val_check_interval:
        near = min(divisors(steps), key=lambda interval: abs(interval - trainer.val_check_interval))
        raise ConfigError(
            f"trainer.val_check_interval={trainer.val_check_interval} does not divide"
            f" trainer.max_steps={steps}, so the run would end without a validation. The nearest"
            f" interval that does is {near}."
        )
    if trainer.evaluate_every is not None:
        _check_evaluate_every(trainer)
    check_save_interval("trainer.checkpoint_every_n_steps", trainer.checkpoint_every_n_steps)
    check_number("trainer.restarts", trainer.restarts, least=0)
    check_number("trainer.hours_between_failures", trainer.hours_between_failures, least=0.01)
    if trainer.keep_last < 1 and trainer.keep_last != -1:
        raise ConfigError(
            "trainer.keep_last must be at least 1, or -1 to keep all checkpoints; got"
            f" {trainer.keep_last}."
        )
    if trainer.limit_val_batches is not None:
        check_number("trainer.limit_val_batches", trainer.limit_val_batches, least=0)
    if trainer.gradient_clip_val is not None:
        check_number("trainer.gradient_clip_val", trainer.gradient_clip_val, least=0)
    if trainer.average_decay is not None:
        check_decay("trainer.average_decay", trainer.average_decay)
    check_float32_matmul("trainer.float32_matmul_precision", trainer.float32_matmul_precision)
    if trainer.max_time is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", trainer.max_time):
        raise ConfigError(
            "trainer.max_time must be DD:HH:MM:SS, for example 00:12:00:00; got"
            f" {trainer.max_time!r}."
        )
    if trainer.resume is not None:
        _check_resume(trainer.resume)
    one_of(*NONFINITE)("trainer.nonfinite", trainer.nonfinite)
    check_number("trainer.collective_timeout", trainer.collective_timeout, least=1)
    trainer.check("trainer.")
    if trainer.start_method not in START_METHODS:
        raise ConfigError(
            f"trainer.start_method must be {listed(START_METHODS, last='or')}; got"
            f" {trainer.start_method!r}."
        )


def _check_evaluate_every(trainer: TrainerConfig) -> None:
    """Refuse a second key that says when to validate. `val_check_interval` is `max_steps` where it
    is left out."""
    given = {
        f"extra.{key}": trainer.extra[key]
        for key in ("val_check_interval", "check_val_every_n_epoch")
        if key in trainer.extra
    }
    if trainer.val_check_interval != trainer.max_steps:
        given["val_check_interval"] = trainer.val_check_interval
    for key, value in given.items():
        default = (
            f" (its default here is {trainer.max_steps}: set that if a recipe sets another one)"
            if "extra" not in key
            else ""
        )
        raise ConfigError(
            f"trainer.evaluate_every={trainer.evaluate_every} and trainer.{key}={value} both say"
            f" when to validate. Leave one of them out{default}."
        )


def _check_optimizer(run: CompleteRun, layout: Layout, zero: ZeroOptions) -> None:
    """Check the optimizer, its schedule, and its groups if the names of the model's parameters are
    known without building it."""
    check_optimizer(run.optimizer)
    check_sharding(run.optimizer, layout, zero.stage)
    check_length(run.optimizer.get("scheduler"), run.trainer.max_steps)
    if run.optimizer.get("name") == "cpu_adamw" and zero.offload == NONE:
        raise ConfigError(
            "optimizer.name=cpu_adamw updates weights in host memory, which needs"
            " parallelism.zero_offload=optimizer. Set that, or use optimizer.name=adamw."
        )
    if run.optimizer.get("name") == MUON and zero.offload != NONE:
        raise ConfigError(offload_refusal())
    names = run.spec.parameter_names if run.lora.r is None else None
    if names is not None:
        require_pattern_matches("optimizer.adamw", adamw_patterns(run.optimizer), names)
        require_matches(read_groups(run.optimizer.get("groups")), names)


def _check_resume(given: str) -> None:
    """Check what the folder itself shows; the ranks compare the files with their hashes."""
    path = place(given)
    try:
        recover(path)
        if isinstance(path, Path) and path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"trainer.resume={given} points to {path.readlink()}, which does not exist. Name an"
                " existing checkpoint."
            )
        if not path.exists():
            raise CheckpointError(
                f"There is no checkpoint {given} to resume from (trainer.resume)."
            )
        if not (path / MANIFEST).is_file():
            raise CheckpointError(
                f"trainer.resume={given} is not a complete checkpoint: it has no"
                f" {MANIFEST}.{how_to_convert(path)}"
            )
    except OSError as error:
        raise CheckpointError(
            f"trainer.resume={given} cannot be read: {error.strerror or error}."
        ) from error


def _check_classes(run: RunConfig) -> None:
    """Check that each logger and callback names its class."""
    examples = {"logger": "loggers.CSVLogger", "callbacks": "callbacks.LearningRateMonitor"}
    for group, entries in (("logger", run.logger), ("callbacks", run.callbacks)):
        for name, entry in entries.items():
            if entry is not None and not (
                isinstance(entry, dict) and isinstance(entry.get("_target_"), str)
            ):
                raise ConfigError(
                    f"{group}.{name} must have a _target_, which names its class. Set it, for"
                    f" example with +{group}.{name}._target_=lightning.pytorch.{examples[group]}."
                )
            if group == "callbacks" and entry and "://" in str(entry.get("dirpath")):
                _check_url(f"callbacks.{name}.dirpath", str(entry["dirpath"]))


def _check_url(key: str, url: str) -> None:
    """Check that a URL for checkpoints is remote and that the library that writes to it is
    installed."""
    path = place(url)
    if not isinstance(path, RemotePath):
        raise ConfigError(
            f"{key} must be a remote URL or a path; got {url}, which is on the local disk. Use"
            f" {path}."
        )
    try:
        path.require_backend()
    except CheckpointError as error:
        raise ConfigError(f"{key}={error}") from error


def ramp_of(data: Mapping[str, Any]) -> BatchRamp:
    """Return the sizes of the global batches of the group `data`, whose batch and sequence length
    are given.

    Raises:
        ConfigError: `data.batch_ramp` is wrong.
    """
    return BatchRamp.read(
        data.get("batch_ramp"), data["global_batch_size"], data["sequence_length"]
    )


def _splits_sequences(run: RunConfig) -> bool:
    """Whether tensor-parallel ranks split sequences. Where it is left open they do on GPUs, but not
    over gloo."""
    wanted = run.parallelism.sequence_parallel
    return run.cluster.accelerator != "cpu" if wanted is None else wanted


def _check_model_and_batch(
    run: CompleteRun, layout: Layout, schedule: str, experts: ExpertOptions
) -> tuple[int, int]:
    """Return (rows of a micro-batch, micro-batches of a step on each data-parallel rank)."""
    spec = run.spec
    if spec.experts and spec.top_k > spec.experts:
        raise ConfigError(
            f"The model routes each token to {spec.top_k} experts, but has only {spec.experts}."
            " Change one of these numbers in model.config."
        )
    if experts.asked_of_experts and not spec.experts:
        name = experts.asked_of_experts[0]
        raise ConfigError(
            f"parallelism.{name} works only with a mixture of experts, but the model is dense."
            " Omit it."
        )
    family = FAMILIES.get(spec.model_type)
    if experts.moe_bias_update and family is not None and not family.biased_routers:
        raise ConfigError(
            "parallelism.moe_bias_update needs routers that choose experts with a bias, as in"
            f" DeepSeek-V3. The routers of {spec.model_type} have none. Use"
            " parallelism.moe_aux_loss."
        )
    if run.data.get("document_mask"):
        check_documents(
            spec.model_type,
            run.model["config"].get,
            run.model.get("attn_implementation"),
            layout.cp,
        )
    if layout.cp > 1:
        check_fields(spec.model_type, run.model["config"].get)
    sizes = ModelSizes(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        layers=spec.layers,
        vocab=spec.vocab,
        intermediate=spec.intermediate,
        max_positions=spec.max_positions,
        experts=spec.experts or None,
    )
    check_model(
        layout,
        sizes,
        schedule=schedule,
        sequence_length=run.data.get("sequence_length"),
        sequence_parallel=_splits_sequences(run),
        cp_kind=run.parallelism.cp_kind,
        stages=listed_stages(run.parallelism.stages),
    )
    if run.data.get("sequence_length") is None:
        raise ConfigError(
            "data.sequence_length must be given in tokens, for example data.sequence_length=4096."
        )
    global_batch = run.data.get("global_batch_size")
    if global_batch is None:
        raise ConfigError(
            "data.global_batch_size must be given: the number of sequences in an optimizer step,"
            " over all ranks, for example data.global_batch_size=64."
        )
    check_sizes(**{"data.global_batch_size": global_batch})
    ramp = ramp_of(run.data)
    micro_batch_size = run.parallelism.micro_batch_size
    if micro_batch_size is None:
        micro_batch_size = largest_micro_batch(layout, schedule, global_batch, ramp.sizes)
    micro_batches = check_batch(layout, global_batch, micro_batch_size, schedule)
    check_ramp(layout, ramp, micro_batch_size, schedule)
    return micro_batch_size, micro_batches
