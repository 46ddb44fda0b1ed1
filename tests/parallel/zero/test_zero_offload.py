"""Master weights, optimizer and parameters in host memory: as exact as one process, restored by any
other mode, or refused.

`test_zero.py` trains the modes "offloaded" and "on host" with every kind of parameter,
`test_compat_deepspeed.py` looks into DeepSpeed.
"""

import os
from typing import Any
from unittest.mock import patch

import checkpoint_fits
import pytest
import torch
import torch.distributed as dist
from handmade_gradients import Run, check
from parity import Module, Part, Rows, assert_same_run, assert_same_training, fit_on_rank
from ranks import run_ranks
from reference import Recipe, data, reference
from sweeps import by_default
from torch import nn

from lightning_3d.compat.deepspeed import DeepSpeedGroup
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec, cut_along, replicated
from lightning_3d.parallel.zero import make_backend
from lightning_3d.parallel.zero.deepspeed_engine import Partition
from lightning_3d.parallel.zero.deepspeed_stepper import VECTOR
from lightning_3d.parallel.zero.trained import check_place

full = pytest.mark.full
MODES: dict[str, dict[str, Any]] = {
    "1": {"zero": 1, "zero_offload": "optimizer"},
    "1 scattered": {"zero": 1, "zero_offload": "optimizer", "zero_reduce_scatter": True},
    "2 eager": {"zero": 2, "zero_offload": "optimizer", "zero_reduce": "micro_batch"},
    "3": {"zero": 3, "zero_offload": "optimizer"},
    "3 on host": {"zero": 3, "zero_offload": "parameters"},
    "3 on host, step": {
        "zero": 3,
        "zero_offload": "parameters",
        "zero_gather": "step",
        "zero_reduce": "step",
    },
}
CELLS = [
    (layout, schedule, mode)
    for layout, schedule in (
        ("tp2_pp2_dp2", "1F1B"),
        ("tp2_dp2", "1F1B"),
        ("pp2_dp2", "1F1B"),
        ("pp2_dp2", "ZBVZeroBubble"),
        ("pp2_dp2", "Interleaved1F1B"),
        ("dp4", "1F1B"),
    )
    for mode in MODES
]
DEFAULT = [("pp2_dp2", "1F1B", "1"), ("tp2_dp2", "1F1B", "3 on host")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "schedule", "mode"),
    [cell if cell in DEFAULT else pytest.param(*cell, marks=full) for cell in CELLS],
    ids=str,
)
def test_as_on_one_process(layout: str, schedule: str, mode: str) -> None:
    """Clipped by the norm of the gradient, as every parity run."""
    assert_same_training("qwen2", layout, schedule, **MODES[mode])


@pytest.mark.parametrize("mode", by_default(["2 eager offloaded", "3 eager on host"], 1))
@pytest.mark.parametrize(
    "change",
    [{"precision": "bf16", "late": True}, {"frozen": ("layers.0", "layers.1"), "clip_value": 0.1}],
    ids=str,
)
def test_every_kind_of_parameter(mode: str, change: dict[str, Any]) -> None:
    """All of `test_zero.py` runs in the long sweeps. bf16 weights are as close as one of their
    steps."""
    check(
        Run("pp2_dp2", mode=mode, **change),
        weights=2e-2 if "precision" in change else 5e-5,
        norm=1e-5,
    )


def test_whole_vectors_are_rounded_alike_everywhere() -> None:
    """A kernel for the whole update rounds the last elements of a tensor differently, where they do
    not fill a vector: copies that lie elsewhere would drift apart. On AVX512 1 of 100 such elements
    differs after 60 steps; of whole vectors none does."""
    torch.manual_seed(0)
    values = torch.randn(100 * VECTOR)
    whole, parts = (
        nn.Parameter(values.clone()),
        [nn.Parameter(part.clone()) for part in values.split(VECTOR)],
    )
    optimizers = [
        torch.optim.AdamW(parameters, lr=3e-4, fused=True) for parameters in ([whole], parts)
    ]
    for _ in range(60):
        gradient = torch.randn_like(values)
        whole.grad = gradient.clone()
        for parameter, part in zip(parts, gradient.split(VECTOR), strict=True):
            parameter.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, torch.cat([parameter.detach() for parameter in parts]))


def sizes_of_masters(stage: int, offload: str, fused: bool) -> list[int]:
    """Elements that the optimizer of this rank steps, by parameter group."""
    mesh = Mesh(Layout.parse("dp2"))
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    options = ZeroOptions(stage, "step", "step" if stage == 3 else None, offload=offload)
    backend = make_backend(options, mesh, specs)
    backend.shard(module, [], torch.device("cpu"), lambda block: True)
    groups = [{"params": list(layer.parameters())} for layer in module]
    optimizer = backend.prepare(module, torch.optim.AdamW(groups, fused=fused))
    sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
    backend.make_whole()
    backend.teardown()
    return sizes


