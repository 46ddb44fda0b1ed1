"""``assert_same_training(model="llama", layout="tp2_pp2_dp2", ...)``: a layout computes what one
process computes.

An ordinary LightningModule runs through a real ``Trainer`` on warm ranks; the loss and the gradient
norm of every step and every final weight are compared with the plain loop of ``reference.py``.
"""

import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import models
import torch
from ranks import run_ranks
from reference import STEPS, Noise, Recipe, Run, compare, data, initial_model, reference, tuned
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

# (relative for losses and gradient norms, absolute for weights); larger where 3 x the reference's
# own noise is larger.
TOLERANCES = {"float32": (1e-5, 5e-5), "float64": (1e-10, 1e-10)}
NOISE_FACTOR = 3
QUIET = Noise(0.0, 0.0, 0.0)
ACCELERATOR = "LIGHTNING_3D_TEST_ACCELERATOR"
PRECISIONS = {"float32": "32-true", "float64": "64-true", "bfloat16": "bf16-true"}
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
LOOPED_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
SCHEDULES = ("GPipe", "1F1B", *LOOPED_SCHEDULES, *V_SCHEDULES)
LOSS_TERMS = ("label_smoothing", "z_loss")
# five layers where the stages allow: no split of them is even
UNEVEN_MODELS = ("qwen3", "gemma3", models.PLAIN)


