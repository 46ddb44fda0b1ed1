"""The configuration of a run: which keys there are, and what a run makes of them. Imports no torch.

`plan_run` is the check that comes before anything is started: it takes a composed configuration, refuses what the
configuration alone shows to be wrong, and returns what was left open in it (schedule, accelerator, precision, number of
micro-batches).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.block_options import BlockOptions
from lightning_3d.checkpoint_names import MANIFEST, how_to_convert, recover
from lightning_3d.cluster import ClusterConfig
from lightning_3d.config_keys import check_group_keys, check_type, data_options, explain_value
from lightning_3d.context_options import check_fields
from lightning_3d.errors import CheckpointError, ConfigError, LayoutError, listed
from lightning_3d.expert_options import ExpertOptions
from lightning_3d.launch import OutsideRank
from lightning_3d.layout import AXES, Layout, divisors, nearest_layouts
from lightning_3d.layout_rules import (
    check_batch,
    check_cp_kind,
    check_model,
    check_number,
    check_sizes,
    few_micro_batches,
    resolve_layout,
)
from lightning_3d.lora_options import LoraOptions
from lightning_3d.model_families import FAMILIES, read_spec
from lightning_3d.nonfinite import check_nonfinite
from lightning_3d.plan_options import PlanOptions
from lightning_3d.precision import PRECISIONS, check_fp8_device, check_fp8_library, fp8_refused, listed_capability, unknown_precision
from lightning_3d.pretrained_config import complete_model
from lightning_3d.remote_path import RemotePath, place
from lightning_3d.schedules import find_schedule
from lightning_3d.self_check.mode import check_mode
from lightning_3d.training.optimizers import check_optimizer
from lightning_3d.zero_options import NONE, ZeroOptions

START_METHODS = ("auto", "fork", "spawn")
GROUPS = ("model", "data", "parallelism", "cluster", "optimizer", "precision", "trainer")
MODEL_KEYS = ("name", "attn_implementation", "published_parameters", "active_parameters", "config", "pretrained", "lora")


@dataclass
class ParallelismConfig:
    """Group `parallelism`: `Lightning3DStrategy`, or a class made of it, and its arguments."""

    _target_: str = "lightning_3d.Lightning3DStrategy"
    _convert_: str = "all"
    layout: str = MISSING
    order: list[str] | None = field(default_factory=lambda: list(AXES))
    schedule: str | None = None
    vp: int | None = None
    zero_stage: int | None = 1
    zero_reduce: str | None = None
    zero_gather: str | None = None
    zero_reduce_scatter: bool | None = None
    zero_offload: str = "none"
    cp_kind: str = "ring"
    recompute: str | None = "none"
    recompute_every: int = 1
    recompute_keep: list[str] | None = None
    offload_activations: bool = False
    compile: bool = False
    sequence_parallel: bool | None = None
    moe_aux_loss: float | None = None
    moe_z_loss: float = 0.0
    moe_bias_update: float = 0.0
    moe_capacity_factor: float | None = None
    checkpoint_verify: bool = True
    checkpoint_fall_back: bool = False
    checkpoint_asynchronous: bool = True
    checkpoint_timeout_seconds: float = 1800.0
    checkpoint_check_space: bool = True
    micro_batch_size: int | None = None
    pipeline_module: str | None = None
    self_check: str = "auto"


@dataclass
class PrecisionConfig:
    """Group `precision`: a name of `PRECISIONS`, or auto."""

    name: str = MISSING


@dataclass
class TrainerConfig:
    """Group `trainer`: how long, how often, and arguments of Lightning's `Trainer`."""

    max_steps: int = MISSING
    max_time: str | None = None
    val_check_interval: int = MISSING
    limit_val_batches: int | None = None
    gradient_clip_val: float | None = None
    log_every_n_steps: int = 10
    trace_every_n_steps: int | None = None
    nonfinite: str = "stop"
    checkpoint_every_n_steps: int | None = None
    keep_last: int = 3
    resume: str | None = None
    auto_resume: bool = False
    start_method: str = "auto"
    dry: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class RunConfig:
    """A whole run. `model`, `data` and `optimizer` are checked by what they are for; loggers and callbacks have a
    `_target_`.
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    plan: PlanOptions = field(default_factory=PlanOptions)
    seed: int = 0
    force: bool = False
    profile: str | None = None
    run_folder: str = ""


class Advice(Protocol):
    """What the planner is asked (`lightning_3d.prediction`)."""

    def choose(self, run: RunConfig, precision: str) -> dict[str, Any]:
        """Values for the keys of `parallelism` that `parallelism=auto` leaves open."""

    def refuse(self, run: RunConfig, precision: str, layout: Layout, schedule: str, micro_batch: int) -> tuple[str, ...]:
        """Raise LayoutError for what does not fit on the GPUs; return warnings of what fits badly."""

    def refuse_here(self, run: RunConfig, precision: str, layout: Layout, schedule: str, micro_batch: int, ranks: int) -> None:
        """Raise LayoutError for what does not fit in the memory of this machine, on whose cores so many of the ranks run."""


@dataclass(frozen=True)
class RunPlan:
    """What a run will be.

    Attributes:
        layout: with `vp` as the schedule implies it.
        micro_batches: of one optimizer step on each data-parallel rank.
        accelerator: cpu or gpu.
        precision: a name of `PRECISIONS`.
        model: the group `model`, with what a pretrained folder says.
        warnings: for the user, before the start.
        chosen: keys of `parallelism` that the planner filled in.
    """

    layout: Layout
    schedule: str
    zero: ZeroOptions
    blocks: BlockOptions
    micro_batch_size: int
    micro_batches: int
    accelerator: str
    precision: str
    model: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def freeze(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration with everything that was left open in it filled in."""
        filled: dict[str, Mapping[str, Any]] = {
            "parallelism": {
                **self.chosen,
                "layout": self.layout.name,
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
        return config | {group: {**config[group], **values} for group, values in filled.items()}

    def describe(self) -> str:
        """One line for the user."""
        count = f"{self.micro_batches} micro-batch" + ("es" if self.micro_batches > 1 else "")
        micro = f"{count} of {self.micro_batch_size}"
        where = "GPUs" if self.accelerator == "gpu" else "CPU"
        words = [
            f"{self.layout.name}: {self.layout.world_size} rank{'s' * (self.layout.world_size > 1)} on {where}",
            self.schedule,
            self.zero.describe(),
        ]
        words += [self.blocks.describe()] if self.blocks.changes_blocks else []
        return ", ".join([*words, self.precision, micro])


def plan_run(config: DictConfig, outside: OutsideRank | None = None, advice: Advice | None = None) -> RunPlan:
    """Check a composed configuration.

    Args:
        config: all groups; `hydra` is ignored.
        outside: this process as a rank of torchrun or SLURM; None when the ranks are still to be started.
        advice: the planner, for `parallelism=auto` and to refuse what does not fit.

    Raises:
        LayoutError, ConfigError: the first thing found wrong. The number of launched ranks comes first.
    """
    run = check_keys(config)
    parallelism = run.parallelism
    chosen = _choose_layout(run, advice)
    layout, schedule = resolve_layout(
        parallelism.layout, parallelism.schedule, parallelism.vp, tuple(parallelism.order or AXES)
    )
    if outside is not None:
        layout.require_world_size(outside.world_size)
    zero = ZeroOptions(*(getattr(parallelism, f"zero_{option.name}") for option in fields(ZeroOptions))).resolve(schedule, layout.pp)
    blocks = BlockOptions(**{option.name: getattr(parallelism, option.name) for option in fields(BlockOptions)})
    blocks.require_suits(schedule, tp=layout.tp, pp=layout.pp, cp=layout.cp)
    check_cp_kind(parallelism.cp_kind)
    check_mode(parallelism.self_check)
    check_number("parallelism.checkpoint_timeout_seconds", parallelism.checkpoint_timeout_seconds, least=1)
    experts = ExpertOptions(*(getattr(parallelism, f"moe_{option.name}") for option in fields(ExpertOptions)))
    accelerator, warnings = choose_accelerator(run, layout, outside)
    precision = choose_precision(run, accelerator)
    _check_trainer(run.trainer)
    run.plan.check()
    _check_targets(run)
    LoraOptions.of(run.model)
    run.model = complete_model(run.model, dry=run.trainer.dry)
    micro_batch_size, micro_batches = _check_model_and_batch(run, layout, schedule, experts)
    check_optimizer(run.optimizer)
    if run.optimizer["name"] == "cpu_adamw" and zero.offload == NONE:
        raise ConfigError(
            "optimizer.name=cpu_adamw steps weights in host memory, where they are with parallelism.zero_offload=optimizer. Set that, or"
            " use optimizer.name=adamw."
        )
    if advice is not None and not run.force:
        here = outside.local_world_size if outside is not None else layout.world_size
        warnings += _check_memory(run, advice, accelerator, here, (precision, layout, schedule, micro_batch_size))
    bubble = few_micro_batches(layout, schedule, micro_batches)
    return RunPlan(
        layout=layout,
        schedule=schedule,
        zero=zero,
        blocks=blocks,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        accelerator=accelerator,
        precision=precision,
        model=run.model,
        warnings=(*warnings, *((bubble,) if bubble else ())),
        chosen=chosen,
    )


def _check_memory(run: RunConfig, advice: Advice, accelerator: str, here: int, planned: tuple[str, Layout, str, int]) -> tuple[str, ...]:
    """Refuse what does not fit. A dry run on the CPU may be for another machine: it only says that this one has too little memory."""
    if accelerator == "gpu":
        return advice.refuse(run, *planned)
    try:
        advice.refuse_here(run, *planned, here)
    except LayoutError as error:
        if not run.trainer.dry:
            raise
        return (f"{error}".partition("\n")[0],)
    return ()


def _choose_layout(run: RunConfig, advice: Advice | None) -> dict[str, Any]:
    """With `parallelism=auto`: what the planner chose, which is filled in; otherwise nothing."""
    parallelism = run.parallelism
    open_keys = [key for key in ("zero_stage", "recompute") if getattr(parallelism, key) is None]
    if parallelism.layout != "auto":
        if open_keys:
            raise ConfigError(f"parallelism.{open_keys[0]} must be given. Only parallelism=auto leaves it to the planner.")
        return {}
    if advice is None:
        raise ConfigError("parallelism=auto is for the command line, which asks the planner. Name a layout.")
    run.model = complete_model(run.model, dry=run.trainer.dry)
    run.cluster.check()
    run.plan.check()
    for key in ("sequence_length", "global_batch_size"):
        check_sizes(**{f"data.{key}": run.data.get(key)})
        if run.data.get(key) is None:
            raise ConfigError(f"data.{key} must be given, so that the planner can choose a layout.")
    here = run.cluster.accelerator == "auto" and not visible_gpus()
    chosen = advice.choose(run, choose_precision(run, "cpu" if here or run.cluster.accelerator == "cpu" else "gpu"))
    for key, value in chosen.items():
        setattr(parallelism, key, value)
    return chosen


def check_keys(config: DictConfig) -> RunConfig:
    """The configuration with types.

    Raises:
        ConfigError: a key that does not exist, a value of a wrong type, or one that must be given and is not.
    """
    for group in GROUPS:
        if config.get(group) is None:
            raise ConfigError(
                f"The group {group} must be given, as {group}=... or in the defaults list of the configuration."
            )
    if "recipe" in config:
        raise ConfigError("A recipe sets keys of the whole run: the first line of its file must be  # @package _global_")
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    OmegaConf.update(plain, "run_folder", "", force_add=True)  # it does not exist yet
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), plain)
        missing = sorted(OmegaConf.missing_keys(merged))
        if merged.trainer.dry:  # files of data may be named when the run is started
            for key in (name for name in missing if name.startswith("data.")):
                OmegaConf.update(merged, key, None)
            missing = [key for key in missing if not key.startswith("data.")]
        if missing:
            raise ConfigError(f"{listed(missing)} must be given, for example {missing[0]}=... on the command line.")
        run = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise explain_value(error) from error
    assert isinstance(run, RunConfig)
    check_group_keys("model", run.model, MODEL_KEYS)
    options = data_options(run.data.get("name"))
    check_group_keys("data", run.data, (*options, "global_batch_size", "seed", "vocab_size") if options else ())
    for key, value in run.data.items():
        check_type(f"data.{key}", value, options.get(key))
    return run


