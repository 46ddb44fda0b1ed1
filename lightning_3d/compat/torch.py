"""Private PyTorch APIs, except those of checkpoints (`torch_checkpoint`) and of tensors without
values (`torch_fake`)."""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup, Work


_functional: ContextVar[bool] = ContextVar("functional", default=False)


@contextmanager
def functional_collectives() -> Iterator[None]:
    """Context in which tensor-parallel sums are operators that return new tensors, so that
    selective recomputation can keep their results."""
    token = _functional.set(True)
    try:
        yield
    finally:
        _functional.reset(token)


def collectives_are_functional() -> bool:
    """Return whether this runs inside `functional_collectives`."""
    return _functional.get()


def functional_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce contiguous `x` into new memory, by an operator that compilers and recomputation
    see.

    `torch.ops._c10d_functional` (torch 2.11 to 2.13); the public collectives write into their
    argument.
    """
    import torch

    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(x, "sum", group.group_name))


def functional_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather contiguous tensors, concatenated along dimension 0, by such an operator (see
    `functional_sum`)."""
    import torch

    operators = torch.ops._c10d_functional
    return operators.wait_tensor(
        operators.all_gather_into_tensor(x, group.size(), group.group_name)
    )


def functional_scatter_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Reduce-scatter contiguous `x` along dimension 0 by such an operator (see
    `functional_sum`)."""
    import torch

    operators = torch.ops._c10d_functional
    return operators.wait_tensor(
        operators.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)
    )


def functional_all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange equal parts of contiguous `x` along dimension 0 by such an operator (see
    `functional_sum`)."""
    import torch

    operators = torch.ops._c10d_functional
    parts = [x.shape[0] // group.size()] * group.size()
    return operators.wait_tensor(operators.all_to_all_single(x, parts, parts, group.group_name))


def group_of_name(name: str) -> ProcessGroup:
    """Find the process group that operators name
    (`torch.distributed.distributed_c10d._resolve_process_group`, torch 2.11 to 2.13)."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def kept_collectives() -> frozenset[Any]:
    """Operators whose results a selective recomputation keeps instead of communicating again."""
    import torch

    operators = torch.ops._c10d_functional
    return frozenset(
        {
            operators.all_reduce.default,
            operators.reduce_scatter_tensor.default,
            operators.wait_tensor.default,
        }
    )


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the innermost functions that pack and unpack what autograd saves
    (`_top_saved_tensors_default_hooks`, torch 2.11 to 2.13).

    Raises:
        RuntimeError: there are none.
    """
    import torch

    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if found is None:
        raise RuntimeError(
            "This runs outside of torch.utils.checkpoint.checkpoint, which has hooks for saved"
            " tensors."
        )
    pack, unpack = found
    return pack, unpack


def detached_in_mode(x: Tensor) -> Tensor:
    """Detach `x` in the mode that made it, with its version counter, so that later changes in place
    are seen.

    `_SetExcludeDispatchKeyGuard`, as torch.utils.checkpoint does it (torch 2.11 to 2.13).
    """
    import torch

    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


@cache
def ignored_by_checkpoints() -> frozenset[Any]:
    """Operators that a selective recomputation does not count, because autograd runs them
    (`SAC_IGNORED_OPS`, torch 2.11 to 2.13)."""
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    return frozenset(SAC_IGNORED_OPS)


_recomputed: ContextVar[bool] = ContextVar("recomputed", default=False)


@contextmanager
def recomputed() -> Iterator[None]:
    """Context for a forward that the backward will run again; it is entered for both runs."""
    token = _recomputed.set(True)
    try:
        yield
    finally:
        _recomputed.reset(token)


def is_recomputed() -> bool:
    """Return whether this runs inside `recomputed`, so that saved activations are short-lived."""
    return _recomputed.get()


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread now, such as one that runs a
    recomputed forward again."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def autograd_in_operator() -> Iterator[None]:
    """Context in which autograd records, in the implementation of an operator, which runs below
    autograd.

    `torch._C._ForceDispatchKeyGuard` (torch 2.11 to 2.13).
    """
    import torch

    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        keys.AutogradFunctionality,
        keys.AutogradOther,
        keys.AutogradNestedTensor,
        keys.ADInplaceOrView,
    ):
        excluded = excluded.remove(key)
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded),
        torch.enable_grad(),
    ):
        yield


