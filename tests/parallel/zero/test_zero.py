"""The data-parallel backends against one process with plain PyTorch.

Gradients are made by hand: a known function of parameter, weights, step and micro-batch, of which
each rank adds the part that it would see in a real layout. So every kind of parameter is there in a
model of a few hundred numbers: cut, cut unevenly, replicated, with partial gradients, tied across
stages, frozen, and never used.
"""

import math
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
from counting import recording
from handmade_gradients import MODES, Run, check, reference, train
from ranks import run_ranks
from sweeps import by_default
from torch import nn

from lightning_3d.layout import Layout
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import replicated
from lightning_3d.parallel.zero import make_backend
from lightning_3d.parallel.zero.gradients import clip_coefficient, squared_norm
from lightning_3d.parallel.zero.muon import ADAMW, MUON, MuonWithAdamW
from lightning_3d.parallel.zero.stepper import skipping, skips_on_device

COMMON = ("0", "1", "2 eager", "3 eager")  # the others run in the long sweeps
ALL = [mode if mode in COMMON else pytest.param(mode, marks=pytest.mark.full) for mode in MODES]
every_mode = pytest.mark.parametrize("mode", ALL)
below_3 = pytest.mark.parametrize(
    "mode", [mode for mode, options in MODES.items() if options.stage < 3]
)


LAYOUTS = ["tp1", "dp2", "dp4", "tp2", "tp4", "pp2", "tp2_dp2", "pp2_dp2", "tp2_pp2"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stage_0_in_double_precision(layout: str) -> None:
    check(Run(layout, precision="fp64"), weights=1e-12, norm=1e-12)


@pytest.mark.parametrize("layout", by_default(["dp4", "tp2_pp2", "pp2_dp2"], 1))
def test_stage_0_in_single_precision(layout: str) -> None:
    check(Run(layout), weights=1e-6, norm=1e-6)


@pytest.mark.parametrize("layout", by_default(LAYOUTS, 1, 7, 8))
@pytest.mark.parametrize("mode", ALL[1:])
def test_sharded_in_single_precision(layout: str, mode: str) -> None:
    check(Run(layout, mode=mode), weights=5e-5, norm=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(["tp1", "dp4", "tp2_dp2", "pp2_dp2"], 2))
@every_mode
def test_bf16_with_single_precision_masters(layout: str, mode: str) -> None:
    """Against float32 masters and sums in one process; bf16 weights alone would lose most of these
    updates."""
    run = Run(layout, mode=mode, precision="bf16", steps=20)
    expected, norms = reference(run)
    equal = total = 0
    for result in run_ranks(train, Layout.parse(layout).world_size, run):
        assert result["norms"] == pytest.approx(norms, rel=1e-5)
        for name, weight in result["weights"].items():
            spec = result["specs"][name]
            assert weight.dtype == torch.bfloat16
            equal += int(
                (weight == spec.cut(expected[spec.tied_to or name]).to(torch.bfloat16)).sum()
            )
            total += weight.numel()
    assert equal >= 0.995 * total  # a sum in another order may round a weight to its neighbour


REPLICATED, SHARDED = ("0",), ("3 eager",)
# each with the modes in which it runs by default
CHANGES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"max_norm": None, "clip_value": 0.1}, REPLICATED + SHARDED),
    ({"max_norm": None}, SHARDED),
    ({"max_norm": 1e9}, REPLICATED),
    ({"bucket_bytes": 2**30, "tensor_scale": True}, REPLICATED),
    ({"late": True}, REPLICATED + SHARDED),
    ({"optimizer": "SGD", "options": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}}, SHARDED),
    (
        {
            "optimizer": "SGD",
            "options": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
            "wakes": 5,
        },
        REPLICATED + SHARDED,
    ),
    ({"optimizer": "Adam", "options": {"lr": 3e-4, "amsgrad": True}}, SHARDED),
    ({"frozen": ("layers.0", "layers.1")}, REPLICATED + SHARDED),
    ({"frozen": ("embed", "layers.0", "layers.1")}, SHARDED),
    ({"frozen": ("layers.2", "layers.3", "unused")}, REPLICATED),
]
CHANGED = [(change, mode) for change, _ in CHANGES for mode in MODES]
DEFAULT = [(change, mode) for change, modes in CHANGES for mode in modes]


