"""The data-parallel backends against one process with plain PyTorch.

Gradients are made by hand: a known function of parameter, weights, step and micro-batch, of which each rank adds the
part that it would see in a real layout. So every kind of parameter is there in a model of a few hundred numbers: cut,
cut unevenly, replicated, with partial gradients, tied across stages, frozen, and never used.
"""

import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import recording
from ranks import run_ranks
from sweeps import by_default
from torch import Tensor, nn

from lightning_3d.config.options.zero import ZeroOptions
from lightning_3d.layout import Layout
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec, cut_along, even_range, replicated
from lightning_3d.parallel.zero import make_backend
from lightning_3d.parallel.zero.gradient_norm import clip_coefficient, squared_norm

LAYERS = 4
MICRO_BATCHES = 4  # of the whole world
WIDTH = 6
VOCABULARY = 11
HEADS = 2  # of keys and values


MODES = {
    "0": ZeroOptions(0, "step"),
    "1": ZeroOptions(1, "step"),
    "1 scattered": ZeroOptions(1, "step", reduce_scatter=True),
    "2": ZeroOptions(2, "step"),
    "2 scattered": ZeroOptions(2, "step", reduce_scatter=True),
    "2 eager": ZeroOptions(2, "micro_batch"),
    "2 eager to owners": ZeroOptions(2, "micro_batch", reduce_scatter=True),
    "3": ZeroOptions(3, "step", "step"),
    "3 to owners": ZeroOptions(3, "step", "step", reduce_scatter=True),
    "3 eager": ZeroOptions(3, "micro_batch", "step"),
    "1 offloaded": ZeroOptions(1, "step", offload="optimizer"),
    "2 eager offloaded": ZeroOptions(2, "micro_batch", offload="optimizer"),
    "3 offloaded": ZeroOptions(3, "step", "step", offload="optimizer"),
    "3 eager on host": ZeroOptions(3, "micro_batch", "step", offload="parameters"),
}
COMMON = ("0", "1", "2 eager", "3 eager")  # the others run in the long sweeps
ALL = [mode if mode in COMMON else pytest.param(mode, marks=pytest.mark.full) for mode in MODES]
every_mode = pytest.mark.parametrize("mode", ALL)
below_3 = pytest.mark.parametrize("mode", [mode for mode, options in MODES.items() if options.stage < 3])


@dataclass(frozen=True)
class Run:
    """One training run: everything that ranks and reference have in common."""

    layout: str = "tp1"
    mode: str = "0"
    precision: str = "fp32"
    steps: int = 10
    max_norm: float | None = 0.5
    clip_value: float | None = None
    bucket_bytes: int = 400
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 3e-4, "weight_decay": 0.1})
    frozen: tuple[str, ...] = ()  # beginnings of names
    late: bool = False  # only the first data-parallel rank has gradients for "down.bias"
    wakes: int | None = None  # step from which on "unused" is used
    tensor_scale: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return {"fp64": torch.float64, "bf16": torch.bfloat16}.get(self.precision, torch.float32)


def full_shapes() -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of the model."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        shapes[f"layers.{layer}.norm.weight"] = (WIDTH,)
        shapes[f"layers.{layer}.up.weight"] = (8, WIDTH)
        shapes[f"layers.{layer}.key.weight"] = (HEADS * 3, WIDTH)
        shapes[f"layers.{layer}.down.bias"] = (WIDTH,)
        shapes[f"layers.{layer}.frozen"] = (3,)
    shapes["unused"] = (5,)
    return shapes


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    return _noise(name, shape, 0, 0)


def gradient(name: str, weight: Tensor, step: int, micro_batch: int, use: str = "") -> Tensor:
    """Of one global micro-batch; `use` tells the two uses of the tied embedding apart. In the weights' type."""
    noise = _noise(name + use, tuple(weight.shape), step + 1, micro_batch + 1).to(weight.dtype)
    return noise + weight * 0.1


