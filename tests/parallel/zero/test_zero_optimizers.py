"""Optimizers other than AdamW: which of them may be sharded, and that those are exact with ZeRO and
tensor parallelism."""

import warnings
from typing import Any

import pytest
import torch
from handmade_gradients import Run, check
from ranks import run_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_3d.app.config.optimizer import check_sharding
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.options.optimizer import ELEMENTWISE
from lightning_3d.options.zero import ZeroOptions
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import replicated
from lightning_3d.parallel.trials.optimizers import (
    is_elementwise,
    needs_closure,
    steps_each_tensor_alone,
)
from lightning_3d.parallel.zero import make_backend
from lightning_3d.parallel.zero.trained import check_optimizer

CPU = torch.device("cpu")


def of(kind: Any, **options: Any) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(3, 2))], **{"lr": 0.1, **options})


class Own(torch.optim.Optimizer):
    """Plain descent along a direction that a derived class computes."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.direction(parameter, parameter.grad), alpha=group["lr"])

    def direction(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class TrustRatio(Own):
    """As in LARS."""

    def direction(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * parameter.norm() / gradient.norm()


class GlobalNorm(Own):
    """A norm over the gradients of all tensors, as LAMB of NVIDIA's apex and Prodigy have."""

    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        super().step(closure)

    def direction(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / self.norm


class Rows(Own):
    """A scale for each row: other elements where the tensor is flat."""

    def direction(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm(dim=-1, keepdim=True)


class Blocks(Own):
    """A scale for each 256 elements, as in states of 8 bits."""

    def direction(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        flat = nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % 256)).view(-1, 256)
        return (
            (flat / flat.abs().amax(1, keepdim=True))
            .flatten()[: gradient.numel()]
            .view_as(gradient)
        )


class Matrices(Own):
    """As Muon: refuses everything else."""

    def direction(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        assert gradient.ndim == 2
        return gradient


class OnOneGroup(Own):
    """Elementwise, but in a group with this option."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = parameter.grad.norm() if group.get("normed") else 1.0
                parameter.sub_(parameter.grad / scale, alpha=group["lr"])


class WithClosure(Own):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class AsksForClosure(Own):
    def step(self, closure: Any = None) -> None:
        closure()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_list_of_elementwise_optimizers(name: str) -> None:
    """A class derived from each is not known by its name, so it is tried."""
    derived = type("Derived", (getattr(torch.optim, name),), {})
    assert is_elementwise(of(getattr(torch.optim, name)), CPU) is True
    assert is_elementwise(of(derived), CPU) is True


class LimitedNorm(torch.optim.SGD):
    """A limit of each tensor's gradient norm, which only large gradients reach."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_((100 / parameter.grad.norm()).clamp(max=1))
        return super().step()


class LimitedRms(torch.optim.Optimizer):
    """Adam whose update is scaled down where the root mean square of gradient / deviation is above
    1, as in StableAdamW."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            squares = state["squares"] = state.get("squares", parameter.grad**2).lerp(
                parameter.grad**2, 0.1
            )
            rms = (parameter.grad**2 / squares).mean().sqrt()
            parameter.sub_(
                parameter.grad / squares.sqrt() / rms.clamp(min=1), alpha=self.param_groups[0]["lr"]
            )


class ByAttribute(torch.optim.SGD):
    """What it does depends on a constructor's argument that is not among its defaults."""

    def __init__(self, params: Any, whole: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        self.whole = whole

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"] if self.whole else ():
            parameter.grad.div_(parameter.grad.norm())
        return super().step()


class Caches(Own):
    """Its options have a list in which it keeps numbers."""

    def __init__(self, params: Any, lr: float) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "cache": [None]})

    def direction(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        cache = self.param_groups[0]["cache"]
        cache[0] = self.param_groups[0]["lr"] if cache[0] is None else cache[0]
        return gradient * cache[0]


def test_options_and_attributes() -> None:
    optimizer = of(Caches)
    assert is_elementwise(optimizer, CPU) is True and optimizer.param_groups[0]["cache"] == [None]
    assert [is_elementwise(of(ByAttribute, whole=whole), CPU) for whole in (True, False)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    "kind",
    [
        TrustRatio,
        Rows,
        Blocks,
        Matrices,
        GlobalNorm,
        LimitedNorm,
        LimitedRms,
        torch.optim.Adafactor,
        torch.optim.Muon,
    ],
)
def test_optimizers_of_whole_tensors(kind: Any) -> None:
    assert is_elementwise(of(kind), CPU) is False
    assert is_elementwise(of(Own), CPU) is True


def test_a_pipeline_needs_an_optimizer_that_steps_each_tensor_alone() -> None:
    """Its stages have different tensors, also where nothing is sharded."""
    kinds = [
        TrustRatio,
        Rows,
        Own,
        torch.optim.Adafactor,
        type("Derived", (torch.optim.Adafactor,), {}),
    ]
    for kind in kinds:
        assert steps_each_tensor_alone(of(kind), CPU) is True
        check_optimizer(of(kind), [], 0, CPU, Layout.parse("pp2"))
    assert steps_each_tensor_alone(of(GlobalNorm), CPU) is False
    check_optimizer(of(GlobalNorm), [], 0, CPU, Layout.parse("dp2_cp2"))
    with pytest.raises(
        ConfigError,
        match=(
            "GlobalNorm computes the update of a tensor from other tensors.* With pp2, no rank"
            " has all"
        ),
    ):
        check_optimizer(of(GlobalNorm), [], 0, CPU, Layout.parse("pp2"))
    said = (
        "AsksForClosure could not step two small matrices, so it is unknown whether pp2 may"
        " train it"
    )
    with pytest.warns(UserWarning, match=said):
        check_optimizer(of(AsksForClosure), [], 0, CPU, Layout.parse("pp2"))


def test_every_parameter_group_is_tried() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [first]}, {"params": [second], "normed": True}]
    assert is_elementwise(OnOneGroup(groups[:1], lr=0.1), CPU) is True
    assert is_elementwise(OnOneGroup(groups, lr=0.1), CPU) is False


