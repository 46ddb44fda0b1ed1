"""Initialization of modules that one writes by hand: which of their methods count, and what is
refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.weights.initialize import initialize


def initialized(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    with torch.device("meta"):
        module = make()
    initialize(module, seed)
    assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    return module


class Gain(nn.Module):
    """A raw parameter with an initializer of its own."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 48),
    "embedding": lambda: nn.Embedding(64, 32, padding_idx=3),
    "convolution": lambda: nn.Conv1d(16, 24, 3),
    "attention": lambda: nn.MultiheadAttention(32, 4),
    "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64),
    "transformer": lambda: nn.Transformer(16, 2, 1, 1, 32),
    "recurrent": lambda: nn.LSTM(16, 24, num_layers=2),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "activation": lambda: nn.PReLU(5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch_are_like_ordinary_ones(name: str) -> None:
    torch.manual_seed(0)
    module, eager = initialized(LAYERS[name]), LAYERS[name]()
    for key, expected in eager.state_dict().items():
        value = module.state_dict()[key]
        assert value.shape == expected.shape and value.dtype == expected.dtype
        if expected.numel() < 2 or not expected.is_floating_point() or expected.std() == 0:
            assert torch.equal(value, expected), key
        else:
            assert abs(value.std() / expected.std() - 1) < 6 / expected.numel() ** 0.5, key


def test_recurrent_layers_run_with_the_weights_they_show() -> None:
    module = initialized(LAYERS["recurrent"])
    output, _ = module(torch.ones(2, 1, 16))
    assert output.isfinite().all()
    assert all(
        weight is shown
        for weight, shown in zip(module._flat_weights, module.parameters(), strict=True)
    )


def test_an_own_initializer_is_used() -> None:
    assert torch.equal(initialized(Gain).weight, torch.ones(4))


def test_a_raw_parameter_without_initializer_is_refused() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

    with pytest.raises(
        ConfigError, match=r"'0\.gain' of shape \(4,\).* nn\.init\.ones_\(self\.gain\)`.* to Raw"
    ):
        initialized(lambda: nn.Sequential(Raw()))


def test_a_parameter_that_is_filled_in_part_is_refused() -> None:
    class Half(Gain):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight[:2])

    with pytest.raises(ConfigError, match=r"no initializer writes all of it"):
        initialized(Half)


def test_a_parameter_may_be_filled_piece_by_piece() -> None:
    class Halves(Gain):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight[:2])
            self.weight.data[2:] = 7

    assert initialized(Halves).weight.tolist() == [1, 1, 7, 7]


def test_initializers_that_pass_over_meta_tensors_are_found() -> None:
    class Truncated(Gain):
        def reset_parameters(self) -> None:
            nn.init.trunc_normal_(self.weight, std=0.1, a=-0.1, b=0.1)

    class Above(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32, bias=False)

        def reset_parameters(self) -> None:
            nn.init.trunc_normal_(self.linear.weight, mean=5, std=0.1, a=4.9, b=5.1)

    weight = initialized(lambda: Truncated(1000)).weight
    assert 0.04 < weight.std() < 0.07 and weight.abs().max() <= 0.1
    assert initialized(Above).linear.weight.min() >= 4.9


@pytest.mark.parametrize(
    "fill", [nn.init.orthogonal_, nn.init.dirac_, lambda w: nn.init.sparse_(w[..., 0], 0.5)]
)
def test_elaborate_initializers_run(fill: Callable[[Tensor], Any]) -> None:
    class Elaborate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 8, 1))

        def reset_parameters(self) -> None:
            fill(self.weight)

    assert initialized(Elaborate).weight.any()


def test_modules_around_come_after_the_module_itself() -> None:
    class Scaled(nn.Module):
        """Scales what its layer drew: the value before matters."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Gain())

        def reset_parameters(self) -> None:
            self.inner[0].weight.data.mul_(0.5)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def init_weights(self) -> None:
            with torch.no_grad():
                self.scaled.inner[0].weight.add_(1)

    assert initialized(Scaled).inner[0].weight.tolist() == [0.5] * 4
    assert initialized(Twice).scaled.inner[0].weight.tolist() == [1.5] * 4


def test_one_method_for_all_modules() -> None:
    class Model(nn.Module):
        """As in many small codes: `self.apply(self._init_weights)` at the end of the
        constructor."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
            self.norm = nn.LayerNorm(64)
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.constant_(module.bias, 3.0)

    module = initialized(Model)
    assert module.layers[1].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert module.layers[1].bias.tolist() == [3.0] * 64
    assert module.norm.weight.tolist() == [1.0] * 64


