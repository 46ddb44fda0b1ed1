"""The last collectives of this process, from torch's flight recorder.

torch 2.8 to 2.13 records what gloo and NCCL are asked to do in one buffer for each kind of device.
It reads the size from the environment when the first group is made, and shows the contents through
private functions: `_dump_fr_trace_json` for gloo, `_dump_nccl_trace_json` for NCCL.
"""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KEPT = 2000
"""Collectives that are kept, over all groups."""

_SIZE = "TORCH_FR_BUFFER_SIZE"
_DONE = "completed"


@dataclass(frozen=True)
class RecordedCollective:
    """A collective, or a message between two ranks on NCCL.

    Attributes:
        group: name of the group in torch, the same on all its ranks.
        purpose: description that the group was made with, such as "tp".
        number: 1 for the first collective of the group.
        kind: such as "all_reduce".
        shape: shapes and types of the inputs, such as "(4, 8) float".
        done: whether it has ended.
        message: whether it is a message between two ranks, which has numbers of its own.
    """

    group: str
    purpose: str
    number: int
    kind: str
    shape: str
    done: bool
    message: bool


@dataclass
class SharedMemoryCall:
    """A collective or a message through shared memory, of which torch knows nothing.

    Attributes:
        group: name of the group in torch.
        purpose: description that the group was made with.
        number: 1 for the first of its kind in the group: collectives and messages have numbers of
            their own.
        kind: such as "all_reduce".
        size: shape of this rank's tensor.
        dtype: its type.
        message: whether it is a message between two ranks.
        done: whether it has ended.
    """

    group: str
    purpose: str
    number: int
    kind: str
    size: tuple[int, ...]
    dtype: torch.dtype
    message: bool
    done: bool = False

    def described(self) -> RecordedCollective:
        """Return the call as torch would have recorded it, in a group of its own, which has its own
        numbers."""
        shape = f"({', '.join(map(str, self.size))}) {str(self.dtype).removeprefix('torch.')}"
        return RecordedCollective(
            _shared(self.group),
            self.purpose,
            self.number,
            self.kind,
            shape,
            self.done,
            self.message,
        )


shared_memory_calls: deque[SharedMemoryCall] = deque(maxlen=KEPT)
"""The last calls through shared memory, oldest first."""


def _shared(group: str) -> str:
    return f"{group} in shared memory"


def record_collectives() -> None:
    """Let torch record collectives, unless the environment says how many. Call it before the first
    group is made."""
    os.environ.setdefault(_SIZE, str(KEPT))


def group_members() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each group of this process, rising, by the name that torch gives
    it.

    `torch.distributed.distributed_c10d._world` is not public (torch 2.8 to 2.13).
    """
    from torch.distributed.distributed_c10d import _world

    # torch also keeps an entry for groups that this process is not in, under a number.
    groups = [
        (group, ranks)
        for group, ranks in list(_world.pg_group_ranks.items())
        if group in _world.pg_names
    ]
    members = {_world.pg_names[group]: tuple(sorted(ranks)) for group, ranks in groups}
    return members | {_shared(name): ranks for name, ranks in members.items()}


def recorded_collectives() -> list[RecordedCollective]:
    """Return the last collectives of this process, oldest first; none where torch has no
    recorder."""
    import torch

    found = [call.described() for call in list(shared_memory_calls)]
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            found += _read(json.loads(dump() or "{}"))
    return found


def _read(trace: dict[str, Any]) -> list[RecordedCollective]:
    entries = sorted(trace.get("entries", []), key=lambda entry: entry["record_id"])
    return [_collective(entry) for entry in entries]


def _collective(entry: dict[str, Any]) -> RecordedCollective:
    name, purpose = entry["process_group"]
    message = bool(entry["is_p2p"])
    shapes = [
        f"({', '.join(map(str, size))}) {kind.lower()}"
        for size, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    ]
    return RecordedCollective(
        name,
        purpose,
        entry["p2p_seq_id" if message else "collective_seq_id"],
        entry["profiling_name"].partition(":")[2],
        " + ".join(shapes),
        bool(entry["retired"]) or entry["state"] == _DONE,
        message,
    )
