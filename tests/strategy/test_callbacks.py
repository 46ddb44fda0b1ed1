"""Callbacks of Lightning see what they see on one process, or are refused by name."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import parity
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from parity import Part, micro_batch_rows, quiet_trainer
from plain_module import SEQUENCE, LanguageModel, TextData
from ranks import run_ranks
from reference import one_thread
from sweeps import by_default
from torch import Tensor, nn

from lightning_3d.engine.model_size import ModelSize
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.weights.initialize import initialize

GLOBAL_BATCH, STEPS_PER_EPOCH = 16, 4
RELATIVE, ABSOLUTE = 2e-5, 5e-5
full = pytest.mark.full


class Kept(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def values(self, key: str) -> list[float]:
        return [row[key] for _, row in self.rows if key in row]


def make(
    layout: str | None, callbacks: list[Callback], logger: Any = False, **arguments: Any
) -> tuple[pl.Trainer, LanguageModel, TextData]:
    """Trainer, module and data; `layout` None is one process without our strategy, whose module has
    the weights of a layout's."""
    from lightning_3d.strategy import Lightning3DStrategy

    options = {
        key: arguments.pop(key) for key in list(arguments) if key.startswith(("zero_", "schedule"))
    }
    size = Layout.parse(layout) if layout else Layout()
    micro_batch = micro_batch_rows(size.dp, size.pp, GLOBAL_BATCH)
    strategy: Any = (
        Lightning3DStrategy(layout, micro_batch_size=micro_batch, **options) if layout else "auto"
    )
    defaults = {"max_epochs": 2, "log_every_n_steps": 1}
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size.world_size,
        callbacks=callbacks,
        logger=logger,
        **defaults | arguments,
    )
    return trainer, model(layout), TextData(GLOBAL_BATCH // size.dp)


def model(layout: str | None) -> LanguageModel:
    module = LanguageModel()
    if layout is None:
        with torch.device("meta"):
            module.configure_model()
        initialize(module, 0)
    return module


def world_size(layout: str) -> int:
    return Layout.parse(layout).world_size


def part_of(trainer: pl.Trainer, module: nn.Module) -> Part:
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return Part(
        [],
        [],
        weights,
        dict(getattr(trainer.strategy, "specs", {}) if trainer.world_size > 1 else {}),
    )


def assert_same_weights(found: list[Part], expected: Part) -> None:
    weights, drift = parity.assemble(found)
    assert drift == 0.0 and weights.keys() == expected.weights.keys()
    assert (
        max((weights[name] - value).abs().max().item() for name, value in expected.weights.items())
        < ABSOLUTE
    )


@functools.cache
def alone(fn: Callable[..., Any], *args: Any) -> Any:
    """What one process returns."""
    return run_ranks(fn, 1, None, *args)[0]


# Throughput


FLOPS = 1000


class Flops(LanguageModel):
    flops_per_batch = FLOPS


def throughput(layout: str) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Logged rows of training and validation that have rates, with the seconds that these are
    of."""
    monitor = ThroughputMonitor(
        lambda batch: len(batch["input_ids"]),
        lambda batch: batch["input_ids"].numel(),
        window_size=3,
    )
    logger = Kept()
    trainer, _, data = make(layout, [monitor], logger)
    module = Flops()
    trainer.fit(module, datamodule=data)
    trainer.validate(module, data.train_dataloader(), verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=data)  # what was corrected once is not corrected again
    rows = [row for _, row in logger.rows]
    stages = []
    for stage in ("train", "validate"):
        own = [
            {key.removeprefix(f"{stage}/"): row[key] for key in row if key.startswith(f"{stage}/")}
            for row in rows
        ]
        own = [row for row in own if row]
        times = [row["time"] for row in own]
        for index, row in enumerate(own):
            # the window has three updates: two batches between first and last
            if "device/samples_per_sec" in row:
                row["seconds"] = times[index] - times[index - 2]
        stages.append([row for row in own if "seconds" in row])
    return stages[0], stages[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "share"),
    by_default([("tp2_pp2", 4), ("pp2_dp2", 2), ("dp2", 1), ("tp2_pp2_dp2", 4)], 1),
)
def test_throughput_counts_a_batch_once(layout: str, share: int) -> None:
    """Two batches over the same seconds: rows, tokens and FLOPs of the global batch, and each
    device's part of them."""
    ranks = world_size(layout)
    trained, validated = run_ranks(throughput, ranks, layout)[0]
    assert (len(trained), len(validated)) == (2 * (2 * STEPS_PER_EPOCH - 2), STEPS_PER_EPOCH - 2)
    copies = ranks // share
    for found in (*trained, *validated):
        for key, whole in (
            ("samples", 2 * GLOBAL_BATCH),
            ("items", 2 * GLOBAL_BATCH * SEQUENCE),
            ("flops", 2 * FLOPS * copies),
            ("batches", 2 * copies),
        ):
            assert found[f"{key}_per_sec"] * found["seconds"] == pytest.approx(whole)
            assert found[f"device/{key}_per_sec"] * found["seconds"] == pytest.approx(whole / ranks)


# Early stopping, checkpoints, learning rates


@dataclass(frozen=True)
class Watched:
    steps: int
    scores: dict[str, float]
    best: str
    monitored: float
    exist: bool
    again: float  # val_loss with the best weights
    rates: list[float]
    train_scores: dict[str, float]


def watch(layout: str | None, folder: str, **options: Any) -> Watched:
    best = ModelCheckpoint(
        f"{folder}/val", monitor="val_loss", save_top_k=2, filename="{epoch}-{step}"
    )
    often = ModelCheckpoint(
        f"{folder}/train",
        monitor="train_loss_step",
        save_top_k=2,
        every_n_train_steps=3,
        filename="{step}",
        save_weights_only=True,
    )
    stops = EarlyStopping(
        "train_loss_step", stopping_threshold=THRESHOLD, patience=100, check_on_train_epoch_end=True
    )
    logger = Kept()
    callbacks = [best, often, stops, LearningRateMonitor()]
    trainer, module, data = make(
        layout, callbacks, logger, max_epochs=9, enable_checkpointing=True, **options
    )
    trainer.fit(module, datamodule=data)
    exist = all(Path(path).exists() for path in (*best.best_k_models, *often.best_k_models))
    rates = logger.values("lr-AdamW/pg1")
    steps, monitored = trainer.global_step, float(trainer.callback_metrics["train_loss_step"])
    again = trainer.validate(
        module, datamodule=data, ckpt_path=best.best_model_path, verbose=False
    )[0]["val_loss"]
    return Watched(
        steps,
        {Path(path).name: float(score) for path, score in best.best_k_models.items()},
        Path(best.best_model_path).name,
        monitored,
        exist,
        again,
        rates,
        {Path(path).name: float(score) for path, score in often.best_k_models.items()},
    )


THRESHOLD = 3.95


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    [outcome] = run_ranks(watch, 1, None, str(tmp_path_factory.mktemp("watched")))
    assert STEPS_PER_EPOCH < outcome.steps < 9 * STEPS_PER_EPOCH, "it stops early, but not at once"
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param("tp2_pp2", {"zero_stage": 1}, marks=full),
        pytest.param("pp2_dp2", {"zero_stage": 2, "schedule": "Interleaved1F1B"}, marks=full),
        ("dp2", {"zero_stage": 3}),
        *(
            pytest.param(layout, {"zero_stage": stage}, marks=full)
            for layout in ("tp2_pp2", "pp2_dp2", "dp2")
            for stage in range(4)
        ),
    ],
    ids=str,
)
def test_all_ranks_stop_keep_and_restore_as_one_process(
    layout: str, options: dict, watched: Watched, tmp_path: Path
) -> None:
    ranks = run_ranks(watch, world_size(layout), layout, str(tmp_path), **options)
    for found in ranks:
        assert found.steps == watched.steps
        assert found.monitored == pytest.approx(watched.monitored, rel=RELATIVE)
        assert found.exist and found.best == watched.best
        for own, expected in (
            (found.scores, watched.scores),
            (found.train_scores, watched.train_scores),
        ):
            assert own == pytest.approx(expected, rel=RELATIVE) and len(own) == 2
        assert found.again == pytest.approx(min(watched.scores.values()), rel=RELATIVE)
    assert sorted(path.name for path in (tmp_path / "val").iterdir()) == sorted(watched.scores)
    # plain_module: a warm-up over four steps times 0.97 ** step, at 1e-3, as the loop has it when
    # the step is logged
    formula = [1e-3 * min(1.0, (step + 1) / 4) * 0.97**step for step in range(watched.steps)]
    assert ranks[0].rates == pytest.approx(formula, rel=1e-12) and watched.rates == pytest.approx(
        formula, rel=1e-12
    )


