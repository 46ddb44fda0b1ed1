"""Processes that wait for calls, one for each rank. They are started once, because an import of
torch costs seconds; every call makes process groups of its own. A call that hangs or leaves ranks
behind ends all of them, and the next call starts new ones.

With more ranks than GPUs, ranks share GPUs: each is a node of its own with one GPU. NCCL refuses
two ranks on one GPU of one host; it takes these ranks for different hosts, and sends their messages
through sockets of the loopback interface.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_3d.ranks.progress import VARIABLE as PROGRESS

_OTHERS_SECONDS = 5.0
"""How long the other ranks may take to answer after the first failure."""

_START_SECONDS = 180.0


class CallFailed(Exception):
    """A rank raised an error or ended; the text has the tracebacks."""


class CallHung(Exception):
    """Ranks did not answer in time; the text has their stacks."""


@dataclass(frozen=True)
class _WorkerCall:
    payload: bytes
    rank: int
    world_size: int
    port: int
    number: int
    stack: str
    seconds: float
    alone_on_node: bool


class Workers:
    """Rank processes of this machine. Use it as a context, so that none is left behind.

    Args:
        count: number of ranks.
        gpus: number of GPUs that they use; 0: CPU ranks. With more ranks than GPUs, ranks share
            GPUs.
        prepare: function that each worker calls when it starts.
    """

    def __init__(
        self, count: int, gpus: int = 0, prepare: Callable[[], None] | None = None
    ) -> None:
        self._count, self._gpus, self._prepare = count, gpus, prepare
        self._ranks: list[tuple[Any, connection.Connection]] = []
        self._calls = 0
        self._folder = tempfile.TemporaryDirectory(prefix="lightning_3d_selftest_")

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    @property
    def _shares(self) -> bool:
        return 0 < self._gpus < self._count

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._folder.cleanup()

    def start(self) -> None:
        """Start the workers that do not run, and wait until they have imported what they need."""
        if self._ranks:
            return
        # CUDA does not survive a fork, and imports of other libraries may initialize it; CPU ranks
        # share one import.
        context: Any = multiprocessing.get_context("spawn" if self._gpus else "forkserver")
        if not self._gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            context.set_forkserver_preload(
                [
                    "lightning_3d.app.verification.cell_ranks",
                    "transformers.models.llama.modeling_llama",
                ]
            )
        for rank in range(self._count):
            here, there = context.Pipe()
            place = _shared_gpu(rank, self._gpus) if self._shares else {}
            process = context.Process(
                target=_serve, args=(there, place, self._prepare), daemon=True
            )
            process.start()
            there.close()
            self._ranks.append((process, here))
        self._collect(self._count, _START_SECONDS)

    def call(
        self, function: Callable[..., Any], ranks: int, seconds: float, *arguments: Any
    ) -> list[Any]:
        """Call a function of a module on the first ranks, and return the results in the order of
        the ranks.

        Raises:
            CallFailed: a rank failed.
            CallHung: a rank did not answer within `seconds`.
        """
        from torch.distributed import TCPStore

        self.start()
        self._calls += 1
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        payload = pickle.dumps((function, arguments))
        for rank, (_, pipe) in enumerate(self._ranks[:ranks]):
            pipe.send(
                _WorkerCall(
                    payload,
                    rank,
                    ranks,
                    store.port,
                    self._calls,
                    str(self._stack(rank)),
                    seconds,
                    self._shares,
                )
            )
        return self._collect(ranks, seconds)

    def _stack(self, rank: int) -> Path:
        return self.folder / f"stack_{rank}"

    def _collect(self, ranks: int, seconds: float) -> list[Any]:
        answers: dict[int, tuple[bool, bytes | str]] = {}
        deadline, failed = time.monotonic() + seconds, False
        while len(answers) < ranks:
            waiting: dict[Any, int] = {
                self._ranks[rank][1]: rank for rank in range(ranks) if rank not in answers
            }
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                answers[waiting[pipe]] = self._receive(waiting[pipe])
            if not failed and not all(good for good, _ in answers.values()):
                failed, deadline = True, min(deadline, time.monotonic() + _OTHERS_SECONDS)
        if failed:
            texts = {
                str(text): rank
                for rank, (good, text) in sorted(answers.items(), reverse=True)
                if not good
            }
            self._end()
            raise CallFailed(
                "\n".join(f"rank {rank}:\n{text}" for text, rank in reversed(texts.items()))
            )
        if len(answers) < ranks:
            silent = [rank for rank in range(ranks) if rank not in answers]
            time.sleep(1.0)  # workers write their stacks when the time is over
            stacks = "".join(
                f"rank {rank} is at:\n{self._stack(rank).read_text()}"
                for rank in silent
                if self._stack(rank).exists()
            )
            self._end()
            raise CallHung(f"ranks {silent} did not answer within {seconds:.0f} s\n{stacks}")
        return [pickle.loads(answers[rank][1]) for rank in range(ranks)]  # type: ignore[arg-type]

    def _receive(self, rank: int) -> tuple[bool, bytes | str]:
        process, pipe = self._ranks[rank]
        try:
            answer: tuple[bool, bytes | str] = pipe.recv()
        except (EOFError, OSError):
            process.join(5)
            return (
                False,
                f"the process ended with exit code {process.exitcode} and reported no error",
            )
        return answer

    def _end(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            pipe.close()
        for process, _ in self._ranks:
            process.join(10)
        self._ranks = []


def _shared_gpu(rank: int, gpus: int) -> dict[str, str]:
    """Environment of a rank that shares its GPU: it sees this GPU only, and NCCL takes it for a
    host of its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(gpus)]
    sockets = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
    return sockets | {
        "CUDA_VISIBLE_DEVICES": devices[rank % gpus],
        "NCCL_HOSTID": f"lightning_3d_selftest_{rank}",
    }