def _noise(name: str, shape: tuple[int, ...], step: int, micro_batch: int) -> Tensor:
    seed = sum((index + 1) * byte for index, byte in enumerate(name.encode())) * 10007 + step * 101 + micro_batch
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uses(name: str) -> tuple[str, ...]:
    """A tied embedding gets one gradient as embedding and one as head."""
    return ("", "/head") if name == "embed.weight" else ("",)


def arrives(run: Run, name: str, step: int, micro_batch: int) -> bool:
    """Whether this micro-batch has a gradient for the parameter."""
    if name == "unused":
        return run.wakes is not None and step >= run.wakes
    return not (run.late and name.endswith("down.bias")) or micro_batch % Layout.parse(run.layout).dp == 0


def trainable(name: str, run: Run) -> bool:
    return "frozen" not in name and not name.startswith(run.frozen or "-")


def parameter_groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Weights, vectors without weight decay, and a group that only the last layer's norm is in: empty on other
    stages."""
    last = f"layers.{LAYERS - 1}.norm.weight"
    return [
        {"params": [p for name, p in named.items() if p.ndim > 1]},
        {"params": [p for name, p in named.items() if name == last], "lr": 1e-3},
        {"params": [p for name, p in named.items() if p.ndim == 1 and name != last], "weight_decay": 0.05},
    ]


def make_optimizer(run: Run, named: dict[str, nn.Parameter]) -> tuple[Any, Any]:
    optimizer = getattr(torch.optim, run.optimizer)(parameter_groups(named), **run.options)
    factors = [lambda step: 1.0 / (step + 1), lambda step: 0.9**step, lambda step: 1.0]
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factors)


def reference(run: Run) -> tuple[dict[str, Tensor], list[float]]:
    """Final weights (master weights for bf16) and gradient norms of one process."""
    named = {
        name: nn.Parameter(initial(name, shape).to(run.dtype), requires_grad=trainable(name, run))
        for name, shape in full_shapes().items()
    }
    exact = run.dtype if run.dtype != torch.bfloat16 else torch.float32
    masters = {name: nn.Parameter(p.detach().to(exact), requires_grad=p.requires_grad) for name, p in named.items()}
    optimizer, scheduler = make_optimizer(run, masters)
    norms = []
    for step in range(run.steps):
        for name, master in masters.items():
            parts = [
                gradient(name, named[name].detach(), step, micro_batch, use).to(exact)
                for micro_batch in range(MICRO_BATCHES)
                for use in uses(name)
                if arrives(run, name, step, micro_batch)
            ]
            master.grad = sum(parts[1:], parts[0]) / MICRO_BATCHES if parts and master.requires_grad else None
        gradients = [master.grad for master in masters.values() if master.grad is not None]
        norms.append(float(torch.cat([g.reshape(-1) for g in gradients]).double().norm()))
        if run.max_norm is not None:
            for g in gradients:
                g.mul_(clip_coefficient(norms[-1], run.max_norm))
        if run.clip_value is not None:
            nn.utils.clip_grad_value_(masters.values(), run.clip_value)
        optimizer.step()
        scheduler.step()
        for name, master in masters.items():
            named[name].data.copy_(master.data)
    return {name: master.detach() for name, master in masters.items()}, norms


# What follows runs in the ranks.


class Shard:
    """One rank's part of the model."""

    def __init__(self, run: Run, layout: Layout, rank: int) -> None:
        self.run = run
        self.at = layout.coordinates(rank)
        self.layout = layout
        self.module = nn.Module()
        self.specs: dict[str, ShardSpec] = {}
        self.named: dict[str, nn.Parameter] = {}
        per_stage = LAYERS // layout.pp
        for name, shape in full_shapes().items():
            layer = int(name.split(".")[1]) if name.startswith("layers.") else None
            if layer is None or layer // per_stage == self.at["pp"]:
                self._add(name, shape)

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        last = self.layout.pp - 1
        if name == "embed.weight" and self.at["pp"] not in (0, last) or name == "unused" and self.at["pp"] != last:
            return
        spec = self._spec(name, shape)
        if name == "embed.weight" and last > 0:
            spec = replace(spec, pp_replicas=(0, last))
            if self.at["pp"] == last:
                spec = spec.renamed("head.weight", tied_to="embed.weight")
        value = spec.cut(initial(name, shape)).to(self.run.dtype)
        parameter = nn.Parameter(value, requires_grad=trainable(name, self.run))
        self.module.register_parameter(spec.name.replace(".", "_"), parameter)
        self.specs[spec.name.replace(".", "_")] = spec
        self.named[spec.name] = parameter

    def _spec(self, name: str, shape: tuple[int, ...]) -> ShardSpec:
        tp, own = self.layout.tp, self.at["tp"]
        if tp > 1 and name.endswith(("embed.weight", "up.weight")):
            return cut_along(name, shape, 0, [even_range(shape[0], tp, own)], tp_replicas=(own,))
        if tp > 1 and name.endswith("key.weight"):
            share = max(1, tp // HEADS)  # ranks that hold the same head
            first = own // share * share
            holders = tuple(range(first, first + share))
            heads = max(1, HEADS // tp)
            piece = (first // share * heads * 3, heads * 3)
            return cut_along(name, shape, 0, [piece], tp_replicas=holders, tp_grad_sum=holders if share > 1 else ())
        return replicated(name, shape, tp, grad_sum=name.endswith("norm.weight"))

    def groups(self) -> list[tuple[int, ...]]:
        """Process groups that the specifications need, of all ranks."""
        share = max(1, self.layout.tp // HEADS)
        groups = [
            ranks[start : start + share]
            for ranks in self.layout.groups("tp")
            for start in range(0, self.layout.tp, share)
        ]
        return groups + [(ranks[0], ranks[-1]) for ranks in self.layout.groups("pp") if len(ranks) > 1]

    def backward(self, step: int, micro_batch: int, use: str) -> None:
        """Add this rank's part of the gradients of one of its micro-batches, of the first or the second use of
        parameters."""
        for spec in self.specs.values():
            parameter = self.named[spec.name]
            canonical = spec.tied_to or spec.name
            if not parameter.requires_grad or use not in uses(canonical):
                continue
            if not arrives(self.run, canonical, step, micro_batch):
                continue
            mine = {"": 0, "/head": self.layout.pp - 1}[use] if len(spec.pp_replicas) > 1 else self.at["pp"]
            if mine == self.at["pp"]:
                self._arrive(spec, parameter, step, micro_batch, canonical, use)

    def _arrive(
        self, spec: ShardSpec, parameter: nn.Parameter, step: int, micro_batch: int, name: str, use: str
    ) -> None:
        full = torch.zeros(spec.global_shape, dtype=parameter.dtype)
        spec.paste(parameter.detach(), full)  # elements of other shards stay zero and are cut away again
        arriving = spec.cut(gradient(name, full, step, micro_batch, use))
        if len(spec.tp_grad_sum) > 1:  # parts that add up without rounding: n, -1, -1, ...
            arriving = arriving * (len(spec.tp_grad_sum) if spec.tp_grad_sum[0] == self.at["tp"] else -1)
        parameter.grad = arriving if parameter.grad is None else parameter.grad + arriving


def train(run: Run) -> dict[str, Any]:
    """Train one rank's shard; returns weights by parameter name, specifications, norms and what was counted."""
    layout = Layout.parse(run.layout)
    mesh = Mesh(layout)
    shard = Shard(run, layout, dist.get_rank())
    mesh.create(shard.groups())
    backend = make_backend(MODES[run.mode], mesh, shard.specs, precision=run.precision, bucket_bytes=run.bucket_bytes)
    backend.shard(shard.module, [], torch.device("cpu"), lambda block: True)
    optimizer, scheduler = make_optimizer(run, shard.named)
    assert backend.prepare(shard.module, optimizer) is optimizer
    own = [m for m in range(MICRO_BATCHES) if m % layout.dp == shard.at["dp"]]
    norms = []
    for step in range(run.steps):
        with backend.gradient_scope():
            with backend.parameters_in_use():
                for micro_batch in own:
                    for use in ("", "/head"):
                        shard.backward(step, micro_batch, use)
                        backend.after_backward(shard.module.parameters())
            backend.reduce(torch.tensor(1.0 / MICRO_BATCHES) if run.tensor_scale else 1.0 / MICRO_BATCHES)
        norms.append(backend.grad_norm())
        if run.max_norm is not None or run.clip_value is not None:
            backend.clip(max_norm=run.max_norm, value=run.clip_value)
        backend.step()
        scheduler.step()
    backend.make_whole()
    result = {
        "weights": {name: parameter.detach().clone() for name, parameter in shard.named.items()},
        "specs": {spec.name: spec for spec in shard.specs.values()},
        "norms": norms,
        "rates": [group["lr"] for group in optimizer.param_groups],
    }
    backend.teardown()
    mesh.destroy()
    return result


# Tests.


def check(run: Run, *, weights: float, norm: float, world_size: int | None = None) -> None:
    """Train in one process and over ranks, and compare every weight and every norm."""
    expected, norms = reference(run)
    results = run_ranks(train, world_size or Layout.parse(run.layout).world_size, run)
    seen = set()
    for result in results:
        assert result["norms"] == results[0]["norms"], "a norm differs between ranks"
        assert result["norms"] == pytest.approx(norms, rel=norm)
        assert result["rates"] == results[0]["rates"]
        for name, weight in result["weights"].items():
            spec = result["specs"][name]
            seen.add(spec.tied_to or name)
            error = (weight.double() - spec.cut(expected[spec.tied_to or name]).double()).abs().max().item()
            assert error <= weights, f"{name}: {error:.2e}"
    assert seen == set(full_shapes())


LAYOUTS = ["tp1", "dp2", "dp4", "tp2", "tp4", "pp2", "tp2_dp2", "pp2_dp2", "tp2_pp2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stage_0_in_double_precision(layout: str) -> None:
    check(Run(layout, precision="fp64"), weights=1e-12, norm=1e-12)


@pytest.mark.parametrize("layout", ["dp4", "tp2_pp2", "pp2_dp2"])
def test_stage_0_in_single_precision(layout: str) -> None:
    check(Run(layout), weights=1e-6, norm=1e-6)


@pytest.mark.parametrize("layout", by_default(LAYOUTS, 1, 3, 7, 8))
@pytest.mark.parametrize("mode", ALL[1:])
def test_sharded_in_single_precision(layout: str, mode: str) -> None:
    check(Run(layout, mode=mode), weights=5e-5, norm=1e-5)


@pytest.mark.parametrize("layout", by_default(["tp1", "dp4", "tp2_dp2", "pp2_dp2"], 2, 3))
@every_mode
def test_bf16_with_single_precision_masters(layout: str, mode: str) -> None:
    """Against float32 masters and sums in one process; bf16 weights alone would lose most of these updates."""
    run = Run(layout, mode=mode, precision="bf16", steps=20)
    expected, norms = reference(run)
    equal = total = 0
    for result in run_ranks(train, Layout.parse(layout).world_size, run):
        assert result["norms"] == pytest.approx(norms, rel=1e-5)
        for name, weight in result["weights"].items():
            spec = result["specs"][name]
            assert weight.dtype == torch.bfloat16
            equal += int((weight == spec.cut(expected[spec.tied_to or name]).to(torch.bfloat16)).sum())
            total += weight.numel()
    assert equal >= 0.995 * total  # a sum in another order may round a weight to its neighbour


@pytest.mark.parametrize("mode", by_default(list(MODES), *(place for place, mode in enumerate(MODES) if mode in ("0", "3 eager"))))
@pytest.mark.parametrize(
    "change",
    [
        {"max_norm": None, "clip_value": 0.1},
        {"max_norm": None},
        {"max_norm": 1e9},
        {"bucket_bytes": 2**30, "tensor_scale": True},
        {"late": True},
        {"optimizer": "SGD", "options": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}},
        {"optimizer": "SGD", "options": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}, "wakes": 5},
        {"optimizer": "Adam", "options": {"lr": 3e-4, "amsgrad": True}},
        {"frozen": ("layers.0", "layers.1")},
        {"frozen": ("embed", "layers.0", "layers.1")},
        {"frozen": ("layers.2", "layers.3", "unused")},
    ],
    ids=str,
)
def test_options(mode: str, change: dict[str, Any]) -> None:
    """By value, without clipping, one bucket, gradients on one rank or in some steps only, other optimizers, frozen
    parameters and whole stages."""
    check(Run("pp2_dp2", mode=mode, **change), weights=5e-5, norm=1e-5)


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


def count_collectives(mode: str, micro_batches: int, bucket_bytes: int) -> dict[str, Counter[tuple[str, int]]]:
    """What a step of two ranks sends, by its parts: calls by name and number of elements."""
    mesh = Mesh(Layout.parse("dp2"))
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    backend = make_backend(MODES[mode], mesh, specs, bucket_bytes=bucket_bytes)
    backend.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
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
    return {part: Counter((call.name, call.numel) for call in recorder.calls) for part, recorder in recorders.items()}


LAYER, TENSORS = 16 * 16 + 16, 16  # elements of each of 8 layers; tensors in all


@pytest.mark.parametrize("buckets", [1, 8])
@below_3
def test_what_a_step_sends(mode: str, buckets: int) -> None:
    """With reduce=step as much for 16 micro-batches as for one; with micro_batch every bucket in each."""
    options = MODES[mode]
    for micro_batches in (1, 16):
        for sent in run_ranks(count_collectives, 2, mode, micro_batches, 2**20 if buckets == 1 else 4 * LAYER):
            whole = 8 * LAYER
            parameters = Counter({("all_gather_into_tensor", whole // 2): 1} if options.stage else {})
            assert sent["step"] == parameters
            # The norm is one number: all data-parallel ranks know it at stage 0.
            assert sent["norm"] == Counter({("all_reduce", 1): 1} if options.stage else {})
            counts = Counter({("all_reduce", TENSORS * (2 if options.reduce == "micro_batch" else 1)): 1})
            if options.reduce == "micro_batch":
                function = "reduce" if options.reduce_scatter else "all_reduce"
                numel = sum(calls * size for (_, size), calls in sent["backward"].items())
                assert {name for name, _ in sent["backward"]} == {function}
                assert numel == micro_batches * whole
                assert sent["reduction"] == counts
                continue
            assert not sent["backward"]
            if options.reduce_scatter:
                assert sent["reduction"] == Counter({("reduce_scatter_tensor", whole): 1}) + counts
            else:
                assert sum(sent["reduction"].values()) == buckets
                assert sum(calls * size for (_, size), calls in sent["reduction"].items()) == whole + TENSORS


def interrupted(mode: str) -> int:
    """A rank that raises inside the scope sends nothing more; the next step is as if it had not been."""
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
    """The same module under a new optimizer and a new backend, three times; weights written from outside in between."""
    mesh = Mesh(Layout.parse("dp2"))
    module = nn.Linear(4, 3)
    module.weight.no_weight_decay = True  # type: ignore[assignment]  # an attribute of the user's
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    values = []
    for fit in range(3):
        backend = make_backend(MODES[mode], mesh, specs)
        backend.prepare(module, torch.optim.SGD(module.parameters(), lr=0.5))
        with torch.no_grad():
            module.load_state_dict({"weight": torch.full((3, 4), float(fit)), "bias": torch.zeros(3)})
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


def test_the_clip_coefficient_is_torchs() -> None:
    for size in (0.0, 1e-3, 0.5, 7.0, float("inf"), float("nan")):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = torch.full_like(parameter, 1.0 if size != size or size == float("inf") else size)
        expected = nn.utils.clip_grad_norm_([parameter], 0.5)
        if size < float("inf"):
            assert clip_coefficient(float(expected), 0.5) * size == pytest.approx(parameter.grad.item())
    assert clip_coefficient(float("inf"), 0.5) == 0.0
    assert clip_coefficient(float("nan"), 0.5) != clip_coefficient(float("nan"), 0.5)
