"""Values that something other than the optimizer wrote into parameters, and the choice of the
kernel that copies them."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_3d.parallel.zero import outside_writes
from lightning_3d.parallel.zero.outside_writes import follow_writes, is_right

CPU = torch.device("cpu")
KERNEL = "lightning_3d.parallel.zero.outside_writes_kernel"


@pytest.fixture(autouse=True)
def untried() -> Any:
    outside_writes._tried_kernel.cache_clear()
    yield
    outside_writes._tried_kernel.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_is_right_if_it_does_what_torch_does(dtype: torch.dtype) -> None:
    assert is_right(outside_writes._follow_in_pieces, CPU, dtype)


def nothing(master: Tensor, written: Tensor) -> None:
    """Follows no write."""


def all_of_them(master: Tensor, written: Tensor) -> None:
    """Loses the low bits of every master weight."""
    master.copy_(written)


def truncating(master: Tensor, written: Tensor) -> None:
    """Rounds to zero, not to the nearest number."""
    rounded = (master.view(torch.int32) & ~0xFFFF).view(torch.float32)
    master.copy_(torch.where(rounded == written.float(), master, written.float()))


def without_nan(master: Tensor, written: Tensor) -> None:
    """Takes a NaN for no write."""
    differs = (master.to(written.dtype) != written) & ~written.isnan()
    master.copy_(torch.where(differs, written.float(), master))


def whole_blocks(master: Tensor, written: Tensor) -> None:
    """Leaves out the last elements."""
    end = len(master) // 4096 * 4096
    outside_writes._follow_in_pieces(master[:end], written[:end])


@pytest.mark.parametrize(
    "kernel",
    [nothing, all_of_them, truncating, without_nan, whole_blocks],
    ids=lambda kernel: kernel.__name__,
)
def test_a_wrong_kernel_is_noticed(kernel: Any) -> None:
    assert not is_right(kernel, CPU, torch.bfloat16)


def module_with(kernel: Any) -> types.ModuleType:
    module = types.ModuleType(KERNEL)
    module.follow = kernel  # type: ignore[attr-defined]
    return module


def tried(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> Any:
    """What is chosen where Triton is installed and its kernel does this."""
    monkeypatch.setattr(outside_writes.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, KERNEL, module_with(kernel))
    return outside_writes._tried_kernel(CPU, torch.bfloat16)


def test_the_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, outside_writes._follow_in_pieces) is outside_writes._follow_in_pieces


def test_a_wrong_kernel_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="cannot be used on cpu .its result is wrong"):
        assert tried(monkeypatch, truncating) is None


def test_a_kernel_that_cannot_be_compiled_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(master: Tensor, written: Tensor) -> None:
        raise FileNotFoundError("Python.h")

    with pytest.warns(UserWarning, match="FileNotFoundError: Python.h"):
        assert tried(monkeypatch, fails) is None


def test_without_triton_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(outside_writes.importlib.util, "find_spec", lambda name: None)
    assert outside_writes._tried_kernel(CPU, torch.bfloat16) is None
    assert not recwarn.list


def test_the_kernel_gets_what_it_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a GPU whose elements lie one after the other; anything else is compared piece by
    piece."""
    asked = []
    monkeypatch.setattr(outside_writes, "_tried_kernel", lambda device, dtype: asked.append(dtype))

    class OnGpu(Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    def kernel_for(master: Tensor, written: Tensor) -> None:
        outside_writes._kernel_for(master.as_subclass(OnGpu), written.as_subclass(OnGpu))

    narrow = torch.zeros(4, 6, dtype=torch.bfloat16)
    kernel_for(torch.zeros(4, 6), narrow)
    assert asked == [torch.bfloat16]
    kernel_for(torch.zeros(6, 4).t(), narrow)
    kernel_for(torch.zeros(4, 6), torch.zeros(6, 4, dtype=torch.bfloat16).t())
    kernel_for(torch.zeros(0), narrow[:0, 0])
    kernel_for(torch.zeros(4, 6, dtype=torch.float64), narrow)
    outside_writes._kernel_for(torch.zeros(4, 6).as_subclass(OnGpu), narrow)  # it was offloaded
    assert asked == [torch.bfloat16]


def test_written_values_and_no_others_replace_master_weights() -> None:
    master = torch.tensor([1.001, 2.002, 3.003])
    before, parameter = master.clone(), master.to(torch.bfloat16)
    follow_writes(master, parameter)
    assert torch.equal(master, before)
    parameter.data[1] = 7.0
    follow_writes(master, parameter)
    assert master.tolist() == [before[0].item(), 7.0, before[2].item()]
