"""The private parts of torch that keep a parameter's identity and find hooks on its gradient (tried
with torch 2.13)."""

import weakref

import pytest
import torch
from torch import nn

from lightning_3d.compat.torch import (
    accumulation_hooks,
    gradient_hooks,
    has_gradient_hooks,
    put_values,
)
from lightning_3d.errors import ConfigError


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_parameter_with_other_values_is_the_same_object(device: str) -> None:
    layer = nn.Linear(4, 6, bias=False, device=device)
    parameter, calls = layer.weight, []
    parameter.mark = "kept"  # type: ignore[attr-defined]
    known, optimizer = weakref.ref(parameter), torch.optim.SGD(layer.parameters(), lr=1.0)
    first = parameter.register_hook(lambda gradient: calls.append("gradient"))
    parameter.register_hook(lambda gradient: 2 * gradient)
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    put_values(parameter, torch.ones(3, 4))
    assert layer.weight is parameter is known() is optimizer.param_groups[0]["params"][0]
    assert vars(parameter)["mark"] == "kept" and parameter.requires_grad and parameter.is_leaf
    assert [len(gradient_hooks(parameter)), len(accumulation_hooks(parameter))] == [2, 1]
    layer(torch.ones(1, 4)).sum().backward()
    assert calls == ["gradient", "accumulated"]
    assert parameter.grad is not None and torch.equal(parameter.grad, torch.full((3, 4), 2.0))
    first.remove()
    gradient_hooks(parameter).update(
        dict.fromkeys(gradient_hooks(parameter), lambda gradient: None)
    )
    layer(torch.ones(1, 4)).sum().backward()
    assert calls == ["gradient", "accumulated", "accumulated"]
    assert torch.equal(parameter.grad, torch.full((3, 4), 3.0)), (
        "what is written into the hooks is called"
    )


def test_a_parameter_without_hooks_has_none() -> None:
    assert not gradient_hooks(nn.Parameter(torch.ones(1)))
    assert not accumulation_hooks(nn.Parameter(torch.ones(1)))
    assert not has_gradient_hooks(nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_either_kind_are_found_until_they_are_removed(register: str) -> None:
    parameter = nn.Parameter(torch.ones(1))
    handle = getattr(parameter, register)(lambda value: None)
    assert has_gradient_hooks(parameter)
    handle.remove()
    assert not has_gradient_hooks(parameter)


def test_a_parameter_whose_result_still_exists_keeps_its_shape() -> None:
    layer = nn.Linear(4, 6, bias=False)
    result = layer(torch.ones(1, 4))
    with pytest.raises(ConfigError, match="still exists"):
        put_values(layer.weight, torch.ones(3, 4))
    del result
