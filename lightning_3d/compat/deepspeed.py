"""Private APIs of DeepSpeed. `tests/compat/test_compat_deepspeed.py` has a contract test for each
function."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_3d.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class DeepSpeedGroup:
    """Flat buffers of one parameter group of the optimizer in ZeRO stage 1.

    Attributes:
        parameters: views of `flat`.
        flat: all parameters end to end, padded to a multiple of the data-parallel size.
        owned: this rank's shard of `flat`, shape (flat.numel() / ranks,).
        master: float32 weights of `owned`, which the optimizer trains; in host memory with
            `offload_optimizer`.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    owned: Tensor
    master: Tensor


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed (0.19) for this kind of device, silently and without compiling anything.
    Returns the module.

    - `DS_ACCELERATOR` must be set before the import on a machine without GPU, else it warns on
      standard output.
    - `deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]`: a shared-memory all-reduce that it
      would compile (37 s).
    - The first engine imports its Muon optimizer, whose `torch.compile` decorators import Inductor:
      1 to 4 s. It is imported here while `torch.compile` does nothing; that Muon is never used.
    - The first engine imports `auto_ep_layer` and `mori` (0.19.8): here, so that ranks that are
      forked afterwards have it.
    - Its logger writes to standard output.

    Raises:
        ConfigError: DeepSpeed was already imported for another kind of device.
    """
    import logging

    chosen = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        with _without_compiling():
            import deepspeed
            import deepspeed.runtime.zero.muon.muon_optimizer

            with suppress(ImportError):  # versions before 0.19.8
                import deepspeed.comm.mori
                import deepspeed.module_inject.auto_ep_layer
    finally:
        if chosen is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = chosen
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = deepspeed.get_accelerator().device_name()
    if accelerator != device.type:
        raise ConfigError(
            f"DeepSpeed was already imported for {accelerator}, but training runs on {device.type}."
            f" Set the environment variable DS_ACCELERATOR={device.type}."
        )
    return deepspeed


@contextmanager
def _without_compiling() -> Iterator[None]:
    """Make `torch.compile` return its argument, as a decorator with and without options."""
    import torch

    compile_ = torch.compile

    def unchanged(function: Any = None, **options: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function

    torch.compile = unchanged  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


EXPERTS = "experts"
"""Name under which the group of experts is announced to DeepSpeed."""


def deepspeed_engine(
    module: nn.Module,
    optimizer: Any,
    groups: Any,
    config: dict[str, Any],
    device: torch.device,
    *,
    on_host: bool = False,
    expert_group: Any = None,
) -> Any:
    """Call `deepspeed.initialize` (0.19) with existing process groups. Collective over the
    data-parallel ranks.

    With `on_host`, which needs a single data-parallel rank and `offload_optimizer`, the parameters
    stay in host memory. Parameters in groups of the optimizer with "moe" and the "name" `EXPERTS`
    are sharded over `expert_group` instead.

    - It takes the device from `LOCAL_RANK`, which not every launcher sets.
    - `ZeROOptimizer.scaled_global_norm` is replaced: it costs one all-reduce per parameter group,
      hangs where pipeline ranks have different groups, and counts tied copies twice.
      (`compute_grad_norm: false` does this too, but only in later versions.)
    - torch 2.13 renamed `all_gather_into_tensor`, which DeepSpeed 0.19.8 still calls, with a
      warning. Either is looked up at each call, so that a trace and the watch for hangs see it.
    - `DeepSpeedEngine._broadcast_model` sends parameters even to a single rank. NCCL would make a
      communicator for it, and does not accept tensors in host memory.
    """
    import deepspeed
    import torch

    attributes = [(parameter, set(vars(parameter))) for parameter in module.parameters()]
    local_rank = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if expert_group is not None:
        _announce_experts(module, optimizer, expert_group)
    try:
        alone = on_host or groups.get_data_parallel_world_size() == 1
        with (
            _without_broadcast(deepspeed.DeepSpeedEngine) if alone else nullcontext(),
            _keeping_optimizer(),
        ):
            engine, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, mpu=groups, config=config
            )
    finally:
        if local_rank is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = local_rank
    engine.attributes_before = attributes
    # a number of the host, which it need not wait for
    engine.optimizer.scaled_global_norm = lambda norm_type=2: 0.0
    gather = (
        "all_gather_single"
        if hasattr(torch.distributed, "all_gather_single")
        else "all_gather_into_tensor"
    )
    deepspeed.comm.comm.cdb.all_gather_function = lambda **given: getattr(  # noqa: PLW0108
        torch.distributed, gather
    )(**given)
    if engine.optimizer.cpu_offload:
        _drop_own_reduction(engine.optimizer)
    if on_host:
        _keep_parameters_on_host(engine.optimizer)
    return engine


def _announce_experts(module: nn.Module, optimizer: Any, expert_group: Any) -> None:
    """Make an engine shard some groups of parameters over other ranks, as it does for its mixtures
    of experts (0.19).

    The engine looks for a `deepspeed.moe.layer.MoE` in the module, finds process groups by name in
    two dicts of `deepspeed.utils.groups`, and recognizes a parameter of an expert by `allreduce`
    and `group_name`.
    """
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups
    from torch import nn

    class Marker(MoE):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = 1

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """Do nothing: the groups exist."""

    module.add_module(EXPERTS, Marker())
    groups._EXPERT_PARALLEL_GROUP[EXPERTS] = groups._EXPERT_DATA_PARALLEL_GROUP[EXPERTS] = (
        expert_group
    )
    for parameter in (
        parameter
        for group in optimizer.param_groups
        if group.get("moe")
        for parameter in group["params"]
    ):
        parameter.allreduce, parameter.group_name = False, EXPERTS


@contextmanager
def _without_broadcast(engine: Any) -> Iterator[None]:
    """Keep engines of this class from broadcasting their parameters when they start
    (`_broadcast_model`, 0.19)."""
    broadcast = engine._broadcast_model
    engine._broadcast_model = lambda self: None
    try:
        yield
    finally:
        engine._broadcast_model = broadcast


@contextmanager
def _keeping_optimizer() -> Iterator[None]:
    """Keep an engine from replacing the user's Adagrad
    (`DeepSpeedZeroOptimizer.initialize_optimizer_states`, 0.19).

    An Adagrad makes its state when it is built. The engine would build another one for its master
    weights, with a single parameter group, which schedules and checkpoints do not know.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    initialize = DeepSpeedZeroOptimizer.initialize_optimizer_states

    def initialize_and_keep(self: Any) -> None:
        optimizer = self.optimizer
        initialize(self)
        self.optimizer = optimizer

    DeepSpeedZeroOptimizer.initialize_optimizer_states = initialize_and_keep
    try:
        yield
    finally:
        DeepSpeedZeroOptimizer.initialize_optimizer_states = initialize