@pytest.mark.parametrize(("stage", "offload"), [(1, "optimizer"), (3, "parameters")])
def test_what_one_kernel_steps_is_whole_vectors(stage: int, offload: str) -> None:
    for sizes in run_ranks(sizes_of_masters, 2, stage, offload, True):
        assert sizes and all(size % VECTOR == 0 for size in sizes)
    for sizes in run_ranks(sizes_of_masters, 2, stage, offload, False):
        assert any(size % VECTOR for size in sizes), "nothing was to be filled up"


class OneKernel(Module):
    """Steps with one kernel for the whole update."""

    kind = "fused"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"lr": self.recipe.learning_rate, "weight_decay": self.recipe.weight_decay}
        if self.kind == "fused":
            return torch.optim.AdamW(self.parameters(), fused=True, **options)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(self.parameters(), **options)


class CpuAdam(OneKernel):
    kind = "DeepSpeedCPUAdam"


def train_with_one_kernel(recipe: Recipe, module: type[OneKernel], **strategy: Any) -> Part:
    return fit_on_rank(recipe, Rows(data(recipe)), module(recipe), **strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "layout", "mode"),
    [
        (OneKernel, "tp2_dp2", {"zero_stage": 2, "zero_offload": "optimizer"}),
        pytest.param(
            OneKernel, "pp2_dp2", {"zero_stage": 3, "zero_offload": "parameters"}, marks=full
        ),
        pytest.param(
            CpuAdam, "tp2_dp2", {"zero_stage": 1, "zero_offload": "optimizer"}, marks=full
        ),
        pytest.param(
            CpuAdam, "pp2_dp2", {"zero_stage": 3, "zero_offload": "parameters"}, marks=full
        ),
    ],
)
@pytest.mark.timeout(1200)
def test_one_kernel_for_the_update(
    module: type[OneKernel], layout: str, mode: dict[str, Any]
) -> None:
    """DeepSpeedCPUAdam is compiled first, which takes minutes."""
    recipe = Recipe("llama")
    expected, _ = reference(recipe)
    parts = run_ranks(
        train_with_one_kernel,
        4,
        recipe,
        module,
        layout=layout,
        micro_batch_size=2,
        **mode,
        timeout=1000,
    )
    assert_same_run(parts, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "first", "other"),
    [
        pytest.param(
            "32-true", {"zero_stage": 1, "zero_offload": "optimizer"}, {"zero_stage": 3}, marks=full
        ),
        ("bf16-true", {"zero_stage": 3, "zero_offload": "parameters"}, {"zero_stage": 1}),
        pytest.param(
            "bf16-true",
            {"zero_stage": 2},
            {"zero_stage": 3, "zero_offload": "parameters"},
            marks=full,
        ),
        pytest.param(
            "32-true", {"zero_stage": 0}, {"zero_stage": 2, "zero_offload": "optimizer"}, marks=full
        ),
    ],
    ids=str,
)
def test_what_is_saved_is_restored_elsewhere(
    precision: str, first: dict[str, Any], other: dict[str, Any], tmp_path: Any
) -> None:
    """Bit by bit: weights, master weights and optimizer state, on another layout, with and without
    offloading."""
    saved, again = str(tmp_path / "saved.ckpt"), str(tmp_path / "again.ckpt")
    checkpoint_fits.run_fit("pp2_dp2", 1, at_end=saved, precision=precision, **first)
    losses = checkpoint_fits.run_fit(
        "tp2_dp2", 2, resume=saved, at_start=again, precision=precision, **other
    )
    checkpoint_fits.assert_equal(
        checkpoint_fits.all_tensors(tmp_path / "again.ckpt"),
        checkpoint_fits.all_tensors(tmp_path / "saved.ckpt"),
    )
    if precision == "32-true":  # else rounding depends on the layout
        expected = checkpoint_fits.run_fit("tp2_dp2", 2, precision=precision)
        assert losses == pytest.approx(expected[checkpoint_fits.STEPS_PER_EPOCH :], rel=1e-5)


def fit_with_cpu_adam(*args: Any, **more: Any) -> list[float]:
    def configure(module: nn.Module) -> torch.optim.Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(module.parameters(), lr=3e-4)

    with patch.object(checkpoint_fits.TiedModel, "configure_optimizers", configure):
        return checkpoint_fits.fit(*args, **more)


@full
@pytest.mark.timeout(1200)
def test_deepspeeds_optimizer_is_restored(tmp_path: Any) -> None:
    """It keeps the number of its steps as a number. It is compiled first, which takes minutes."""
    saved, again = str(tmp_path / "saved.ckpt"), str(tmp_path / "again.ckpt")
    mode: dict[str, Any] = {"zero_stage": 3, "zero_offload": "parameters"}
    [whole, *_] = run_ranks(
        fit_with_cpu_adam, 4, "tp2_dp2", 2, zero_stage=1, zero_offload="optimizer", timeout=1000
    )
    run_ranks(fit_with_cpu_adam, 4, "pp2_dp2", 1, at_end=saved, **mode)
    [losses, *_] = run_ranks(
        fit_with_cpu_adam, 4, "tp2_dp2", 2, resume=saved, at_start=again, **mode
    )
    checkpoint_fits.assert_equal(
        checkpoint_fits.all_tensors(tmp_path / "again.ckpt"),
        checkpoint_fits.all_tensors(tmp_path / "saved.ckpt"),
    )
    assert losses == pytest.approx(whole[checkpoint_fits.STEPS_PER_EPOCH :], rel=1e-5)