# Several entry points


def in_turn(
    layout: str | None, two_trainers: bool = False, **options: Any
) -> tuple[list[float], Part]:
    """Validation losses before, between and after fits of one Trainer that goes on, or of a second
    one."""
    trainer, module, data = make(layout, [], max_steps=3, max_epochs=-1, **options)
    losses = [trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"]]
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 3
    if two_trainers:
        trainer, _, _ = make(layout, [], max_steps=3, max_epochs=-1, **options)
    else:
        trainer.fit_loop.epoch_loop.max_steps = 7
    losses.append(trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"])
    losses.append(trainer.validate(module, data.train_dataloader(), verbose=False)[0]["val_loss"])
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == (3 if two_trainers else 7)
    if not two_trainers:
        trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = -1, 3
        trainer.fit(module, datamodule=data)
    losses.append(trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"])
    losses.append(float(trainer.global_step))
    return losses, part_of(trainer, module)


@pytest.mark.slow
@pytest.mark.parametrize(
    "two_trainers", by_default([False, True], 1), ids=["one trainer", "two trainers"]
)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param("tp2_pp2", {"zero_stage": 1}, marks=full),
        ("pp2_dp2", {"zero_stage": 3}),
        *(pytest.param("dp2", {"zero_stage": stage}, marks=full) for stage in range(4)),
    ],
    ids=str,
)
def test_one_module_goes_through_several_fits(
    layout: str, options: dict, two_trainers: bool
) -> None:
    losses, part = alone(in_turn, two_trainers)
    found = run_ranks(in_turn, world_size(layout), layout, two_trainers, **options)
    for own, _ in found:
        assert own == pytest.approx(losses, rel=RELATIVE)
    assert_same_weights([part for _, part in found], part)


# Clipping


def clipped(layout: str | None, algorithm: str, value: float, **options: Any) -> Part:
    trainer, module, data = make(
        layout, [], gradient_clip_val=value, gradient_clip_algorithm=algorithm, **options
    )
    trainer.fit(module, datamodule=data)
    return part_of(trainer, module)


CLIPPED = [
    ("tp2_pp2", {"zero_stage": 0}),
    ("tp2_dp2", {"zero_stage": 2, "zero_reduce": "micro_batch", "zero_reduce_scatter": True}),
    ("pp2_dp2", {"zero_stage": 3, "zero_reduce": "micro_batch", "zero_reduce_scatter": True}),
    *(
        pytest.param(
            "pp2_dp2",
            {"zero_stage": stage, "zero_reduce": reduce, "zero_reduce_scatter": scatter},
            marks=full,
        )
        for stage, reduce, scatter in itertools.product(
            (2, 3), ("step", "micro_batch"), (False, True)
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "value"), by_default([("value", 1e-3), ("norm", 0.05)], 0))
@pytest.mark.parametrize(("layout", "options"), by_default(CLIPPED, 1), ids=str)
def test_gradients_are_clipped_as_on_one_process(
    layout: str, options: dict, algorithm: str, value: float
) -> None:
    expected, other = alone(clipped, algorithm, value), alone(clipped, algorithm, 100.0)
    assert (
        max(
            (expected.weights[name] - value).abs().max().item()
            for name, value in other.weights.items()
        )
        > 2 * ABSOLUTE
    )
    assert_same_weights(
        run_ranks(clipped, world_size(layout), layout, algorithm, value, **options), expected
    )


# Others


def accumulated(layout: str | None, **options: Any) -> tuple[int, Part]:
    trainer, module, data = make(
        layout, [GradientAccumulationScheduler({0: 1, 1: 2, 3: 4})], max_epochs=4, **options
    )
    trainer.fit(module, datamodule=data)
    return trainer.global_step, part_of(trainer, module)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    by_default(
        [
            ("tp2_pp2", {"zero_stage": 1}),
            ("pp2_dp2", {"zero_stage": 3}),
            ("dp2", {"zero_stage": 3}),
        ],
        2,
    ),
    ids=str,
)
def test_accumulation_changes_from_epoch_to_epoch(layout: str, options: dict) -> None:
    """All batches have as many tokens, and every step as many batches: so Lightning's mean of
    batches is the mean over tokens."""
    steps, expected = alone(accumulated)
    assert steps == 4 + 2 + 2 + 1
    found = run_ranks(accumulated, world_size(layout), layout, **options)
    assert {own for own, _ in found} == {steps}
    assert_same_weights([part for _, part in found], expected)


class RunsOut(Callback):
    """The time of rank 0 is over after two steps; the others have an hour."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, index: int
    ) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 0:
            timer = next(callback for callback in trainer.callbacks if isinstance(callback, Timer))  # type: ignore[attr-defined]
            timer._duration = 0.0


def timed(layout: str) -> int:
    trainer, module, data = make(
        layout, [Timer("00:01:00:00", interval="step"), RunsOut()], max_epochs=50
    )
    trainer.fit(module, datamodule=data)
    return trainer.global_step


@pytest.mark.slow
def test_a_timer_ends_the_fit_on_all_ranks_together() -> None:
    assert run_ranks(timed, 4, "tp2_pp2", timeout=90) == [3] * 4


def device_stats(layout: str) -> list[set[str]]:
    logger = Kept()
    trainer, module, data = make(layout, [DeviceStatsMonitor(cpu_stats=True)], logger, max_epochs=1)
    trainer.fit(module, datamodule=data)
    return [
        set(row)
        for _, row in logger.rows
        if any(key.startswith("DeviceStatsMonitor") for key in row)
    ]


def test_device_statistics_are_logged() -> None:
    pytest.importorskip("psutil")
    first, *_ = run_ranks(device_stats, 2, "pp2")
    assert len(first) == 2 * (STEPS_PER_EPOCH + 2), (
        "before and after each batch of training and validation"
    )


class WithExample(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, SEQUENCE, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.model is not None
        return self.model(input_ids=tokens).logits


class Counting(Callback):
    """Keeps the numbers of parameters while parameters are sharded."""

    counts = (0, 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.counts = cast(Any, trainer.strategy).parameter_counts


class Shown(ModelSummary):
    """Keeps what it would print."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.totals: list[int] = []
        self.columns: dict[str, list[str]] = {}

    def summarize(self, data: Any, total: int, trainable: int, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.totals.append(total)
        self.columns = dict(data)


def summary(
    layout: str, kind: str, example: bool, **options: Any
) -> tuple[list[int], dict[str, list[str]], tuple[int, int], str]:
    """Parameters as shown, the columns of the table, parameters of the model and of this rank, and
    what is refused."""
    shown = Shown(max_depth=2) if kind == "plain" else RichModelSummary(max_depth=2)
    counted = Counting()
    trainer, module, data = make(
        layout,
        [shown, counted],
        max_epochs=1,
        limit_train_batches=1,
        limit_val_batches=0,
        **options,
    )
    module = WithExample() if example else module
    try:
        trainer.fit(module, datamodule=data)
    except Exception as error:
        return [], {}, (0, 0), f"{type(error).__name__}: {error}"
    assert (module.example_input_array is not None) == example
    return getattr(shown, "totals", []), getattr(shown, "columns", {}), counted.counts, ""


@pytest.mark.slow
@pytest.mark.parametrize("example", by_default([False, True], 1), ids=["no example", "example"])
@pytest.mark.parametrize(
    ("layout", "options"),
    by_default([("tp2_pp2", {}), ("tp2", {}), ("pp2_dp2", {"zero_stage": 3})], 0),
    ids=str,
)
def test_a_summary_shows_the_whole_model_and_the_share_of_rank_0(
    layout: str, options: dict, example: bool
) -> None:
    """With an example it calls the model, on all ranks; with a pipeline it does not."""
    [first, *others] = run_ranks(summary, world_size(layout), layout, "plain", example, **options)
    totals, columns, (whole, share), message = first
    alone = LanguageModel()
    with torch.device("meta"):
        alone.configure_model()
    assert message == "" and totals == [whole] == [
        sum(parameter.numel() for parameter in alone.parameters())
    ]
    assert 0.2 < share / whole < 0.8, "a half or a quarter, and what every rank has"
    row = columns["Name"].index("model")
    shown = [columns[name][row] for name in ("Type", "Params", "Params per Device")]
    assert shown == [
        type(alone.model).__name__,
        get_human_readable_count(whole),
        get_human_readable_count(share),
    ]
    shares = [share, *(one[2][1] for one in others)]
    assert sum(shares) >= whole and (sum(shares) < 1.1 * whole or layout != "pp2_dp2"), (
        "ZeRO-3 keeps nothing twice but what is tied"
    )
    assert all(totals == [] and message == "" for totals, _, _, message in others)
    assert all(
        message == ""
        for *_, message in run_ranks(
            summary, world_size(layout), layout, "rich", example, **options
        )
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Embedding(10, 4), nn.Linear(4, 10)
        self.leave.weight = self.enter.weight
        self.leave.bias.requires_grad_(False)


def test_a_tied_parameter_counts_once() -> None:
    with torch.device("meta"):
        size = ModelSize.of(Tied())
    assert (size.count(), size.count(trained=True)) == (50, 40)
    assert (size.count("enter"), size.count("leave"), size.count("leave", trained=True)) == (
        40,
        50,
        40,
    )
    assert size.types["leave"] == "Linear" and size.modes == {True: 2}


REFUSED: dict[str, tuple[Callable[[], Callback], str]] = {
    "finetuning": (
        lambda: BackboneFinetuning(),
        "BackboneFinetuning unfreezes parameters.*two fits",
    ),
    "pruning": (
        lambda: ModelPruning("l1_unstructured", amount=0.5),
        "ModelPruning replaces parameters.*Prune after",
    ),
    "batch size": (
        lambda: BatchSizeFinder(),
        "BatchSizeFinder increases the batch size until.*micro_batch_size",
    ),
}


def refused(layout: str, kind: str) -> None:
    trainer, module, data = make(layout, [REFUSED[kind][0]()])
    trainer.fit(module, datamodule=data)


@pytest.mark.parametrize("kind", REFUSED)
def test_callbacks_that_cannot_work_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[kind][1]):
        run_ranks(refused, 2, "pp2", kind, timeout=60)


class Frozen(LanguageModel):
    """Has a backbone that may be frozen until it is released, as BackboneFinetuning would do at a
    later epoch."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen

    def configure_model(self) -> None:
        new = self.model is None
        super().configure_model()
        assert self.model is not None
        if new and self.frozen:
            self.model.model.requires_grad_(False)


def in_two_fits(layout: str | None, frozen: bool, **options: Any) -> Part:
    module = Frozen(frozen)
    if layout is None:
        with torch.device("meta"):
            module.configure_model()
        initialize(module, 0)
    for _ in range(2):
        trainer, _, data = make(layout, [], max_steps=3, max_epochs=-1, **options)
        trainer.fit(module, datamodule=data)
        assert module.model is not None
        module.model.requires_grad_(True)
    return part_of(trainer, module)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp2", {"zero_stage": 1}),
        *(pytest.param("pp2_dp2", {"zero_stage": stage}, marks=full) for stage in range(4)),
        pytest.param("tp2_pp2", {"zero_stage": 0}, marks=full),
    ],
    ids=str,
)
def test_a_backbone_is_unfrozen_between_two_fits(layout: str, options: dict) -> None:
    """What the refusal of BackboneFinetuning advises."""
    expected, at_once = alone(in_two_fits, True), alone(in_two_fits, False)
    assert (
        max(
            (expected.weights[name] - value).abs().max().item()
            for name, value in at_once.weights.items()
        )
        > 10 * ABSOLUTE
    )
    assert_same_weights(
        run_ranks(in_two_fits, world_size(layout), layout, True, **options), expected
    )


def found_rate(
    layout: str | None, folder: str, tuned: bool, **options: Any
) -> tuple[list[float], float, Part]:
    """The finder as a callback of the fit, or before it with a Tuner."""
    search: dict[str, Any] = {"min_lr": 1e-5, "max_lr": 1e-1, "early_stop_threshold": None}
    finder = LearningRateFinder(num_training_steps=12, **search)
    trainer, module, data = make(
        layout, [] if tuned else [finder], max_epochs=1, default_root_dir=folder, **options
    )
    found = (
        Tuner(trainer).lr_find(module, datamodule=data, num_training=12, **search)
        if tuned
        else None
    )
    trainer.fit(module, datamodule=data)
    found = found or finder.optimal_lr
    assert found is not None
    return found.results["loss"], module.learning_rate, part_of(trainer, module)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options", "tuned"),
    [
        pytest.param("pp2", {"zero_stage": 1}, False, marks=full),
        ("dp2", {"zero_stage": 3}, True),
        pytest.param("pp2", {"zero_stage": 1}, True, marks=full),
        pytest.param("dp2", {"zero_stage": 3}, False, marks=full),
    ],
    ids=str,
)
def test_the_learning_rate_finder_finds_the_same(
    layout: str, options: dict, tuned: bool, tmp_path: Path
) -> None:
    """It trains on batches at rising rates, reads its own checkpoint back, and the fit takes the
    rate that it found."""
    [(losses, rate, expected)] = run_ranks(found_rate, 1, None, str(tmp_path), tuned)
    found = run_ranks(found_rate, world_size(layout), layout, str(tmp_path), tuned, **options)
    for own, other, _ in found:
        assert own == pytest.approx(losses, rel=1e-3) and other == rate
    assert_same_weights([part for _, _, part in found], expected)
    assert list(tmp_path.iterdir()) == []


class Spikes(SpikeDetection):
    """Notes what it took for a spike, instead of ending the fit."""

    def __init__(self) -> None:
        super().__init__(mode="max", window=3, warmup=2, atol=0.1, rtol=0.0)
        self.seen: list[int] = []

    def _handle_spike(self, fabric: Any, batch_idx: int) -> None:
        self.seen.append(fabric.global_step)


def spikes(layout: str | None, **options: Any) -> list[int]:
    trainer, module, data = make(layout, [callback := Spikes()], max_epochs=4, **options)
    trainer.fit(module, datamodule=data)
    return callback.seen


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(["pp2", "pp2_dp2", "tp2_pp2", "dp2"], 0))
def test_spikes_of_the_loss_are_seen_on_all_ranks(layout: str) -> None:
    expected = alone(spikes)
    assert 0 < len(expected) < 4 * STEPS_PER_EPOCH
    for found in run_ranks(spikes, world_size(layout), layout):
        assert found == expected


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], Tensor]] = []
        self.epoch: list[int] = []

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        prediction: Any,
        indices: Any,
        *args: Any,
    ) -> None:
        self.batches.append((list(indices), prediction))

    def write_on_epoch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, predictions: Any, indices: Any
    ) -> None:
        self.epoch = [index for batches in indices for batch in batches for index in batch]


class Predicts(LanguageModel):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(**batch).logits.argmax(-1)


def written(layout: str) -> dict[int, Tensor]:
    trainer, _, data = make(layout, [writer := Writer()])
    trainer.predict(Predicts(), data.val_dataloader())
    found = {
        index: row
        for indices, rows in writer.batches
        for index, row in zip(indices, rows, strict=True)
    }
    assert sorted(found) == sorted(writer.epoch)
    return found


@pytest.mark.slow
def test_predictions_are_written_with_their_rows() -> None:
    rows = TextData(GLOBAL_BATCH).val_dataloader().dataset
    found = run_ranks(written, 4, "pp2_dp2")
    assert sorted(index for rank in (0, 2) for index in found[rank]) == list(range(len(rows)))  # type: ignore[arg-type]
    assert found[0].keys() == found[1].keys() and found[2].keys() == found[3].keys()
    whole = model(None).model
    assert whole is not None
    with one_thread(), torch.no_grad():
        expected = whole(input_ids=torch.stack([row["input_ids"] for row in rows])).logits.argmax(
            -1
        )
    for rank in found:
        for index, prediction in rank.items():
            assert torch.equal(expected[index], prediction)
