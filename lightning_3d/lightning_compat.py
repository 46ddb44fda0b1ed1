"""Every private symbol of Lightning, torch and DeepSpeed that this package touches, in one place, with the reason.

Each function names the library, the versions it was read in and what would make it unnecessary. `tests/test_compat*.py` hold one
contract test for each, so that a new version which changes one of them fails there and not in a training run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def torch_pipeline_order(
    schedule: str, stages: Sequence[int], num_stages: int, pp: int, micro_batches: int
) -> dict[int, list[tuple[int, str, int]]]:
    """Actions of every rank that a schedule class of torch.distributed.pipelining (2.11 to 2.13) computes.

    The classes want live stages and a process group; they read only the few attributes given here to lay out their order, which is
    not public. Returns for each rank (stage, letter in F B I W, micro-batch). Combined actions (DualPipeV) are flattened.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    stand_ins = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=num_stages,
            group_size=pp,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank={},
        )
        for stage in stages
    ]
    schedule_class: Any = get_schedule_class(schedule)
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    order = schedule_class(stand_ins, micro_batches, loss_fn=lambda output, target: output).pipeline_order
    actions: dict[int, list[tuple[int, str, int]]] = {}
    for rank, listed in order.items():
        single = [part for action in listed if action is not None for part in (action.sub_actions or (action,))]
        actions[rank] = [
            (action.stage_index, letters[action.computation_type.name], action.microbatch_index)
            for action in single
            if action.computation_type.name in letters
        ]
    return actions


def backward_input(
    output: Tensor | None, gradient: Tensor | None, received: Tensor | None, parameters: Sequence[nn.Parameter]
) -> list[dict[str, Any]] | None:
    """First half of a split backward: the gradient of a stage's input, added to `received.grad`.

    torch.distributed.pipelining._backward.stage_backward_input (torch 2.11 to 2.13), not public. Returns the state that
    `backward_weight` needs, None when the output does not depend on anything that requires gradients.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    if output is None or not output.requires_grad:
        return None
    gradients = None if gradient is None else [gradient]
    _, work = stage_backward_input([output], gradients, [received], iter(parameters))
    return work


def backward_weight(parameters: Sequence[nn.Parameter], work: list[dict[str, Any]]) -> None:
    """Second half of a split backward: adds to `.grad` of the parameters, without running AccumulateGrad hooks.

    torch.distributed.pipelining._backward.stage_backward_weight (torch 2.11 to 2.13), not public.
    """
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(parameters), work)


def forward_value(metric: Any) -> Any:
    """What the last call of a torchmetrics object returned, None if it was only updated.

    torchmetrics 1.x keeps it in `_forward_cache`, which Lightning reads for `on_step` logging; there is no public reader.
    """
    return metric._forward_cache


def set_forward_value(metric: Any, value: Tensor) -> None:
    """Set the value that Lightning logs for a torchmetrics object with `on_step=True` (see `forward_value`)."""
    metric._forward_cache = value


def mark_updated(metric: Any) -> None:
    """Tell a torchmetrics object (1.x) that its state is meaningful on this rank.

    On ranks before the last stage it was never updated; computing it there, from the last stages' states, would warn.
    """
    metric._update_count = max(metric._update_count, 1)
    metric._computed = None


def run_after_closure(precision_plugin: Any, module: Any, optimizer: Any) -> None:
    """Run Lightning's hooks and clipping between backward and optimizer step.

    `Precision._after_closure` (Lightning 2.6) calls `on_before_optimizer_step` and `configure_gradient_clipping`. Lightning's own
    `Precision.optimizer_step` runs it inside `optimizer.step(closure)`; ours steps a backend instead of the optimizer.
    """
    precision_plugin._after_closure(module, optimizer)


def subprocess_launcher(cluster_environment: Any, num_processes: int, num_nodes: int) -> Any:
    """Lightning's launcher that runs the user's script once per local rank; None where the cluster already started the ranks.

    `_SubprocessScriptLauncher` is not public (Lightning 2.6), but it is what DDPStrategy uses.
    """
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    if cluster_environment.creates_processes_externally:
        return None
    return _SubprocessScriptLauncher(cluster_environment, num_processes, num_nodes)


def connect_process_group(strategy: Any, timeout: Any) -> None:
    """Tell the cluster environment this process's place and initialize the default process group.

    `_init_dist_connection` and `_get_default_process_group_backend_for_device` are not public (Lightning 2.6); DDPStrategy uses
    both. `reset_seed` keeps the seed of `seed_everything` in launched processes.
    """
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device, _init_dist_connection
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    reset_seed()
    environment = strategy.cluster_environment
    environment.set_global_rank(strategy.node_rank * strategy.num_processes + strategy.local_rank)
    environment.set_world_size(strategy.num_nodes * strategy.num_processes)
    rank_zero_only.rank = fabric_rank_zero_only.rank = strategy.global_rank
    device = strategy.root_device
    backend = _get_default_process_group_backend_for_device(device)
    _init_dist_connection(environment, backend, timeout=timeout, device_id=device if device.type != "cpu" else None)


@contextmanager
def watch_operations(callback: Callable[[str, list[Tensor], list[Tensor]], None]) -> Iterator[None]:
    """Call `callback(operator, tensors read, tensors written)` before every ATen operation of this thread.

    Initialization has to know which tensors a model's own initializers write. `TorchDispatchMode` is documented ("Extending
    PyTorch") but lives in `torch.utils._python_dispatch`, and what an operator writes stands in its `_schema` only
    (torch 2.11 to 2.13). The operator is named like "normal_.default". Views count as neither read nor written.
    """
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            read: list[Tensor] = []
            written: list[Tensor] = []
            for position, argument in enumerate(func._schema.arguments):
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                tensors = [item for item in (value if isinstance(value, list | tuple) else (value,)) if isinstance(item, Tensor)]
                if argument.alias_info is None:
                    read += tensors
                elif argument.alias_info.is_write:
                    written += tensors
            callback(func.__name__, read, written)
            return func(*args, **kwargs)

    with Watcher():
        yield


def storage_key(tensor: Tensor) -> int:
    """A number that a tensor shares with its views and its `.data`, also on meta, where the data pointer is 0 for all.

    `UntypedStorage._cdata` (torch 2.11 to 2.13); there is no public identity of a storage. Valid while the tensor lives.
    """
    return tensor.untyped_storage()._cdata