def test_master_weights_may_be_elsewhere() -> None:
    """Parameters on one device, here meta, and master weights on the host: each tensor is made
    where it belongs."""
    flat = torch.zeros(8, dtype=torch.bfloat16, device="meta")
    parameter = nn.Parameter(flat[:6])
    master = torch.arange(4.0)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    optimizer.state[master] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}
    partition = Partition(
        DeepSpeedGroup([parameter], flat, flat[:4], master), 0, optimizer, torch.device("meta")
    )
    [slot] = partition.owned_slots
    assert partition.sum_of_gradients().device.type == "meta"
    before = partition.copy_of(slot)
    assert {name: value.device.type for name, value in before.items()} == {
        "exp_avg": "cpu",
        "master": "cpu",
    }
    master.zero_()
    partition.restore(slot, before)
    assert torch.equal(master, torch.arange(4.0))
    assert partition.values_of(slot)["master"].device.type == "cpu"  # type: ignore[union-attr]


def refused(make: Any, spec: ShardSpec, options: ZeroOptions) -> str:
    """The message with which a backend refuses to train one weight."""
    mesh = Mesh(Layout.parse("dp2"))
    module = nn.Linear(4, 4, bias=False)
    backend = make_backend(options, mesh, {"weight": spec})
    try:
        backend.prepare(module, make(module.parameters()))
    except ConfigError as error:
        assert error.exit_code == 2
        return str(error)
    finally:
        backend.teardown()
    return ""


class FusedAdam(torch.optim.SGD):
    """Called as those of Apex and of DeepSpeed."""


def capturable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, capturable=True)


def apex(parameters: Any) -> torch.optim.Optimizer:
    with patch.object(FusedAdam, "__module__", "apex.optimizers.fused_adam"):
        return FusedAdam(parameters, lr=1.0)


def from_apex(spec: ShardSpec, options: ZeroOptions) -> str:
    with patch.object(FusedAdam, "__module__", "apex.optimizers.fused_adam"):
        return refused(apex, spec, options)


PLAIN = cut_along("weight", (4, 4), 0, [(0, 4)], tp_replicas=(0,))


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_optimizers_that_run_on_gpus_only(offload: str) -> None:
    options = ZeroOptions(
        3 if offload == "parameters" else 1,
        "step",
        "step" if offload == "parameters" else None,
        offload=offload,
    )
    backend = run_ranks(refused, 2, capturable, PLAIN, options)
    assert all(
        "AdamW with capturable=True" in message and "zero_offload=none" in message
        for message in backend
    )
    assert all(
        "FusedAdam of apex runs on GPUs only" in message
        for message in run_ranks(from_apex, 2, PLAIN, options)
    )


class DeepSpeedCPUAdam(torch.optim.SGD):
    """Called as that of DeepSpeed."""


class DeepSpeedCPULion(torch.optim.SGD):
    """Likewise."""


def test_what_steps_in_host_memory_needs_offloading() -> None:
    adam, lion = (
        kind([nn.Parameter(torch.zeros(1))]) for kind in (DeepSpeedCPUAdam, DeepSpeedCPULion)
    )
    with pytest.raises(
        ConfigError,
        match="DeepSpeedCPUAdam updates weights in host memory.* zero_offload=optimizer",
    ):
        check_place(adam, offloaded=False)
    check_place(adam, offloaded=True)
    for offloaded in (True, False):
        with pytest.raises(ConfigError, match="DeepSpeedCPULion is not supported"):
            check_place(lion, offloaded=offloaded)


def without_compiler(kind: type[OneKernel]) -> str:
    """What is said where ninja is not found. Nothing is compiled."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    recipe = Recipe("llama", steps=1)
    with patch.dict(os.environ, {"PATH": "/nowhere"}), patch.dict(OpBuilder._loaded_ops):
        OpBuilder._loaded_ops.pop("cpu_adam", None)
        try:
            train_with_one_kernel(
                recipe, kind, layout="dp2", zero_stage=1, zero_offload="optimizer"
            )
        except ConfigError as error:
            return str(error)
    return f"rank {dist.get_rank()} trained"


@pytest.mark.slow
def test_no_compiler() -> None:
    for message in run_ranks(without_compiler, 2, CpuAdam):
        assert "made DeepSpeedCPUAdam, whose C++ code is compiled" in message
        assert "inja" in message and "torch.optim.AdamW with fused=True" in message


def test_stages_that_cannot() -> None:
    for stage, offload, words in (
        (0, "optimizer", "zero_stage=1 or more; got 0"),
        (2, "parameters", "zero_stage=3; got 2"),
    ):
        with pytest.raises(LayoutError, match=words):
            ZeroOptions(stage, offload=offload).resolve("1F1B", 1)