def choose_accelerator(run: RunConfig, layout: Layout, outside: OutsideRank | None) -> tuple[str, tuple[str, ...]]:
    """(cpu or gpu, warnings) for the ranks on this machine.

    Raises:
        LayoutError: the layout does not fill the cluster, or the GPUs of this machine are fewer than its ranks.
        ConfigError: an impossible number of the cluster, or several nodes without a launcher that reaches them.
    """
    cluster = run.cluster
    cluster.check()
    _require_cluster(cluster, layout)
    if run.trainer.dry and cluster.accelerator != "auto":
        return cluster.accelerator, ()
    if cluster.nodes > 1 and outside is None:
        raise ConfigError(
            f"The cluster {cluster.name} has {cluster.nodes} nodes, but this process reaches one. Start the ranks with"
            f" torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} or with srun, or add"
            " trainer.dry=true to check the configuration."
        )
    needed = outside.local_world_size if outside is not None else layout.world_size
    there = visible_gpus()
    if cluster.accelerator == "gpu" and there < needed:
        near = listed((other.name for other in nearest_layouts(layout, there)), last="or")
        layouts = f" Layouts for {there}: {near}." if near else ""
        raise LayoutError(
            f"{needed} ranks need {needed} GPUs on this machine, but it has {there}.{layouts} Or run on the CPU with"
            " cluster=local_cpu."
        )
    if cluster.accelerator == "auto" and 0 < there < needed:
        return "cpu", (f"This machine has {there} GPUs for {needed} ranks: running on the CPU.",)
    return ("gpu" if cluster.accelerator != "cpu" and there >= needed else "cpu"), ()


