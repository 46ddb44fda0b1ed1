"""Every private symbol of Lightning and torch that this package touches, in one place, with the reason; DeepSpeed's: `deepspeed_compat`.

Each function names the library, the versions it was read in and what would make it unnecessary. `tests/test_compat*.py` hold one
contract test for each, so that a new version which changes one of them fails there and not in a training run.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_3d.checkpoint_names import SAVING, aside, checkpoints_in
from lightning_3d.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lightning_3d.remote_path import Place


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

    `_SubprocessScriptLauncher` is not public (Lightning 2.6), but it is what DDPStrategy uses. Its `launch` is overridden, because
    the observer that it starts kills rank 0 when a child has failed, and the children that it starts outlive rank 0. Attribute
    `children`: who watches instead, None before.

    Raises:
        ConfigError: from its `launch`: the ranks cannot meet at MASTER_ADDR and MASTER_PORT.
    """
    from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    from lightning_3d.children import Children
    from lightning_3d.failures import PARENT_VARIABLE
    from lightning_3d.rendezvous import hold_meeting_point
    from lightning_3d.ties import die_with

    class Launcher(_SubprocessScriptLauncher):
        children: Children | None = None
        meeting_point: Any = None

        def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            self.cluster_environment.validate_settings(num_devices=num_processes, num_nodes=num_nodes)
            if self.children is None:  # not again for a second fit, or a test after it
                self.meeting_point = hold_meeting_point(cluster_environment, num_nodes)
                children = Children(cluster_environment.node_rank() * num_processes, num_nodes * num_processes)
                children.start(self._start_scripts)
                self.children = children
            _set_num_threads_if_needed(num_processes=num_processes)
            return function(*args, **kwargs)

        def _start_scripts(self) -> list[subprocess.Popen]:
            self._check_can_spawn_children()
            place = {"MASTER_ADDR": cluster_environment.main_address, "MASTER_PORT": str(cluster_environment.main_port)}
            place |= {"NODE_RANK": str(cluster_environment.node_rank()), "WORLD_SIZE": str(num_processes * num_nodes)}
            os.environ.update(place, LOCAL_RANK=str(cluster_environment.local_rank()))
            self.procs = []
            for local_rank in range(1, num_processes):
                command, folder = _basic_subprocess_cmd(), None
                if _in_hydra_job():
                    command, folder = _hydra_subprocess_cmd(local_rank)
                environment = {**os.environ, "LOCAL_RANK": str(local_rank), PARENT_VARIABLE: str(os.getpid())}
                tie = partial(die_with, os.getpid())
                self.procs.append(subprocess.Popen(command, env=environment, cwd=folder, preexec_fn=tie))
            return self.procs

    if cluster_environment.creates_processes_externally:
        return None
    return Launcher(cluster_environment, num_processes, num_nodes)


def _in_hydra_job() -> bool:
    """Whether this script is a job of Hydra, which need not be installed."""
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    return hydra_config is not None and hydra_config.HydraConfig.initialized()


def connect_process_group(strategy: Any, timeout: Any) -> Callable[[], Any]:
    """Tell the cluster environment this process's place and initialize the default process group.

    `_init_dist_connection` and `_get_default_process_group_backend_for_device` are not public (Lightning 2.6); DDPStrategy uses
    both. DDPStrategy also resets the random number generators here. This returns the function that does, for the caller to decide.

    The group is not bound to a device, as DDPStrategy binds it: NCCL communicators of a bound group are made eagerly, and in them
    all messages of a rank are serialized, so that a send of a middle pipeline stage would wait behind the receives posted before
    it. Unbound, every pair of ranks has a communicator of its own (torch 2.11 to 2.13, `ProcessGroupNCCL::pointToPoint`).
    """
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device, _init_dist_connection
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from lightning_3d.failures import connect_store, store_outlives_ranks
    from lightning_3d.rendezvous import explained_errors

    environment = strategy.cluster_environment
    environment.set_global_rank(strategy.node_rank * strategy.num_processes + strategy.local_rank)
    environment.set_world_size(strategy.num_nodes * strategy.num_processes)
    for decorator in (rank_zero_only, fabric_rank_zero_only):
        setattr(decorator, "rank", strategy.global_rank)  # noqa: B010  an attribute that its type does not declare
    device = strategy.root_device
    backend = _get_default_process_group_backend_for_device(device)
    settle_gloo_at_exit()
    place: dict[str, Any] = {}
    if store_outlives_ranks() and strategy.world_size > 1:  # torch 2.13 would read the addresses of ranks that are gone
        place["store"] = connect_store(strategy.global_rank, strategy.world_size)[0]
    with explained_errors(strategy.global_rank):
        _init_dist_connection(environment, backend, timeout=timeout, **place)
    return reset_seed


