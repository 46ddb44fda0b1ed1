"""Explains on one rank that memory ran out: what it asked for, what it holds, and what is
largest."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_3d.compat.memory_errors import bytes_asked, is_out_of_memory, write_gpu_memory
from lightning_3d.engine.own_code import own_line
from lightning_3d.errors import OutOfMemory
from lightning_3d.ranks.memory_kills import MEMORY_RAN_OUT
from lightning_3d.storage.numbers import gibibytes

if TYPE_CHECKING:
    from lightning_3d.engine.built_model import BuiltModel

_MOST_NAMED = 5


def explain(
    error: BaseException,
    built: BuiltModel | None,
    activity: str,
    rank: int,
    device: torch.device,
    folder: Path,
) -> OutOfMemory | None:
    """Return an error whose message explains that memory ran out; None for any other error. Local.

    Args:
        built: the model of this rank; None before it is built.
        activity: what the rank did.
        folder: folder of the run, for a picture of a GPU's memory.
    """
    if not is_out_of_memory(error):
        return None
    asked = bytes_asked(error)
    lines = [
        f"Rank {rank} ({socket.gethostname()}, {device}) {MEMORY_RAN_OUT}"
        f" ({activity}){_place(error)}." + (f" It asked for {_size(asked)}." if asked else "")
    ]
    lines += _held(built, device) if built is not None else []
    if device.type == "cuda":
        picture = folder / f"memory_rank_{rank}.pickle"
        if write_gpu_memory(picture):
            lines.append(f"All blocks of its memory are in {picture}, for pytorch.org/memory_viz.")
    lines.append(
        "To need less, set parallelism.recompute=full, a smaller parallelism.micro_batch_size, a"
        " higher parallelism.zero_stage, or a larger tp or pp. lightning-3d plan and dryrun predict"
        " the memory of a layout (docs/memory.md)."
    )
    return OutOfMemory("\n".join(lines))


def _place(error: BaseException) -> str:
    """Name the innermost line of the user's own code, or of a model."""
    line = own_line(error)
    return f", at {line}" if line is not None else ""


def _held(built: BuiltModel, device: torch.device) -> list[str]:
    """List what the rank holds, by category, and its largest tensors."""
    held = built.backend.held()
    named = dict(built.module.named_parameters())
    sizes = {
        "weights": _bytes([*named.values(), *held["parameters"]], device),
        "gradients": _bytes(
            [*held["gradients"], *(p.grad for p in named.values() if p.grad is not None)], device
        ),
        "optimizer": _bytes(held["optimizer"], device),
    }
    if device.type == "cuda":
        allocated, reserved = (
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
        free, total = torch.cuda.mem_get_info(device)
        sizes["activations and other tensors"] = max(0, allocated - sum(sizes.values()))
        sizes["unused parts of the allocator"] = reserved - allocated
        sizes["others on this GPU"] = max(0, total - free - reserved)
    largest = sorted(named.items(), key=lambda item: -item[1].nbytes)[:_MOST_NAMED]
    return [
        "It holds:",
        *(f"  {name:<30} {_size(size):>11}" for name, size in sizes.items()),
        "Its largest weights:",
        *(
            f"  {name} {tuple(parameter.shape)}, {_size(parameter.nbytes)}"
            for name, parameter in largest
        ),
    ]


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the storages of tensors on a device, each once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device == device
    }
    return sum(storages.values())


def _size(size: int) -> str:
    return gibibytes(size) if size >= 2**30 else f"{size / 2**20:.1f} MiB"