def _require_cluster(cluster: ClusterConfig, layout: Layout) -> None:
    """A cluster of known size is used as a whole."""
    if not cluster.gpus_per_node:
        return
    size = cluster.nodes * cluster.gpus_per_node
    if layout.world_size != size:
        near = listed((other.name for other in nearest_layouts(layout, size)), last="or")
        raise LayoutError(
            f"Layout {layout} has {layout.world_size} ranks, but the cluster {cluster.name} has {size} GPUs"
            f" ({cluster.nodes} nodes of {cluster.gpus_per_node}). Layouts for {size} ranks: {near}."
        )


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, without asking CUDA, which would forbid a fork."""
    there = len([device for device in devices.glob("nvidia[0-9]*") if device.name[6:].isdigit()]) or _listed_gpus()
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return there
    names = [name.strip() for name in allowed.split(",")]
    named = names.index("-1") if "-1" in names else len([name for name in names if name])
    return min(there, named)


def _listed_gpus() -> int:
    """GPUs that the driver's tool lists, for machines that have them under other names in /dev."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def choose_precision(run: RunConfig, accelerator: str) -> str:
    """A name of `PRECISIONS`."""
    name, zero_stage = run.precision.name, run.parallelism.zero_stage
    if name == "auto":
        return "bf16" if accelerator == "gpu" else "fp32"
    if name not in PRECISIONS:
        raise unknown_precision(name)
    if name == "fp64" and zero_stage:
        raise ConfigError(
            f"precision=fp64 with ZeRO stage {zero_stage} would keep the master weights in fp32. Use"
            " parallelism.zero_stage=0."
        )
    if name == "fp8":
        if run.cluster.lacks_fp8:
            raise fp8_refused(f"needs GPUs with float8 matrix products, such as H100; those of the cluster {run.cluster.name} have none")
        planned = run.trainer.dry and run.cluster.accelerator != "auto"  # for other machines than this
        check_fp8_device(accelerator, None if planned else listed_capability())
        if not planned:
            check_fp8_library()
    return name