@contextmanager
def watch_operations(callback: Callable[[str, list[Tensor], list[Tensor]], None]) -> Iterator[None]:
    """Call `callback(operator, tensors read, tensors written)` before every ATen operation of this thread.

    Initialization has to know which tensors a model's own initializers write. `TorchDispatchMode` is documented ("Extending PyTorch")
    but lives in `torch.utils._python_dispatch`, and what an operator writes stands in its `_schema` only (torch 2.11 to 2.13). The
    operator is named like "normal_.default". Views count as neither read nor written.
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
    """Stop the device with an assertion unless `condition`, of shape (), holds; nothing waits for it.

    `torch._assert_async` (torch 2.11 to 2.13) has no public form.
    """
    import torch

    torch._assert_async(condition, message)


def storage_key(tensor: Tensor) -> int:
    """A number that a tensor shares with its views and its `.data`, also on meta, where the data pointer is always 0.

    `UntypedStorage._cdata` (torch 2.11 to 2.13); a storage has no public identity. Valid while the tensor lives.
    """
    return tensor.untyped_storage()._cdata


def hush_sync_dist_advice(name: str) -> None:
    """Keep Lightning from advising `sync_dist=True` for a value that already is the same on every rank.

    Lightning 2.6 keeps the messages that it showed in a module-level set, under their full text; there is no other way to tell it
    that a value was reduced.
    """
    from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache

    warning_cache.add(
        f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)` when logging on epoch level in distributed setting to"
        " accumulate the metric across devices."
    )


def hush_tree_warning() -> None:
    """Keep Lightning 2.6 with torch 2.13 from warning on every rank of a name of torch that Lightning itself uses (`LeafSpec`)."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")


@cache
def settle_gloo_at_exit() -> None:
    """At the end of the process, wait until gloo's threads have let go of their last tensors.

    To be called as early as possible: what is registered at exit first runs last, after others that may communicate.

    A gloo worker thread (torch 2.11 to 2.13, pytorch/pytorch#179291) frees the tensors of a collective after it has told the caller that
    it is done. If one of them has a Python object, that takes the interpreter's lock. When the main thread has begun to finalize the
    interpreter meanwhile, Python ends the thread, which unwinds through a C++ destructor: "terminate called without an active exception",
    and a run that succeeded ends with SIGABRT. That is about one in ten short runs which end soon after a collective, with DeepSpeed or
    without. Here the main thread waits, without the lock, until all of these threads are asleep. `atexit` runs before finalization.
    """
    atexit.register(_settle_gloo)


def _settle_gloo(patience_seconds: float = 2.0) -> None:
    deadline = time.monotonic() + patience_seconds
    asleep = 0
    # Twice: at the first look a thread may sleep because it waits for the interpreter's lock, which the pause gives it.
    while asleep < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        asleep = asleep + 1 if _gloo_threads_sleep() else 0


def _gloo_threads_sleep() -> bool:
    """Whether no gloo worker thread of this process is running or ready to; True on systems without /proc."""
    for status in Path("/proc/self/task").glob("*/stat"):
        try:
            name, state = status.read_text().rpartition(")")[0::2]
        except OSError:  # the thread has ended
            continue
        if name.partition("(")[2] == "pt_gloo_runloop" and state.split()[0] != "S":
            return False
    return True


def read_dcp_metadata(path: Place) -> Any:
    """The table of contents of a torch.distributed.checkpoint folder, a `Metadata`.

    DCP (torch 2.11 to 2.13) keeps it as a pickle and opens it with plain `pickle.load`, which runs whatever code a file asks for.
    Here only the classes that DCP itself writes are let through: those of `checkpoint.metadata`, `_StorageInfo`, sizes, dtypes,
    layouts and paths.

    Raises:
        CheckpointError: the file asks for anything else, or is damaged.
    """
    import pickle

    import torch

    metadata = ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
    storage = ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata")
    known = {("torch.distributed.checkpoint.metadata", name) for name in (*metadata, *storage)}
    known |= {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}
    known |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size")}

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            if (module, name) not in known and not is_dtype:
                raise CheckpointError(f"{path} asks for {module}.{name}, which no checkpoint of this kind holds. It was not loaded.")
            return super().find_class(module, name)

    try:
        with path.open("rb") as file:
            return Reader(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} cannot be read: {error!r}.") from error