def _serve(
    pipe: connection.Connection, place: dict[str, str], prepare: Callable[[], None] | None
) -> None:
    """Answer calls in a worker until the owner closes the pipe or ends."""
    threading.Thread(target=_die_with_owner, daemon=True).start()
    os.environ.update(place)  # before CUDA starts
    import torch

    import lightning_3d.app.verification.cell_ranks  # noqa: F401 - what all calls need

    os.environ[PROGRESS] = "0"  # the owner shows the progress
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    pipe.send((True, pickle.dumps(None)))
    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        pipe.send(_answer(call))


def _die_with_owner() -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    os._exit(1)


def _answer(call: _WorkerCall) -> tuple[bool, bytes | str]:
    import torch
    import torch.distributed as dist

    _become_rank(call)
    with open(call.stack, "w") as stack:
        faulthandler.dump_traceback_later(call.seconds, file=stack)
        try:
            function, arguments = pickle.loads(call.payload)
            torch.manual_seed(0)
            answer = pickle.dumps(function(*arguments))
            if dist.is_initialized():
                # Nobody closes connections that another rank still reads from.
                dist.barrier(
                    device_ids=(
                        [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None
                    )
                )
                dist.destroy_process_group()
            _reset_deepspeed()
        except BaseException:
            return False, traceback.format_exc()
        finally:
            faulthandler.cancel_dump_traceback_later()
    return True, answer


def _become_rank(call: _WorkerCall) -> None:
    """Set what torchrun sets, so that a Trainer finds itself started. The owner serves the store,
    as torchrun's agent does."""
    node, local, on_node = (
        (call.rank, 0, 1) if call.alone_on_node else (0, call.rank, call.world_size)
    )
    place = {"RANK": call.rank, "LOCAL_RANK": local, "GROUP_RANK": node, "NODE_RANK": node}
    world = {
        "WORLD_SIZE": call.world_size,
        "LOCAL_WORLD_SIZE": on_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": call.port,
    }
    elastic = {
        "RUN_ID": "selftest",
        "USE_AGENT_STORE": "True",
        "RESTART_COUNT": call.number,
        "MAX_RESTARTS": call.number,
    }
    values = place | world | {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}
    os.environ.update({name: str(value) for name, value in values.items()})


def _reset_deepspeed() -> None:
    """Forget the groups of DeepSpeed's last engine, which it keeps in globals of its modules."""
    groups = sys.modules.get("deepspeed.utils.groups")
    for name, value in list(vars(groups).items()) if groups is not None else []:
        if (name.isupper() and name.startswith("_") and "GROUP" in name) or name == "mpu":
            setattr(groups, name, {} if isinstance(value, dict) else None)
    if (comm := sys.modules.get("deepspeed.comm.comm")) is not None:
        vars(comm)["cdb"] = None
