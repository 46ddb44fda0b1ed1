"""Linear layers that multiply in float8: the arithmetic against plain PyTorch, fits against one
process, and who is refused.

No CPU multiplies in float8. torchao emulates it here, as its own tests do: it casts to float8 and
back, and multiplies in bf16.
"""

import copy
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from master_weights import train_with_masters
from models import IGNORE
from omegaconf import OmegaConf
from parity import Data, Module, Part, Rows, quiet_trainer, train_on_rank
from ranks import run_ranks
from reference import Recipe, Run, cut, data, initial_model, split
from torch import Tensor, nn

from lightning_3d.app.config import machine
from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.config.run_config import PrecisionConfig, RunConfig
from lightning_3d.app.training.run import make_strategy
from lightning_3d.engine import float8 as fp8
from lightning_3d.errors import ConfigError
from lightning_3d.options import precision
from lightning_3d.parallel.tensor.lora import UnbiasedLinear
from lightning_3d.strategy import Lightning3DStrategy

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (extra fp8)"
)
# biases, and dimensions that two ranks cut into multiples of 16
RECIPE = Recipe("gpt_neox", dtype="bfloat16", steps=8)


def emulated() -> Any:
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(round_scales_to_power_of_2=True, emulate=True)


@pytest.fixture
def emulation() -> Iterator[None]:
    with mock.patch.object(fp8, "recipe", emulated):
        yield


def rounded(values: Tensor, kind: torch.dtype) -> Tensor:
    """In float8 under the largest power of two as scale that the largest element bears; as
    float32."""
    values = values.detach().float()
    scale = torch.exp2(
        torch.floor(torch.log2(torch.finfo(kind).max / values.abs().max().clamp(min=1e-12)))
    )
    return (values * scale).to(kind).float() / scale


class Float8Product(torch.autograd.Function):
    """`input` (rows, in) @ weight (out, in) transposed, in plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return (rounded(input, torch.float8_e4m3fn) @ rounded(weight, torch.float8_e4m3fn).T).to(
            input.dtype
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors
        known = rounded(gradient, torch.float8_e5m2)
        of_input, of_weight = (
            known @ rounded(weight, torch.float8_e4m3fn),
            known.T @ rounded(input, torch.float8_e4m3fn),
        )
        return of_input.to(input.dtype), of_weight.to(weight.dtype)


class PlainFloat8(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        product = Float8Product.apply(input.flatten(0, -2), self.weight).unflatten(
            0, input.shape[:-1]
        )
        return product if self.bias is None else product + self.bias


def in_plain_float8(model: nn.Module) -> None:
    """The linear layers of a GPT-NeoX's blocks."""
    for layer in model.get_submodule("gpt_neox.layers").modules():
        if isinstance(layer, nn.Linear):
            layer.__class__ = PlainFloat8


def error(value: Tensor, expected: Tensor) -> float:
    return ((value.float() - expected.float()).norm() / expected.float().norm()).item()


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    out = layer(x)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out) * 1e-3
    return [out.detach(), *torch.autograd.grad(out, (x, *layer.parameters()), gradient)]


@needs_torchao
def test_a_layer_multiplies_in_float8(emulation: None) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, dtype=torch.bfloat16)
    ours, independent = copy.deepcopy(plain), copy.deepcopy(plain)
    names, weight = dict(ours.named_parameters()), ours.weight
    fp8.multiply_in_float8([nn.Sequential(ours)], on=True)
    independent.__class__ = PlainFloat8
    assert (
        dict(ours.named_parameters()).keys() == names.keys()
        and ours.weight is weight
        and list(ours.children()) == []
    )
    x = torch.randn(4, 16, 64, dtype=torch.bfloat16)
    for mine, close, exact in zip(
        results(ours, x), results(independent, x), results(plain, x), strict=True
    ):
        assert error(mine, close) < 2**-8, "the rounding of bf16"
        assert error(mine, exact) < 0.1, "three bits of mantissa, two for gradients"
    assert error(results(ours, x)[0], results(plain, x)[0]) > 1e-3, "it is not bf16"
    odd = x[:, :3]  # 12 rows, which a backward cannot multiply: bf16
    assert all(
        torch.equal(a, b) for a, b in zip(results(ours, odd), results(plain, odd), strict=True)
    )
    fp8.multiply_in_float8([nn.Sequential(ours)], on=False)
    assert type(ours) is nn.Linear and torch.equal(ours(x), plain(x))


