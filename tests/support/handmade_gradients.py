"""Training with gradients that are made by hand, on the data-parallel backends and on one process.

A known function of parameter, weights, step and micro-batch gives each gradient.
Each rank adds the part that it would see in a real layout.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from lightning_3d.layout import Layout
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec, cut_along, even_range, replicated
from lightning_3d.parallel.zero import make_backend
from lightning_3d.parallel.zero.gradients import clip_coefficient

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
    # AdamW counts the steps of all parameters, and not those in which one has a gradient
    one_count: bool = False
    tensor_scale: bool = False
    shard: int | None = None  # data-parallel ranks that shard; None: all
    overlap_gather: bool = False

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
    """Of one global micro-batch; `use` tells the two uses of the tied embedding apart. In the
    weights' type."""
    noise = _noise(name + use, tuple(weight.shape), step + 1, micro_batch + 1).to(weight.dtype)
    return noise + weight * 0.1


def _noise(name: str, shape: tuple[int, ...], step: int, micro_batch: int) -> Tensor:
    seed = (
        sum((index + 1) * byte for index, byte in enumerate(name.encode())) * 10007
        + step * 101
        + micro_batch
    )
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uses(name: str) -> tuple[str, ...]:
    """A tied embedding gets one gradient as embedding and one as head."""
    return ("", "/head") if name == "embed.weight" else ("",)


def arrives(run: Run, name: str, step: int, micro_batch: int) -> bool:
    """Whether this micro-batch has a gradient for the parameter."""
    if name == "unused":
        return run.wakes is not None and step >= run.wakes
    return (
        not (run.late and name.endswith("down.bias"))
        or micro_batch % Layout.parse(run.layout).dp == 0
    )


def trainable(name: str, run: Run) -> bool:
    return "frozen" not in name and not name.startswith(run.frozen or "-")


def parameter_groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Weights, vectors without weight decay, and a group that only the last layer's norm is in:
    empty on other stages."""
    last = f"layers.{LAYERS - 1}.norm.weight"
    return [
        {"params": [p for name, p in named.items() if p.ndim > 1]},
        {"params": [p for name, p in named.items() if name == last], "lr": 1e-3},
        {
            "params": [p for name, p in named.items() if p.ndim == 1 and name != last],
            "weight_decay": 0.05,
        },
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
    masters = {
        name: nn.Parameter(p.detach().to(exact), requires_grad=p.requires_grad)
        for name, p in named.items()
    }
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
            master.grad = (
                sum(parts[1:], parts[0]) / MICRO_BATCHES if parts and master.requires_grad else None
            )
        gradients = [master.grad for master in masters.values() if master.grad is not None]
        norms.append(float(torch.cat([g.reshape(-1) for g in gradients]).double().norm()))
        if run.max_norm is not None:
            for g in gradients:
                g.mul_(
                    float(
                        clip_coefficient(torch.tensor(norms[-1], dtype=torch.float64), run.max_norm)
                    )
                )
        if run.clip_value is not None:
            nn.utils.clip_grad_value_(masters.values(), run.clip_value)
        for master in masters.values() if run.one_count else ():
            state = optimizer.state[master] or {
                key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")
            }
            optimizer.state[master] = {**state, "step": torch.tensor(float(step))}
        optimizer.step()
        scheduler.step()
        for name, master in masters.items():
            named[name].data.copy_(master.data)
    return {name: master.detach() for name, master in masters.items()}, norms


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
        if (
            name == "embed.weight"
            and self.at["pp"] not in (0, last)
            or name == "unused"
            and self.at["pp"] != last
        ):
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
            return cut_along(
                name,
                shape,
                0,
                [piece],
                tp_replicas=holders,
                tp_grad_sum=holders if share > 1 else (),
            )
        return replicated(name, shape, tp, grad_sum=name.endswith("norm.weight"))

    def groups(self) -> list[tuple[int, ...]]:
        """Process groups that the specifications need, of all ranks."""
        share = max(1, self.layout.tp // HEADS)
        groups = [
            ranks[start : start + share]
            for ranks in self.layout.groups("tp")
            for start in range(0, self.layout.tp, share)
        ]
        return groups + [
            (ranks[0], ranks[-1]) for ranks in self.layout.groups("pp") if len(ranks) > 1
        ]

    def backward(self, step: int, micro_batch: int, use: str) -> None:
        """Add this rank's part of the gradients of one of its micro-batches, of the first or the
        second use of parameters."""
        for spec in self.specs.values():
            parameter = self.named[spec.name]
            canonical = spec.tied_to or spec.name
            if not parameter.requires_grad or use not in uses(canonical):
                continue
            if not arrives(self.run, canonical, step, micro_batch):
                continue
            mine = (
                {"": 0, "/head": self.layout.pp - 1}[use]
                if len(spec.pp_replicas) > 1
                else self.at["pp"]
            )
            if mine == self.at["pp"]:
                self._arrive(spec, parameter, step, micro_batch, canonical, use)

    def _arrive(
        self,
        spec: ShardSpec,
        parameter: nn.Parameter,
        step: int,
        micro_batch: int,
        name: str,
        use: str,
    ) -> None:
        full = torch.zeros(spec.global_shape, dtype=parameter.dtype)
        # elements of other shards stay zero and are cut away again
        spec.paste(parameter.detach(), full)
        arriving = spec.cut(gradient(name, full, step, micro_batch, use))
        if len(spec.tp_grad_sum) > 1:  # parts that add up without rounding: n, -1, -1, ...
            arriving = arriving * (
                len(spec.tp_grad_sum) if spec.tp_grad_sum[0] == self.at["tp"] else -1
            )
        parameter.grad = arriving if parameter.grad is None else parameter.grad + arriving


def train(run: Run) -> dict[str, Any]:
    """Train one rank's shard; returns weights by parameter name, specifications, norms and what was
    counted."""
    layout = Layout.parse(run.layout)
    mesh = Mesh(layout)
    mesh.shard_data(run.shard)
    shard = Shard(run, layout, dist.get_rank())
    mesh.create(shard.groups())
    zero = replace(MODES[run.mode], overlap_gather=run.overlap_gather)
    backend = make_backend(
        zero, mesh, shard.specs, precision=run.precision, bucket_bytes=run.bucket_bytes
    )
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
            backend.reduce(
                torch.tensor(1.0 / MICRO_BATCHES) if run.tensor_scale else 1.0 / MICRO_BATCHES
            )
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
            error = (
                (weight.double() - spec.cut(expected[spec.tied_to or name]).double())
                .abs()
                .max()
                .item()
            )
            assert error <= weights, f"{name}: {error:.2e}"
    assert seen == set(full_shapes())
