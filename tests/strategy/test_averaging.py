"""Averages of weights: callbacks of Lightning and of the user's own give what they give on one
process."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import parity
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from parity import Part, micro_batch_rows, quiet_trainer
from plain_module import LanguageModel, TextData
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.layout import Layout
from lightning_3d.weights.initialize import initialize

GLOBAL_BATCH, STEPS_PER_EPOCH = 16, 4
RELATIVE, ABSOLUTE = 2e-5, 5e-5  # of losses and of weights, as in test_unmodified.py and parity.py


class EveryOtherEpoch(WeightAveraging):
    """The equally weighted average of the weights after some epochs, kept elsewhere."""

    def __init__(self) -> None:
        super().__init__(device="cpu", use_buffers=False)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx % 2 == 0


class OwnAverage(pl.Callback):
    """What people write themselves: an exponential average of the parameters, which is in the model
    while it is validated."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any
    ) -> None:
        parameters = [parameter.detach() for parameter in module.parameters()]
        self.average = self.average or [torch.zeros_like(parameter) for parameter in parameters]
        for average, parameter in zip(self.average, parameters, strict=True):
            average.mul_(0.8).add_(parameter, alpha=0.2)

    def _swap(self, module: pl.LightningModule) -> None:
        for average, parameter in zip(self.average, module.parameters(), strict=False):
            average_, parameter_ = average.clone(), parameter.data.clone()
            average.copy_(parameter_)
            parameter.data.copy_(average_)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._swap(module)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._swap(module)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._swap(module)


class GoesBack(pl.Callback):
    """Once in an epoch the weights are halved."""

    @torch.no_grad()
    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int
    ) -> None:
        for parameter in module.parameters() if index == 2 else ():
            parameter.mul_(0.5)


class BehindTheCounter(pl.Callback):
    """The same through `.data`, which no version counter shows.

    Args:
        says_so: call `refresh_master_weights` afterwards.
    """

    def __init__(self, says_so: bool) -> None:
        self.says_so = says_so

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int
    ) -> None:
        for parameter in module.parameters() if index == 2 else ():
            parameter.data.mul_(0.5)
        if index == 2 and self.says_so:
            trainer.strategy.refresh_master_weights()


