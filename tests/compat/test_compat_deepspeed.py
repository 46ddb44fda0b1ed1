"""Contracts of what `deepspeed_compat` touches inside DeepSpeed, and inside gloo: a new version
that changes one fails here."""

import gc
import inspect
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from counting import recording
from ranks import run_ranks
from torch import nn

from lightning_3d.compat.deepspeed import (
    EXPERTS,
    deepspeed_engine,
    deepspeed_groups,
    import_deepspeed,
    release_deepspeed,
    revive_cpu_adam,
    set_deepspeed_gradients,
    step_without_gathering,
)
from lightning_3d.compat.torch import (
    _gloo_threads_sleep,
    _settle_gloo,
    autograd_is_running,
    settle_gloo_at_exit,
)
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.zero.deepspeed_engine import Groups, Holder, deepspeed_config

CPU = torch.device("cpu")


def engine_of_two_groups(
    dtype: torch.dtype = torch.float32, *, offload: bool = False, on_host: bool = False
) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    import_deepspeed(CPU)
    module = nn.Linear(3, 5, dtype=dtype)  # 15 and 5 elements: neither is divisible by two ranks
    optimizer = torch.optim.SGD([{"params": [module.weight]}, {"params": [module.bias]}], lr=1.0)
    groups = Groups(Mesh(Layout.parse("dp2")), sharded=not on_host)
    engine = deepspeed_engine(
        module, optimizer, groups, deepspeed_config(dtype, offload=offload), CPU, on_host=on_host
    )
    return engine, module, optimizer


def importing() -> None:
    compile_ = torch.compile
    deepspeed = import_deepspeed(CPU)
    assert torch.compile is compile_
    assert deepspeed.get_accelerator().device_name() == "cpu"
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    backend = inspect.getsource(sys.modules["deepspeed.comm.torch"])
    assert "deepspeed.ops.__compatible_ops__" in backend  # decides whether it is compiled
    # When it compiles nothing at its import any more, `_without_compiling` can go.
    assert "\n@compiler.compile" in inspect.getsource(
        sys.modules["deepspeed.runtime.zero.muon.original_muon"]
    )
    with pytest.raises(ConfigError, match="DS_ACCELERATOR=cuda"):
        import_deepspeed(torch.device("cuda"))


def test_import_deepspeed() -> None:
    run_ranks(importing, 1)


def engine() -> None:
    del os.environ["LOCAL_RANK"]
    started, module, _ = engine_of_two_groups()
    assert "LOCAL_RANK" not in os.environ
    assert type(started.optimizer).__name__ == "DeepSpeedZeroOptimizer"
    assert callable(
        type(started.optimizer).scaled_global_norm
    )  # what is replaced is still there, and the step calls it
    assert "self.scaled_global_norm()" in inspect.getsource(type(started.optimizer).step)
    # No hook on a parameter: gradients add up in `.grad` as without DeepSpeed.
    assert started.optimizer._grad_acc_hooks == []
    assert not module.weight._backward_hooks and not module.weight._post_accumulate_grad_hooks
    from deepspeed.comm.torch import TorchBackend

    if hasattr(dist, "all_gather_single"):  # else the replacement of `all_gather_function` can go
        assert TorchBackend.get_all_gather_function() is dist.all_gather_into_tensor
    release_deepspeed(started)


def test_deepspeed_engine() -> None:
    run_ranks(engine, 2)


def adagrad() -> None:
    """The user's object stays, with its own groups. When DeepSpeed does not replace it any more,
    `_keeping_optimizer` can go."""
    import_deepspeed(CPU)
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert "torch.optim.Adagrad(self.single_partition" in inspect.getsource(
        DeepSpeedZeroOptimizer.initialize_optimizer_states
    )
    module = nn.Linear(3, 5)
    optimizer = torch.optim.Adagrad(
        [{"params": [module.weight]}, {"params": [module.bias], "lr": 0.5}]
    )
    started = deepspeed_engine(
        module, optimizer, Groups(Mesh(Layout.parse("dp2"))), deepspeed_config(torch.float32), CPU
    )
    assert started.optimizer.optimizer is optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
    release_deepspeed(started)


def test_adagrad_is_not_replaced() -> None:
    run_ranks(adagrad, 2)


def expert_groups() -> None:
    """The second group is an expert's: sharded over a group of its own, here this rank alone, and
    stepped with."""
    import_deepspeed(CPU)
    module = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(
        [{"params": [module.weight]}, {"params": [module.bias], "moe": True, "name": EXPERTS}],
        lr=1.0,
    )
    mesh = Mesh(Layout.parse("dp2"))
    with torch.no_grad():
        module.weight.fill_(1.0)
        # other experts on the other rank: nothing makes them equal
        module.bias.fill_(float(dist.get_rank()))
    started = deepspeed_engine(
        module,
        optimizer,
        Groups(mesh),
        deepspeed_config(torch.float32),
        CPU,
        expert_group=mesh.group_for((mesh.rank,)),
    )
    dense, experts = deepspeed_groups(started)
    assert (dense.flat.numel(), dense.owned.numel()) == (16, 8)
    assert experts.owned.numel() == experts.flat.numel() and torch.equal(
        experts.owned, experts.flat
    )
    set_deepspeed_gradients(started, [torch.ones(8), torch.full_like(experts.owned, 2.0)])
    started.step()
    assert module.weight.eq(0.0).all() and module.bias.eq(dist.get_rank() - 2.0).all()
    from deepspeed.utils import groups

    assert EXPERTS in groups._EXPERT_DATA_PARALLEL_GROUP
    release_deepspeed(started)
    assert EXPERTS not in groups._EXPERT_DATA_PARALLEL_GROUP
    assert not {"allreduce", "group_name"} & vars(module.bias).keys()