def micro_batch_rows(dp: int, pp: int, global_batch: int = Recipe.global_batch) -> int:
    """Twice as many micro-batches as pipeline ranks: all phases of a schedule run, and
    tensor-parallel ranks send few messages."""
    return max(1, global_batch // dp // (2 * pp))


@dataclass(frozen=True)
class Cell:
    """One run to compare: a model on a layout."""

    model: str = "llama"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "1F1B"
    zero: int = 0
    dtype: str = "float32"
    cp: int = 1
    vp: int | None = None  # stages per pipeline rank; None for what the schedule implies
    options: tuple[tuple[str, Any], ...] = ()  # further arguments of the strategy
    ep: int = 1

    @property
    def layout(self) -> str:
        further = (
            f"_{axis}{degree}"
            for axis, degree in (("cp", self.cp), ("ep", self.ep), ("vp", self.vp))
            if degree and degree > 1
        )
        return f"tp{self.tp}_pp{self.pp}_dp{self.dp}" + "".join(further)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def stages(self) -> int:
        implied = 2 if self.schedule in V_SCHEDULES + LOOPED_SCHEDULES and self.pp > 1 else 1
        return self.pp * (self.vp or implied)

    @property
    def layers(self) -> int:
        return max(self.stages, 5 if self.model in UNEVEN_MODELS else 4)

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch: twice as many micro-batches as pipeline ranks, so that all phases
        of a schedule run; with losses of routers as many as the reference's."""
        if self.recipe.routers:
            return 4
        return micro_batch_rows(self.dp, self.pp)

    @property
    def recipe(self) -> Recipe:
        routers = tuple(
            (key.removeprefix("moe_"), value)
            for key, value in self.options
            if key.startswith("moe_")
        )
        loss = tuple((key, value) for key, value in self.options if key in LOSS_TERMS)
        return Recipe(
            self.model,
            self.layers,
            self.dtype,
            routers=routers,
            loss=loss,
            data_ranks=self.dp if routers else 1,
        )

    @property
    def name(self) -> str:
        return "-".join(
            [self.model, self.layout, self.schedule, f"zero{self.zero}", self.dtype, *self.words]
        )

    @property
    def words(self) -> list[str]:
        """The further arguments, as in a file name."""
        return [str(key if value is True else value) for key, value in self.options]


@dataclass(frozen=True)
class Measured:
    """What a cell's comparison found; ``limits`` hold the errors that it was allowed."""

    cell: Cell
    error: Noise
    limits: Noise
    noise: Noise
    drift: float  # largest difference between two ranks that hold the same shard: must be zero
    seconds: float

    @property
    def ok(self) -> bool:
        return self.drift == 0.0 and self.error.within(self.limits)

    def line(self) -> str:
        """One row of the table: error and, in brackets, the reference's own reordering noise."""
        cell = self.cell
        pairs = zip(dataclasses.astuple(self.error), dataclasses.astuple(self.noise), strict=True)
        numbers = "  ".join(f"{error:7.1e} ({noise:7.1e})" for error, noise in pairs)
        mode = " ".join([cell.dtype, f"zero{cell.zero}", *cell.words])
        where = f"{cell.model:<9} {cell.layout:<12} {cell.schedule:<21} {mode:<13}"
        return f"{where}  {numbers}  {self.seconds:5.1f}  {'ok' if self.ok else 'FAILED'}"


HEADER = (
    f"{'model':<9} {'layout':<12} {'schedule':<21} {'mode':<13}  {'loss':<17}  {'grad norm':<17} "
    f" {'weights':<17}      s\nlargest error over {STEPS} steps (the reference's own reordering"
    " noise); losses and norms relative, weights absolute"
)
TABLE: list[Measured] = []  # printed at the end of the session, see conftest.py


def assert_same_training(
    model: str = "llama",
    layout: str = "tp2_pp2_dp2",
    schedule: str = "1F1B",
    zero: int = 0,
    dtype: str = "float32",
    **strategy: Any,
) -> Measured:
    """Train ``model`` on ``layout`` and on one process; fail where they differ by more than
    rounding.

    Args:
        layout: every degree of "tp", "pp", "dp", "cp", "ep" and "vp" that is not 1, as in
            "tp2_dp4".
        strategy: further arguments of ``Lightning3DStrategy``, which override what the cell would
            choose.
    """
    degrees = {part[:2]: int(part[2:]) for part in layout.split("_")}
    options = tuple(
        sorted(
            (key, strategy.pop(key))
            for key in list(strategy)
            if key.startswith(("zero_", "moe_", "cp_", *LOSS_TERMS))
        )
    )
    return check(
        Cell(model, schedule=schedule, zero=zero, dtype=dtype, options=options, **degrees),
        **strategy,
    )


def check(cell: Cell, **strategy: Any) -> Measured:
    """Measure a cell, add it to the table, and assert that it holds."""
    measured = measure(cell, **strategy)
    TABLE.append(measured)
    assert measured.drift == 0.0, (
        f"ranks that hold the same shard differ by {measured.drift:.1e}\n{measured.line()}"
    )
    assert measured.ok, (
        f"differs from one process by more than {measured.limits}\n{HEADER}\n{measured.line()}"
    )
    return measured


def measure(cell: Cell, **strategy: Any) -> Measured:
    expected, noise = reference(cell.recipe)
    started = time.monotonic()
    parts = run_ranks(
        train_on_rank,
        cell.world_size,
        cell.recipe,
        **strategy_arguments(cell) | strategy,
        timeout=180,
    )
    seconds = time.monotonic() - started
    error, drift = differences(parts, expected)
    if cell.recipe.routers:
        assert_same_routers(parts, expected, cell)
    return Measured(cell, error, limits(cell.dtype, noise), noise, drift, seconds)


def limits(dtype: str, noise: Noise = QUIET) -> Noise:
    """The largest allowed differences."""
    relative, absolute = TOLERANCES[dtype]
    return Noise(
        max(relative, NOISE_FACTOR * noise.loss),
        max(relative, NOISE_FACTOR * noise.grad_norm),
        max(absolute, NOISE_FACTOR * noise.weight),
    )


def differences(parts: list["Part"], expected: Run) -> tuple[Noise, float]:
    """Largest differences between a run on ranks and the reference, and between two ranks that hold
    the same shard."""
    for part in parts[1:]:
        assert (part.losses, part.grad_norms) == (
            parts[0].losses,
            parts[0].grad_norms,
        ), "ranks report different values"
    weights, drift = assemble(parts)
    return compare(Run(parts[0].losses, parts[0].grad_norms, weights), expected), drift


def assert_same_routers(parts: list["Part"], expected: Run, cell: Cell) -> None:
    """All ranks report the losses of the routers that one process has, and as many tokens as there
    are."""
    for part in parts:
        found = [loss for step in part.routers for loss in (step.aux_loss, step.z_loss)]
        wanted = [loss for losses in expected.router_losses for loss in losses]
        tolerance = TOLERANCES[cell.dtype][0]
        assert max(abs(a - b) / b for a, b in zip(found, wanted, strict=True)) < tolerance, (
            found[:4],
            wanted[:4],
        )
        pairs = (
            models.experts_of_a_token(cell.recipe.model)
            * models.SEQUENCE
            * cell.recipe.global_batch
        )
        assert all(sum(tokens) == pairs for step in part.routers for tokens in step.tokens)


def assert_same_run(
    parts: list["Part"], expected: Run, dtype: str = "float32", noise: Noise = QUIET
) -> None:
    """As ``check``, for runs with data or modules of their own. ``noise``: what rounding changes on
    one process."""
    error, drift = differences(parts, expected)
    allowed = limits(dtype, noise)
    assert drift == 0.0, f"ranks that hold the same shard differ by {drift:.1e}"
    assert error.within(allowed), f"{error} exceeds {allowed}"


def strategy_arguments(cell: Cell) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "layout": cell.layout,
        "micro_batch_size": cell.micro_batch,
        "schedule": cell.schedule,
        "zero_stage": cell.zero,
        **dict(cell.options),
    }
    if cell.model == models.PLAIN:
        arguments["plan"] = models.PlainModel.plan
    return arguments