def _check_trainer(trainer: TrainerConfig) -> None:
    steps = trainer.max_steps
    check_sizes(
        **{
            "trainer.max_steps": steps,
            "trainer.val_check_interval": trainer.val_check_interval,
            "trainer.log_every_n_steps": trainer.log_every_n_steps,
            "trainer.checkpoint_every_n_steps": trainer.checkpoint_every_n_steps,
            "trainer.trace_every_n_steps": trainer.trace_every_n_steps,
        }
    )
    if steps % trainer.val_check_interval:
        near = min(divisors(steps), key=lambda interval: abs(interval - trainer.val_check_interval))
        raise ConfigError(
            f"trainer.val_check_interval={trainer.val_check_interval} does not divide trainer.max_steps={steps}, so the"
            f" run would end without a validation. The nearest that does is {near}."
        )
    if trainer.keep_last < 1 and trainer.keep_last != -1:
        raise ConfigError(f"trainer.keep_last must be at least 1, or -1 to keep all checkpoints; got {trainer.keep_last}.")
    if trainer.limit_val_batches is not None:
        check_number("trainer.limit_val_batches", trainer.limit_val_batches, least=0)
    if trainer.gradient_clip_val is not None:
        check_number("trainer.gradient_clip_val", trainer.gradient_clip_val, least=0)
    if trainer.max_time is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", trainer.max_time):
        raise ConfigError(f"trainer.max_time is {trainer.max_time!r}; write DD:HH:MM:SS, for example 00:12:00:00.")
    if trainer.resume is not None:
        _check_resume(trainer.resume)
    check_nonfinite("trainer.nonfinite", trainer.nonfinite)
    if trainer.start_method not in START_METHODS:
        raise ConfigError(
            f"trainer.start_method is {trainer.start_method!r}; it must be {listed(START_METHODS, last='or')}."
        )


