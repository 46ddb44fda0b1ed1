"""Contract test of `replacing_total_norm`: torch's clipping of modules of which a rank has no
gradients."""

import torch
from torch import nn

from lightning_3d.compat.torch import replacing_total_norm


def test_clipping_by_value_accepts_an_empty_list() -> None:
    """`clip_grad._group_tensors_by_device_and_dtype`, torch 2.11 to 2.13."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    with replacing_total_norm(lambda original, *args, **kwargs: original(*args, **kwargs)):
        nn.utils.clip_grad_value_([], 0.1)
        nn.utils.clip_grad_value_([parameter], 0.1)
    assert parameter.grad.tolist() == [torch.tensor(0.1).item()] * 3
