"""The optimizers and schedules that a configuration names: closed formulas, classes of torch, and
what is refused."""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from alphabet_fits import MODEL, OPTIMIZER
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR

from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.config.optimizer import check_optimizer, check_sharding
from lightning_3d.app.config.parameter_groups import matches, matching, nearest, read_groups
from lightning_3d.app.training.module import CausalLM
from lightning_3d.app.training.optimizers import decay_of, make_optimizer
from lightning_3d.app.training.parameter_groups import NamedGroup
from lightning_3d.app.training.schedules import lr_factor, make_scheduler
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.options.optimizer import ELEMENTWISE
from lightning_3d.strategy import Lightning3DStrategy

# Schedules


def factors(steps: int, total: int, **config: Any) -> list[float]:
    factor = lr_factor(config, total)
    return [factor(step) for step in range(steps)]


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: 0.5 + 0.5 * math.cos(math.pi * p),
    "sqrt": lambda p: 1 - p**0.5,
}


@pytest.mark.parametrize("shape", [*SHAPES, None])
def test_warmup_stable_decay(shape: str | None) -> None:
    """5 steps of warm-up, 45 constant ones, 50 of decay; then it stays at the end."""
    options = {
        "name": "wsd",
        "warmup_steps": 5,
        "cooldown_steps": 50,
        "cooldown_shape": shape,
        "min_lr_ratio": 0.2,
    }
    expected = (
        [0.2, 0.4, 0.6, 0.8, 1.0]
        + [1.0] * 45
        + [0.2 + 0.8 * SHAPES[shape or "linear"](i / 50) for i in range(51)]
        + [0.2] * 9
    )
    assert factors(110, 100, **options) == pytest.approx(expected)
    assert factors(110, 1000, **options, decay_steps=100) == pytest.approx(expected)


def test_warmup_stable_decay_without_a_plateau() -> None:
    assert factors(5, 4, name="wsd", warmup_steps=2, cooldown_steps=2) == pytest.approx(
        [0.5, 1, 1, 0.5, 0]
    )
    with pytest.raises(
        ConfigError,
        match="a warm-up of 3 steps and a cooldown of 2 steps do not fit into the 4 steps",
    ):
        lr_factor({"name": "wsd", "warmup_steps": 3, "cooldown_steps": 2}, 4)
    with pytest.raises(ConfigError, match=r"the run has no end. Set trainer.max_steps or"):
        lr_factor({"name": "wsd", "cooldown_steps": 2}, math.inf)


def test_inverse_square_root_is_that_of_transformers() -> None:
    """Transformers begins its warm-up at 0, this package at 1 / warmup_steps."""
    from transformers import get_inverse_sqrt_schedule

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    theirs = get_inverse_sqrt_schedule(optimizer, num_warmup_steps=10).lr_lambdas[0]
    ours = lr_factor({"name": "inverse_sqrt", "warmup_steps": 10}, math.inf)
    assert [ours(step) for step in range(9)] == pytest.approx(
        [theirs(step + 1) for step in range(9)]
    )
    assert [ours(step) for step in range(10, 500)] == pytest.approx(
        [theirs(step) for step in range(10, 500)]
    )
    assert ours(1000) == pytest.approx(0.1)
    assert (
        lr_factor({"name": "inverse_sqrt", "warmup_steps": 10, "min_lr_ratio": 0.25}, math.inf)(
            1000
        )
        == 0.25
    )


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (
            {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5},
            lambda o: ExponentialLR(o, 0.5),
        ),
        (
            {
                "_target_": "torch.optim.lr_scheduler.CosineAnnealingLR",
                "T_max": 5,
                "_partial_": True,
            },
            lambda o: CosineAnnealingLR(o, 5),
        ),
        (
            {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 2.0, "total_steps": 9},
            lambda o: OneCycleLR(o, 2.0, 9),
        ),
        ({"name": "constant", "warmup_steps": 0}, lambda o: LambdaLR(o, lambda step: 1.0)),
    ],
    ids=["exponential", "cosine", "one_cycle", "constant"],
)
def test_schedules_of_torch(config: dict[str, Any], same: Any) -> None:
    rates = []
    for make in (lambda o: make_scheduler(o, config, math.inf), same):
        optimizer = torch.optim.SGD(
            [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [], "lr": 0.5}],
            lr=1.0,
            momentum=0.9,
        )
        scheduler = make(optimizer)
        rates.append([])
        for _ in range(8):
            rates[-1] += [group["lr"] for group in optimizer.param_groups]
            optimizer.step()
            scheduler.step()
    assert rates[0] == rates[1]