@pytest.mark.parametrize(
    ("change", "mode"), by_default(CHANGED, *map(CHANGED.index, DEFAULT)), ids=str
)
def test_options(change: dict[str, Any], mode: str) -> None:
    """By value, without clipping, one bucket, gradients on one rank or in some steps only, other
    optimizers, frozen parameters and whole stages."""
    check(Run("pp2_dp2", mode=mode, **change), weights=5e-5, norm=1e-5)


@pytest.mark.parametrize(
    ("mode", "one_count"),
    by_default([("0", False), ("1", True), ("2 eager", True), ("3 eager", True)], 0, 3),
)
def test_adam_counts_the_steps_of_a_group(mode: str, one_count: bool) -> None:
    """One parameter has no gradient in the first steps. Without ZeRO each parameter has a count of
    its own."""
    check(Run("dp2", mode=mode, wakes=5, one_count=one_count), weights=5e-5, norm=1e-5)
    with pytest.raises(AssertionError):
        check(Run("dp2", mode=mode, wakes=5, one_count=not one_count), weights=5e-5, norm=1e-5)


@pytest.mark.parametrize("mode", ["0", "1", "1 offloaded"])
def test_bf16_with_a_stage_that_trains_nothing(mode: str) -> None:
    """Nobody waits for its ranks in the step."""
    run = Run("pp2_dp2", mode=mode, precision="bf16", frozen=("embed", "layers.0", "layers.1"))
    check(run, weights=2e-2, norm=1e-5)


def not_a_number(mode: str) -> bool:
    """Whether a gradient that is not a number reaches the weights."""
    mesh = Mesh(Layout.parse("dp2"))
    module = nn.Linear(4, 4, dtype=torch.bfloat16)
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    backend = make_backend(MODES[mode], mesh, specs, precision="bf16")
    backend.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    with backend.gradient_scope():
        module(torch.full((1, 4), float("nan"), dtype=torch.bfloat16)).sum().backward()
        backend.after_backward(module.parameters())
        backend.reduce(1.0)
    backend.step()
    backend.teardown()
    return bool(module.weight.isnan().all()) and not bool(module.bias.isnan().any())


@pytest.mark.parametrize("mode", ["0", "1", "2 eager", "1 offloaded"])
def test_what_is_not_a_number_is_not_hidden(mode: str) -> None:
    assert all(run_ranks(not_a_number, 2, mode))


def count_collectives(
    mode: str, micro_batches: int, bucket_bytes: int
) -> dict[str, Counter[tuple[str, int]]]:
    """What the second step of two ranks sends, by its parts: calls by name and number of
    elements."""
    mesh = Mesh(Layout.parse("dp2"))
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    backend = make_backend(MODES[mode], mesh, specs, bucket_bytes=bucket_bytes)
    backend.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    for _ in range(2):
        with backend.gradient_scope():
            with recording() as backward:
                for _ in range(micro_batches):
                    module(torch.randn(2, 16)).sum().backward()
                    backend.after_backward(module.parameters())
            with recording() as reduction:
                backend.reduce(1.0)
        with recording() as norm:
            backend.grad_norm()
            backend.grad_norm()
        with recording() as step:
            backend.clip(max_norm=1.0)
            backend.step()
    backend.teardown()
    recorders = {"backward": backward, "reduction": reduction, "norm": norm, "step": step}
    return {
        part: Counter((call.name, call.numel) for call in recorder.calls)
        for part, recorder in recorders.items()
    }


