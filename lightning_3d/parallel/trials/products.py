"""What does the forward of a linear layer return: x W^T + b, or something else?"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.parallel.trials.ask import ask
from lightning_3d.parallel.trials.clone import clone_in_float64
from lightning_3d.parallel.trials.tolerances import SAME_PRODUCT
from lightning_3d.parallel.trials.values import draw, generator_of, normal

_ROWS, _INPUTS, _OUTPUTS = 2, 3, 2


def returns_features(layer: nn.Module) -> bool:
    """Return whether a linear layer returns its features alone. A router that is a linear layer
    (Llama 4's) chooses experts, too."""
    return ask(_returns_features, layer)


def is_product(layer: nn.Module) -> bool:
    """Return whether a layer whose forward does not call that of nn.Linear computes x W^T + b all
    the same (Falcon's)."""
    return (
        not set(layer._parameters) - {"weight", "bias"}
        and "forward" not in vars(layer)
        and ask(_is_product, layer)
    )


def _returns_features(layer: nn.Module) -> bool:
    found = _run_small(layer)
    return found is None or (isinstance(found, Tensor) and found.shape == (_ROWS, _OUTPUTS))


def _is_product(layer: Any) -> bool:
    found = _run_small(layer)
    if not isinstance(found, Tensor) or found.shape != (_ROWS, _OUTPUTS):
        return False
    bias = None if layer.bias is None else _value("bias")
    product = F.linear(_input(), _value("weight"), bias)
    return bool((found - product).abs().max() <= SAME_PRODUCT * product.abs().max())


def _run_small(layer: nn.Module) -> Any:
    """Run the forward of a linear layer's class with few inputs and outputs; None where it cannot
    run alone."""
    try:
        small = clone_in_float64(layer, lambda name, _: _value(name))
        small.in_features, small.out_features = _INPUTS, _OUTPUTS
        small._buffers, small._modules = {}, {}
        return type(layer).forward(small, _input())
    except Exception:  # of the layer's own code
        return None


def _input() -> Tensor:
    return normal((_ROWS, _INPUTS), generator_of("input"))


def _value(name: str) -> Tensor:
    """Value of a parameter; without elements for one that a linear layer does not have."""
    shapes = {"weight": (_OUTPUTS, _INPUTS), "bias": (_OUTPUTS,)}
    return draw(name, shapes.get(name, (0,)))