def test_deepspeed_shards_experts_over_a_group_of_their_own() -> None:
    run_ranks(expert_groups, 2)


def flat_groups() -> None:
    started, module, optimizer = engine_of_two_groups()
    groups = deepspeed_groups(started)
    assert [group.parameters for group in groups] == [[module.weight], [module.bias]]
    # padded to a multiple of twice the number of ranks
    for group, numel in zip(groups, (16, 8), strict=True):
        assert (group.flat.numel(), group.owned.numel(), group.master.numel()) == (
            numel,
            numel // 2,
            numel // 2,
        )
        assert torch.equal(group.owned, group.master)
        assert group.owned.storage_offset() == dist.get_rank() * numel // 2
        (parameter,) = group.parameters
        assert parameter.untyped_storage().data_ptr() == group.flat.untyped_storage().data_ptr()
        assert parameter.storage_offset() == 0
    assert [group["params"] for group in optimizer.param_groups] == [
        [group.master] for group in groups
    ]
    release_deepspeed(started)


def test_deepspeed_groups() -> None:
    run_ranks(flat_groups, 2)


def gradients(dtype: torch.dtype) -> None:
    started, module, _ = engine_of_two_groups(dtype)
    groups = deepspeed_groups(started)
    before = [group.master.detach().clone() for group in groups]
    given = [torch.full_like(group.master, 1e-3).detach() for group in groups]
    set_deepspeed_gradients(started, given)
    started.step()
    for group, weights in zip(groups, before, strict=True):
        # the float32 gradient, neither scaled nor rounded
        assert torch.equal(group.master, weights - 1e-3)
        assert torch.equal(group.owned, group.master.to(dtype))
        assert group.master.grad is None
    gathered = [torch.empty_like(groups[0].owned) for _ in range(2)]
    dist.all_gather(gathered, groups[0].owned)
    assert torch.equal(module.weight.detach().reshape(-1), torch.cat(gathered)[:15])
    release_deepspeed(started)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_set_deepspeed_gradients(dtype: torch.dtype) -> None:
    run_ranks(gradients, 2, dtype)


def not_gathered() -> None:
    started, module, _ = engine_of_two_groups()
    [group, _] = deepspeed_groups(started)
    before = group.flat.clone()
    set_deepspeed_gradients(
        started, [torch.ones_like(each.master) for each in deepspeed_groups(started)]
    )
    step_without_gathering(started)
    own = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
    expected = before.clone()
    expected[own] -= 1.0
    assert torch.equal(group.flat, expected)
    assert torch.equal(module.weight.detach().reshape(-1), group.flat[:15])
    set_deepspeed_gradients(
        started, [torch.ones_like(each.master) for each in deepspeed_groups(started)]
    )
    started.step()  # gathers again
    assert not torch.equal(group.flat[:8], before[:8]) and not torch.equal(
        group.flat[8:15], before[8:15]
    )
    release_deepspeed(started)


def test_step_without_gathering() -> None:
    run_ranks(not_gathered, 2)


