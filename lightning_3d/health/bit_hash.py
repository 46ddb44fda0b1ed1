"""A 64-bit hash of the bits of tensors, computed where they are: two passes over the memory, and no
wait of the host.

The 32-bit words of all tensors, one after the other in rows, are multiplied by odd numbers that
depend on their place, and added modulo 2**64. So one flipped bit always changes the hash, and
several leave it as it was with a chance of about 2**-32 at most. It does not matter how many rows
are multiplied at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

_COLUMNS = 1 << 16
"""Words in a row: 256 KiB, whose products stay in the cache of a CPU core."""

_ROWS_ON_CPU, _ROWS_ON_GPU = 1, 1 << 8
"""Rows that are multiplied at a time: on a GPU 64 MiB, so that launches cost little."""

_TOGETHER = 1 << 24
"""Words of small tensors that are copied into one."""

_MASK = (1 << 64) - 1


def mixed(number: int, seed: int = 0) -> int:
    """Mix a number to 64 bits, as a signed integer (SplitMix64)."""
    z = (number * 0x9E3779B97F4A7C15 + seed + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


@torch.no_grad()
def hash_bits(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Hash the bits of tensors, each in its row-major order. NaN and -0.0 are bits as any others.

    Args:
        device: where the result is; tensors on another device are hashed there.

    Returns:
        An int64 tensor of shape ().
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    row = 0
    for words in _joined(tensors):
        total += _hash_rows(words, row).to(device, non_blocking=True)
        row += -(-len(words) // _COLUMNS)
    return total


def _hash_rows(words: Tensor, row: int) -> Tensor:
    """Hash int32 words that begin in this row."""
    columns, whole = _columns(words.device), len(words) // _COLUMNS
    factors = _factors(row + whole + 1, words.device)
    batch = _ROWS_ON_CPU if words.device.type == "cpu" else _ROWS_ON_GPU
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, whole, batch):
        last = min(whole, first + batch)
        rows = words[first * _COLUMNS : last * _COLUMNS].view(-1, _COLUMNS)
        total += ((rows * columns).sum(1) * factors[row + first : row + last]).sum()
    end = words[whole * _COLUMNS :]
    return total + (end * columns[: len(end)]).sum() * factors[row + whole]


def _joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The words of all tensors, in order; neighbours that are small are copied into one."""
    pending: list[Tensor] = []
    length = 0
    for words in (words for tensor in tensors for words in _words(tensor)):
        fits = len(words) < _COLUMNS and length < _TOGETHER
        if pending and (not fits or words.device != pending[0].device):
            yield torch.cat(pending)
            pending, length = [], 0
        if len(words) < _COLUMNS:
            pending.append(words)
            length += len(words)
        else:
            yield words
    if pending:
        yield torch.cat(pending)


def _words(tensor: Tensor) -> Iterator[Tensor]:
    """The bits of a tensor as int32; bytes at its end that do not fill a word are filled up with
    zeros."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    elif flat.dtype == torch.bool:  # whose copies are 0 or 1
        flat = flat.view(torch.uint8)
    size = flat.element_size()
    if flat.storage_offset() * size % 4:
        flat = flat.clone()
    rest = flat.numel() * size % 4 // size
    if flat.numel() > rest:
        yield flat[: flat.numel() - rest].view(torch.int32)
    if rest:
        end = flat[flat.numel() - rest :].clone().view(torch.uint8)
        yield torch.cat([end, end.new_zeros(4 - len(end))]).view(torch.int32)


@cache
def _columns(device: torch.device) -> Tensor:
    """Odd factors of the words of a row."""
    return torch.tensor(
        [mixed(place, seed=1) | 1 for place in range(_COLUMNS)], dtype=torch.int64
    ).to(device)


_KNOWN: dict[torch.device, Tensor] = {}


def _factors(rows: int, device: torch.device) -> Tensor:
    """Odd factors of at least so many rows, kept on the device."""
    known = _KNOWN.get(device)
    if known is None or len(known) < rows:
        wanted = max(rows, 64 if known is None else 2 * len(known))
        known = _KNOWN[device] = torch.tensor(
            [mixed(row, seed=2) | 1 for row in range(wanted)], dtype=torch.int64
        ).to(device)
    return known