def dcp_place(file: str, offset: int, length: int) -> Any:
    """Where a slice lies, as the reader of torch.distributed.checkpoint expects it: its `_StorageInfo` (torch 2.11 to 2.13)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def dcp_metadata(tensors: dict[str, Any], notes: Any) -> Any:
    """A table of contents of the version that torch.distributed.checkpoint (torch 2.11 to 2.13) writes itself; older ones had none."""
    import torch.distributed.checkpoint.filesystem as filesystem
    from torch.distributed.checkpoint.metadata import Metadata

    metadata = Metadata(tensors, planner_data=notes)
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return metadata


def keep_sample_order(trainer: Any, make_sampler: Callable[..., Any]) -> None:
    """Let every data loader keep the order that it has on one process, of which each data-parallel rank reads its part.

    With several ranks Lightning 2.6 injects a `DistributedSampler` into the training loader, which shuffles whatever the user asked for,
    and by its own seed. Its `_DataConnector._resolve_sampler` is asked here for another one, except for prediction, whose samples are not
    repeated.

    Args:
        make_sampler: called with the loader's own sampler and dataset and, as keywords, the arguments that Lightning gives a
            `DistributedSampler`, `drop_last`, and `training`: whether the loader is one of the training.
    """
    from lightning.pytorch.trainer.states import RunningStage

    connector = trainer._data_connector
    inject = type(connector)._resolve_sampler

    def resolve(dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        if mode == RunningStage.PREDICTING or not connector._requires_distributed_sampler(dataloader):
            return inject(connector, dataloader, shuffle, mode)
        batches = dataloader.batch_sampler  # given by the user, it has the user's sampler, and the loader a sequential one
        return make_sampler(
            getattr(batches, "sampler", dataloader.sampler),
            dataloader.dataset,
            **trainer.distributed_sampler_kwargs,
            drop_last=bool(getattr(batches, "drop_last", False)),
            training=mode == RunningStage.TRAINING,
        )

    connector._resolve_sampler = resolve


def evaluation_place(trainer: Any) -> tuple[object, int]:
    """The data loader of the running validation or test batch, and the batch's index in it; (None, 0) for a batch of several loaders.

    A step need not take `batch_idx`, so the loop is asked: `Trainer._evaluation_loop` and its `batch_progress`, which counts over
    all loaders, `_is_sequential` and `_combined_loader` (Lightning 2.6).
    """
    loop = trainer._evaluation_loop
    if not loop._is_sequential:
        return None, 0
    done = loop.batch_progress.current.ready - 1
    for loader, batches in zip(loop._combined_loader.flattened, loop.max_batches, strict=True):
        if done < batches:
            return loader, int(done)
        done -= batches
    return None, 0


def batches_to_come(trainer: Any) -> float | None:
    """At the first batch of an epoch or an evaluation: how many this rank will have (infinity where nobody knows); None later.

    `Trainer._evaluation_loop` and the loops' `batch_progress` are not public (Lightning 2.6).
    """
    if trainer.training:
        return trainer.num_training_batches if trainer.fit_loop.batch_idx == 0 else None
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    return sum(loop.max_batches) if loop.batch_progress.current.ready == 1 else None


def go_on_in_data(trainer: Any, batches_then: float | None, restore_generators: Callable[[], None]) -> None:
    """At the start of a resumed fit: take its data loader to where it was, and restore the random number generators where an
    uninterrupted fit would have had the saved states: before a new epoch's iterator is made, or after the last batch trained on.

    Lightning 2.6 has made the iterator by then (`FitLoop.setup_data`), before it tells samplers the epoch, and counts where the fit was
    (`epoch_loop.batch_progress`, to which `restarted_on_train_batch_end` adds one). It restores the position of loaders that have
    `load_state_dict`; of others it would take the first batches of the epoch again, and warn. Here the batches of before are read and
    dropped.

    Args:
        batches_then: in an epoch, when the checkpoint was saved.

    Raises:
        DataError: an epoch has another number of batches now, so that the position means nothing.
    """
    from lightning.fabric.utilities.data import _set_sampler_epoch

    loop = trainer.fit_loop
    fetcher, loaders = loop._data_fetcher, loop._combined_loader.flattened
    restore_generators()
    if any(hasattr(loader, "load_state_dict") for loader in loaders):
        return
    done = loop.epoch_loop.batch_progress.current.completed + int(loop.epoch_loop.restarted_on_train_batch_end)
    now = trainer.num_training_batches
    inside = loop.epoch_loop.restarting and 0 < done < (batches_then if batches_then is not None else now)
    if inside and batches_then is not None and batches_then != now:
        raise DataError(
            f"The checkpoint was saved after {done} of the {batches_then} batches of an epoch, which has {now} now: nothing tells which"
            " samples come next. Use the same data and global batch, or a checkpoint from the end of an epoch."
        )
    if not inside and trainer.current_epoch == 0:
        return
    for loader in loaders:
        _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    iter(fetcher)
    if not inside:
        return
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
    for _ in range(done):
        next(fetcher)
    fetcher.fetched -= done
    restore_generators()


def autograd_is_running() -> bool:
    """Whether this is called from inside a backward: `torch._C._current_graph_task_id` (torch 2.11 to 2.13) is not public."""
    import torch

    return torch._C._current_graph_task_id() != -1


def steps_after_this_batch(trainer: Any) -> bool:
    """Whether the optimizer steps after this batch, as Lightning's loop asks itself (`FitLoop._should_accumulate`, 2.6)."""
    return not trainer.fit_loop._should_accumulate()


