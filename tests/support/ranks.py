"""One warm pool of rank processes for a whole test session.

``run_ranks(fn, world_size, *args, **kwargs)`` runs a module-level function on ``world_size`` ranks
that form a gloo process group, and returns their results in rank order. A fork server imports
torch, Transformers, Lightning, DeepSpeed and what most tests need of this project once; ranks are
forked from it, so eight of them start in about a second, and they stay from one test to the next.
Every call has its own process group, part of the store and log, and leaves no global state behind.

After a failure or a time-out all ranks are killed, because those that are left may wait in a
collective for ever; the next call forks new ones.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib.util
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed.pipelining.schedules",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.phi3.modeling_phi3",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen3.modeling_qwen3",
    "lightning.pytorch",
    "deepspeed",
    "peft",
    "pytest",  # test files import it, and functions that ranks run lie in test files
    "preloaded",
)
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    # Every new connection to a store looks up the name of its address. Where no name server answers
    # that takes 5 s.
    "RES_OPTIONS": "timeout:1 attempts:1",
}
OTHERS_SECONDS = 1.0
# after a failure by a lost peer, how long the rank that was lost may take to be seen; a busy
# machine takes its time
CAUSE_SECONDS = 60.0
STACKS_SECONDS = 3.0  # after a time-out, how long they may take to write where they are
LOG_TAIL_BYTES = 4000
LAUNCH_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class RankTimeout(TimeoutError):
    """Some rank did not finish in time; the notes hold every unfinished rank's stack."""


class RankDied(RuntimeError):
    """A rank process ended without an answer (a signal, ``os._exit``, out of memory); ``answers``
    are those of the others."""

    answers: list[Any] = []  # replaced on instances