SCHEDULER_REFUSALS = [
    ({"name": "wsd"}, "cooldown_steps must be a number of at least 2, .*; got None"),
    (
        {"name": "wsd", "cooldown_steps": 1},
        "cooldown_steps must be a number of at least 2, because the first step .*; got 1",
    ),
    (
        {"name": "wsd", "cooldown_steps": 5, "cooldown_shape": "sqr"},
        "cooldown_shape must be linear, cosine or sqrt; got 'sqr'. Did",
    ),
    (
        {"name": "cosine", "cooldown_steps": 5},
        "cooldown_steps is an option of wsd only; got 5 with cosine",
    ),
    ({"name": "inverse_sqrt"}, "warmup_steps must be a number of at least 1 with inverse_sqrt"),
    (
        {"name": "inverse_sqrt", "warmup_steps": 5, "decay_steps": 9},
        "decay_steps is not an option of inverse_sqrt",
    ),
    (
        {"_target_": "torch.optim.lr_scheduler.StepLR", "name": "cosine"},
        r"_target_ and also name,.* ~optimizer.scheduler \+optimizer",
    ),
    ({"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, "needs a validation loss"),
]


@pytest.mark.parametrize(("scheduler", "message"), SCHEDULER_REFUSALS, ids=str)
def test_schedules_that_cannot_work(scheduler: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_optimizer({**OPTIMIZER, "scheduler": scheduler})


def test_schedules_of_torch_that_cannot_be_made() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    for config, message in (
        (
            {"_target_": "torch.optim.lr_scheduler.StepLR"},
            "Cannot create optimizer.scheduler .*step_size",
        ),
        (
            {"_target_": "torch.optim.SGD"},
            "optimizer.scheduler must name a class that is a LRScheduler; got torch.optim.SGD",
        ),
        ({"_target_": "torch.optim.lr_scheduler.StpLR"}, "Cannot create optimizer.scheduler"),
        ({"_target_": "os.system"}, "names code of os, which a configuration may not run"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_scheduler(optimizer, config, 10)


# Optimizers by their class

NAMES = (
    "AdamW",
    "Adam",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "Adagrad",
    "ASGD",
    "RMSprop",
    "Rprop",
    "SGD",
    "Adafactor",
)


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.sin(torch.arange(parameter.numel()) * (step + 1.0)).view_as(
                parameter
            )
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_by_its_class(name: str) -> None:
    file = yaml.safe_load((conf_folder() / "optimizer" / "torch.yaml").read_text())
    config = {
        **file,
        "_target_": f"torch.optim.{name}",
        "lr": 0.01,
        "weight_decay": 0 if name == "Rprop" else 0.1,
    }
    check_optimizer(config)
    ours, theirs = ([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))] for _ in range(2))
    groups = [
        NamedGroup(frozenset({"a"}), {"weight_decay": decay_of(config)}),
        NamedGroup(frozenset({"b"}), {"weight_decay": 0.0}),
    ]
    made = make_optimizer(config, dict(zip("ab", ours, strict=True)), groups)
    own = {} if name == "Rprop" else {"weight_decay": 0.1}
    same = getattr(torch.optim, name)(
        [{"params": [theirs[0]], **own}, {"params": [theirs[1]], **dict.fromkeys(own, 0.0)}],
        lr=0.01,
    )
    assert type(made) is type(same)
    for one, other in zip(stepped(made, ours), stepped(same, theirs), strict=True):
        assert torch.equal(one, other)


def test_arguments_of_a_class() -> None:
    config = {
        "_target_": "torch.optim.NAdam",
        "_partial_": True,
        "lr": 0.1,
        "betas": [0.8, 0.9],
        "momentum_decay": 0.01,
    }
    parameter = nn.Parameter(torch.ones(2, 2))
    [group] = make_optimizer(
        config, {"a": parameter}, [NamedGroup(frozenset("a"), {"weight_decay": 0.0})]
    ).param_groups
    assert (group["lr"], group["betas"], group["momentum_decay"]) == (0.1, (0.8, 0.9), 0.01)


def test_the_decay_of_a_class_is_its_default() -> None:
    assert decay_of({"_target_": "torch.optim.AdamW", "weight_decay": None}) == 0.01
    assert decay_of({"_target_": "torch.optim.AdamW", "weight_decay": 0}) == 0.0
    assert decay_of({"_target_": "torch.optim.Rprop"}) == 0.0
    with pytest.raises(
        ConfigError,
        match=r"torch.optim.Rprop has no weight decay. Set optimizer.weight_decay=0; got 0.1",
    ):
        decay_of({"_target_": "torch.optim.Rprop", "weight_decay": 0.1})
    groups = [{"pattern": "*.bias", "weight_decay": 0}, {"pattern": "*", "weight_decay": 0.1}]
    with pytest.raises(
        ConfigError,
        match=(
            r"torch.optim.Rprop has no weight decay. Set optimizer.groups\[1\].weight_decay=0;"
            r" got 0.1"
        ),
    ):
        decay_of({"_target_": "torch.optim.Rprop", "groups": groups})
    assert decay_of({"_target_": "torch.optim.Rprop", "groups": groups[:1]}) == 0.0


SCHEDULES = "torch.optim.lr_scheduler"
CLASS_REFUSALS = [
    (
        {"_target_": "torch.optim.NAdam", "momentum": 0.9},
        "torch.optim.NAdam has no argument 'momentum'.*Did you mean",
    ),
    (
        {"_target_": "torch.optim.NAdam", "betas": [2, 2]},
        r"Cannot create optimizer \(torch.optim.NAdam\): Invalid beta",
    ),
    (
        {"_target_": "torch.optim.NAdamm"},
        r"Cannot create optimizer \(torch.optim.NAdamm\): .*\. Did you mean \"NAdam\"\?",
    ),
    (
        {"_target_": "torch.optim.lr_scheduler.StepLR"},
        "optimizer must name a class that is a Optimizer; got",
    ),
    ({"_target_": "os.system"}, "names code of os, which a configuration may not run"),
    (
        {"_target_": "torch.optim.SGD", "name": "sgd"},
        "optimizer has both name=sgd and _target_=torch.optim.SGD",
    ),
    (
        {"_target_": "torch.optim.SGD", "momentum": {"_target_": "a.b"}},
        "optimizer.momentum must be a plain value",
    ),
    (
        {**OPTIMIZER, "scheduler": {"_target_": f"{SCHEDULES}.ExponentiaLR", "gamma": 0.9}},
        'scheduler .*\\. Did you mean "ExponentialLR"',
    ),
    (
        {"_target_": "torch.optim.SGD", "scheduler": {"_target_": f"{SCHEDULES}.StepLR"}},
        "Cannot create optimizer.scheduler .*step_size",
    ),
]


@pytest.mark.parametrize(("config", "message"), CLASS_REFUSALS, ids=str)
def test_classes_that_cannot_be_used(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CausalLM(MODEL, {"lr": 0.1, **config})


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "LBFGS", *ELEMENTWISE])
def test_known_names_are_refused_before_ranks_start(name: str) -> None:
    config = {"_target_": f"torch.optim.{name}"}
    for layout, zero, by in (
        ("tp2_pp2_dp2", 1, "tp2 and zero_stage=1"),
        ("tp2", 0, "tp2"),
        ("dp2", 2, "zero_stage=2"),
        ("pp2_dp2", 0, ""),
    ):
        try:
            check_sharding(config, Layout.parse(layout), zero)
            message = ""
        except ConfigError as error:
            message = str(error)
        if name == "LBFGS":
            assert "LBFGS computes the loss several times in a step, by a closure" in message
        elif name not in ELEMENTWISE and by:
            assert (
                f"It needs whole weight matrices, which {by} would shard. Use an elementwise"
                " optimizer (AdamW, Adam," in message
            )
        else:
            assert message == ""


# Patterns of groups

LAYERS = [
    f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in range(3) for kind in "qkvo"
]
LLAMA = ["model.embed_tokens.weight", *LAYERS, "model.norm.weight"]


def test_patterns() -> None:
    assert [name for name in LLAMA if matches("model.layers.[02].*.q_proj.*", name)] == [
        LLAMA[1],
        LLAMA[9],
    ]
    assert [name for name in LLAMA if matches(r"re:model\.(embed|norm).*", name)] == [
        LLAMA[0],
        LLAMA[-1],
    ]
    assert not any(
        matches("norm", name) or matches("re:norm", name) or matches("*.NORM.*", name)
        for name in LLAMA
    )
    assert nearest("*.v_prj.weight", LLAMA)[0] == "model.layers.0.self_attn.v_proj.weight"
    assert nearest(r"re:embed_token\.weight", LLAMA)[0] == "model.embed_tokens.weight"


def test_groups_of_a_smaller_model() -> None:
    groups = [
        {"pattern": "model.layers.30.*", "lr": 1},
        {"pattern": "*.q_proj.*", "lr": 1},
        {"pattern": "*.0.*.q_proj.*", "lr": 2},
    ]
    assert matching(groups, [[name] for name in LLAMA]) == [groups[1]]
    assert matching(None, [[name] for name in LLAMA]) == []


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("*.bias", "optimizer.groups must be a list, for example .*; got '\\*.bias'"),
        (["*.bias"], r"optimizer.groups\[0\] must be a mapping, for example .*; got '\*.bias'"),
        ([{"lr": 1}], r"optimizer.groups\[0\].pattern must be a pattern .*; got None"),
        (
            [{"pattern": "*"}],
            r"optimizer.groups\[0\] changes nothing. Give it lr, lr_scale or weight_decay",
        ),
        ([{"pattern": "*", "lr": 1, "lr_scale": 1}], "has both lr and lr_scale"),
        (
            [{"pattern": "*", "lr": -1}],
            r"optimizer.groups\[0\].lr must be a number of at least 0; got -1",
        ),
        ([{"pattern": "*", "lr_scal": 1}], "no option 'lr_scal'.* Did you mean \"lr_scale\""),
        ([{"pattern": "re:(", "lr": 1}], '"re:\\(" is not a regular expression: '),
    ],
    ids=str,
)
def test_groups_that_cannot_work(groups: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_groups(groups)


class Extended(CausalLM):
    """Adds a parameter to the built model."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.scale = nn.Parameter(torch.ones(1))


def test_parameters_that_are_in_no_group() -> None:
    causal_lm = Extended(MODEL, {**OPTIMIZER, "scheduler": None})
    causal_lm.configure_model()
    with pytest.raises(
        ConfigError,
        match=(
            r"1 trained parameter would be in no group of the optimizer, for example scale\."
            r" .*group_param"
        ),
    ):
        causal_lm.configure_optimizers()
    causal_lm.group_parameters()
    groups = causal_lm.configure_optimizers().param_groups
    assert (
        sum(parameter is causal_lm.model.scale for group in groups for parameter in group["params"])
        == 1
    )


def test_the_schedule_of_cpu_adamw_is_tried_without_compiling_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "lightning_3d.app.training.optimizers.import_deepspeed",
        lambda device: pytest.fail("compiles"),
    )
    CausalLM(
        MODEL,
        {
            **OPTIMIZER,
            "name": "cpu_adamw",
            "scheduler": {"_target_": f"{SCHEDULES}.ExponentialLR", "gamma": 0.9},
        },
    )


def test_a_schedule_scales_the_learning_rate_of_each_group() -> None:
    config = {
        **OPTIMIZER,
        "groups": [{"pattern": "*.q_proj.*", "lr": 0.5}, {"pattern": "*norm*", "lr_scale": 3}],
    }
    causal_lm = CausalLM(MODEL, config)
    causal_lm.configure_model()
    causal_lm.trainer = SimpleNamespace(estimated_stepping_batches=100)  # type: ignore[assignment]
    found = causal_lm.configure_optimizers()
    groups = [
        (group["initial_lr"], group["lr"], group["weight_decay"], len(group["params"]))
        for group in found["optimizer"].param_groups
    ]
    expected = [(0.01, 0.1, 13), (0.01, 0.0, 1), (0.5, 0.1, 2), (0.03, 0.0, 5)]
    assert groups == [(lr, pytest.approx(lr / 4), decay, count) for lr, decay, count in expected]


# Fused kernels

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")
BY_CLASS = ["Adam", "AdamW", "SGD", "Adagrad"]


def made_for(
    config: dict[str, Any], steps_on: torch.device | None, dtype: torch.dtype = torch.float32
) -> Any:
    """`fused` and `foreach` of an optimizer that steps on a device."""
    group = NamedGroup(
        frozenset("a"),
        {} if config.get("_target_", "").endswith("Rprop") else {"weight_decay": 0.0},
    )
    made = make_optimizer(
        {"lr": 0.1, **config}, {"a": nn.Parameter(torch.ones(2, 2, dtype=dtype))}, [group], steps_on
    )
    return made.param_groups[0].get("fused"), made.param_groups[0].get("foreach")


@pytest.mark.parametrize(
    "config",
    [
        {"name": "adamw"},
        {"name": "sgd", "momentum": 0.9},
        *({"_target_": f"torch.optim.{name}"} for name in BY_CLASS),
    ],
    ids=str,
)
def test_an_optimizer_is_fused_on_a_gpu_unless_it_is_told(config: dict[str, Any]) -> None:
    assert (
        made_for({**config, "fused": None}, GPU)
        == made_for(config, GPU, torch.bfloat16)
        == (True, None)
    )
    assert made_for(config, CPU) == made_for(config, None) == (None, None), (
        "on a CPU, numbers stay as they were"
    )
    assert made_for({**config, "fused": True}, CPU) == (True, None)
    told = made_for({**config, "fused": False}, GPU)
    assert told == ((None, None) if "name" in config else (False, None)), (
        "false is torch's default; a class gets its arguments as they are"
    )


@pytest.mark.parametrize("name", sorted({*NAMES} - {*BY_CLASS, "Adafactor"}))
def test_a_class_without_fused_kernels_is_not_fused(name: str) -> None:
    assert made_for({"_target_": f"torch.optim.{name}"}, GPU)[0] is None


def test_what_a_fused_kernel_cannot_do_is_left_to_torch() -> None:
    adam = {"_target_": "torch.optim.Adam"}
    assert made_for({**adam, "foreach": True}, GPU) == (None, True)
    assert made_for({**adam, "differentiable": True}, GPU) == (None, None)
    assert made_for(adam, GPU, torch.complex64) == (None, None)


def test_a_module_asks_the_strategy_where_its_optimizer_steps() -> None:
    causal_lm = CausalLM(MODEL, {**OPTIMIZER, "scheduler": None})
    causal_lm.configure_model()
    found = []
    for device in (GPU, CPU, None):
        # None: another strategy than ours
        strategy = SimpleNamespace() if device is None else SimpleNamespace(optimizer_device=device)
        causal_lm.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
        found.append(causal_lm.configure_optimizers().param_groups[0]["fused"])
    assert found == [True, None, None]


@pytest.mark.parametrize("options", [{}, {"zero_stage": 1, "zero_offload": "optimizer"}], ids=str)
def test_an_offloaded_optimizer_steps_on_the_cpu(options: dict[str, Any]) -> None:
    with patch.object(Lightning3DStrategy, "root_device", GPU):
        assert Lightning3DStrategy("dp2", **options).optimizer_device == (CPU if options else GPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"weight_decay": 0.1}),
        ("AdamW", {"weight_decay": 0.1, "betas": (0.9, 0.95)}),
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {}),
        ("Adagrad", {"lr_decay": 0.01, "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_fused_and_foreach_steps_are_equal(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Torch's own kernels on a CPU: 30 steps with a learning rate that changes, of tensors that
    fill vectors and of others."""
    sizes = (1, 3, 16, 257, 4096)
    ends = []
    for kernels in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        numbers = torch.Generator().manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(size, generator=numbers, dtype=dtype)) for size in sizes
        ]
        optimizer = getattr(torch.optim, name)(parameters, lr=3e-4, **options, **kernels)
        for step in range(30):
            optimizer.param_groups[0]["lr"] = 3e-4 / (1 + step)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=numbers, dtype=dtype)
            optimizer.step()
        ends.append(torch.cat([parameter.detach() for parameter in parameters]))
    for other in ends[1:]:
        torch.testing.assert_close(
            ends[0], other, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6
        )


FEW_BITS = [
    ("tp2_pp2_dp2", 0, "tp2 would split. Use pp2_dp4 with zero_stage=0."),
    ("dp2_ep2", 0, "ep2 would split. Use dp2 with zero_stage=0."),
    ("tp2_cp2", 1, "tp2 and zero_stage=1 would split. Use dp2_cp2 with zero_stage=0."),
    ("pp2", 3, "zero_stage=3 would split. Use pp2 with zero_stage=0."),
]


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"])
@pytest.mark.parametrize(("layout", "zero", "message"), FEW_BITS)
def test_states_of_few_bits_are_refused_before_ranks_start(
    name: str, layout: str, zero: int, message: str
) -> None:
    config = {"_target_": f"torchao.optim.{name}"}
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_sharding(config, Layout.parse(layout), zero)
    check_sharding(config, Layout.parse(message.partition("Use ")[2].partition(" ")[0]), 0)


def test_only_optimizers_of_torchao_with_blocks_are_refused() -> None:
    check_sharding({"_target_": "torchao.optim.CPUOffloadOptimizer"}, Layout.parse("tp2"), 1)