def backward_runs_again() -> bool:
    """Return whether the backward that runs in this thread keeps what it needs, and so may run
    another time (`torch._C._autograd._get_current_graph_task_keep_graph`, torch 2.11 to 2.13)."""
    import torch

    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def graph_breaks() -> Counter[str]:
    """Count Dynamo's graph breaks in this process, by reason (`torch._dynamo.utils.counters`, torch
    2.11 to 2.13)."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def compiled_graphs() -> int:
    """Count the graphs that Dynamo compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def uncompiled_frames() -> int:
    """Count the functions that Dynamo was asked to compile but did not, for example beyond its
    limit of variants."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["total"] - counters["frames"]["ok"])


def allow_graphs(variants: int) -> None:
    """Allow one function to be compiled for this many kinds of arguments
    (`torch._dynamo.config.recompile_limit`, 8 by default)."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, variants)


def allow_notes_in_recomputation() -> None:
    """Allow a compiled function to change Python objects in a part that the backward recomputes;
    they are not changed a second time.

    Sharded layers note the input that they share, and forget it at the end of their region
    (`torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint`, torch 2.11 to 2.13).
    """
    from torch._dynamo import config

    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def allow_second_backward() -> None:
    """Allow the backward of a compiled function to run twice, as schedules with a split backward
    do.

    By default it reuses the memory of saved tensors for its results
    (`torch._functorch.config.donated_buffer`, torch 2.11 to 2.13).
    """
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


def keep_order_in_graphs() -> None:
    """Let Inductor run operators in the order of the code, also where another order would need less
    memory (`torch._inductor.config.reorder_for_peak_memory`, torch 2.11 to 2.13)."""
    from torch._inductor import config

    config.reorder_for_peak_memory = False


