"""`ExponentialAverage` equals the closed formula on the weights of one process, at every ZeRO stage and in every layout."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from parity import micro_batch_rows, quiet_trainer
from plain_module import SEQUENCE, VOCABULARY, LanguageModel, TextData
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.layout import Layout
from lightning_3d.weights.initialize import initialize

GLOBAL_BATCH, STEPS, DECAY = 16, 4, 0.8
BOUNDS = {"64-true": 1e-12, "32-true": 1e-6}

Weights = dict[str, Tensor]


class Recorded(pl.Callback):
    """The weights after each step, and the losses of validations."""

    def __init__(self) -> None:
        self.weights: list[Weights] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.weights.append({name: parameter.detach().clone() for name, parameter in module.named_parameters()})

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


class Mixture(LanguageModel):
    """The same with a mixture of experts."""

    def configure_model(self) -> None:
        if self.model is None:
            sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
            config = MixtralConfig(vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False, **sizes, **experts)
            self.model = MixtralForCausalLM(config)  # type: ignore[assignment]


MODELS = {"llama": LanguageModel, "mixtral": Mixture}


def alone(kind: str, precision: Any, epochs: int, averages: bool) -> Recorded:
    """One process, without this package's strategy; `averages`: with Lightning's own average."""
    module = MODELS[kind](learning_rate=3e-4)
    with torch.device("meta"):
        module.configure_model()
    initialize(module.double() if precision == "64-true" else module, 0)
    recorded = Recorded()
    callbacks = [recorded, *([EMAWeightAveraging(decay=DECAY)] if averages else [])]
    quiet_trainer(max_epochs=epochs, precision=precision, callbacks=callbacks).fit(module, datamodule=TextData(GLOBAL_BATCH))
    return recorded


def fit(
    folder: str, kind: str, layout: str, precision: Any, epochs: int = 2, resume: str | None = None, **options: Any
) -> tuple[list[float], bool]:
    """The losses of the validations, and whether the module ends with the weights of its last step, bit for bit."""
    from lightning_3d import ExponentialAverage, Lightning3DStrategy

    parsed, recorded = Layout.parse(layout), Recorded()
    strategy = Lightning3DStrategy(layout, micro_batch_size=micro_batch_rows(parsed.dp, parsed.pp, GLOBAL_BATCH), **options)
    keeps = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=strategy, devices=parsed.world_size, max_epochs=epochs, precision=precision, enable_checkpointing=True,
        callbacks=[recorded, keeps, ExponentialAverage(DECAY)],
    )
    module = MODELS[kind](learning_rate=3e-4)
    trainer.fit(module, datamodule=TextData(GLOBAL_BATCH // parsed.dp), ckpt_path=resume)
    last = dict(module.named_parameters())
    return recorded.losses, all(torch.equal(last[name], value) for name, value in recorded.weights[-1].items() if not value.isnan().any())


REFERENCES: dict[tuple[Any, ...], Any] = {}


def reference(kind: str, precision: str) -> tuple[list[Weights], list[float]]:
    """On one process: the weights after each step, and the losses of validations of Lightning's average."""
    if (kind, precision) not in REFERENCES:
        [plain] = run_ranks(alone, 1, kind, precision, 2, False)
        [averaged] = run_ranks(alone, 1, kind, precision, 2, True)
        REFERENCES[kind, precision] = plain.weights, averaged.losses
    return REFERENCES[kind, precision]


def formula(weights: list[Weights]) -> Weights:
    """DECAY^(n-1) w_1 + sum over k > 1 of (1 - DECAY) DECAY^(n-k) w_k, in float64."""
    factors = [DECAY ** (len(weights) - 1), *((1 - DECAY) * DECAY ** (len(weights) - k) for k in range(2, len(weights) + 1))]
    return {name: sum(f * step[name].double() for f, step in zip(factors, weights, strict=True)) for name in weights[0]}


def distance(found: Weights, expected: Weights) -> float:
    return max((found[name].double() - value.double()).abs().max().item() for name, value in expected.items())


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


@pytest.mark.parametrize(("kind", "layout", "precision", "options"), by_default(CELLS, 2), ids=str)
def test_the_average_is_that_of_one_process(kind: str, layout: str, precision: str, options: dict[str, Any], tmp_path: Path) -> None:
    weights, losses = reference(kind, precision)
    found = run_ranks(fit, Layout.parse(layout).world_size, str(tmp_path), kind, layout, precision, **options)
    for steps in (STEPS, 2 * STEPS):
        path = tmp_path / f"step={steps}.ckpt"
        average, plain = load_full_state_dict(path, average=True), load_full_state_dict(path)
        assert distance(average, formula(weights[:steps])) < BOUNDS[precision]
        assert distance(plain, weights[steps - 1]) < BOUNDS[precision]
        assert distance(average, plain) > 1e-4  # the bounds above can tell the two apart
    for own, unchanged in found:
        assert own == pytest.approx(losses, rel=1e-10 if precision == "64-true" else 1e-5)
        assert unchanged
