"""`ExponentialAverage` equals the closed formula on the weights of one process, at every ZeRO stage
and in every layout."""

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from models import keep_double
from parity import micro_batch_rows, quiet_trainer
from plain_module import SEQUENCE, VOCABULARY, LanguageModel, TextData
from ranks import run_ranks
from reference import default_dtype
from sweeps import by_default
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.engine.step.outside_reads import is_blank
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.weights.initialize import initialize

GLOBAL_BATCH, STEPS, DECAY = 16, 4, 0.8
BOUNDS = {"64-true": 1e-12, "32-true": 1e-6}

Weights = dict[str, Tensor]


class Recorded(pl.Callback):
    """The weights and the saved buffers after each step, and the losses of validations."""

    def __init__(self) -> None:
        self.weights: list[Weights] = []
        self.buffers: list[Weights] = []
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any
    ) -> None:
        # not with zero_stage=3
        here = {
            name: parameter
            for name, parameter in module.named_parameters()
            if not is_blank(parameter)
        }
        self.weights.append({name: parameter.detach().clone() for name, parameter in here.items()})
        self.buffers.append(
            {
                name: buffer.clone()
                for name, buffer in module.named_buffers()
                if name in module.state_dict()
            }
        )

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


class Llama(LanguageModel):
    """In float64 its norms and its loss keep double precision. Those of Transformers round to
    float32, so equal sums differ by 1e-8."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    def configure_model(self) -> None:
        if self.model is None:
            self.build()
            if torch.get_default_dtype() == torch.float64:
                keep_double(self.model)

    def build(self) -> None:
        super().configure_model()


class Mixture(Llama):
    """The same with a mixture of experts."""

    def build(self) -> None:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        experts = {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
        }
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
            **sizes,
            **experts,
        )
        self.model = MixtralForCausalLM(config)  # type: ignore[assignment]


class Normed(Llama):
    """The same with logits that a batch norm scales: in a validation, by its running statistics."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__(learning_rate)
        self.scale = nn.BatchNorm1d(VOCABULARY, affine=False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.model is not None
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
        return nn.functional.cross_entropy(
            self.scale(logits.flatten(0, 1)), batch["labels"][:, 1:].flatten()
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


MODELS: dict[str, type[Llama]] = {"llama": Llama, "mixtral": Mixture, "normed": Normed}


def alone(
    kind: str, precision: Any, epochs: int, averages: bool
) -> tuple[list[Weights], list[float]]:
    """One process, without this package's strategy; `averages`: with Lightning's own average."""
    module = MODELS[kind](learning_rate=3e-4)
    # as Lightning builds it in this precision
    with default_dtype(torch.float64 if precision == "64-true" else torch.float32):
        with torch.device("meta"):
            module.configure_model()
        initialize(module, 0)
    recorded = Recorded()
    callbacks = [recorded, *([EMAWeightAveraging(decay=DECAY)] if averages else [])]
    quiet_trainer(max_epochs=epochs, precision=precision, callbacks=callbacks).fit(
        module, datamodule=TextData(GLOBAL_BATCH)
    )
    return recorded.weights, recorded.losses


def fit(
    folder: str,
    kind: str,
    layout: str,
    precision: Any,
    epochs: int = 2,
    resume: str | None = None,
    **options: Any,
) -> tuple[list[float], bool]:
    """The losses of the validations, and whether the module ends with the weights of its last step,
    bit for bit."""
    from lightning_3d import ExponentialAverage, Lightning3DStrategy

    parsed, recorded = Layout.parse(layout), Recorded()
    strategy = Lightning3DStrategy(
        layout, micro_batch_size=micro_batch_rows(parsed.dp, parsed.pp, GLOBAL_BATCH), **options
    )
    keeps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=parsed.world_size,
        max_epochs=epochs,
        precision=precision,
        enable_checkpointing=True,
        callbacks=[recorded, keeps, ExponentialAverage(DECAY)],
    )
    module = MODELS[kind](learning_rate=3e-4)
    trainer.fit(module, datamodule=TextData(GLOBAL_BATCH // parsed.dp), ckpt_path=resume)
    last = dict(module.named_parameters())
    return recorded.losses, all(
        torch.equal(last[name], value) for name, value in recorded.weights[-1].items()
    )


REFERENCES: dict[tuple[Any, ...], Any] = {}


def reference(kind: str, precision: str) -> tuple[list[Weights], list[float]]:
    """On one process: the weights after each step, and the losses of validations of Lightning's
    average."""
    if (kind, precision) not in REFERENCES:
        [(weights, _)], [(_, losses)] = (
            run_ranks(alone, 1, kind, precision, 2, averages) for averages in (False, True)
        )
        REFERENCES[kind, precision] = weights, losses
    return REFERENCES[kind, precision]


def formula(weights: list[Weights]) -> Weights:
    """DECAY^(n-1) w_1 + sum over k > 1 of (1 - DECAY) DECAY^(n-k) w_k, in float64."""
    factors = [
        DECAY ** (len(weights) - 1),
        *((1 - DECAY) * DECAY ** (len(weights) - k) for k in range(2, len(weights) + 1)),
    ]
    return {
        name: sum(f * step[name].double() for f, step in zip(factors, weights, strict=True))
        for name in weights[0]
    }


def distance(found: Weights, expected: Weights) -> float:
    return max(
        (found[name].double() - value.double()).abs().max().item()
        for name, value in expected.items()
    )


CELLS = [
    ("llama", "tp2_pp2", "64-true", {}),
    ("llama", "dp2", "32-true", {"zero_stage": 3}),
    ("llama", "dp2", "32-true", {"zero_stage": 2}),
    ("llama", "pp2_dp2", "32-true", {"zero_stage": 3, "zero_gather": "micro_batch"}),
    ("llama", "tp2_dp2", "32-true", {"zero_stage": 3}),
    ("llama", "tp2_dp2", "32-true", {"zero_stage": 1, "zero_overlap_gather": True}),
    ("llama", "dp4", "32-true", {"zero_stage": 3, "zero_shard_size": 2}),
    ("llama", "dp4", "32-true", {"zero_stage": 1, "zero_shard_size": 2}),
    ("llama", "cp2_dp2", "32-true", {"zero_stage": 3}),
    ("llama", "cp2_dp2", "64-true", {}),
    ("llama", "dp2", "32-true", {"zero_stage": 2, "zero_offload": "optimizer"}),
    ("llama", "dp2", "32-true", {"zero_stage": 3, "zero_offload": "parameters"}),
    ("mixtral", "dp2_ep2", "64-true", {}),
    ("mixtral", "dp2_ep2", "32-true", {"zero_stage": 3}),
    ("mixtral", "dp4_ep2", "32-true", {"zero_stage": 2}),
    ("mixtral", "pp2_dp2_ep2", "32-true", {"zero_stage": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "precision", "options"), by_default(CELLS, 2), ids=str)
def test_the_average_is_that_of_one_process(
    kind: str, layout: str, precision: str, options: dict[str, Any], tmp_path: Path
) -> None:
    weights, losses = reference(kind, precision)
    found = run_ranks(
        fit, Layout.parse(layout).world_size, str(tmp_path), kind, layout, precision, **options
    )
    for steps in (STEPS, 2 * STEPS):
        path = tmp_path / f"step={steps}.ckpt"
        average, plain = load_full_state_dict(path, average=True), load_full_state_dict(path)
        assert distance(average, formula(weights[:steps])) < BOUNDS[precision]
        assert distance(plain, weights[steps - 1]) < BOUNDS[precision]
        assert distance(average, plain) > 1e-4  # the bounds above can tell the two apart
    for own, unchanged in found:
        assert own == pytest.approx(losses, rel=1e-5)
        assert unchanged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    by_default(
        [
            (("dp2", {"zero_stage": 3}), ("tp2", {"zero_stage": 2})),
            (("tp2_dp2", {"zero_stage": 3}), ("pp2_dp2", {"zero_stage": 1})),
            (("pp2", {}), ("dp4", {"zero_stage": 3, "zero_gather": "micro_batch"})),
        ],
        0,
    ),
    ids=str,
)
def test_a_fit_resumes_the_average_in_another_layout(
    before: tuple[str, dict[str, Any]], after: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    precision = "32-true"
    weights, losses = reference("llama", precision)
    for epochs, (layout, options), resume in (
        (1, before, None),
        (2, after, str(tmp_path / f"step={STEPS}.ckpt")),
    ):
        found = run_ranks(
            fit,
            Layout.parse(layout).world_size,
            str(tmp_path),
            "llama",
            layout,
            precision,
            epochs=epochs,
            resume=resume,
            **options,
        )
    path = tmp_path / f"step={2 * STEPS}.ckpt"
    assert distance(load_full_state_dict(path, average=True), formula(weights)) < BOUNDS[precision]
    assert [own for own, _ in found] == [[pytest.approx(losses[1], rel=1e-5)]] * len(found)


def normed_alone(folder: str) -> tuple[Weights, list[float]]:
    """One process with Lightning's average: the module with it, and the losses of validations."""
    module = Normed(learning_rate=3e-4)
    with torch.device("meta"):
        module.configure_model()
    initialize(module, 0)
    recorded = Recorded()
    quiet_trainer(max_epochs=2, callbacks=[recorded, EMAWeightAveraging(decay=DECAY)]).fit(
        module, datamodule=TextData(GLOBAL_BATCH)
    )
    return {name: value.clone() for name, value in module.state_dict().items()}, recorded.losses


def normed_fit(
    folder: str, layout: str, resume: str | None = None, **options: Any
) -> tuple[list[Weights], list[float], bool]:
    """Each step's buffers, the losses of validations, and whether the buffers at the end are those
    of the last step, bit for bit."""
    from lightning_3d import ExponentialAverage, Lightning3DStrategy

    parsed, recorded = Layout.parse(layout), Recorded()
    strategy = Lightning3DStrategy(layout, micro_batch_size=GLOBAL_BATCH // parsed.dp, **options)
    keeps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=parsed.world_size,
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[recorded, keeps, ExponentialAverage(DECAY)],
    )
    module = Normed(learning_rate=3e-4)
    trainer.fit(module, datamodule=TextData(GLOBAL_BATCH // parsed.dp), ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    last = dict(module.named_buffers())
    return (
        recorded.buffers,
        recorded.losses,
        all(torch.equal(last[name], value) for name, value in recorded.buffers[-1].items()),
    )


STATISTICS, COUNT = ("scale.running_mean", "scale.running_var"), "scale.num_batches_tracked"


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", by_default([3, 0], 0))
def test_running_statistics_are_averaged_as_lightning_does(zero_stage: int, tmp_path: Path) -> None:
    [(expected, losses)] = run_ranks(normed_alone, 1, str(tmp_path))
    [(_, own, unchanged)] = run_ranks(normed_fit, 1, str(tmp_path), "dp1", zero_stage=zero_stage)
    assert own == pytest.approx(losses, rel=1e-5) and unchanged
    for name in (f"step={2 * STEPS}", "after"):
        average, plain = (
            load_full_state_dict(tmp_path / f"{name}.ckpt", average=chosen)
            for chosen in (True, False)
        )
        assert (
            distance(average, {name: value for name, value in expected.items() if name != COUNT})
            < BOUNDS["32-true"]
        )
        assert average[COUNT] == plain[COUNT] == 2 * STEPS
        # the bound can tell the two apart
        assert min(distance(average, {name: plain[name]}) for name in STATISTICS) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize(("layout", "zero_stage"), [("dp2", 3), ("dp2", 1), ("cp2", 0)])
def test_running_statistics_are_those_of_the_first_rank(
    layout: str, zero_stage: int, tmp_path: Path
) -> None:
    buffers, _, unchanged = run_ranks(normed_fit, 2, str(tmp_path), layout, zero_stage=zero_stage)[
        0
    ]
    average = load_full_state_dict(tmp_path / f"step={2 * STEPS}.ckpt", average=True)
    assert (
        distance(average, {name: formula(buffers)[name] for name in STATISTICS}) < BOUNDS["32-true"]
        and unchanged
    )


@pytest.mark.full
def test_a_fit_resumes_the_average_of_running_statistics(tmp_path: Path) -> None:
    run_ranks(normed_fit, 1, str(tmp_path), "dp1")
    whole = load_full_state_dict(tmp_path / f"step={2 * STEPS}.ckpt", average=True)
    again = tmp_path / "again"
    run_ranks(
        normed_fit, 1, str(again), "dp1", resume=str(tmp_path / f"step={STEPS}.ckpt"), zero_stage=3
    )
    assert (
        distance(load_full_state_dict(again / f"step={2 * STEPS}.ckpt", average=True), whole)
        < BOUNDS["32-true"]
    )


def master_average(folder: str, zero_stage: int) -> float:
    """The largest difference of the average from the formula on the master weights of bf16
    parameters."""
    from lightning_3d import ExponentialAverage, Lightning3DStrategy

    class Masters(pl.Callback):
        """The elements that this rank steps, after each step."""

        def __init__(self) -> None:
            self.steps: list[Weights] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            shards = trainer.strategy.built.backend.optimizer_shards()  # type: ignore[attr-defined]
            self.steps.append({shard.name: shard.values["master"].clone() for shard in shards})

        def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
            shards = trainer.strategy.built.backend.average_shards()  # type: ignore[attr-defined]
            self.average = {shard.name: shard.values["average"].clone() for shard in shards}

    masters = Masters()
    strategy = Lightning3DStrategy("dp2", micro_batch_size=4, zero_stage=zero_stage)
    callbacks = [masters, ExponentialAverage(DECAY)]
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=2, precision="bf16-true", callbacks=callbacks
    )
    trainer.fit(Llama(), datamodule=TextData(GLOBAL_BATCH // 2))
    assert all(value.dtype == torch.float32 for value in masters.average.values())
    return distance(masters.average, formula(masters.steps))


@pytest.mark.parametrize("zero_stage", by_default([0, 2, 3]))
def test_master_weights_of_bf16_are_averaged_in_float32(zero_stage: int, tmp_path: Path) -> None:
    """Also across a validation in between, after which they are what they were."""
    assert max(run_ranks(master_average, 2, str(tmp_path), zero_stage)) < 1e-6


class Interrupts(pl.Callback):
    """Ctrl-C in the middle of a validation, while the average is in the place of the weights."""

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        raise KeyboardInterrupt


def interrupted(folder: str, zero_stage: int) -> None:
    from lightning_3d import ExponentialAverage, Lightning3DStrategy, PeriodicCheckpoint

    strategy = Lightning3DStrategy("dp2", micro_batch_size=4, zero_stage=zero_stage)
    keeps = PeriodicCheckpoint(
        folder, filename="last", every_n_train_steps=100, save_on_exception=True
    )
    callbacks = [ExponentialAverage(DECAY), Interrupts(), keeps]
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=1, callbacks=callbacks, enable_checkpointing=True
    )
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        trainer.fit(Llama(learning_rate=3e-4), datamodule=TextData(GLOBAL_BATCH // 2))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", by_default([0, 2, 3], 1))
def test_a_checkpoint_saved_during_a_validation_has_the_weights(
    zero_stage: int, tmp_path: Path
) -> None:
    weights, _ = reference("llama", "32-true")
    run_ranks(interrupted, 2, str(tmp_path), zero_stage)
    (path,) = tmp_path.glob("*.ckpt")
    assert distance(load_full_state_dict(path), weights[STEPS - 1]) < BOUNDS["32-true"]
    assert (
        distance(load_full_state_dict(path, average=True), formula(weights[:STEPS]))
        < BOUNDS["32-true"]
    )


class Fails(pl.Callback):
    """An error of the user's code in a validation, which the script catches."""

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        raise ArithmeticError


def after_an_error(zero_stage: int) -> bool:
    """Whether the module has the weights of its last step, bit for bit, after a validation that
    failed."""
    from lightning_3d import ExponentialAverage, Lightning3DStrategy

    recorded = Recorded()
    strategy = Lightning3DStrategy("tp1", zero_stage=zero_stage)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=1,
        max_epochs=1,
        callbacks=[ExponentialAverage(DECAY), recorded, Fails()],
    )
    module = Llama(learning_rate=3e-4)
    with contextlib.suppress(ArithmeticError):
        trainer.fit(module, datamodule=TextData(GLOBAL_BATCH))
    assert len(recorded.weights) == STEPS
    return all(
        torch.equal(value, recorded.weights[-1][name]) for name, value in module.named_parameters()
    )


@pytest.mark.parametrize("zero_stage", by_default([0, 2], 0))
def test_a_validation_that_fails_leaves_the_weights(zero_stage: int) -> None:
    assert run_ranks(after_an_error, 1, zero_stage) == [True]


def evaluated(path: str, layout: str, zero_stage: int, averages: bool) -> float:
    """The loss that `trainer.validate` computes of a checkpoint."""
    from lightning_3d import ExponentialAverage, Lightning3DStrategy

    parsed = Layout.parse(layout)
    strategy = Lightning3DStrategy(layout, micro_batch_size=4, zero_stage=zero_stage)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=parsed.world_size,
        callbacks=[ExponentialAverage()] if averages else [],
    )
    return trainer.validate(
        Llama(), TextData(GLOBAL_BATCH // parsed.dp), ckpt_path=path, verbose=False
    )[0]["val_loss"]


@pytest.mark.slow
def test_an_evaluation_reads_the_average_where_asked(tmp_path: Path) -> None:
    _, losses = reference("llama", "32-true")
    run_ranks(fit, 2, str(tmp_path), "llama", "dp2", "32-true", zero_stage=3)
    path = str(tmp_path / f"step={2 * STEPS}.ckpt")
    assert run_ranks(evaluated, 2, path, "tp2", 0, True) == [pytest.approx(losses[1], rel=1e-5)] * 2
    assert run_ranks(evaluated, 2, path, "dp2", 3, False)[0] != pytest.approx(losses[1], rel=1e-4)


def refused(layout: str, of_lightning: bool) -> None:
    """Fit with two averages."""
    from lightning_3d import ExponentialAverage, Lightning3DStrategy

    callbacks = [
        ExponentialAverage(0.9),
        EMAWeightAveraging() if of_lightning else ExponentialAverage(0.8),
    ]
    trainer = quiet_trainer(
        strategy=Lightning3DStrategy(layout), devices=1, max_epochs=1, callbacks=callbacks
    )
    trainer.fit(Llama(), datamodule=TextData(GLOBAL_BATCH))


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    from lightning_3d import ExponentialAverage

    for decay in (1, -0.1, 2, float("nan"), True, "0.9"):
        with pytest.raises(ConfigError, match=r"decay must be a number of at least 0 and below 1"):
            ExponentialAverage(decay)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="several ExponentialAverage"):
        run_ranks(refused, 1, "tp1", False)
    with pytest.raises(ConfigError, match="Use one of them"):
        run_ranks(refused, 1, "tp1", True)
    with pytest.raises(ConfigError, match="needs Lightning3DStrategy.*Use EMAWeightAveraging"):
        quiet_trainer(max_epochs=1, callbacks=[ExponentialAverage()]).fit(
            LanguageModel(), datamodule=TextData(GLOBAL_BATCH)
        )