def test_a_learning_rate_of_zero_hides_nothing() -> None:
    """As a warm-up leaves it."""
    optimizer = of(TrustRatio)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0 and is_elementwise(optimizer, CPU) is False


def test_trying_changes_nothing() -> None:
    optimizer = of(Own)
    [parameter] = optimizer.param_groups[0]["params"]
    before, random = parameter.detach().clone(), torch.get_rng_state()
    assert is_elementwise(optimizer, CPU)
    assert torch.equal(parameter, before) and parameter.grad is None and not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)


def test_trying_in_a_dry_run() -> None:
    """Where tensors have no values."""
    with FakeTensorMode():
        assert [is_elementwise(of(kind), CPU) for kind in (Own, TrustRatio)] == [True, False]


def test_closures() -> None:
    assert needs_closure(of(torch.optim.LBFGS)) and needs_closure(of(WithClosure))
    assert not any(
        needs_closure(of(getattr(torch.optim, name)))
        for name in (*ELEMENTWISE, "Muon", "Adafactor")
    )
    assert is_elementwise(of(AsksForClosure), CPU) is None


def test_an_optimizer_of_sparse_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match="SparseAdam takes sparse gradients only"):
        check_optimizer(of(torch.optim.SparseAdam), [], 0, CPU, Layout.parse("dp2"))
    with pytest.raises(ConfigError, match="SparseAdam takes sparse gradients only"):
        check_sharding({"_target_": "torch.optim.SparseAdam"}, Layout.parse("dp2"), 0)


def warnings_of(kind: Any) -> list[str]:
    """Warnings of a backend that shards an optimizer."""
    module = nn.Linear(4, 4)
    specs = {name: replicated(name, tuple(p.shape), 1) for name, p in module.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_backend(ZeroOptions(1, "step"), Mesh(Layout.parse("tp1")), specs).prepare(
            module, kind(module.parameters(), lr=0.1)
        )
    return [str(one.message) for one in caught]


def test_an_optimizer_that_cannot_be_tried_is_announced() -> None:
    [found] = run_ranks(warnings_of, 1, AsksForClosure)
    said = (
        "AsksForClosure could not step a small matrix, so it is unknown whether it may be sharded"
        " by zero_stage=1"
    )
    assert any(said in warning for warning in found)
    [found] = run_ranks(warnings_of, 1, Own)
    assert not any("unknown" in warning for warning in found)


def refusal_of(kind: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        warnings_of(kind)
    return str(refused.value)


def test_what_a_backend_refuses() -> None:
    [message] = run_ranks(refusal_of, 1, TrustRatio)
    assert (
        "TrustRatio computes the update of an element from other elements of its tensor." in message
    )
    assert (
        "which zero_stage=1 would shard. Use an elementwise optimizer (AdamW, Adam, NAdam"
        in message
    )
    [message] = run_ranks(refusal_of, 1, WithClosure)
    assert "WithClosure computes the loss several times in a step, by a closure" in message


OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 3e-4, "weight_decay": 0.1, "amsgrad": True},
    "NAdam": {"lr": 3e-4, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 3e-4, "weight_decay": 0.1},
    "Adagrad": {
        "lr": 3e-3,
        "weight_decay": 0.1,
        "initial_accumulator_value": 0.1,
        "lr_decay": 0.01,
    },
    "RMSprop": {"lr": 3e-4, "weight_decay": 0.1, "momentum": 0.9, "centered": True},
    "SGD": {"lr": 3e-3, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
    "Adamax": {"lr": 3e-4, "weight_decay": 0.1},
    "Adadelta": {"lr": 3e-2, "weight_decay": 0.1},
    "ASGD": {"lr": 3e-3, "weight_decay": 0.1, "t0": 3},
    "Rprop": {"lr": 1e-3},
}
LATER = ("Adamax", "Adadelta", "ASGD", "Rprop")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name in LATER else name for name in OPTIONS],
)
def test_optimizers_with_zero_1_and_tp(name: str) -> None:
    """Three parameter groups, with learning rates and a schedule of their own."""
    check(
        Run(layout="tp2_dp2", mode="1", optimizer=name, options=OPTIONS[name]),
        weights=5e-6,
        norm=1e-5,
    )


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("layout", "mode"),
    [("tp2_dp2", "0"), ("pp2_dp2", "2 eager"), ("dp4", "3"), ("tp2_dp2", "1 offloaded")],
)
def test_optimizers_in_other_layouts(name: str, layout: str, mode: str) -> None:
    check(
        Run(layout=layout, mode=mode, optimizer=name, options=OPTIONS[name]),
        weights=5e-6,
        norm=1e-5,
    )


@pytest.mark.full
@pytest.mark.parametrize("mode", ["0", "1", "3"])
def test_adagrad_with_master_weights(mode: str) -> None:
    """It makes its state when it is built, before there are master weights."""
    check(
        Run(
            layout="dp2",
            mode=mode,
            precision="bf16",
            optimizer="Adagrad",
            options=OPTIONS["Adagrad"],
        ),
        weights=2e-2,
        norm=1e-2,
    )