@needs_torchao
def test_the_layer_inside_a_row_parallel_adapted_one(emulation: None) -> None:
    """It adds no bias, in bf16 or float8: that comes after the sum over the ranks."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, dtype=torch.bfloat16)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    exact = F.linear(x, layer.weight)
    layer.__class__ = UnbiasedLinear
    assert torch.equal(layer(x), exact)
    fp8.multiply_in_float8([nn.Sequential(layer)], on=True)
    assert 0 < error(layer(x), exact) < 0.1


@needs_torchao
def test_what_stays_in_bf16(emulation: None) -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight * 2)

    class Same(nn.Linear):
        pass

    kinds = {
        "gate_proj": nn.Linear(32, 32),
        "gate": nn.Linear(32, 16),
        "router_proj": nn.Linear(32, 16),
        "narrow": nn.Linear(32, 24),
    }
    block = nn.ModuleDict({**kinds, "own": Own(32, 32), "same": Same(32, 32)})
    fp8.multiply_in_float8([block], on=True)
    assert [name for name, layer in block.items() if hasattr(layer, "float8_product")] == [
        "gate_proj",
        "same",
    ]
    assert isinstance(block["same"], Same)
    with pytest.raises(
        ConfigError,
        match="no linear layer .* whose dimensions are multiples of 16. Use precision=bf16",
    ):
        fp8.multiply_in_float8([nn.Sequential(nn.Linear(24, 8))], on=True)


# Fits


def train_in_float8(recipe: Recipe, **strategy: Any) -> tuple[Part, int]:
    """What a rank has at the end, and how many of its layers multiplied in float8."""
    converted: list[nn.Module] = []
    convert = fp8._convert

    def count(layer: Any) -> None:
        converted.append(layer)
        convert(layer)

    def anywhere(device: torch.device) -> None:
        pass

    float8 = "lightning_3d.engine.float8"
    patches = [
        (f"{float8}.recipe", emulated),
        (f"{float8}._convert", count),
        ("lightning_3d.strategy.strategy.require_fp8", anywhere),
    ]
    with mock.patch(*patches[0]), mock.patch(*patches[1]), mock.patch(*patches[2]):
        return train_on_rank(recipe, fp8=True, **strategy), len(converted)


@pytest.fixture(scope="module")
def expected() -> Run:
    return train_with_masters(RECIPE, in_plain_float8)


def first_loss(prepare: Callable[[nn.Module], None]) -> float:
    """Of the first global batch, before a step, from logits in bf16."""
    model = initial_model(RECIPE)
    prepare(model)
    losses = []
    for rows in split(cut(data(RECIPE), 0, RECIPE.global_batch), 4):
        with torch.no_grad():
            logits = model(input_ids=rows["input_ids"]).logits[:, :-1].flatten(0, 1).float()
        losses.append(
            F.cross_entropy(
                logits, rows["labels"][:, 1:].flatten(), reduction="none", ignore_index=IGNORE
            )
        )
    found = torch.cat(losses)
    return (found.sum() / (found != 0).sum()).item()


LAYOUTS = [
    pytest.param("pp2_dp2", {"zero_stage": 2, "schedule": "ZBVZeroBubble"}, marks=pytest.mark.full),
    ("tp2_dp2", {"zero_stage": 3}),
    pytest.param("tp1", {}, marks=pytest.mark.full),
    pytest.param("tp2_pp2_dp2", {"zero_stage": 1}, marks=pytest.mark.full),
    pytest.param("pp2_dp2", {"zero_stage": 3, "schedule": "1F1B"}, marks=pytest.mark.full),
]


@pytest.mark.slow
@needs_torchao
@pytest.mark.parametrize(("layout", "strategy"), LAYOUTS, ids=str)
def test_a_fit_is_that_of_one_process(layout: str, strategy: dict[str, Any], expected: Run) -> None:
    ranks = torch.tensor([int(part[2:]) for part in layout.split("_")]).prod().item()
    stages = 2 if "pp2" in layout else 1
    answers = run_ranks(
        train_in_float8,
        ranks,
        RECIPE,
        layout=layout,
        micro_batch_size=4 // stages,
        **strategy,
        timeout=180,
    )
    assert {count for _, count in answers} == {4 * 4 // stages}, (
        "four layers in each of four blocks"
    )
    parts = [part for part, _ in answers]
    assert all(part.losses == parts[0].losses for part in parts)
    first, in_bf16 = first_loss(in_plain_float8), first_loss(lambda model: None)
    assert abs(parts[0].losses[0] - first) < abs(in_bf16 - first) / 4, (
        "nearer to float8 than bf16 is"
    )
    assert parts[0].losses == pytest.approx(expected.losses, rel=1e-2)
    assert parts[0].grad_norms == pytest.approx(expected.grad_norms, rel=5e-2)
    assert parts[0].losses[-1] < parts[0].losses[0]


@needs_torchao
def test_another_strategy_goes_on_in_bf16(ranks: Any) -> None:
    assert ranks(fit_then_evaluate, 1) == [(4 * 4, 0)]


def fit_then_evaluate() -> tuple[int, int]:
    """Layers in float8 after a fit with float8, and after another Trainer's without."""
    recipe = dataclasses.replace(RECIPE, steps=1)
    module = Module(recipe)
    rows = Data(Rows(data(recipe)), 16)
    counts = []
    for asked in (True, False):
        with (
            mock.patch("lightning_3d.engine.float8.recipe", emulated),
            mock.patch("lightning_3d.strategy.strategy.require_fp8"),
        ):
            strategy = Lightning3DStrategy("tp1", fp8=asked)
            quiet_trainer(strategy=strategy, devices=1, precision="bf16-true", max_steps=1).fit(
                module, datamodule=rows
            )
        counts.append(sum(isinstance(layer, fp8._Float8) for layer in module.modules()))
    return counts[0], counts[1]