@dataclass(frozen=True)
class Part:
    """What one rank has at the end of a run: step values, its shards and where they belong."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    specs: dict[str, Any]
    routers: list[Any] = dataclasses.field(default_factory=list)  # of each step, see StepResult


def assemble(parts: list[Part]) -> tuple[dict[str, Tensor], float]:
    """Put the shards of all ranks together.

    Returns:
        The whole weights by name (tied copies once, under the name that they are tied to), and the
        largest difference between two ranks that hold the same elements.
    """
    whole: dict[str, Tensor] = {}
    drift = 0.0
    for part in parts:
        for name, local in part.weights.items():
            spec = part.specs[name]
            full = whole.setdefault(
                spec.tied_to or name, torch.full(spec.global_shape, torch.nan, dtype=local.dtype)
            )
            seen = spec.cut(full)
            both = ~seen.isnan()
            drift = max(drift, (seen - local)[both].abs().max().item() if both.any() else 0.0)
            spec.paste(local, full)
    for name, full in whole.items():
        assert not full.isnan().any(), f"no rank holds some of {name}, or it is not a number"
    return whole, drift


# What follows runs on the ranks.


class Rows(Dataset):
    """The rows of a batch as samples."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.batch.items()}


class Module(pl.LightningModule):
    """An ordinary LightningModule: the model, the user's loss, an optimizer."""

    def __init__(self, recipe: Recipe, model: nn.Module | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = model

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tuned(models.build(self.recipe.model, self.recipe.layers), self.recipe)

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        assert self.model is not None
        return models.task(self.recipe.model).step(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        return torch.optim.AdamW(
            self.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )


class Data(pl.LightningDataModule):
    """Rows in their order: left to itself, Lightning shuffles training data when there are several
    ranks.

    Args:
        rows: the data set.
        batch_size: of one data-parallel rank; None where the samples are whole batches already.
    """

    def __init__(self, rows: Dataset, batch_size: int | None) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        sampler: DistributedSampler = DistributedSampler(
            self.rows, shuffle=False, **self.trainer.distributed_sampler_kwargs or {}
        )
        return DataLoader(self.rows, batch_size=self.batch_size, sampler=sampler)


class StepValues(pl.Callback):
    """Keeps the strategy's loss, averaged over the batches that accumulate, and gradient norm of
    every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.routers: list[Any] = []
        self._batches: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step = trainer.strategy.last_step  # type: ignore[attr-defined]
        self._batches.append(step)
        if step.grad_norm is not None:
            total = sum(batch.weight for batch in self._batches)
            self.losses.append(sum(batch.loss * batch.weight for batch in self._batches) / total)
            self.grad_norms.append(step.grad_norm)
            self.routers.append(step.routers)
            self._batches = []


def quiet_trainer(**arguments: Any) -> pl.Trainer:
    """A Trainer that writes no files and draws no bars, on CPU unless the variable ACCELERATOR says
    otherwise (`tests/cuda`)."""
    defaults: dict[str, Any] = {
        "accelerator": os.environ.get(ACCELERATOR, "cpu"),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**defaults | arguments)


def train_on_rank(recipe: Recipe, *, eager: bool = False, **strategy: Any) -> Part:
    """Run the recipe through a Trainer; the model is built in ``configure_model``, or before it if
    ``eager``."""
    return fit_on_rank(
        recipe,
        Rows(data(recipe)),
        Module(recipe, initial_model(recipe) if eager else None),
        **strategy,
    )


class SaveFirst(pl.Callback):
    """Writes a checkpoint after the first step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def fit_on_rank(
    recipe: Recipe,
    rows: Dataset,
    module: "Module",
    *,
    batches: bool = False,
    accumulate: int = 1,
    nodes: int = 1,
    resume: str | None = None,
    save: str | None = None,
    **strategy: Any,
) -> Part:
    """One pass over a data set, at most ``recipe.steps`` steps, with a Trainer like any user's.

    Args:
        rows: the data set; Lightning deals its samples to the data-parallel ranks.
        batches: its samples are whole batches of one rank already.
        accumulate: into how many batches that of a step is divided.
        nodes: hosts over which the ranks are spread.
        resume: checkpoint from which to continue.
        save: checkpoint to write after the first step.
        strategy: arguments of ``Lightning3DStrategy``.
    """
    from lightning_3d.strategy import Lightning3DStrategy

    plan = Lightning3DStrategy(**strategy, seed=recipe.seed)
    assert plan.layout is not None
    values = StepValues()
    trainer = quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size // nodes,
        num_nodes=nodes,
        precision=PRECISIONS[recipe.dtype],
        max_steps=recipe.steps,
        max_epochs=1,
        gradient_clip_val=recipe.clip,
        accumulate_grad_batches=accumulate,
        callbacks=[values, *([SaveFirst(save)] if save is not None else [])],
    )
    data = Data(rows, None if batches else recipe.global_batch // plan.layout.dp // accumulate)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    weights = {
        name: parameter.detach().cpu().clone() for name, parameter in module.named_parameters()
    }
    return Part(values.losses, values.grad_norms, weights, dict(plan.specs), values.routers)