def _check_resume(given: str) -> None:
    """What a look at the folder shows; the ranks compare the files with their hashes."""
    path = place(given)
    try:
        recover(path)
        if isinstance(path, Path) and path.is_symlink() and not path.exists():
            raise CheckpointError(f"trainer.resume={given} points to {path.readlink()}, which is not there.")
        if not path.exists():
            raise CheckpointError(f"There is no checkpoint {given} to resume from (trainer.resume).")
        if not (path / MANIFEST).is_file():
            raise CheckpointError(f"trainer.resume={given} is no complete checkpoint: there is no {MANIFEST} in it.{how_to_convert(path)}")
    except OSError as error:
        raise CheckpointError(f"trainer.resume={given} cannot be read: {error.strerror or error}.") from error


def _check_targets(run: RunConfig) -> None:
    """Loggers and callbacks are objects, by the name of their class."""
    examples = {"logger": "loggers.CSVLogger", "callbacks": "callbacks.LearningRateMonitor"}
    for group, entries in (("logger", run.logger), ("callbacks", run.callbacks)):
        for name, entry in entries.items():
            if entry is not None and not (isinstance(entry, dict) and isinstance(entry.get("_target_"), str)):
                raise ConfigError(
                    f"{group}.{name} has no _target_, the class to make. Write for example"
                    f" +{group}.{name}._target_=lightning.pytorch.{examples[group]}."
                )
            if group == "callbacks" and entry and "://" in str(entry.get("dirpath")):
                _check_url(f"callbacks.{name}.dirpath", str(entry["dirpath"]))


def _check_url(key: str, url: str) -> None:
    """Where checkpoints are to be written: what writes there is installed."""
    path = place(url)
    if not isinstance(path, RemotePath):
        raise ConfigError(f"{key}={url} is on the local disk; write {path}.")
    try:
        path.require_backend()
    except CheckpointError as error:
        raise ConfigError(f"{key}={error}") from error


def _check_model_and_batch(run: RunConfig, layout: Layout, schedule: str, experts: ExpertOptions) -> tuple[int, int]:
    """(rows of a micro-batch, micro-batches of a step on each data-parallel rank)."""
    if not isinstance(run.model.get("config"), dict):
        raise ConfigError("model.config must hold the fields of a Transformers configuration, with its model_type.")
    spec = read_spec(run.model["config"])
    if spec.experts and spec.top_k > spec.experts:
        raise ConfigError(f"The model sends each token to {spec.top_k} experts, but has only {spec.experts}.")
    if experts.asked_for and not spec.experts:
        name = experts.asked_for[0]
        raise ConfigError(f"parallelism.{name} is for a mixture of experts, but the model is dense. Leave it out.")
    family = FAMILIES.get(spec.model_type)
    if experts.bias_update and family is not None and not family.biased_routers:
        raise ConfigError(
            f"parallelism.moe_bias_update is for routers with a bias for the choice of experts, as in DeepSeek-V3; {spec.model_type} has"
            " none. Use parallelism.moe_aux_loss."
        )
    if layout.cp > 1:
        check_fields(spec.model_type, run.model["config"].get)
    check_model(
        layout,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        layers=spec.layers,
        vocab=spec.vocab,
        intermediate=spec.intermediate,
        sequence_length=run.data.get("sequence_length"),
        max_positions=spec.max_positions,
        sequence_parallel=run.parallelism.sequence_parallel is not False,
        experts=spec.experts or None,
        schedule=schedule,
        cp_kind=run.parallelism.cp_kind,
    )
    if run.data.get("sequence_length") is None:
        raise ConfigError("data.sequence_length must be given: the tokens of a sample.")
    global_batch = run.data.get("global_batch_size")
    if global_batch is None:
        raise ConfigError("data.global_batch_size must be given: the sequences of one optimizer step over all ranks.")
    micro_batch_size = run.parallelism.micro_batch_size
    if micro_batch_size is None:
        micro_batch_size = largest_micro_batch(layout, schedule, global_batch)
    return micro_batch_size, check_batch(layout, global_batch, micro_batch_size, schedule)


def largest_micro_batch(layout: Layout, schedule: str, global_batch: int) -> int:
    """The largest micro-batch that the schedule runs with; 1 when none works, for `check_batch` to explain."""
    check_sizes(global_batch=global_batch)
    rows, info = global_batch // layout.dp, find_schedule(schedule)
    sizes = [size for size in divisors(max(rows, 1)) if info.accepts(layout.pp, layout.vp, rows // size)]
    return max(sizes, default=1)