# Refusals


@pytest.mark.parametrize(
    ("device", "capability", "words"),
    [
        (
            "cpu",
            None,
            "precision=fp8 needs NVIDIA GPUs, but this run is on the CPU. Use precision=bf16.",
        ),
        (
            "cuda",
            (8, 0),
            (
                "compute capability 8.9 or higher, such as H100; the GPUs of this machine have 8.0."
                " Use precision=bf16."
            ),
        ),
    ],
)
def test_f17_devices_without_float8(
    device: str, capability: tuple[int, int] | None, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        precision.check_fp8_device(device, capability)
    assert words in str(refused.value) and refused.value.exit_code == 2
    precision.check_fp8_device("gpu", (8, 9))
    precision.check_fp8_device("cuda", (9, 0))
    precision.check_fp8_device("cuda", None)


def test_f17_without_torchao() -> None:
    said = r'"lightning-3d\[fp8\]", or use precision=bf16'
    with (
        mock.patch.object(importlib.util, "find_spec", return_value=None),
        pytest.raises(ConfigError, match=said),
    ):
        precision.check_fp8_library()


def test_f17_before_a_rank_is_started() -> None:
    """In a user's own script: when the Trainer is made."""
    with pytest.raises(ConfigError, match="fp8 needs NVIDIA GPUs"):
        quiet_trainer(
            strategy=Lightning3DStrategy("dp2", fp8=True), devices=2, precision="bf16-true"
        )
    with pytest.raises(ConfigError, match="got '32-true'"):
        quiet_trainer(strategy=Lightning3DStrategy("dp2", fp8=True), devices=2)


@pytest.mark.parametrize(
    "plugin", [HalfPrecision("16-true"), MixedPrecision("16-mixed", "cpu", scaler=object())]
)
def test_f17_float16(plugin: Any) -> None:
    """Wherever it is asked for, in the same words."""
    with pytest.raises(ConfigError) as refused:
        quiet_trainer(strategy=Lightning3DStrategy("dp2"), devices=2, plugins=[plugin])
    assert str(refused.value) == str(precision.unknown_precision(plugin.precision))
    assert "float16 needs a loss scale" in str(refused.value) and "Use precision=bf16" in str(
        refused.value
    )


def test_f17_what_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for answer, found in (
        ("9.0\\n8.0\\n", (9, 0)),
        ("12.0\\n", (12, 0)),
        ("[N/A]\\n", None),
        ("", None),
    ):
        tool.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
        tool.chmod(0o755)
        assert precision.listed_capability() == found
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert precision.listed_capability() is None


def test_f17_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine lacks is refused, unless the run is only checked and is for another."""
    run = RunConfig(precision=PrecisionConfig("fp8"))
    monkeypatch.setattr(machine, "check_fp8_library", lambda: None)
    monkeypatch.setattr(machine, "listed_capability", lambda: (9, 0))
    assert machine.choose_precision(run, "gpu") == "fp8"
    monkeypatch.setattr(machine, "listed_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match="have 8.0"):
        machine.choose_precision(run, "gpu")
    run = replace(
        run, trainer=replace(run.trainer, dry=True), cluster=replace(run.cluster, accelerator="gpu")
    )
    assert machine.choose_precision(run, "gpu") == "fp8"
    with pytest.raises(ConfigError, match="on the CPU"):
        machine.choose_precision(run, "cpu")


@pytest.mark.parametrize(("name", "asked"), [("fp8", True), ("bf16", False)])
def test_the_configuration_asks_the_strategy(name: str, asked: bool) -> None:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        composed = OmegaConf.to_container(compose("config", overrides=[f"precision={name}"]))
    assert isinstance(composed, dict)
    assert make_strategy(composed).fp8 is asked and precision.PRECISIONS[name] == "bf16-true"
