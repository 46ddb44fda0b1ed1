"""The simulation finds what it is there to find: each fault here is made on purpose."""

from __future__ import annotations

import ctypes
import signal
import time
from datetime import timedelta

import pytest
import simulated_ranks
import torch
import torch.distributed as dist
from simulated_ranks import Ended


def alone(fn: object, **more: object) -> Ended:
    [ended] = simulated_ranks.attempt(fn, 1, **more)  # type: ignore[arg-type]
    return ended


def test_says_what_it_is() -> None:
    [name] = simulated_ranks.run(torch.cuda.get_device_name, 1)
    assert name == "simulated GPU"


def read_on_host() -> int:
    return ctypes.c_char.from_address(torch.ones(4, device="cuda").data_ptr()).value[0]


def test_the_host_cannot_read_device_memory() -> None:
    assert alone(read_on_host).code == -signal.SIGSEGV


def mixed_devices() -> torch.Tensor:
    return torch.ones(3, device="cuda") + torch.ones(3)


def test_an_operator_refuses_tensors_of_two_devices() -> None:
    assert "Expected all tensors to be on the same device" in alone(mixed_devices).output


def unordered(wait: bool) -> float:
    x, side = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    x.add_(1)
    if wait:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = (x * 2).sum()
    torch.cuda.current_stream().wait_stream(side)
    return total.item()


def test_an_access_that_waits_for_nothing_is_a_race() -> None:
    assert simulated_ranks.run(unordered, 1, wait=True) == [16.0]
    ended = alone(unordered, wait=False)
    assert ended.code == 1
    assert "aten.mul.Tensor on stream 64 reads memory" in ended.output
    assert "aten.add_.Tensor on stream 0 writes, and nothing makes it wait for that" in ended.output


def freed_too_early(record: bool) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x = torch.ones(1 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (x * 2).sum()
    if record:
        x.record_stream(side)
    del x
    torch.zeros(1 << 20, device="cuda")  # gets the memory of x, if the allocator believes it free


def test_memory_that_a_side_stream_still_reads_is_a_race() -> None:
    simulated_ranks.run(freed_too_early, 1, record=True)
    assert "overwrites memory" in alone(freed_too_early, record=False).output


def late_copy(wait: bool) -> list[float]:
    kept = torch.empty(3, pin_memory=True)
    kept.copy_(torch.full((3,), 2.0, device="cuda"), non_blocking=True)
    torch.ones(3, device="cuda") * 3  # the stream goes on, and has done the copy
    if wait:
        torch.cuda.current_stream().synchronize()
    return kept.tolist()


def test_a_copy_to_the_host_is_seen_after_waiting_for_it_only() -> None:
    late = {"CUDASIM_HOST_DELAY": 1000}
    assert simulated_ranks.run(late_copy, 1, wait=True, environment=late) == [[2.0, 2.0, 2.0]]
    [seen] = simulated_ranks.run(late_copy, 1, wait=False, environment=late)
    assert seen != [2.0, 2.0, 2.0]


def collect(order: tuple[tuple[int, ...], ...]) -> list[float]:
    """All-reduce on two groups of the same two ranks, one after the other."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1], group_desc=name) for name in ("first group", "second group")]
    numbers = [torch.full((4,), float(rank + 1), device="cuda") for _ in groups]
    for group in groups:  # make their communicators in the same order
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    works = [
        dist.all_reduce(numbers[which], group=groups[which], async_op=True) for which in order[rank]
    ]
    for work in works:
        work.wait()
    return [number.sum().item() for number in numbers]


def in_a_group(fn: object, *args: object) -> object:
    torch.cuda.set_device(int(__import__("os").environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    return fn(*args)  # type: ignore[operator]


def test_groups_in_another_order_hang_and_are_named() -> None:
    one_at_a_time = {"CUDASIM_NCCL_MOST": 1, "CUDASIM_HANG": 5}
    patient = one_at_a_time | {"CUDASIM_HANG": 30}
    same = simulated_ranks.run(in_a_group, 2, collect, ((0, 1), (0, 1)), environment=patient)
    assert same == [[12.0, 12.0], [12.0, 12.0]]
    ended = simulated_ranks.attempt(
        in_a_group, 2, collect, ((0, 1), (1, 0)), environment=one_at_a_time
    )
    assert {rank.code for rank in ended} & {-signal.SIGABRT}
    said = "".join(rank.output for rank in ended)
    assert "HANG" in said
    assert "ncclAllReduce 1 of group" in said
    assert "(ranks 0 1)" in said


def watched(wait: bool) -> float:
    """Read what a broadcast writes, long after it has ended and NCCL's watchdog has seen that."""
    numbers = torch.full((4,), float(dist.get_rank() + 1), device="cuda")
    work = dist.broadcast(numbers, 0, async_op=True)
    if wait:
        work.wait()
    time.sleep(2)
    return (numbers * 2).sum().item()


def test_what_only_the_watchdog_has_seen_is_a_race() -> None:
    assert simulated_ranks.run(in_a_group, 2, watched, True) == [8.0, 8.0]
    ended = simulated_ranks.attempt(in_a_group, 2, watched, False)
    assert "that ncclBroadcast" in "".join(rank.output for rank in ended)


def mismatched() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank(), device="cuda"))
    torch.cuda.synchronize()


def test_collectives_of_different_sizes_are_named() -> None:
    said = "".join(rank.output for rank in simulated_ranks.attempt(in_a_group, 2, mismatched))
    assert "MISMATCH: ncclAllReduce" in said and "3 elements" in said


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_reductions(dtype: torch.dtype) -> None:
    for results in simulated_ranks.run(in_a_group, 2, reductions, dtype):
        assert results == [[4.0, 6.0], [3.0, 4.0], [1.0, 2.0], [3.0, 8.0]]


def reductions(dtype: torch.dtype) -> list[list[float]]:
    """Sum, maximum, minimum and product of (1, 2) and (3, 4)."""
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        x = torch.tensor([1, 2], device="cuda", dtype=dtype) + 2 * dist.get_rank()
        dist.all_reduce(x, op)
        found.append(x.tolist())
    return found
