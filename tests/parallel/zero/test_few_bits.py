"""Optimizers of torchao with states of few bits: the bits of one process, and checkpoints from
which they resume exactly."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import handmade_gradients as handmade
import pytest
import torch
from alphabet_fits import MODEL
from checkpoint_fits import TiedModel, all_tensors, assert_equal, fit, world_size
from handmade_gradients import Run
from parity import Module, Part, Rows, assert_same_run, fit_on_rank
from ranks import run_ranks
from reference import Recipe, data
from reference import train as train_plainly
from torch import Tensor, nn

from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.layout import Layout
from lightning_3d.parallel.zero.stepper import inner_states, new_wrapped_states
from lightning_3d.parallel.zero.trained import check_optimizer

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed (extra fp8)"
)


def make(name: str, parameters: Any, **options: Any) -> Any:
    return getattr(import_module("torchao.optim"), name)(parameters, lr=1e-2, **options)


def uncompiled(function: Any, *args: Any, **more: Any) -> Any:
    """Call a function; torchao would compile its step for every shape, which takes seconds of
    each."""
    with torch.compiler.set_stance("force_eager"):
        return function(*args, **more)


# Against one process

SHAPES = {"embed.weight": (64, 64), "unused": (4096,)} | {
    f"layers.{layer}.{name}": shape
    for layer in range(handmade.LAYERS)
    for name, shape in {
        "up.weight": (72, 64),
        "key.weight": (6, 64),
        "norm.weight": (64,),
        "down.bias": (8192,),
    }.items()
}
"""Matrices and vectors in blocks, and others with fewer than 4096 elements, whose states torchao
leaves as they are."""


def gradient(name: str, weight: Tensor, step: int, micro_batch: int, use: str = "") -> Tensor:
    """Multiples of 1/16 below 8: a sum of some of them is exact in float32. Often the largest of a
    block is negative."""
    noise = handmade._noise(name + use, tuple(weight.shape), step + 1, micro_batch + 1)
    return (noise * 16).round().clamp(-127, 127).div(16).to(weight.dtype)


def by_torchao(run: Run, named: dict[str, nn.Parameter]) -> tuple[Any, Any]:
    """With three groups and a learning rate that falls."""
    optimizer = make(run.optimizer, handmade.parameter_groups(named), weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def patch(patched: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("gradient", gradient),
        ("make_optimizer", by_torchao),
        ("full_shapes", lambda: SHAPES),
    ):
        patched.setattr(handmade, name, value)


def train(run: Run) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patch(patched)
        return handmade.train(run)


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        ("AdamW8bit", "pp2_dp2", "fp32"),
        ("AdamW4bit", "dp2", "bf16"),
        ("AdamWFp8", "pp2", "fp32"),
        *(
            pytest.param(name, layout, precision, marks=pytest.mark.full)
            for name in KINDS
            for layout in ("dp4", "pp4", "pp2_dp2")
            for precision in ("fp32", "fp64", "bf16")
        ),
    ],
)
def test_the_bits_of_torchao(
    name: str, layout: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients whose sums do not round, weights have the bits of the same optimizer on one
    process."""
    run = Run(layout, "0", precision, steps=4, max_norm=None, optimizer=name)
    patch(monkeypatch)
    expected, _ = uncompiled(handmade.reference, run)
    seen = set()
    for result in run_ranks(uncompiled, Layout.parse(layout).world_size, train, run):
        for key, weight in result["weights"].items():
            full = result["specs"][key].tied_to or key
            assert torch.equal(weight, expected[full].to(weight.dtype)), (
                f"{key}: {(weight - expected[full]).abs().max().item():.1e}"
            )
            seen.add(full)
    assert seen == set(SHAPES)


def train_sequences(name: str, recipe: Recipe, layout: str) -> Part:
    module = Module(recipe)
    module.configure_optimizers = lambda: make(name, module.parameters())  # type: ignore[method-assign]
    return fit_on_rank(
        recipe, Rows(data(recipe)), module, layout=layout, micro_batch_size=4, zero_stage=0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("AdamW8bit", "cp2"),
        pytest.param("AdamW4bit", "dp2_cp2", marks=pytest.mark.full),
        pytest.param("AdamWFp8", "pp2_cp2", marks=pytest.mark.full),
    ],
)
def test_sequences_over_ranks_train_as_one_process(name: str, layout: str) -> None:
    """In float64, where ranks that sum the gradients of their tokens round too little to change a
    code."""
    recipe = Recipe("gpt_neox", layers=2, dtype="float64", steps=4)
    expected = uncompiled(
        train_plainly, recipe, optimizers=lambda model: (make(name, model.parameters()), None)
    )
    parts = run_ranks(
        uncompiled, Layout.parse(layout).world_size, train_sequences, name, recipe, layout
    )
    assert_same_run(parts, expected, "float64")