def _drop_own_reduction(zero: Any) -> None:
    """Remove what an engine with `offload_optimizer` (`DeepSpeedZeroOptimizer`, 0.19) uses for its
    own reduction of gradients.

    These are hooks on the parameters (`_grad_acc_hooks`), which would send each gradient in the
    backward, and two buffers as large as the largest parameter, one of them on the device
    (`temp_grad_buffer_for_cpu_offload`, `temp_grad_buffer_for_gpu_offload`).
    """
    for hook in zero._grad_acc_hooks:
        hook.remove()
    zero._grad_acc_hooks = []
    zero.temp_grad_buffer_for_cpu_offload = zero.temp_grad_buffer_for_gpu_offload = None


def _keep_parameters_on_host(zero: Any) -> None:
    """Make the parameters of an engine with `offload_optimizer` and one data-parallel rank views of
    its host buffers.

    The step writes new weights to `param_buffer_of_bit16_for_cpu_offload_groups` (0.19), which is
    pinned where possible, and then copies them to `bit16_groups_flat`. Here the first replaces the
    second, which may be on the device and is never pinned. `_hp_mapping` of the parameters would
    keep the second alive.
    """
    for index, buffer in enumerate(zero.param_buffer_of_bit16_for_cpu_offload_groups):
        buffer.copy_(zero.bit16_groups_flat[index])
        zero.bit16_groups_flat[index] = buffer
        zero.parallel_partitioned_bit16_groups[index] = [buffer]
        for parameter in zero.bit16_groups[index]:
            parameter._hp_mapping = None
        zero._update_model_bit16_weights(index)


