"""`lightning-3d verify`: jobs made small, and whether a layout that computes something else is found."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import models
import pytest
import torch
import yaml
from command_line import REPOSITORY, run_commands
from starts import in_fresh_process
from sweeps import by_default

import lightning_3d
from lightning_3d.layout import Layout
from lightning_3d.layout_rules import check_model
from lightning_3d.model_spec import ModelSpec
from lightning_3d.verification.compare import Difference
from lightning_3d.verification.shrink import MOST_RANKS, SEQUENCE, fold, micro_batches, shrink_model

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("name", "small", "left_out"),
    [
        ("tp8_pp4_dp8", "tp2_pp2_dp2", []),
        ("tp8_pp4_dp8_cp2", "tp2_pp2_cp2", ["dp"]),
        ("dp64", "dp2", []),
        ("tp4_pp8_vp5_dp2", "tp2_pp2_dp2_vp2", []),
        ("tp2_ep8_dp16", "tp2_dp2_ep2", []),
        ("pp4", "pp2", []),
    ],
)
def test_every_kind_of_axis_stays(name: str, small: str, left_out: list[str]) -> None:
    folded, missing = fold(Layout.parse(name))
    assert folded == Layout.parse(small)
    assert missing == left_out
    assert folded.world_size <= MOST_RANKS


CONFIGS = sorted(path.stem for path in (REPOSITORY / "conf" / "model").glob("*.yaml") if path.stem != "pretrained")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", ["tp8_pp4_dp8", "tp2_pp2_cp2"])
def test_published_models_become_small_ones_that_fit(name: str, layout: str) -> None:
    from lightning_3d.training.module import transformers_config

    config = yaml.safe_load((REPOSITORY / "conf" / "model" / f"{name}.yaml").read_text())["config"]
    big = Layout.parse(layout)
    folded, _ = fold(big)
    small = shrink_model(config, big, folded)
    spec, before = ModelSpec.from_config(small), ModelSpec.from_config(config)
    check_model(
        folded,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        layers=spec.layers,
        vocab=spec.vocab,
        intermediate=spec.intermediate,
        seq_len=SEQUENCE,
        max_positions=spec.max_positions,
        sequence_parallel=True,
        experts=spec.experts or None,
    )
    transformers_config(small)
    assert (spec.model_type, spec.tied, bool(spec.experts)) == (before.model_type, before.tied, bool(before.experts))
    assert {window is None for window in spec.windows} == {window is None for window in before.windows}
    assert (spec.kv_heads < folded.tp) == (before.kv_heads < big.tp) or before.kv_heads == before.heads
    assert spec.hidden <= 512 and spec.layers <= 9


def test_schedules_get_enough_micro_batches() -> None:
    assert micro_batches("1F1B", Layout.parse("pp2_dp2")) == 4
    assert micro_batches("Interleaved1F1B", Layout.parse("pp2_vp2")) == 8
    assert micro_batches("1F1B", Layout.parse("dp2")) == 2


class Own(pl.LightningModule):
    """A module as a user has it, whose loss may depend on the rank, which no layout can hide."""

    def __init__(self, slip: float = 0.0) -> None:
        super().__init__()
        self.model: Any = None
        self.slip = slip

    def configure_model(self) -> None:
        if self.model is None:
            self.model = models.build(models.PLAIN, 4)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return models.plain_step(self.model, batch) * (1 + self.slip * self.global_rank)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def own_batches(steps: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [models.plain_data(8, models.PlainModel.vocabulary, generator) for _ in range(steps)]


def verified(slip: float, strategy: dict[str, Any]) -> Difference:
    return lightning_3d.verify(Own(slip), strategy, own_batches())


@pytest.mark.parametrize("warm", by_default([True, False], 0), ids=["forked", "fresh interpreters"])
def test_own_module(warm: bool) -> None:
    strategy = {"layout": "tp2_pp2", "plan": models.PlainModel.plan, "micro_batch_size": 2}
    found = in_fresh_process(verified, 0.0, strategy) if warm else verified(0.0, strategy)
    assert found.same, found
    assert found.weight > 0 and len(found.losses) == 2


def test_what_differs_is_found() -> None:
    strategy = {"layout": "dp2", "micro_batch_size": 2}
    found = in_fresh_process(verified, 0.01, strategy)
    assert not found.same
    assert 1e-3 < found.loss < 1e-2, "half of the rows weigh one percent more"
    assert "allowed" in str(found)


LINES = {
    "small": ["verify", "--steps", "2", "parallelism=tp2_dp2"],
    "steps": ["verify", "--steps=0"],
    "option": ["verify", "--json=x"],
    "layout": ["verify", "parallelism=tp3"],
    "help": ["verify", "--help"],
}


def test_command_lines(tmp_path: Path) -> None:
    quick = ["help", "steps", "option", "layout"]
    results = dict(zip(quick, run_commands([LINES[name] for name in quick]), strict=True))
    assert results["help"].code == 0 and "--steps N" in results["help"].output
    for name, words in (("steps", "--steps 0"), ("option", "--json is no option of verify"), ("layout", "Tensor parallelism deals")):
        result = results[name]
        assert (result.code, result.torch, result.left) == (2, False, []), result.output
        assert result.output.startswith("lightning_3d: ") and words in result.output
        assert result.output.count("\n") == 1
    [small] = run_commands([LINES["small"]], warm=True)
    assert small.code == 0, small.output
    assert "this layout computes the same thing: tp2_dp2" in small.output
    assert small.left == []


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        "model=mixtral_8x7b parallelism=tp4_pp4_ep4_dp4 cluster=h100_8x8 data.global_batch_size=64",
        "model=llama3_70b parallelism=tp8_pp4_dp8 cluster=h100_32x8 data.global_batch_size=64 parallelism.zero_stage=3",
        "model=gemma3_tiny parallelism=tp2_pp2_dp2 parallelism.schedule=zbvzerobubble",
        "model=deepseek_v3_tiny parallelism=tp2_ep2_dp4 parallelism.zero_stage=2",
        "model=llama3_1_8b parallelism=cp4_dp2 cluster=h100_1x8 data.sequence_length=1024 parallelism.recompute=full",
    ],
)
def test_jobs(overrides: str) -> None:
    [result] = run_commands([["verify", *overrides.split()]], timeout=500)
    assert result.code == 0, result.output