def all_gather_by_name(whole: Tensor, part: Tensor, group: ProcessGroup) -> Work:
    """Start `all_gather_single` (torch 2.13) or `all_gather_into_tensor` (before), on any backend,
    as DeepSpeed does."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)


def use_flash_kernels(version: str) -> None:
    """Let torch's flash attention run on "FA3" or "FA4", kernels of other packages, in this
    process; "FA2" are its own.

    `torch.nn.attention.activate_flash_attention_impl`, a prototype (torch 2.11 to 2.13).

    Raises:
        ImportError: the package is not installed, or this version of torch cannot use it.
    """
    from torch.nn import attention

    if version == flash_kernels():
        return
    if version == "FA2":
        attention.restore_flash_attention_impl()
        return
    if version not in attention.list_flash_attention_impls():
        raise ImportError(f"this version of torch has no {version}")
    try:
        attention.activate_flash_attention_impl(version)
    except RuntimeError as error:  # a package of this name, without these kernels
        raise ImportError(str(error)) from error


def flash_kernels() -> str:
    """Return the kernels that torch's flash attention runs on now: "FA2", its own, or others (see
    `use_flash_kernels`)."""
    from torch.nn import attention

    return attention.current_flash_attention_impl() or "FA2"


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute CUDA's flash attention: (out, log of the sum of exponentials in float32).

    `aten::_scaled_dot_product_flash_attention` (torch 2.11 to 2.13); the public function does not
    return the second tensor.

    Args:
        query: (batch, heads, queries, width).
        key, value: (batch, heads or a divisor of them, keys, width).
    """
    import torch

    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=scale
    )
    return out, lse


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a block's queries, keys and values; `out` and `lse`, contiguous, are
    those of the queries with all keys.

    `aten::_scaled_dot_product_flash_attention_backward` (torch 2.11 to 2.13); without dropout its
    random state is not read.
    """
    import torch

    # as the forward returns them
    seed, offset = (
        torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ())
    )
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = (query.shape[2], key.shape[2])
    return backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        None,
        None,
        *lengths,
        0.0,
        causal,
        seed,
        offset,
        scale=scale,
    )


def real_values() -> AbstractContextManager[Any]:
    """Compute values again inside `fake_mode`
    (`torch._subclasses.fake_tensor.unset_fake_temporarily`, torch 2.11 to 2.13)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def backward_input(
    output: Tensor | None,
    gradient: Tensor | None,
    received: Tensor | None,
    parameters: Sequence[nn.Parameter],
) -> list[dict[str, Any]] | None:
    """Run the first half of a split backward: add the gradient of a stage's input to
    `received.grad`.

    `torch.distributed.pipelining._backward.stage_backward_input` (torch 2.11 to 2.13) is not
    public. Returns the state that `backward_weight` needs; None when the output depends on nothing
    that requires gradients.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    if output is None or not output.requires_grad:
        return None
    gradients = None if gradient is None else [gradient]
    _, work = stage_backward_input([output], gradients, [received], iter(parameters))
    return work


def backward_weight(parameters: Sequence[nn.Parameter], work: list[dict[str, Any]]) -> None:
    """Run the second half of a split backward: add to `.grad` of the parameters, without
    AccumulateGrad hooks.

    `torch.distributed.pipelining._backward.stage_backward_weight` (torch 2.11 to 2.13) is not
    public. It runs one backward for each group of parameters that meet the rest of the graph at the
    same nodes. Without the group of executions, each of these recomputes the whole block that it
    begins in (`recompute=full`), and what it does not read lives until the graph is freed.

    The groups run from the output to the input. Only the nodes of later groups hold the graph of a
    block, so that what was recomputed for a block is freed before the block below it is recomputed.
    `work` is empty afterwards.
    """
    from torch.distributed.pipelining._backward import stage_backward_weight
    from torch.utils.checkpoint import GraphExecGroup

    with GraphExecGroup():
        while work:
            stage_backward_weight(iter(parameters), [work.pop()])


@contextmanager
def watch_operations(callback: Callable[[str, list[Tensor], list[Tensor]], None]) -> Iterator[None]:
    """Call `callback(operator, tensors read, tensors written)` before every ATen operation of this
    thread.

    Initialization must know which tensors a model's own initializers write. `TorchDispatchMode` is
    documented ("Extending PyTorch") but defined in `torch.utils._python_dispatch`, and only the
    `_schema` of an operator says what it writes (torch 2.11 to 2.13). Operators have names such as
    "normal_.default". Views count as neither read nor written.
    """
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            read: list[Tensor] = []
            written: list[Tensor] = []
            for position, argument in enumerate(func._schema.arguments):
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                values = value if isinstance(value, list | tuple) else (value,)
                tensors = [item for item in values if isinstance(item, Tensor)]
                if argument.alias_info is None:
                    read += tensors
                elif argument.alias_info.is_write:
                    written += tensors
            callback(func.__name__, read, written)
            return func(*args, **kwargs)

    with Watcher():
        yield


def assert_on_device(condition: Tensor, message: str) -> None:
    """Make the device fail with an assertion unless `condition`, of shape (), is true; the host
    does not wait for it.

    `torch._assert_async` (torch 2.11 to 2.13) has no public form.
    """
    import torch

    torch._assert_async(condition, message)


def innermost_function_mode() -> Any:
    """Return the `TorchFunctionMode` that was entered last and sees functions of torch first; None
    if there is none.

    `torch.overrides._get_current_function_mode` (torch 2.11 to 2.13): the public class leaves the
    innermost mode, whichever it is.
    """
    from torch.overrides import _get_current_function_mode

    return _get_current_function_mode()


def is_pickling(frame: Any) -> bool:
    """Whether a frame of torch is inside of `torch.save` or pickle (`Tensor._reduce_ex_internal`,
    torch 2.11 to 2.13)."""
    from torch import Tensor

    while frame is not None and frame.f_globals.get("__name__") == "torch._tensor":
        if frame.f_code is Tensor._reduce_ex_internal.__code__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def replacing_total_norm(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Let `replacement` compute the norm of several gradients in `torch.nn.utils.clip_grad_norm_`
    and `get_total_norm`.

    `clip_grad_value_` accepts modules of which this rank has no gradients; torch fails for an empty
    list (`clip_grad._group_tensors_by_device_and_dtype`, torch 2.11 to 2.13).

    It gets torch's own function before the arguments. `clip_grad_norm_` finds it as
    `torch.nn.utils.clip_grad._get_total_norm` (torch 2.11 to 2.13), however the user has imported
    `clip_grad_norm_`.
    """
    from functools import partial

    from torch.nn import utils
    from torch.nn.utils import clip_grad

    original, group = clip_grad._get_total_norm, clip_grad._group_tensors_by_device_and_dtype
    clip_grad._get_total_norm = utils.get_total_norm = partial(replacement, original)
    clip_grad._group_tensors_by_device_and_dtype = lambda lists, *args: (
        group(lists, *args) if lists[0] else {}
    )
    try:
        yield
    finally:
        clip_grad._get_total_norm = utils.get_total_norm = original
        clip_grad._group_tensors_by_device_and_dtype = group