class RankFailure(RuntimeError):
    """Stands for an exception that cannot be pickled."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What a rank is told: the pickled function with its arguments, and where it stands in the
    world."""

    payload: bytes
    rank: int
    world_size: int
    store_port: int
    number: int
    log_path: str
    timeout: float
    process_group: bool
    search_path: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a rank says: the pickled result, or the pickled exception with its traceback.
    `lost_peer`: another rank may be the cause."""

    ok: bool
    payload: bytes
    traceback: str = ""
    lost_peer: bool = False


class RankPool:
    """Up to ``limit`` rank processes that wait for calls. Used from one thread.

    Args:
        others_seconds: after the first failure, which is what is raised, how long the other ranks
            may take to report theirs.
    """

    def __init__(self, limit: int = 8, others_seconds: float = OTHERS_SECONDS) -> None:
        self.limit = limit
        self._others_seconds = others_seconds
        self._context = multiprocessing.get_context("forkserver")
        self._folder: Path | None = None
        self._ranks: list[tuple[Any, connection.Connection]] = []
        self._calls = 0
        self._store: Any = None
        self._store_of_call: Any = None

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple,
        kwargs: dict,
        timeout: float,
        process_group: bool,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on ranks 0 .. world_size - 1 and return the results by
        rank."""
        if not 1 <= world_size <= self.limit:
            raise ValueError(f"world size {world_size} is not in 1 .. {self.limit}")
        # a lambda or a local function fails here, in the test
        payload = pickle.dumps((fn, args, kwargs))
        self._start(world_size)
        folder = self._require_folder()
        self._calls += 1
        call = Call(
            payload,
            rank=0,
            world_size=world_size,
            store_port=self._store_port(process_group),
            number=self._calls,
            log_path="",
            timeout=timeout,
            process_group=process_group,
            search_path=tuple(map(str, sys.path)),
        )
        for rank, (_, pipe) in enumerate(self._ranks[:world_size]):
            pipe.send(
                dataclasses.replace(call, rank=rank, log_path=str(folder / f"rank_{rank}.log"))
            )
        try:
            answers = self._collect(world_size, timeout)
        except BaseException:
            self.kill()
            raise
        return [pickle.loads(answer.payload) for answer in answers]

    def _start(self, world_size: int) -> None:
        if any(not process.is_alive() for process, _ in self._ranks):
            self.kill()
        while len(self._ranks) < world_size:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            with server_environment():
                process.start()
            there.close()
            self._ranks.append((process, here))

    def _collect(self, world_size: int, timeout: float) -> list[Answer]:
        """Wait for every rank's answer; raise the first failure that is no consequence of another,
        with all tracebacks as notes."""
        answers: dict[int, Answer] = {}
        failed: list[int] = []
        end = deadline = time.monotonic() + timeout
        while len(answers) < world_size:
            pipes = enumerate(pipe for _, pipe in self._ranks[:world_size])
            waiting: dict[Any, int] = {pipe: rank for rank, pipe in pipes if rank not in answers}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                answers[rank] = self._receive(rank)
                if not answers[rank].ok:
                    failed.append(rank)
            if failed:
                lost = all(answers[rank].lost_peer for rank in failed)
                deadline = min(
                    end, time.monotonic() + (CAUSE_SECONDS if lost else self._others_seconds)
                )
        if failed:
            failed.sort(key=lambda rank: answers[rank].lost_peer)
            raise self._failure(failed, answers, world_size)
        if len(answers) < world_size:
            raise self._timeout(timeout, answers, world_size)
        return [answers[rank] for rank in range(world_size)]

    def _receive(self, rank: int) -> Answer:
        process, pipe = self._ranks[rank]
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join(CAUSE_SECONDS)
            error = RankDied(f"rank {rank} ended with exit code {process.exitcode} and no answer")
            return Answer(False, pickle.dumps(error), str(error))

    def _failure(
        self, failed: Sequence[int], answers: dict[int, Answer], world_size: int
    ) -> BaseException:
        error: BaseException = pickle.loads(answers[failed[0]].payload)
        # each different one once
        for text in dict.fromkeys(answers[rank].traceback for rank in failed):
            ranks = [rank for rank in failed if answers[rank].traceback == text]
            error.add_note(
                f"ranks {ranks} of {world_size} raised:\n{text}{self._log_tail(ranks[0])}"
            )
        if isinstance(error, RankDied):
            error.answers = [
                pickle.loads(answer.payload) for answer in answers.values() if answer.ok
            ]
        missing = [rank for rank in range(world_size) if rank not in answers]
        if missing:
            error.add_note(
                f"ranks {missing} had not finished {self._others_seconds:.0f} s after the first"
                " failure"
            )
        return error

    def _timeout(self, timeout: float, answers: dict[int, Answer], world_size: int) -> RankTimeout:
        missing = [rank for rank in range(world_size) if rank not in answers]
        error = RankTimeout(
            f"ranks {missing} of {world_size} have not finished after {timeout:g} s"
        )
        # the ranks write them, see _answer
        stacks = [self._require_folder() / f"rank_{rank}.log.stack" for rank in missing]
        deadline = time.monotonic() + STACKS_SECONDS
        while not all(stack.stat().st_size for stack in stacks) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.1)  # from the first line to the last
        for rank, stack in zip(missing, stacks, strict=True):
            error.add_note(f"rank {rank} is at:\n{stack.read_text()}{self._log_tail(rank)}")
        return error

    def _log_tail(self, rank: int) -> str:
        text = (
            (self._require_folder() / f"rank_{rank}.log")
            .read_bytes()[-LOG_TAIL_BYTES:]
            .decode(errors="replace")
        )
        return f"\n--- output of rank {rank} (its end) ---\n{text}" if text.strip() else ""

    def _store_port(self, process_group: bool) -> int:
        """Port of the store through which ranks find each other, which this process serves.

        Calls whose group is made here share one store: their keys begin with the number of the
        call. A function that makes its own group gets a store without keys of an earlier call, as
        torchrun serves a new one for each attempt.
        """
        from torch.distributed import TCPStore

        if process_group:
            self._store = self._store or TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False
            )
            return self._store.port
        self._store_of_call = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store_of_call.port

    def _require_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="lightning_3d_ranks_"))
        return self._folder

    def kill(self) -> None:
        """End all ranks at once; the next call starts new ones."""
        for process, pipe in self._ranks:
            process.kill()
            pipe.close()
        for process, _ in self._ranks:
            process.join(10)
        self._ranks.clear()

    def close(self) -> None:
        """End all ranks and remove the pool's files."""
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


POOL = RankPool()  # one for the session, by intention: starting ranks is what costs
atexit.register(POOL.close)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    process_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on each of ``world_size`` ranks; return the results in rank
    order.

    Args:
        fn: a module-level function; its module must be importable from ``sys.path`` (test files
            are).
        world_size: 1 to 8.
        timeout: seconds for the whole call; collectives inside have the same limit.
        process_group: ``False`` leaves the default process group to ``fn`` (RANK, WORLD_SIZE,
            MASTER_* are set).

    Arguments and results are pickled. The first failing rank's exception is raised here, with the
    tracebacks of all failing ranks as notes; a time-out raises ``RankTimeout`` with every
    unfinished rank's stack.
    """
    return POOL.run(fn, world_size, args, kwargs, timeout, process_group)


@contextlib.contextmanager
def server_environment() -> Iterator[None]:
    """The fork server takes its environment and its standard streams from its first start."""
    # it finds what this process finds
    variables = SERVER_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    # only what is installed: the server skips a module that it cannot find, but a parent of it must
    # exist
    names = [
        name for name in PRELOAD if importlib.util.find_spec(name.partition(".")[0]) is not None
    ]
    multiprocessing.set_forkserver_preload(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


# What follows runs in the rank processes.


def _serve(pipe: connection.Connection) -> None:
    """Answer calls until the owner closes the pipe."""
    threading.Thread(target=_die_with_owner, daemon=True).start()
    import torch

    gc.freeze()  # what was imported is never garbage: without it, each collection costs 0.3 s
    torch.set_num_threads(1)
    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # nothing of a rank needs an orderly end, and DeepSpeed's may abort
        answer = _answer(call)
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)


def _die_with_owner() -> None:
    """End this rank when the test session ends, however that happens.

    A rank that waits in a collective would not see its pipe close. The kernel's parent-death signal
    would not do: the parent is the fork server, which lives as long as its children.
    """
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    os.kill(os.getpid(), signal.SIGKILL)


class _Outcome:
    """Context that ends in an ``Answer``, whatever its body raises: a ``SystemExit`` too must not
    end the rank."""

    answer = Answer(False, b"")

    def __enter__(self) -> "_Outcome":
        return self

    def __exit__(self, kind: object, error: BaseException | None, stack: object) -> bool:
        if error is not None:
            from lightning_3d.ranks.failure import is_lost_peer

            text = "".join(traceback.format_exception(error))
            self.answer = Answer(False, _dump_exception(error), text, is_lost_peer(error))
        return True


def _dump_exception(error: BaseException) -> bytes:
    """The exception if it survives pickling both ways, else a stand-in."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
        return payload
    except (pickle.PickleError, TypeError, AttributeError, ValueError):
        return pickle.dumps(RankFailure(f"{type(error).__name__}: {error}"))