# Checkpoints


class FewBits(TiedModel):
    """Wide enough for states in blocks: of 4096 elements in attention and MLP. The tied embedding
    has 3904."""

    kind = "AdamW8bit"
    block_size: int | None = None

    def __init__(self) -> None:
        super().__init__(hidden_size=64)

    def configure_optimizers(self) -> Any:
        return make(
            self.kind,
            self.parameters(),
            **({"block_size": self.block_size} if self.block_size else {}),
        )


class FourBits(FewBits):
    kind = "AdamW4bit"


class Float8(FewBits):
    kind = "AdamWFp8"


class SmallBlocks(FewBits):
    block_size = 128


class FullStates(FewBits):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def run_fit(layout: str, *args: Any, **more: Any) -> list[float]:
    return run_ranks(uncompiled, world_size(layout), fit, layout, *args, zero_stage=0, **more)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "other"),
    [
        (FewBits, "dp2", "pp2"),
        pytest.param(FourBits, "pp2", "dp2", marks=pytest.mark.full),
        pytest.param(Float8, "pp2_dp2", "dp4", marks=pytest.mark.full),
        pytest.param(FourBits, "dp2", "pp2_dp2", marks=pytest.mark.full),
        pytest.param(FewBits, "cp2", "pp4", marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_bit_for_bit(
    model: type[FewBits], layout: str, other: str, tmp_path: Path
) -> None:
    """In the same layout it is the run that never stops. Another layout has the same weights and
    states before its first step."""
    first, whole, again, start, there = (
        tmp_path / f"{name}.ckpt" for name in ("first", "whole", "again", "start", "there")
    )
    losses = run_fit(layout, 2, model=model, at_end=str(whole))
    run_fit(layout, 1, model=model, at_end=str(first))
    then = run_fit(
        layout, 2, model=model, resume=str(first), at_start=str(start), at_end=str(again)
    )
    run_fit(other, 2, model=model, resume=str(first), at_start=str(there))
    saved = all_tensors(first)
    codes = {
        tensor.dtype
        for name, tensor in saved.items()
        if name.endswith((".exp_avg:codes", ".exp_avg_sq:codes"))
    }
    assert codes == {torch.float8_e4m3fn if model is Float8 else torch.uint8}
    assert any(name.endswith("embed_tokens.weight.exp_avg") for name in saved), (
        "too small for blocks"
    )
    assert_equal(all_tensors(start), saved)
    assert_equal(all_tensors(there), saved)
    assert then == losses[-len(then) :]
    assert_equal(all_tensors(again), all_tensors(whole))


def refused(model: type[FewBits], resume: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        uncompiled(fit, "dp1", 2, model=model, resume=resume, zero_stage=0)
    return str(caught.value)


@pytest.mark.full
def test_other_states_are_refused(tmp_path: Path) -> None:
    few, full = str(tmp_path / "few.ckpt"), str(tmp_path / "full.ckpt")
    run_fit("dp1", 1, model=FewBits, at_end=few)
    run_fit("dp1", 1, model=FullStates, at_end=full)
    for model, path, message in (
        (
            FewBits,
            full,
            (
                "the state of AdamW, but configure_optimizers returned AdamW8bit. To resume, return"
                " AdamW."
            ),
        ),
        (
            FullStates,
            few,
            (
                "the state of AdamW8bit, but configure_optimizers returned AdamW. To resume, return"
                " AdamW8bit."
            ),
        ),
        (SmallBlocks, few, "exp_avg:scale (16,), exp_avg_sq:codes (64, 64), "),
    ):
        [said] = run_ranks(refused, 1, model, path)
        assert message in said
    assert said.endswith(
        "use the optimizer and the block_size of the run that saved the checkpoint."
    )


@pytest.mark.parametrize("name", KINDS)
def test_states_that_another_program_saved_are_refused(name: str) -> None:
    """Such as those of a converted checkpoint, which does not say which optimizer wrote it."""
    like = nn.Parameter(torch.zeros(64, 64))
    optimizer = make(name, [like])
    [group] = optimizer.param_groups
    adam = {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros(64, 64),
        "exp_avg_sq": torch.zeros(64, 64),
    }
    with pytest.raises(
        CheckpointError,
        match=rf"'w' in the checkpoint is exp_avg \(64, 64\), .* but {name} has exp_avg:codes",
    ):
        new_wrapped_states(optimizer, group, like, adam, "w")
    assert new_wrapped_states(torch.optim.AdamW([like]), group, like, adam, "w") == {}
    small = nn.Parameter(torch.zeros(8, 8))
    assert (
        new_wrapped_states(
            optimizer, group, small, {**adam, "exp_avg": small, "exp_avg_sq": small}, "w"
        )
        == {}
    )
    assert not optimizer.state


# Where blocks would be split


@pytest.mark.parametrize("name", KINDS)
def test_layouts_that_split_blocks_are_refused(name: str) -> None:
    optimizer = make(name, [nn.Parameter(torch.ones(3, 2))])
    check_optimizer(optimizer, [], 0, CPU, Layout.parse("pp2_dp2"))
    message = (
        rf"{name} keeps its states in few bits, .* which zero_stage=1 would split. Use pp2_dp2 with"
        r" zero_stage=0"
    )
    with pytest.raises(ConfigError, match=message):
        check_optimizer(optimizer, [], 1, CPU, Layout.parse("pp2_dp2"))


# Memory


@pytest.mark.parametrize(
    ("name", "expected"),
    [("AdamW8bit", 2 + 8 / 256), ("AdamW4bit", 1 + 8 / 128), ("AdamWFp8", 2 + 8 / 256)],
)
def test_bytes_of_a_parameter(name: str, expected: float) -> None:
    parameter = nn.Parameter(torch.randn(256, 1024))
    parameter.grad = torch.randn(256, 1024)
    optimizer = make(name, [parameter])
    uncompiled(optimizer.step)
    tables = {
        key: value
        for key, value in inner_states(optimizer.state[parameter]).items()
        if key.endswith(":qmap")
    }
    held = sum(
        value.nbytes
        for key, value in inner_states(optimizer.state[parameter]).items()
        if value.ndim and key not in tables
    )
    assert held / parameter.numel() == expected
    assert all(table.numel() in (16, 256) for table in tables.values())


WIDE = MODEL | {"config": MODEL["config"] | {"hidden_size": 64, "intermediate_size": 96}}  # type: ignore[operator]


def dry_ranks(kind: str, layout: str, precision: str) -> list[tuple[int, int]]:
    """The bytes of optimizer states that a dry run counts on each rank: between two steps, and at
    the peak of one."""
    from lightning_3d.app.dryrun.run import DryJob, FoundResult, dry_run
    from lightning_3d.app.training.module import CausalLM

    size, found = Layout.parse(layout), FoundResult()
    optimizer = {"_target_": f"torchao.optim.{kind}", "lr": 0.1, "weight_decay": 0.0}
    rows = {key: torch.zeros(8, 4, dtype=torch.long) for key in ("input_ids", "labels")}
    job = DryJob(
        module=lambda: CausalLM(WIDE, optimizer),
        strategy=lambda made: made(layout, micro_batch_size=2, zero_stage=0),
        batch=lambda count: {key: value[: 2 * count] for key, value in rows.items()},
        layout=size,
        schedule="1F1B",
        micro_batches=4,
        precision=precision,
    )
    reports = [dry_run(job, rank, found) for rank in range(size.world_size)]
    return [(report.kept["optimizer"], report.usage.peak["optimizer"]) for report in reports]


def bytes_of_a_step(kind: str, precision: str) -> int:
    """The bytes that torchao's optimizer holds after a real step of the whole model, with master
    weights of bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(**{key: value for key, value in WIDE["config"].items() if key != "model_type"})
    )
    optimizer = make(kind, model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    uncompiled(optimizer.step)
    states = [value for state in optimizer.state.values() for value in inner_states(state).values()]
    masters = [value for value in model.parameters() if precision == "bf16-true"]
    return sum(value.nbytes for value in (*states, *masters))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "precision"),
    [
        ("AdamW4bit", "dp1", "bf16-true"),
        pytest.param("AdamW8bit", "pp2", "32-true", marks=pytest.mark.full),
        pytest.param("AdamWFp8", "pp2", "bf16-true", marks=pytest.mark.full),
    ],
)
def test_a_dry_run_counts_the_bytes_of_a_real_step(kind: str, layout: str, precision: str) -> None:
    """The stages of a pipeline have together what one process has."""
    [found] = run_ranks(dry_ranks, 1, kind, layout, precision, process_group=False)
    expected = bytes_of_a_step(kind, precision)
    assert sum(kept for kept, _ in found) == sum(peak for _, peak in found) == expected
