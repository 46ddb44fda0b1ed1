"""Values that something other than the optimizer wrote into parameters that have master weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_3d.parallel.zero.trained import Writes, differs, merged, with_writes

WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "copy_": lambda p: p.copy_(torch.zeros_like(p)),
    "element": lambda p: p.__setitem__(0, 3.0),
    "view": lambda p: p.view(-1)[1:].zero_(),
    "detached": lambda p: p.detach().mul_(0.5),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "clamp": lambda p: nn.init.trunc_normal_(p),
}


@torch.no_grad()
@pytest.mark.parametrize("how", WRITES)
def test_a_write_into_a_view_of_a_flat_buffer_is_seen(how: str) -> None:
    """And only that: what is written into the buffer, as by a gather of new parameters, is the
    optimizer's own."""
    flat = torch.ones(8, dtype=torch.bfloat16)
    written, other = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))
    for parameter, values in zip((written, other), flat.split(4), strict=True):
        parameter.data = values
    writes = Writes([written, other])
    flat.mul_(2)
    assert written not in writes
    WRITES[how](written)
    assert written in writes and other not in writes
    writes.ours()
    assert written not in writes


def test_written_values_and_no_others_replace_master_weights() -> None:
    master = torch.tensor([1.001, 2.002, torch.nan])
    parameter = master.to(torch.bfloat16)
    assert not differs(master, parameter)
    assert with_writes(master, parameter) is master
    parameter.data[1] = 7.0
    assert differs(master, parameter)
    assert merged(master, parameter)[:2].tolist() == [master[0].item(), 7.0]
    assert with_writes(master, parameter)[1] == 7.0
