"""The typed configuration of a run: one dataclass for each group of keys. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from lightning_3d.app.config.cluster import ClusterConfig
from lightning_3d.app.config.lora import LoraOptions
from lightning_3d.app.config.multi_token import MultiTokenOptions
from lightning_3d.app.config.objective import ObjectiveOptions
from lightning_3d.app.config.plan import PlanOptions
from lightning_3d.app.config.sample import SampleOptions
from lightning_3d.app.config.save_interval import HOURS_BETWEEN_FAILURES
from lightning_3d.models.pretrained_config import complete_model
from lightning_3d.models.spec import ModelSpec
from lightning_3d.options.options import OPEN, Options, command_line_default, command_line_options
from lightning_3d.options.reliability import Reliability

START_METHODS = ("auto", "fork", "spawn")
GROUPS = ("model", "data", "parallelism", "cluster", "optimizer", "precision", "trainer")
WHOLE_RUN_GROUPS = ("recipe", "debug", "hparams_search")
"""Groups whose options set keys of the other groups, and leave no key of their own."""
MODEL_KEYS = (
    "name",
    "attn_implementation",
    "published_parameters",
    "active_parameters",
    "config",
    "pretrained",
    "lora",
    "mtp_layers",
    "mtp_loss_weight",
)


def _yaml_type(name: str, hint: Any) -> Any:
    """Return the type of an option as OmegaConf knows it: it has no sequences, and no choice of
    several types."""
    kinds = (
        [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
        if isinstance(hint, UnionType)
        else [hint]
    )
    if len(kinds) > 1 or name == "stages":  # which may be auto on the command line
        return Any
    (kind,) = kinds
    kind = list[get_args(kind)] if get_origin(kind) is Sequence else kind  # type: ignore[misc]
    return kind | None if kind is not hint or name in OPEN else kind


def _parallelism_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, type, default) of the keys of `parallelism`."""
    yield "_target_", str, "lightning_3d.Lightning3DStrategy"
    yield "_convert_", str, "all"
    yield "layout", str, MISSING
    hints = get_type_hints(Options)
    for entry in command_line_options():
        if entry.name != "layout":
            yield entry.name, _yaml_type(entry.name, hints[entry.name]), command_line_default(entry)


if TYPE_CHECKING:

    class ParallelismConfig(Options):
        """Group `parallelism`: `Lightning3DStrategy`, or a subclass, and its arguments."""

        layout: str
        _target_: str
        _convert_: str

else:
    ParallelismConfig = make_dataclass("ParallelismConfig", _parallelism_fields(), frozen=True)
    ParallelismConfig.__module__ = __name__  # by which instances are pickled


@dataclass(frozen=True)
class PrecisionConfig:
    """Group `precision`: a name in `PRECISIONS`, or auto."""

    name: str = MISSING


@dataclass(frozen=True)
class TrainerConfig(Reliability):
    """Group `trainer`: length of a run, intervals, and arguments of Lightning's `Trainer`."""

    max_steps: int = MISSING
    max_time: str | None = None
    val_check_interval: int = MISSING
    evaluate_every: int | None = None
    limit_val_batches: int | None = None
    gradient_clip_val: float | None = None
    average_decay: float | None = None
    float32_matmul_precision: str | None = None
    log_every_n_steps: int = 10
    trace_every_n_steps: int | None = Options.trace_every_n_steps
    nonfinite: str = Options.nonfinite
    collective_timeout: float = 1800.0
    checkpoint_every_n_steps: int | str | None = None
    keep_last: int = 3
    keep_every_n_steps: int | None = None
    hours_between_failures: float = HOURS_BETWEEN_FAILURES
    resume: str | None = None
    auto_resume: bool = False
    restarts: int = 0
    restarts_without_progress: int | None = 5
    start_method: str = "auto"
    dry: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a whole run.

    `model`, `data` and `optimizer` have checks of their own, whose errors say more than
    OmegaConf's. Loggers and callbacks have a `_target_`.
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
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    sample: SampleOptions = field(default_factory=SampleOptions)
    seed: int = 0
    force: bool = False
    profile: str | None = None
    run_folder: str = ""


@dataclass(frozen=True, kw_only=True)
class CompleteRun(RunConfig):
    """A run whose group `model` is complete, with the sizes of its model.

    Attributes:
        spec: sizes of the model.
        lora: adapters that are trained instead of the weights; `lora.r` is None if all weights are
            trained.
        ahead: multi-token prediction; `ahead.layers` is None without.
        second: sizes of the frozen second model of the objective; None without one, and while its
            folder is not named.
    """

    spec: ModelSpec
    lora: LoraOptions
    ahead: MultiTokenOptions
    second: ModelSpec | None = None


def complete_run(run: RunConfig, *, trains: bool = True) -> CompleteRun:
    """Complete the group `model` from its pretrained folder, and read adapters and sizes. The only
    place where a run reads sizes.

    Args:
        trains: whether the model is trained; an evaluation has no second model.

    Raises:
        ConfigError: adapters, fields or sizes that cannot be, or a teacher with another vocabulary.
            CheckpointError: the pretrained folder, or that of the teacher, cannot be read.
    """
    if isinstance(run, CompleteRun):
        return run
    if trains:
        run.objective.check()
    lora = LoraOptions.of(run.model)
    # before its numbers are used, and below again, with what a pretrained folder adds
    MultiTokenOptions.of(run.model)
    model, spec = complete_model(run.model, dry=run.trainer.dry)
    values = {entry.name: getattr(run, entry.name) for entry in fields(run)}
    ahead = MultiTokenOptions.of(model)
    # With modules behind the model, the objective is refused; that needs no teacher.
    second = (
        run.objective.second_spec(spec, dry=run.trainer.dry)
        if trains and ahead.layers is None
        else None
    )
    return CompleteRun(
        **{**values, "model": model}, spec=spec, lora=lora, ahead=ahead, second=second
    )
