"""Contract tests for the private symbols of torch and Transformers by which the package watches
what users and libraries have changed."""

import io
import math
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed import all_reduce
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lightning_3d.compat.torch import (
    global_hooks,
    is_pickling,
    replacing_total_norm,
    watching_world_collectives,
    without_modes,
)
from lightning_3d.compat.transformers import registered_functions


def test_the_norm_of_several_gradients_is_replaced_wherever_it_was_imported() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    seen = []

    def ten_times(original, tensors, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(len(tensors))
        return 10 * original(tensors, *args, **kwargs)

    with pytest.raises(KeyError), replacing_total_norm(ten_times):
        assert clip_grad_norm_(parameters, math.inf).item() == pytest.approx(20.0)
        assert nn.utils.get_total_norm(
            [parameter.grad for parameter in parameters]
        ).item() == pytest.approx(20.0)
        raise KeyError
    assert seen == [2, 2]
    assert clip_grad_norm_(parameters, math.inf).item() == pytest.approx(2.0)


def collectives_of_the_world() -> tuple[list[str], list[str]]:
    seen: list[str] = []
    group = dist.new_group([0])
    value = torch.ones(2)
    with watching_world_collectives(seen.append):
        all_reduce(value, group=group)
        dist.get_rank()
        dist.get_world_size()
        assert not seen, "the group is not that of all ranks, or nothing is sent"
        all_reduce(value)
        dist.all_reduce(value, group=dist.group.WORLD)
        dist.all_gather([torch.empty(2)], value)
        dist.all_gather_into_tensor(torch.empty(2), value)
        dist.reduce_scatter_tensor(torch.empty(2), value)
        dist.broadcast(value, 0)
        dist.barrier()
        inside = list(seen)
    dist.all_reduce(value)
    return inside, seen


def test_collectives_of_all_ranks_are_reported_by_name() -> None:
    ((inside, afterwards),) = run_ranks(collectives_of_the_world, 1)
    kinds = [
        "all_reduce",
        "all_reduce",
        "all_gather",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "barrier",
    ]
    assert inside == afterwards and len(inside) == len(kinds)
    assert all(name.startswith(kind) for name, kind in zip(inside, kinds, strict=True)), inside


class Counts(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **kwargs or {})


def test_modes_do_not_see_what_runs_without_them() -> None:
    with Counts() as mode:
        torch.ones(1).add(1)
        before = mode.count
        with without_modes():
            torch.ones(1).add(1)
        assert mode.count == before > 0
        torch.ones(1)
    assert mode.count > before


def test_hooks_of_all_modules_are_found() -> None:
    def hook(module: nn.Module, *args: object) -> None:
        pass

    known = len(global_hooks())
    handles = [register_module_forward_hook(hook), register_module_forward_pre_hook(hook)]
    try:
        found = [name for name, value in global_hooks() if value is hook]
    finally:
        for handle in handles:
            handle.remove()
    assert found == ["_global_forward_hooks", "_global_forward_pre_hooks"]
    assert len(global_hooks()) == known


def test_functions_that_users_put_into_the_tables_of_transformers_are_found() -> None:
    def attention(*args: object, **kwargs: object) -> None:
        pass

    assert sdpa_attention_forward in dict(registered_functions()).values()
    AttentionInterface.register("watched", attention)
    try:
        assert [
            place
            for place, value in registered_functions()
            if value is attention and "['watched']" in place
        ]
    finally:
        del AttentionInterface._global_mapping["watched"]
    table = AttentionInterface()
    table["watched"] = attention
    assert table["watched"] is attention and "watched" not in AttentionInterface._global_mapping, (
        "one table's own entries are its own"
    )


class _Pickling(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.untyped_storage:
            self.seen.append(is_pickling(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_what_is_pickled() -> None:
    value = torch.ones(2)
    with _Pickling() as mode:
        value.untyped_storage()
        torch.save({"value": value}, io.BytesIO())
        pickle.dumps(value)
    assert mode.seen == [False, True, True]