def test_one_method_that_walks_the_whole_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

        def init_weights(self, scale: float = 1.0) -> None:
            for index, layer in enumerate(self.layers):
                nn.init.constant_(layer.weight, scale * index)

    assert [layer.weight[0, 0].item() for layer in initialized(Model).layers] == [0, 1, 2]


def test_values_drawn_on_the_way_depend_on_nothing_else() -> None:
    class Noisy(nn.Module):
        """Draws into temporaries, whose stream an earlier draw would shift."""

        def __init__(self, extra: bool) -> None:
            super().__init__()
            self.extra = Gain() if extra else None
            self.weight = nn.Parameter(torch.empty(4))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight.copy_(torch.rand(4))

    expected = initialized(lambda: Noisy(False)).weight
    assert torch.equal(initialized(lambda: Noisy(True)).weight, expected)
    assert not torch.equal(initialized(lambda: Noisy(True), seed=1).weight, expected)


def test_parameters_of_a_module_that_depend_on_each_other_agree() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = (nn.Parameter(torch.empty(5)) for _ in range(3))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.first.normal_()
                self.a.normal_()
                self.b.copy_(2 * self.a)

    module = initialized(Pair)
    assert torch.equal(module.b, 2 * module.a)
    assert not torch.equal(module.first, module.a)


def test_an_initializer_may_compute_where_another_parameter_is() -> None:
    class Decay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow, self.fast = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))

        def reset_parameters(self) -> None:
            steps = torch.arange(3.0, device=self.slow.device)
            with torch.no_grad():
                self.slow.copy_(steps)
                self.fast.copy_(2 * steps)

    assert initialized(Decay).fast.tolist() == [0, 2, 4]


def test_an_initializer_that_reads_other_modules_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Gain(), Gain()

        def init_weights(self) -> None:
            self.second.weight.data.copy_(self.first.weight + 1)

    with pytest.raises(
        ConfigError, match=r"Model\.init_weights\(\) of '' could not run.*without reading"
    ):
        initialized(Model)


def test_parameters_in_lists_belong_to_the_module_around() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.empty(2) for _ in range(3))

        def reset_parameters(self) -> None:
            for index, scale in enumerate(self.scales):
                nn.init.constant_(scale, index)

    assert [scale.tolist() for scale in initialized(Model).scales] == [[0, 0], [1, 1], [2, 2]]


# Buffers


class Rotary(nn.Module):
    """Buffers from the constructor's arguments, which it keeps."""

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.base = base
        self.register_buffer(
            "frequencies", base ** -(torch.arange(0, dim, 2) / dim), persistent=False
        )


class HalvedRotary(Rotary):
    """Keeps something else than what it was given."""

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__(dim, base)
        self.base = base / 2


def test_a_module_of_buffers_is_built_again_from_what_it_keeps() -> None:
    assert torch.equal(
        initialized(lambda: Rotary(16, 500.0)).frequencies, Rotary(16, 500.0).frequencies
    )


def test_a_module_that_keeps_something_else_is_not_built_again() -> None:
    with pytest.raises(
        ConfigError,
        match=r"buffer '0\.frequencies' of shape \(8,\).*reset_buffers.* to HalvedRotary",
    ):
        initialized(lambda: nn.Sequential(HalvedRotary(16)))


def test_reset_buffers_is_used() -> None:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
            self.register_buffer("seen", torch.zeros(3))

        def reset_buffers(self) -> None:
            self.mask.copy_(torch.ones(3, 3, dtype=torch.bool).tril())
            self.seen.copy_(self.mask.sum(0))

    module = initialized(Mask)
    assert torch.equal(module.mask, torch.ones(3, 3, dtype=torch.bool).tril())
    assert module.seen.tolist() == [3, 2, 1]


def test_a_shared_buffer_stays_shared() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary(8)
            self.user = nn.Module()
            self.user.register_buffer("frequencies", self.rotary.frequencies)

    module = initialized(Model)
    assert module.user.frequencies is module.rotary.frequencies


def test_an_initializer_may_assign_a_buffer() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("table", torch.arange(5), persistent=False)

        def init_weights(self) -> None:
            self.table = torch.arange(5)

    assert initialized(Cache).table.tolist() == [0, 1, 2, 3, 4]
