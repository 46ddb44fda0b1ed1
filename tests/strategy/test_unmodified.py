"""An ordinary LightningModule, with callbacks, metrics and a scheduler, behaves as on one
process."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import plain_module
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from parity import micro_batch_rows, quiet_trainer
from plain_module import LanguageModel, TextData
from ranks import run_ranks
from sweeps import by_default
from torch import nn

from lightning_3d.layout import Layout
from lightning_3d.weights.initialize import initialize

GLOBAL_BATCH = 16
EPOCHS = 6
TOLERANCE = 2e-5  # float32 after a few dozen steps at learning rate 1e-3


@dataclass(frozen=True)
class Outcome:
    """What a user sees at the end of ``fit``."""

    metrics: dict[str, float]
    history: list[dict[str, float]]  # of callback_metrics, after every validation
    step_losses: list[float]  # train_loss as logged in every step
    learning_rates: list[float]
    best_score: float
    best_path: str
    best_path_exists: bool
    stopped_epoch: int
    steps: int


class History(pl.Callback):
    """Reads what any other callback would read, when it would read it."""

    def __init__(self) -> None:
        self.validations: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.learning_rates: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(numbers(trainer.callback_metrics))


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(metrics.items())}


def fit(
    folder: str, batch_size: int, strategy: Any, devices: int, module: LanguageModel
) -> Outcome:
    """What a user's script does. Early stopping ends it when the loss improves by less than it asks
    for."""
    history = History()
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", mode="min", save_weights_only=True)
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.12)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        num_sanity_val_steps=2,
        log_every_n_steps=1,
        logger=CSVLogger(folder),
        callbacks=[history, checkpoint, stopping, LearningRateMonitor()],
    )
    trainer.fit(module, datamodule=TextData(batch_size))
    return Outcome(
        metrics=numbers(trainer.callback_metrics),
        history=history.validations,
        step_losses=history.losses,
        learning_rates=history.learning_rates,
        best_score=float(checkpoint.best_model_score or 0.0),
        best_path=checkpoint.best_model_path,
        best_path_exists=Path(checkpoint.best_model_path).exists(),
        stopped_epoch=stopping.stopped_epoch,
        steps=trainer.global_step,
    )


def fit_on_rank(folder: str, layout: str, **strategy: Any) -> Outcome:
    from lightning_3d.strategy import Lightning3DStrategy

    size = Layout.parse(layout)
    plan = Lightning3DStrategy(
        layout, micro_batch_size=micro_batch_rows(size.dp, size.pp, GLOBAL_BATCH), **strategy
    )
    assert plan.layout is not None
    return fit(
        folder, GLOBAL_BATCH // plan.layout.dp, plan, plan.layout.world_size, LanguageModel()
    )


@functools.cache
def one_process(folder: str) -> Outcome:
    """The same module and data without any strategy of ours."""
    torch.set_num_threads(1)
    module = LanguageModel()
    with torch.device("meta"):
        module.configure_model()
    initialize(module, 0)
    return fit(folder, GLOBAL_BATCH, "auto", 1, module)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return one_process(str(tmp_path_factory.mktemp("one_process")))


def test_the_module_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(plain_module.__file__).read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert {name.partition(".")[0] for name in imported} == {
        "lightning",
        "torch",
        "torchmetrics",
        "transformers",
    }


def test_the_reference_learns_and_stops_early(expected: Outcome) -> None:
    assert expected.step_losses[-1] < expected.step_losses[0] - 0.3
    assert 2 <= expected.stopped_epoch < EPOCHS - 1
    assert expected.best_path_exists


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "strategy"),
    by_default(
        [
            ("tp2_pp2_dp2", {}),
            ("tp2_pp2_dp2", {"zero_stage": 1}),
            ("pp2_dp2", {"schedule": "ZBVZeroBubble"}),
            ("tp2_dp2", {"zero_stage": 1}),
            ("pp2_dp2", {"zero_stage": 3}),
        ],
        3,
    ),
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(map(str, value.values())) or "default"
    ),
)
def test_every_rank_sees_the_true_values(
    layout: str, strategy: dict, expected: Outcome, tmp_path: Path
) -> None:
    ranks = run_ranks(fit_on_rank, _world_size(layout), str(tmp_path), layout, **strategy)
    for outcome in ranks:
        assert (outcome.steps, outcome.stopped_epoch) == (expected.steps, expected.stopped_epoch)
        assert outcome.learning_rates == pytest.approx(expected.learning_rates, rel=1e-12)
        assert outcome.step_losses == pytest.approx(expected.step_losses, rel=TOLERANCE)
        assert outcome.metrics == pytest.approx(expected.metrics, rel=TOLERANCE)
        for seen, true in zip(outcome.history, expected.history, strict=True):
            assert seen == pytest.approx(true, rel=TOLERANCE)
        assert outcome.best_score == pytest.approx(expected.best_score, rel=TOLERANCE)
        assert outcome.best_path == ranks[0].best_path
        assert outcome.best_path_exists
    assert all(outcome.metrics == ranks[0].metrics for outcome in ranks)


@pytest.mark.slow
def test_the_registered_name_works(expected: Outcome, tmp_path: Path) -> None:
    """``Trainer(strategy="lightning_3d")`` is data parallelism over all ranks."""
    for outcome in run_ranks(fit_by_name, 2, str(tmp_path)):
        assert outcome.metrics == pytest.approx(expected.metrics, rel=TOLERANCE)


def fit_by_name(folder: str) -> Outcome:
    import lightning_3d.strategy  # noqa: F401  registers the name

    return fit(folder, GLOBAL_BATCH // 2, "lightning_3d", 2, LanguageModel())


def test_a_refusal_reaches_the_users_script(tmp_path: Path) -> None:
    """What ``fit`` raises is the refusal itself, not what goes wrong after it."""
    for kind, message in run_ranks(refused_fit, 2, str(tmp_path)):
        assert kind == "LayoutError"
        assert "10 stages" in message and "4 layers" in message


def refused_fit(folder: str) -> tuple[str, str]:
    """More stages than the model has layers, which is seen only when the model is there."""
    from lightning_3d.strategy import Lightning3DStrategy

    try:
        fit(
            folder,
            GLOBAL_BATCH,
            Lightning3DStrategy("pp2_vp5", schedule="Interleaved1F1B"),
            2,
            LanguageModel(),
        )
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.slow
def test_lightning_gets_its_module_back(expected: Outcome, tmp_path: Path) -> None:
    """Two fits with the same module, and no method of ours left on it."""
    for left_behind in run_ranks(attributes_after_fit, 2, str(tmp_path)):
        assert left_behind == set()


def attributes_after_fit(folder: str) -> set[str]:
    from lightning_3d.strategy import Lightning3DStrategy

    module = LanguageModel()
    before = own_attributes(module)
    fit(folder, GLOBAL_BATCH, Lightning3DStrategy("pp2", micro_batch_size=4), 2, module)
    return own_attributes(module) - before


def own_attributes(module: nn.Module) -> set[str]:
    """Methods of the class that an instance attribute hides."""
    return {
        name
        for name in vars(module)
        if callable(getattr(type(module), name, None)) and name != "training"
    }


def _world_size(layout: str) -> int:
    return Layout.parse(layout).world_size