def _answer(call: Call) -> Answer:
    with (
        _redirected_output(call.log_path),
        _stack_on_timeout(call),
        _Outcome() as outcome,
        _clean_state(call),
    ):
        fn, args, kwargs = pickle.loads(call.payload)
        with _process_group(call):
            outcome.answer = Answer(True, pickle.dumps(fn(*args, **kwargs)))
    return outcome.answer


@contextlib.contextmanager
def _redirected_output(path: str) -> Iterator[None]:
    """Standard output and error of the call go to a fresh file, which is shown if the call
    fails."""
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@functools.cache
def _connect(port: int) -> Any:
    """The session's store, over one connection for all calls."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False)


@contextlib.contextmanager
def _stack_on_timeout(call: Call) -> Iterator[None]:
    """Write the stacks of all threads to a file when the call takes too long. No signal is used:
    Trainers replace handlers."""
    descriptor = os.open(f"{call.log_path}.stack", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    faulthandler.dump_traceback_later(call.timeout, file=descriptor)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(descriptor)


@contextlib.contextmanager
def _process_group(call: Call) -> Iterator[None]:
    """The call's own default group; groups made by the function end with it."""
    import torch.distributed as dist

    if call.process_group:
        limit = timedelta(seconds=call.timeout)
        store = dist.PrefixStore(f"call {call.number}", _connect(call.store_port))
        store.set_timeout(limit)
        dist.init_process_group(
            "gloo", store=store, rank=call.rank, world_size=call.world_size, timeout=limit
        )
    yield
    # After an exception the group is left as it is: the pool is killed, and an orderly end could
    # wait for others.
    if dist.is_initialized():
        dist.barrier()  # nobody closes connections that another rank still reads from
        dist.destroy_process_group()


@contextlib.contextmanager
def _clean_state(call: Call) -> Iterator[None]:
    """Environment as torchrun sets it, fixed seeds; everything global is put back afterwards."""
    import numpy
    import torch

    environment, folder = dict(os.environ), os.getcwd()
    sys.path[:] = call.search_path
    os.environ.update(_launch_environment(call))
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        sys.excepthook = sys.__excepthook__
        _reset_deepspeed()
        gc.collect()  # process groups and autograd graphs that wait in cycles


def _launch_environment(call: Call) -> dict[str, str]:
    """What torchrun sets, so that a Trainer inside the call finds itself launched already.

    The store at MASTER_PORT is served by the session, as torchrun's agent serves one.
    """
    values = (
        call.rank,
        call.rank,
        0,
        call.world_size,
        call.world_size,
        "127.0.0.1",
        call.store_port,
    )
    launch = {name: str(value) for name, value in zip(LAUNCH_VARIABLES, values, strict=True)}
    elastic = {
        "RUN_ID": "ranks",
        "USE_AGENT_STORE": "True",
        "RESTART_COUNT": call.number,
        "MAX_RESTARTS": call.number,
    }
    return launch | {f"TORCHELASTIC_{name}": str(value) for name, value in elastic.items()}


def _reset_deepspeed() -> None:
    """DeepSpeed keeps the groups of its last engine in module globals; they are gone with the
    process group. Its own ZeRO 3 replaces `torch.nn.functional.linear` for good, with a function
    whose gradients are wrong in compiled blocks of a later test."""
    import torch

    torch.nn.functional.linear = torch._C._nn.linear
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        for name, value in vars(groups).items():
            if name.isupper() and name.startswith("_") and "GROUP" in name or name == "mpu":
                setattr(groups, name, {} if isinstance(value, dict) else None)
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        vars(comm)["cdb"] = None