LAYER, TENSORS = 16 * 16 + 16, 16  # elements of each of 8 layers; tensors in all


@pytest.mark.parametrize("buckets", [1, 8])
@below_3
def test_what_a_step_sends(mode: str, buckets: int) -> None:
    """With reduce=step as much for 16 micro-batches as for one; with micro_batch every bucket in
    each."""
    options = MODES[mode]
    for micro_batches in (1, 16):
        for sent in run_ranks(
            count_collectives, 2, mode, micro_batches, 2**20 if buckets == 1 else 4 * LAYER
        ):
            whole = 8 * LAYER
            parameters = Counter(
                {("all_gather_into_tensor", whole // 2): 1} if options.stage else {}
            )
            assert sent["step"] == parameters
            # The norm is one number: all data-parallel ranks know it at stage 0.
            assert sent["norm"] == Counter({("all_reduce", 1): 1} if options.stage else {})
            counts = Counter(
                {("all_reduce", TENSORS * (2 if options.reduce == "micro_batch" else 1)): 1}
            )
            if options.reduce == "micro_batch":
                function = "reduce" if options.reduce_scatter else "all_reduce"
                numel = sum(calls * size for (_, size), calls in sent["backward"].items())
                assert {name for name, _ in sent["backward"]} == {function}
                assert numel == micro_batches * whole
                assert sent["reduction"] == counts
                continue
            assert not sent["backward"]
            if options.reduce_scatter and buckets == 1:
                assert sent["reduction"] == Counter({("reduce_scatter_tensor", whole): 1}) + counts
            elif options.reduce_scatter:  # bucket by bucket, each element to the rank that keeps it
                assert sent["reduction"] == Counter({("reduce", LAYER): buckets}) + counts
            else:
                assert sum(sent["reduction"].values()) == buckets
                assert (
                    sum(calls * size for (_, size), calls in sent["reduction"].items())
                    == whole + TENSORS
                )


def interrupted(mode: str) -> int:
    """A rank that raises inside the scope sends nothing more; the next step is as if it had not
    been."""
    mesh = Mesh(Layout.parse("dp2"))
    module = nn.Linear(4, 4)
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    backend = make_backend(MODES[mode], mesh, specs)
    backend.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    with recording() as calls, suppress(ZeroDivisionError), backend.gradient_scope():
        if MODES[mode].reduce == "step":
            module(torch.ones(1, 4)).sum().backward()
        raise ZeroDivisionError
    before = module.bias.detach().clone()
    with backend.gradient_scope():
        module(torch.ones(1, 4)).sum().backward()
        backend.after_backward(module.parameters())
        backend.reduce(0.5)
    backend.step()
    assert torch.equal(module.bias, before - 1.0)
    with pytest.raises(RuntimeError, match="not reduced"), backend.gradient_scope():
        pass
    backend.teardown()
    backend.teardown()
    return len(calls.calls)


@below_3
def test_an_error_inside_the_scope_sends_nothing(mode: str) -> None:
    assert run_ranks(interrupted, 2, mode) == [0, 0]


def several_fits(mode: str) -> list[float]:
    """The same module under a new optimizer and a new backend, three times; weights written from
    outside in between."""
    mesh = Mesh(Layout.parse("dp2"))
    module = nn.Linear(4, 3)
    module.weight.no_weight_decay = True  # type: ignore[assignment]  # an attribute of the user's
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    values = []
    for fit in range(3):
        backend = make_backend(MODES[mode], mesh, specs)
        backend.prepare(module, torch.optim.SGD(module.parameters(), lr=0.5))
        with torch.no_grad():
            module.load_state_dict(
                {"weight": torch.full((3, 4), float(fit)), "bias": torch.zeros(3)}
            )
        backend.refresh_master_weights()
        with backend.gradient_scope():
            module(torch.ones(1, 4)).sum().backward()
            backend.after_backward(module.parameters())
            backend.reduce(0.5)
        backend.step()
        backend.teardown()
        values += [module.weight[0, 0].item(), module.weight[2, 3].item()]
        assert vars(module.weight) == {"no_weight_decay": True}
    deepspeed = sys.modules["deepspeed"]
    assert deepspeed.comm.comm.cdb is None and deepspeed.utils.groups.mpu is None
    return values


@below_3
def test_several_fits_in_one_process(mode: str) -> None:
    for values in run_ranks(several_fits, 2, mode):
        assert values == [-0.5, -0.5, 0.5, 0.5, 1.5, 1.5]


def test_a_norm_of_many_elements_is_exact() -> None:
    """On a CPU torch's own norm of a float32 tensor of this size is off by 1e-4."""
    tensor = torch.rand(3_000_001, generator=torch.Generator().manual_seed(0)) + 1
    exact = float(tensor.double().square().sum())
    assert float(squared_norm([tensor], tensor.device)) == pytest.approx(exact, rel=1e-7)
    assert float(squared_norm([], tensor.device)) == 0.0


@pytest.mark.parametrize("first", [True, False], ids=["the first step", "a later step"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_optimizer_skips_where_it_is_told(
    kind: type[torch.optim.Optimizer], first: bool
) -> None:
    """A contract with torch: weights and state stay, and the next step is what it would have
    been."""
    results = []
    for tells in (True, False):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], lr=0.1, fused=True, weight_decay=0.1)
        assert skips_on_device(optimizer)
        for gradient in ([] if first else [1.0]) + ([math.nan] if tells else []) + [2.0]:
            parameter.grad = torch.full((3,), gradient)
            with skipping(optimizer, torch.tensor(float(math.isnan(gradient)))):
                optimizer.step()
            assert not hasattr(optimizer, "found_inf")
        results.append([parameter.detach(), *optimizer.state[parameter].values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_other_optimizers_cannot_be_skipped_on_a_device() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    assert not skips_on_device(torch.optim.AdamW(parameters))
    assert not skips_on_device(torch.optim.SGD(parameters, momentum=0.9, fused=True)), (
        "its first step would set the momenta"
    )
    assert not skips_on_device(torch.optim.Adagrad(parameters, fused=True))


def test_muon_cannot_be_skipped_on_a_device() -> None:
    """Its step of the matrices knows nothing of `found_inf`: it is no AdamW here, although it
    derives from one and AdamW may be fused."""
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.eye(3))
    groups = [
        {"params": [vector], "algorithm": ADAMW, "fused": True},
        {"params": [matrix], "algorithm": MUON, "fused": True},
    ]
    optimizer = MuonWithAdamW(groups, lr=0.1)
    assert not skips_on_device(optimizer)
    for parameter in (vector, matrix):
        parameter.grad = torch.full_like(parameter, math.nan)
    with skipping(optimizer, torch.tensor(1.0)):
        optimizer.step()
    assert matrix.isnan().all(), "why not: it would step the matrices"


def test_the_clip_coefficient_is_torchs() -> None:
    for size in (0.0, 1e-3, 0.5, 7.0, float("inf"), float("nan")):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = torch.full_like(
            parameter, 1.0 if size != size or size == float("inf") else size
        )
        expected = nn.utils.clip_grad_norm_([parameter], 0.5)
        if size < float("inf"):
            assert float(clip_coefficient(expected, 0.5)) * size == pytest.approx(
                parameter.grad.item()
            )
    assert clip_coefficient(torch.tensor(torch.inf), 0.5) == 0.0
    assert clip_coefficient(torch.tensor(torch.nan), 0.5).isnan()
    norms = torch.linspace(0.1, 20.0, 10000, dtype=torch.float64)
    assert clip_coefficient(norms, 0.3).tolist() == [
        min(1.0, 0.3 / (norm + 1e-6)) for norm in norms.tolist()
    ], "rounded once"
