"""GPU memory that an earlier attempt holds is waited for. The GPU is replaced by numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_3d.health import held_memory
from lightning_3d.options.reliability import Reliability

GPU = torch.device("cuda", 1)
GIB = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free memory, look by look; the last value stays."""
    looks: list[int] = []
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device: (looks.pop(0) if len(looks) > 1 else looks[0], 80 * GIB),
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234")
    )
    monkeypatch.setattr(
        held_memory, "_query", lambda uuid: "4711, /usr/bin/python\n" if uuid == "GPU-1234" else ""
    )
    monkeypatch.setattr(held_memory, "_POLL_SECONDS", 0.01)
    return looks


def test_f54_memory_of_an_earlier_attempt_is_waited_for(
    free: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    free += [20 * GIB, 20 * GIB, 79 * GIB]
    held_memory.wait_for_memory(GPU, 10.0)
    said = capfd.readouterr().err
    assert (
        said
        == "lightning_3d: waiting up to 10 s for 60.0 GiB of cuda:1, still held by process 4711"
        " (/usr/bin/python). If the GPU is shared on purpose, set"
        " trainer.held_memory_timeout=0.\n"
    )


def test_memory_that_stays_held_is_named(
    free: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    free += [20 * GIB]
    held_memory.wait_for_memory(GPU, 0.1)
    said = capfd.readouterr().err
    assert (
        "60.0 GiB of cuda:1 are still held by process 4711 (/usr/bin/python). The run starts with"
        " the remaining memory." in said
    )


def test_nobody_waits_for_a_gpu_that_is_shared_on_purpose(
    free: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    held_memory.wait_for_memory(GPU, 0.0)  # looks at nothing
    assert capfd.readouterr().err == ""
    assert Reliability.of({"held_memory_timeout": 0}).held_memory_timeout == 0


def test_a_free_gpu_and_a_cpu_are_silent(
    free: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    free += [78 * GIB]
    held_memory.wait_for_memory(GPU, 10.0)
    held_memory.wait_for_memory(torch.device("cpu"), 10.0)
    assert capfd.readouterr().err == ""