def offloaded(dtype: torch.dtype) -> None:
    started, module, _ = engine_of_two_groups(dtype, offload=True)
    zero, groups = started.optimizer, deepspeed_groups(started)
    source = inspect.getsource(type(zero))
    assert (
        zero.cpu_offload
        and "self.contiguous_gradients = contiguous_gradients or self.cpu_offload" in source
    )
    # It has made hooks, which would reduce gradients in the backward, and buffers for them. Else
    # `_drop_own_reduction` can go.
    assert "self._grad_acc_hooks.append(register_grad_hook(" in source
    for name in ("cpu", "gpu"):
        assert f"self.temp_grad_buffer_for_{name}_offload = torch.zeros(" in source
        assert getattr(zero, f"temp_grad_buffer_for_{name}_offload") is None
    module(torch.ones(1, 3, dtype=dtype)).sum().backward()
    assert module.bias.grad is not None and torch.equal(
        module.bias.grad, torch.ones(5, dtype=dtype)
    ), "a hook has taken it"
    before = [group.master.detach().clone() for group in groups]
    for _ in range(2):
        set_deepspeed_gradients(
            started, [torch.full_like(group.master, 1e-3).detach() for group in groups]
        )
        started.step()
    for group, weights in zip(groups, before, strict=True):
        assert torch.equal(group.master, weights - 1e-3 - 1e-3)
        assert torch.equal(group.owned, group.master.to(dtype))
        assert group.owned.untyped_storage().data_ptr() != group.master.untyped_storage().data_ptr()
    release_deepspeed(started)
    assert not vars(module.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_offloaded_engine(dtype: torch.dtype) -> None:
    run_ranks(offloaded, 2, dtype)


def kept_on_host(dtype: torch.dtype) -> None:
    before = {}
    make = nn.Linear.reset_parameters

    def reset(module: nn.Linear) -> None:
        make(module)
        before.update(
            {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        )

    with patch.object(nn.Linear, "reset_parameters", reset):
        started, module, _ = engine_of_two_groups(dtype, offload=True, on_host=True)
    engine_source = inspect.getsource(type(started))
    assert "self.module.to(self.device)" in engine_source  # what `Holder` refuses
    assert re.search(r"dist\.broadcast\(p\b", engine_source)  # what is left out
    zero, groups = started.optimizer, deepspeed_groups(started)
    for name, group in zip(("weight", "bias"), groups, strict=True):
        (parameter,) = group.parameters
        assert torch.equal(parameter, before[name].reshape(parameter.shape))
        assert parameter._hp_mapping is None  # type: ignore[attr-defined]
        buffers = zero.param_buffer_of_bit16_for_cpu_offload_groups
        assert any(
            parameter.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            for buffer in buffers
        )
        assert group.owned is group.flat
    set_deepspeed_gradients(started, [torch.ones_like(group.master).detach() for group in groups])
    with recording() as sent:
        started.step()
    assert not sent.calls, "NCCL takes no tensors in host memory"
    for group in groups:
        assert torch.equal(group.flat, group.master.to(dtype))
    assert torch.equal(module.bias, (before["bias"].float() - 1.0).to(dtype))
    release_deepspeed(started)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_engine_of_parameters_on_the_host(dtype: torch.dtype) -> None:
    run_ranks(kept_on_host, 2, dtype)


def test_what_stays_is_not_moved() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert next(Holder(parameters, stays=True).to("meta").parameters()).device == CPU
    assert next(Holder(parameters).to(torch.float64).parameters()).dtype == torch.float64


def lost_with_a_copy() -> None:
    """When no copy takes the C++ object with it any more, `revive_cpu_adam` can go."""
    import_deepspeed(CPU)
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from lightning.pytorch.core.optimizer import LightningOptimizer

    assert "self.ds_opt_adam.destroy_adam(self.opt_id)" in inspect.getsource(
        DeepSpeedCPUAdam.__del__
    )
    assert "self.ds_opt_adam.create_adam(self.opt_id, lr, betas[0]," in inspect.getsource(
        DeepSpeedCPUAdam.__init__
    )
    optimizer = DeepSpeedCPUAdam.__new__(DeepSpeedCPUAdam)
    defaults = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1, "weight_decay": 2, "amsgrad": False}
    torch.optim.Optimizer.__init__(optimizer, [nn.Parameter(torch.zeros(1))], defaults)
    calls: list[tuple[Any, ...]] = []
    optimizer.ds_opt_adam = SimpleNamespace(
        create_adam=lambda *given: calls.append(given),
        destroy_adam=lambda *given: calls.append(given),
    )
    optimizer.opt_id, optimizer.adam_w_mode = 7, True
    wrapper = LightningOptimizer(optimizer)
    del wrapper
    gc.collect()
    assert calls == [(7,)]
    revive_cpu_adam(optimizer)
    assert calls[1] == (7, 0.1, 0.9, 0.99, 1, 2, True, False)


def test_a_copy_of_deepspeeds_optimizer_takes_its_kernel_with_it() -> None:
    run_ranks(lost_with_a_copy, 1)


def released() -> None:
    started, module, _ = engine_of_two_groups()
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    assert comm.cdb is not None and groups.mpu is not None  # else these resets can go
    assert vars(module.weight)
    release_deepspeed(started)
    assert comm.cdb is None and groups.mpu is None
    assert not vars(module.weight) and not vars(module.bias)


def test_release_deepspeed() -> None:
    run_ranks(released, 2)


def settled() -> None:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(10), group=group)
    if Path("/proc/self/task").exists():
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert "pt_gloo_runloop" in names  # torch's name for the threads whose state is looked at
    settle_gloo_at_exit()
    _settle_gloo()
    assert _gloo_threads_sleep(), "idle threads count as busy"


def test_settle_gloo() -> None:
    run_ranks(settled, 2)


def test_settling_gives_the_interpreters_lock_away() -> None:
    """A gloo thread that waits for the lock gets it at the first pause, however long the switch
    interval is."""
    got = threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    try:
        waiting = threading.Thread(target=got.set)
        waiting.start()
        _settle_gloo()
        assert got.is_set()
    finally:
        sys.setswitchinterval(interval)
    waiting.join()


def test_autograd_tells_whether_it_runs() -> None:
    seen = []
    value = torch.ones(1, requires_grad=True)
    doubled = value * 2
    doubled.register_hook(lambda gradient: seen.append(autograd_is_running()))
    assert not autograd_is_running()
    doubled.backward()
    assert seen == [True] and not autograd_is_running()