class History(pl.Callback):
    """The validation loss of every epoch, and the learning rate of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


CALLBACKS: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "late ema": lambda: EMAWeightAveraging(
        decay=0.8, update_starting_at_step=5, update_every_n_steps=2
    ),
    "epochs": EveryOtherEpoch,
    "swa": lambda: StochasticWeightAveraging(5e-4, swa_epoch_start=2, annealing_epochs=2),
    "own": OwnAverage,
    "goes back": GoesBack,
}


class Task(LanguageModel):
    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if normed else None


@dataclass(frozen=True)
class Outcome:
    part: Part
    losses: list[float]
    rates: list[float]
    best: str


def task() -> Task:
    """On one process with the weights that a layout makes."""
    module = Task()
    with torch.device("meta"):
        module.configure_model()
    initialize(module, 0)
    return module


def fit(
    folder: str,
    layout: str | None,
    kind: str | None,
    epochs: int = 4,
    resume: str | None = None,
    normed: bool = False,
    precision: Any = "32-true",
    **options: Any,
) -> Outcome:
    """A user's script, with `layout` None on one process without our strategy."""
    from lightning_3d.strategy import Lightning3DStrategy

    history = History()
    keeps = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_top_k=-1)
    callbacks = [history, keeps, *([CALLBACKS[kind]()] if kind else [])]
    parsed = Layout.parse(layout) if layout else Layout()
    micro_batch = micro_batch_rows(parsed.dp, parsed.pp, GLOBAL_BATCH)
    strategy: Any = (
        Lightning3DStrategy(layout, micro_batch_size=micro_batch, **options) if layout else "auto"
    )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=parsed.world_size,
        max_epochs=epochs,
        precision=precision,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    module = Task(normed) if layout else task()
    trainer.fit(module, datamodule=TextData(GLOBAL_BATCH // parsed.dp), ckpt_path=resume)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    part = Part([], [], weights, dict(strategy.specs) if layout else {})
    return Outcome(part, history.losses, history.rates, keeps.best_model_path)


EXPECTED: dict[str, tuple[Outcome, Path]] = {}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By callback: the run on one process, and where its checkpoints are."""

    def run(kind: str) -> tuple[Outcome, Path]:
        if kind not in EXPECTED:
            folder = tmp_path_factory.mktemp(kind.replace(" ", "_"))
            [outcome] = run_ranks(fit, 1, str(folder), None, kind)
            EXPECTED[kind] = outcome, folder
        return EXPECTED[kind]

    yield run
    EXPECTED.clear()


def world_size(layout: str) -> int:
    return Layout.parse(layout).world_size


def assert_same(found: list[Outcome], expected: Outcome) -> None:
    weights, drift = parity.assemble([outcome.part for outcome in found])
    assert drift == 0.0
    assert weights.keys() == expected.part.weights.keys()
    worst = max(
        (weights[name] - value).abs().max().item() for name, value in expected.part.weights.items()
    )
    assert worst < ABSOLUTE, worst
    for outcome in found:
        assert outcome.losses == pytest.approx(expected.losses, rel=RELATIVE)
        assert outcome.rates == pytest.approx(expected.rates, rel=1e-12)


full = pytest.mark.full
RUNS = [
    ("ema", "tp2_pp2", {"zero_stage": 1}),
    ("ema", "pp2_dp2", {"zero_stage": 2, "schedule": "ZBVZeroBubble"}),
    ("ema", "dp2", {"zero_stage": 2}),
    ("late ema", "dp2", {"zero_stage": 1}),
    ("epochs", "pp2_dp2", {}),
    ("swa", "pp2_dp2", {"zero_stage": 1}),
    ("own", "tp2_pp2", {"zero_stage": 2}),
    ("goes back", "dp2", {"zero_stage": 2, "zero_reduce": "micro_batch"}),
    *(
        pytest.param(kind, layout, {"zero_stage": stage}, marks=full)
        for kind in CALLBACKS
        for layout in ("tp2_pp2", "pp2_dp2", "dp2")
        for stage in (0, 1, 2)
        if (kind, layout, stage) != ("ema", "dp2", 2)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "options"), by_default(RUNS, 2), ids=str)
def test_an_average_equals_that_of_one_process(
    kind: str, layout: str, options: dict[str, Any], one_process: Any, tmp_path: Path
) -> None:
    expected, folder = one_process(kind)
    found = run_ranks(fit, world_size(layout), str(tmp_path), layout, kind, **options)
    assert_same(found, expected)
    for outcome in found:
        assert Path(outcome.best).name == Path(expected.best).name
    for checkpoint in folder.iterdir():
        saved = torch.load(checkpoint, weights_only=False)["state_dict"]
        whole = load_full_state_dict(tmp_path / checkpoint.name)
        for name, value in saved.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=ABSOLUTE)


@full
def test_the_average_is_another_model(one_process: Any, tmp_path: Path) -> None:
    """The tests above can tell the two apart."""
    [plain] = run_ranks(fit, 1, str(tmp_path), None, None)
    for kind in CALLBACKS:
        averaged = one_process(kind)[0].part.weights
        assert (
            max(
                (averaged[name] - value).abs().max().item()
                for name, value in plain.part.weights.items()
            )
            > 10 * ABSOLUTE
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options", "again"),
    [
        pytest.param("tp2_pp2", {"zero_stage": 1}, ("tp2_pp2", {"zero_stage": 1}), marks=full),
        pytest.param("pp2_dp2", {}, ("tp2", {"zero_stage": 2}), marks=full),
        ("pp2", {}, ("tp2", {"zero_stage": 2})),
    ],
    ids=["same layout", "another layout", "another layout of 2 ranks"],
)
def test_a_resumed_average_is_that_of_one_run(
    layout: str,
    options: dict[str, Any],
    again: tuple[str, dict[str, Any]],
    one_process: Any,
    tmp_path: Path,
) -> None:
    expected, _ = one_process("ema")
    run_ranks(fit, world_size(layout), str(tmp_path), layout, "ema", epochs=2, **options)
    layout, options = again
    found = run_ranks(
        fit,
        world_size(layout),
        str(tmp_path),
        layout,
        "ema",
        resume=str(tmp_path / "epoch=1.ckpt"),
        **options,
    )
    rest = replace(
        expected, losses=expected.losses[2:], rates=expected.rates[2 * STEPS_PER_EPOCH :]
    )
    assert_same(found, rest)


@pytest.mark.slow
def test_averaging_may_begin_at_a_resume(tmp_path: Path) -> None:
    """From a checkpoint without an average, which is where the average begins."""
    [_] = run_ranks(fit, 1, str(tmp_path / "one"), None, None, epochs=1)
    [expected] = run_ranks(
        fit,
        1,
        str(tmp_path / "one"),
        None,
        "late ema",
        epochs=2,
        resume=str(tmp_path / "one" / "epoch=0.ckpt"),
    )
    run_ranks(fit, 2, str(tmp_path / "ours"), "pp2", None, epochs=1)
    found = run_ranks(
        fit,
        2,
        str(tmp_path / "ours"),
        "pp2",
        "late ema",
        epochs=2,
        resume=str(tmp_path / "ours" / "epoch=0.ckpt"),
    )
    assert_same(found, expected)


def on_and_on(folder: str, layout: str | None, **options: Any) -> tuple[list[float], Part]:
    """One Trainer: a fit with an average, a validation with its best checkpoint, and a fit that
    goes on."""
    from lightning_3d.strategy import Lightning3DStrategy

    strategy: Any = Lightning3DStrategy(layout, micro_batch_size=2, **options) if layout else "auto"
    history = History()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=world_size(layout) if layout else 1,
        max_epochs=2,
        num_sanity_val_steps=1,
        callbacks=[
            history,
            ModelCheckpoint(folder, monitor="val_loss"),
            EMAWeightAveraging(decay=0.8),
        ],
        enable_checkpointing=True,
    )
    module = Task() if layout else task()
    rows = TextData(GLOBAL_BATCH // (trainer.strategy.layout.dp if layout else 1))  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=rows)
    best = trainer.validate(module, datamodule=rows, ckpt_path="best", verbose=False)[0]["val_loss"]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=rows)
    last = trainer.validate(module, datamodule=rows, verbose=False)[0]["val_loss"]
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return [best, last, *history.losses], Part(
        [], [], weights, dict(strategy.specs) if layout else {}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    by_default([("pp2", {"zero_stage": 2}), ("tp2_dp2", {"zero_stage": 1})], 0),
    ids=str,
)
def test_one_trainer_averages_validates_and_goes_on(
    layout: str, options: dict[str, Any], tmp_path: Path
) -> None:
    [(losses, part)] = run_ranks(on_and_on, 1, str(tmp_path / "one"), None)
    found = run_ranks(on_and_on, world_size(layout), str(tmp_path / "ours"), layout, **options)
    for own, _ in found:
        assert own == pytest.approx(losses, rel=RELATIVE)
    assert_same([Outcome(part, [], [], "") for _, part in found], Outcome(part, [], [], ""))


@pytest.mark.slow
def test_master_weights_of_bf16_survive_a_resume(tmp_path: Path) -> None:
    """Not rounded to the parameters' type where the callback puts these back."""
    straight = run_ranks(
        fit,
        2,
        str(tmp_path / "straight"),
        "dp2",
        "ema",
        epochs=2,
        precision="bf16-true",
        zero_stage=1,
    )
    run_ranks(fit, 2, str(tmp_path), "dp2", "ema", epochs=1, precision="bf16-true", zero_stage=1)
    resume = str(tmp_path / "epoch=0.ckpt")
    found = run_ranks(
        fit,
        2,
        str(tmp_path),
        "dp2",
        "ema",
        epochs=2,
        precision="bf16-true",
        zero_stage=1,
        resume=resume,
    )
    for one, other in zip(straight, found, strict=True):
        for name, value in one.part.weights.items():
            assert torch.equal(value, other.part.weights[name]), name


class Begin(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights = [parameter.detach().clone() for parameter in module.parameters()]


def halved(zero_stage: int, precision: Any, callback: pl.Callback) -> bool:
    """Whether weights that are written once in each of two epochs, and not trained, end as a
    quarter."""
    from lightning_3d.strategy import Lightning3DStrategy

    watched = {"check_replicas_every_n_steps": 1}
    strategy = Lightning3DStrategy(
        "dp2", micro_batch_size=4, zero_stage=zero_stage, reliability=watched
    )
    begin = Begin()
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=2, precision=precision, callbacks=[begin, callback]
    )
    module = LanguageModel(learning_rate=0.0)
    trainer.fit(module, datamodule=TextData(GLOBAL_BATCH // 2))
    pairs = zip(module.parameters(), begin.weights, strict=True)
    return all(
        torch.equal(parameter, weights / 4) and weights.any() for parameter, weights in pairs
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero_stage", "precision"), by_default([(0, "bf16-true"), (1, "bf16-true"), (2, "32-true")], 1)
)
def test_what_is_written_stays(zero_stage: int, precision: str) -> None:
    assert run_ranks(halved, 2, zero_stage, precision, GoesBack()) == [True, True]
    assert run_ranks(halved, 2, zero_stage, precision, BehindTheCounter(says_so=True)) == [
        True,
        True,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero_stage", "precision"), by_default([(0, "bf16-true"), (1, "32-true")], 1)
)
def test_what_is_written_through_data_is_refused_where_replicas_are_compared(
    zero_stage: int, precision: str
) -> None:
    with pytest.raises(ConfigError, match=r"written through \.data.*refresh_master_weights"):
        run_ranks(halved, 2, zero_stage, precision, BehindTheCounter(says_so=False))


@full
def test_swa_goes_on_from_before_its_average_only(one_process: Any, tmp_path: Path) -> None:
    expected, _ = one_process("swa")
    run_ranks(fit, 2, str(tmp_path), "dp2", "swa", zero_stage=1)
    found = run_ranks(
        fit,
        2,
        str(tmp_path / "again"),
        "dp2",
        "swa",
        zero_stage=1,
        resume=str(tmp_path / "epoch=0.ckpt"),
    )
    assert_same(
        found, replace(expected, losses=expected.losses[1:], rates=expected.rates[STEPS_PER_EPOCH:])
    )
    with pytest.raises(ConfigError, match="began to average.*before swa_epoch_start"):
        run_ranks(
            fit,
            2,
            str(tmp_path / "again"),
            "dp2",
            "swa",
            zero_stage=1,
            resume=str(tmp_path / "epoch=2.ckpt"),
        )


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (
            "ema",
            {"zero_stage": 3},
            (
                "EMAWeightAveraging averages parameters between batches.*Use"
                " lightning_3d.ExponentialAverage"
            ),
        ),
        (
            "swa",
            {"zero_stage": 3},
            (
                "StochasticWeightAveraging averages parameters between batches.*Use"
                " lightning_3d.ExponentialAverage"
            ),
        ),
        (
            "swa",
            {"normed": True},
            "statistics of batch norms.*Use WeightAveraging or EMAWeightAveraging",
        ),
    ],
)
def test_averages_that_would_be_wrong_are_refused(
    kind: str, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        run_ranks(fit, 2, str(tmp_path), "pp2", kind, timeout=60, **options)


class HalvesLast(pl.Callback):
    """Writes into the parameters when the last step is done, as averages that are swapped in at the
    end do."""

    @torch.no_grad()
    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(0.5)


def saved_and_read(path: str, zero_stage: int) -> bool:
    """Whether a module in float32 reads what a bf16 one held when it was saved."""
    from lightning_3d.strategy import Lightning3DStrategy

    def trainer(precision: Any, *callbacks: pl.Callback) -> pl.Trainer:
        strategy = Lightning3DStrategy("dp2", micro_batch_size=4, zero_stage=zero_stage)
        return quiet_trainer(
            strategy=strategy, devices=2, max_epochs=1, precision=precision, callbacks=[*callbacks]
        )

    written = LanguageModel(learning_rate=1e-3)
    first = trainer("bf16-true", HalvesLast())
    first.fit(written, datamodule=TextData(GLOBAL_BATCH // 2))
    first.save_checkpoint(path)
    read = LanguageModel(learning_rate=1e-3)
    trainer("32-true").validate(
        read, datamodule=TextData(GLOBAL_BATCH // 2), ckpt_path=path, verbose=False
    )
    pairs = zip(written.parameters(), read.parameters(), strict=True)
    return all(torch.equal(was, now.to(torch.bfloat16)) for was, now in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", by_default([0, 1], 1))
def test_what_is_written_last_is_saved(zero_stage: int, tmp_path: Path) -> None:
    """Not the master weights of before, which a wider type would read."""
    assert run_ranks(saved_and_read, 2, str(tmp_path / "last.ckpt"), zero_stage) == [True, True]


def refused() -> bool:
    """A fit that is refused when the model is to be cut. Whether the callback is what it was."""
    from lightning_3d.strategy import Lightning3DStrategy

    callback = EMAWeightAveraging(decay=0.8)
    strategy = Lightning3DStrategy("tp2", plan={"tp": {"nobody.*": "colwise"}})
    with pytest.raises(PlanError):
        trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[callback])
        trainer.fit(LanguageModel(), datamodule=TextData(GLOBAL_BATCH))
    return "setup" not in vars(callback)


def test_a_refused_fit_leaves_callbacks_as_they_were() -> None:
    assert run_ranks(refused, 2) == [True, True]