def obey_signals_together(trainer: Any) -> None:
    """Let a signal to any rank act before the next batch of a fit, on all ranks, whatever each of them is doing when it comes. SIGTERM ends
    the fit, and so does the first SIGINT (`obey_first_interrupt`). Where SLURM starts jobs again, its signal before that (SIGUSR1) saves a
    checkpoint and requeues the job.

    Lightning's handlers (2.6, `_SignalConnector._sigterm_notifier_fn`, `_slurm_sigusr_handler_fn`) broadcast and save in the middle of a
    step, where the other ranks wait for activations that this rank then never sends. Here they only take a note; where the loop
    broadcasts rank 0's before every batch (`_TrainingEpochLoop._broadcast_sigterm_tensor`), all ranks' notes are reduced. Outside a fit
    SIGTERM ends the process at once.
    """
    import signal

    import torch
    import torch.distributed as dist
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

    connector = trainer._signal_connector
    save_and_requeue = type(connector)._slurm_sigusr_handler_fn
    noted = {"end": 0, "requeue": 0}

    def note_end(signum: int, frame: Any) -> None:
        if trainer.state.fn != "fit":
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        if trainer.strategy.launcher is not None and not noted["end"]:
            trainer.strategy.launcher.kill(signum)
        noted["end"] = max(noted["end"], signum)

    def note_interrupt(signum: int) -> None:  # not passed on: a terminal sends it to all ranks, and a second one would end them at once
        noted["end"] = max(noted["end"], signum)

    def note_requeue(signum: int, frame: Any) -> None:
        noted["requeue"] = 1

    def act_on_notes() -> None:
        anywhere = torch.tensor([noted["end"], noted["requeue"]], device=trainer.strategy.root_device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        end, requeue = anywhere.tolist()
        noted.update(end=0, requeue=0)
        if requeue:
            with trainer.strategy.saving_at_once():
                save_and_requeue(connector, signal.SIGUSR1, None)
        if end:
            rank_zero_info(f"{signal.Signals(end).name}: the fit ends before its next batch.")
            raise ended_by(SIGTERMException(), end)

    obey_first_interrupt(trainer, note_interrupt)
    connector._sigterm_notifier_fn = note_end
    connector._slurm_sigusr_handler_fn = note_requeue
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = act_on_notes


def obey_interrupt_alone(trainer: Any) -> None:
    """As `obey_signals_together`, for a fit of one process: Lightning (2.6) asks `received_sigterm` after each batch, and raises."""

    def note(signum: int) -> None:
        trainer._signal_connector.received_sigterm = True

    obey_first_interrupt(trainer, note)


def obey_first_interrupt(trainer: Any, note: Callable[[int], None]) -> None:
    """Let the first SIGINT of a fit that writes checkpoints call `note`; the second one ends this process at once, whatever it does.

    Lightning (2.6) installs its handlers right before the fit begins (`_SignalConnector.register_signal_handlers`), and `teardown` there
    restores every handler of before, this one's too. A handler of the user's own stays, and so does an ignored SIGINT (nohup, `&`).
    """
    import signal

    connector = trainer._signal_connector

    def interrupted(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        connector.interrupted = True
        note(signum)

    def register() -> None:
        type(connector).register_signal_handlers(connector)
        connector.interrupted = False
        if trainer.state.fn == "fit" and trainer.checkpoint_callbacks and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            connector._register_signal(signal.SIGINT, interrupted)

    connector.register_signal_handlers = register


def ended_by(exception: Any, signum: int) -> Any:
    """The exception of a fit that a signal ended, with the signal in it, and after Ctrl-C the exit code that a shell expects.

    `SIGTERMException` is a `SystemExit` without a code, so that a script ends with 0 (Lightning 2.6). Ranks that Lightning's launcher
    started leave the code to the rank that started them: it takes any other code of theirs for a failure.
    """
    import signal

    from lightning_3d.failures import PARENT_VARIABLE

    exception.signal_number = signum
    if signum == signal.SIGINT and PARENT_VARIABLE not in os.environ:
        exception.code = 128 + signum
    return exception


def name_end(trainer: Any, exception: BaseException) -> None:
    """Complete the exception of a fit of one process, which Lightning raised itself (see `ended_by`)."""
    import signal

    if not hasattr(exception, "signal_number"):
        ended_by(exception, signal.SIGINT if getattr(trainer._signal_connector, "interrupted", False) else signal.SIGTERM)


def finished_requeue(path: str) -> str:
    """The checkpoint of a requeued job that Lightning means by `path`. It takes the highest number in any name with "hpc_ckpt_" (2.6,
    `_CheckpointConnector._hpc_resume_path`), that of a folder too that a killed save has left unfinished."""
    wanted = Path(path)
    if not wanted.name.startswith("hpc_ckpt_") or wanted.exists() or not aside(wanted, SAVING).exists():
        return path
    finished = [other for other in checkpoints_in(wanted.parent) if other.name.startswith("hpc_ckpt_")]
    return str(finished[0]) if finished else path


def throughputs_of(monitor: Any) -> list[Any]:
    """The counters of a `ThroughputMonitor`, which it keeps in `_throughputs` (Lightning 2.6) by stage."""
    return list(monitor._throughputs.values())


def sync_metric_with(metric: Any, gather: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
    """Let a torchmetrics object (1.x) compute its value from the states that `gather` returns for its own.

    Its own `_sync_dist` gathers tensor by tensor, which waits for ever where ranks have lists of different lengths. `_reductions`
    says how each state is joined.
    """
    import torch

    def sync(dist_sync_fn: Any = None, process_group: Any = None) -> None:
        states = gather({name: getattr(metric, name) for name in metric._reductions})
        for name, reduction in metric._reductions.items():
            values = [state[name] for state in states]
            if isinstance(values[0], list):
                joined: Any = [tensor for value in values for tensor in value]
            else:
                joined = torch.stack(values)
            setattr(metric, name, reduction(joined) if reduction is not None and len(joined) else joined)

    if metric._reductions:  # others, as sums of two metrics, have no state of their own
        metric._sync_dist = sync


def metric_state(metric: Any) -> tuple[dict[str, Any], int]:
    """A copy of what a torchmetrics object (1.x) has accumulated: `_copy_state_dict` and `_update_count` have no public form."""
    return metric._copy_state_dict(), metric._update_count


def restore_metric_state(metric: Any, state: tuple[dict[str, Any], int]) -> None:
    """Put back what `metric_state` copied."""
    values, count = state
    for name, value in values.items():
        setattr(metric, name, value)
    metric._update_count = count
    metric._computed = None


def find_last_at_urls() -> None:
    """Let `ckpt_path="last"` find checkpoints at URLs, in this process.

    Lightning 2.6 (`ModelCheckpoint._find_last_checkpoints`) forgets the protocol of what it has listed, so that it looks for it on the
    local disk, warns, and trains from the start. Then it asks when each was modified, which an object store does not know of a folder: so
    what it is given are the manifests, and `CheckpointStore.load` takes a manifest for its checkpoint.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_3d.checkpoint_names import manifests_in
    from lightning_3d.remote_path import RemotePath, place

    found_by_lightning = ModelCheckpoint._find_last_checkpoints
    if hasattr(found_by_lightning, "at_urls"):
        return

    def find(callback: ModelCheckpoint, trainer: Any) -> set[str]:
        folder = place(callback.dirpath or trainer.default_root_dir)
        if not isinstance(folder, RemotePath):
            return found_by_lightning(callback, trainer)
        last = str(callback.CHECKPOINT_NAME_LAST)
        return {str(manifest) for manifest in manifests_in(folder) if manifest.parent.name.startswith(last)}

    find.at_urls = found_by_lightning  # type: ignore[attr-defined]
    ModelCheckpoint._find_last_checkpoints = find  # type: ignore[assignment, method-assign]
