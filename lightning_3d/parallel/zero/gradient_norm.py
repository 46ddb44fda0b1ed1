"""The norm of the whole model's gradient, the same number in every layout and on every rank, and
clipping by it.

Every element counts once: a shard that several tensor-parallel ranks hold, and a copy that is tied
across pipeline stages, count on one of them (`ShardSpec.counts_in_norm`). Squares are added in
float64, so that the number does not depend on how the model is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.parallel.collectives import all_reduce_flat

EPSILON = 1e-6
"""Added to the norm when clipping, as torch.nn.utils.clip_grad_norm_ does."""

ROW = 16384
"""Elements whose squares are added in the gradients' own type. On a CPU torch adds the squares of a
float32 tensor one after the other: the norm of 10 million elements is off by 4e-4, of rows of this
length, added in float64, by 2e-8, in the same time."""


def squared_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements: float64, shape ()."""
    norms = [torch.linalg.vector_norm(rows, dim=1) for tensor in tensors for rows in _rows(tensor)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(norms).to(torch.float64).square().sum()


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """The elements as a matrix of rows of `ROW` elements, and as one row those that are left."""
    elements = tensor.reshape(-1)
    whole = elements.numel() // ROW * ROW
    if whole:
        yield elements[:whole].view(-1, ROW)
    if whole < elements.numel():
        yield elements[whole:].view(1, -1)


def global_norm(
    tensors: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> Tensor:
    """Euclidean norm of the gradients that the ranks of `group` (None: all) count, float64, shape
    (): one all-reduce of one number."""
    square = squared_norm(tensors, device)
    if dist.get_world_size(group) > 1:
        all_reduce_flat(square, group)
    return square.sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings gradients of this norm to a norm of at most `max_norm`, on the norm's
    device. The host does not wait.

    A norm that is not a number stays visible: the coefficient is NaN too, as in
    torch.nn.utils.clip_grad_norm_.
    """
    # A division, not `max_norm / tensor`, which torch computes as a product with the reciprocal and
    # so rounds twice.
    return (torch.full_like(norm, max_norm) / (norm + EPSILON)).clamp(max=1.0)