def _is_mode(frame: Any) -> bool:
    """Whether a frame is that of a `TorchFunctionMode`, which a function of torch passes on its
    way."""
    return bool(frame.f_code.co_name == "__torch_function__")


@contextmanager
def watching_world_collectives(report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` with the name of each collective of torch.distributed over the default group,
    however the caller has imported it. Those of this package are left out.

    Every collective asks `torch.distributed.distributed_c10d._rank_not_in_group` (torch 2.11 to
    2.13) about its `group=` first.
    """
    import sys

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    original, world = distributed_c10d._rank_not_in_group, dist.group.WORLD

    def is_inside(frame: Any, package: str) -> bool:
        return frame is not None and frame.f_globals.get("__name__", "").startswith(package)

    def asked(group: ProcessGroup | None) -> bool:
        if group is None or group is world:
            frame: Any = sys._getframe(1)
            name = frame.f_code.co_name
            while is_inside(frame, "torch.") or (frame is not None and _is_mode(frame)):
                frame = frame.f_back
            ours = is_inside(frame, "lightning_3d.")
            # something may be wrapped around the collective, or a library of kernels may call it
            for _ in range(0 if ours else 3):
                frame = frame and frame.f_back
                # which calls the user's step
                if is_inside(frame, "lightning_3d.engine.step.runner"):
                    break
                ours = ours or is_inside(frame, "lightning_3d.")
            if not ours and not name.startswith(("get_", "_")):
                report(name)
        return original(group)

    distributed_c10d._rank_not_in_group = asked
    try:
        yield
    finally:
        distributed_c10d._rank_not_in_group = original


def storage_key(tensor: Tensor) -> int:
    """A number that a tensor shares with its views and its `.data`, also on meta, where the data
    pointer is always 0.

    `UntypedStorage._cdata` (torch 2.11 to 2.13), because a storage has no public identity. Valid
    while the tensor lives.
    """
    import torch

    with torch._C.DisableTorchFunctionSubclass():  # a subclass may wait for the values
        return tensor.untyped_storage()._cdata


@cache
def settle_gloo_at_exit() -> None:
    """Wait at the end of the process until gloo's threads have released their last tensors.

    Call it as early as possible: the function that is registered first runs last, after others that
    may communicate.

    A gloo worker thread (torch 2.11 to 2.13, pytorch/pytorch#179291) reports that a collective is
    done before it frees the tensors. If one of them has a Python object, freeing it takes the
    interpreter's lock. If the main thread is finalizing the interpreter by then, Python ends the
    thread, which unwinds through a C++ destructor: "terminate called without an active exception",
    and a run that succeeded ends with SIGABRT. About one in ten short runs that end soon after a
    collective does so, with DeepSpeed or without. Here the main thread waits, without the lock,
    until all of these threads are asleep. `atexit` runs before finalization.
    """
    atexit.register(_settle_gloo)


def _settle_gloo(patience_seconds: float = 2.0) -> None:
    deadline = time.monotonic() + patience_seconds
    asleep = 0
    # Twice: the first time, a thread may be asleep because it waits for the interpreter's lock,
    # which the pause releases.
    while asleep < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        asleep = asleep + 1 if _gloo_threads_sleep() else 0


def _gloo_threads_sleep() -> bool:
    """Return whether no gloo worker thread of this process is running or ready to run; True on
    systems without /proc."""
    for status in Path("/proc/self/task").glob("*/stat"):
        try:
            name, state = status.read_text().rpartition(")")[0::2]
        except OSError:  # the thread has ended
            continue
        if name.partition("(")[2] == "pt_gloo_runloop" and state.split()[0] != "S":
            return False
    return True


def autograd_is_running() -> bool:
    """Return whether this is called inside a backward: `torch._C._current_graph_task_id` (torch
    2.11 to 2.13) is not public."""
    import torch

    return torch._C._current_graph_task_id() != -1


def without_modes() -> AbstractContextManager[Any]:
    """Context in which no dispatch mode sees operations, whoever has entered it. (torch 2.11 to
    2.15 have no public way.)"""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def put_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, of any shape and on any device. It stays the same object, so
    its id, attributes, weak references, places in optimizers and hooks on its gradient stay valid.

    `torch._C._swap_tensor_impl` (torch 2.11 to 2.15) for a parameter on meta, whose `data` cannot
    be replaced by values in memory.
    """
    import torch

    parameter.grad = None
    if parameter.is_meta == values.is_meta:
        parameter.data = values
        _require_no_graph(parameter)
        return
    torch._C._swap_tensor_impl(
        parameter, torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
    )
    # Autograd's own entries of hooks have stayed with the tensor on meta; these assignments make
    # them again.
    parameter._backward_hooks = parameter._backward_hooks
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def _require_no_graph(parameter: nn.Parameter) -> None:
    """Refuse a parameter whose earlier shape a result that still exists has fixed for all
    backwards.

    `Node._input_metadata` (torch 2.11 to 2.15) has the shape that autograd expects.

    Raises:
        ConfigError: with what to do.
    """
    from torch.autograd.graph import get_gradient_edge

    if not parameter.requires_grad:
        return
    expected = get_gradient_edge(parameter).node._input_metadata[0].shape
    if tuple(expected) != tuple(parameter.shape):
        raise ConfigError(
            f"A parameter of shape {tuple(expected)} cannot be sharded, because something that was"
            " computed from it still exists. Delete the outputs of the model before training, or"
            " compute them under torch.no_grad()."
        )


def gradient_hooks(parameter: Tensor) -> dict[int, Callable[..., Any]]:
    """Functions that `register_hook` was given for a parameter, by the numbers that their handles
    remove (torch 2.11 to 2.15).

    Whatever is written into it is called instead."""
    return parameter._backward_hooks or {}


def accumulation_hooks(parameter: Tensor) -> dict[int, Callable[..., Any]]:
    """The same for `register_post_accumulate_grad_hook`."""
    return parameter._post_accumulate_grad_hooks or {}


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks of either kind."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def global_hooks() -> list[tuple[str, Any]]:
    """Hooks that run in every module: those of
    `torch.nn.modules.module.register_module_forward_hook` and its neighbours, with names.

    Torch has no public list of them (`_global_*_hooks`, torch 2.11 to 2.13).
    """
    from torch.nn.modules import module

    names = sorted(
        name
        for name in vars(module)
        if name.startswith("_global_") and isinstance(getattr(module, name), dict)
    )
    return [
        (name, hook) for name in names for hook in getattr(module, name).values() if callable(hook)
    ]