def deepspeed_groups(engine: Any) -> list[DeepSpeedGroup]:
    """Read the flat buffers of a ZeRO stage 1 engine (`DeepSpeedZeroOptimizer`, 0.19), one for each
    parameter group.

    `bit16_groups`, `bit16_groups_flat`, `parallel_partitioned_bit16_groups`,
    `single_partition_of_fp32_groups` and, for each of them, `real_dp_process_group` are not public;
    they have these names for parameters of any type.
    """
    from torch.distributed import get_rank

    zero = engine.optimizer
    ranks = [get_rank(group) for group in zero.real_dp_process_group]
    partitions = [
        parts[rank]
        for parts, rank in zip(zero.parallel_partitioned_bit16_groups, ranks, strict=True)
    ]
    columns = (
        zero.bit16_groups,
        zero.bit16_groups_flat,
        partitions,
        zero.single_partition_of_fp32_groups,
    )
    return [
        DeepSpeedGroup(list(parameters), *tensors)
        for parameters, *tensors in zip(*columns, strict=True)
    ]


def set_deepspeed_gradients(engine: Any, gradients: Sequence[Tensor]) -> None:
    """Pass a ZeRO stage 1 engine the reduced gradient, in float32, of this rank's shard of each
    parameter group.

    DeepSpeed's own reduction fills `averaged_gradients` (0.19): for each group a list of pieces,
    here one, that together have the size of the shard. The step flattens it, without a copy, and
    deletes it. With `offload_optimizer` it reads `.grad` of the master weights, which exists from
    the start.
    """
    if engine.optimizer.cpu_offload:
        for master, gradient in zip(
            engine.optimizer.single_partition_of_fp32_groups, gradients, strict=True
        ):
            master.grad.copy_(gradient)
        return
    engine.optimizer.averaged_gradients = {
        index: [gradient] for index, gradient in enumerate(gradients)
    }


def step_without_gathering(engine: Any) -> None:
    """Step a ZeRO stage 1 engine, but leave out the all-gather of the new parameters: each rank has
    only its own shard of them.

    `DeepSpeedZeroOptimizer.step` (0.19) calls `all_gather_dp_groups` by its name in
    `deepspeed.runtime.zero.stage_1_and_2`.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    gather = stage_1_and_2.all_gather_dp_groups
    stage_1_and_2.all_gather_dp_groups = lambda **given: None
    try:
        engine.step()
    finally:
        stage_1_and_2.all_gather_dp_groups = gather


def revive_cpu_adam(optimizer: Any) -> None:
    """Create the C++ object of a DeepSpeedCPUAdam (0.19) again, which may be gone; without it the
    step ends the process (SIGSEGV).

    `DeepSpeedCPUAdam.__del__` destroys it by its number `opt_id`. Lightning 2.6 wraps optimizers in
    objects of a subclass with a copy of their attributes. When a wrapper is freed, it destroys the
    C++ object of the optimizer, which is still in use. The object holds no state: moments and step
    count are in Python.
    """
    group = optimizer.param_groups[0]
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    optimizer.ds_opt_adam.create_adam(optimizer.opt_id, *numbers, optimizer.adam_w_mode, False)


def release_deepspeed(engine: Any) -> None:
    """Make DeepSpeed (0.19) release an engine and its process groups.

    `deepspeed.comm.comm.cdb` (its backend object) and `deepspeed.utils.groups.mpu` are module
    globals that nothing resets; a later engine in the same process would use them. Parameters keep
    attributes that hold the data-parallel group.
    """
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    engine.destroy()
    for parameter, before in engine.attributes_before:
        for name in vars(parameter).keys() - before:
            delattr(parameter, name)
    engine.attributes_before = []
    engine.optimizer = None
    engine.mpu = None
    comm.cdb = None
    groups.mpu = None
    for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
        known.pop(EXPERTS, None)
