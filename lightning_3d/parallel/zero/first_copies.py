"""Equal gradients of the copies of a parameter that several tensor-parallel ranks hold, whatever
their kernels do.

Each rank computes the gradient of such a parameter by itself, or adds up the same numbers as the
others. On a GPU, two of them may round differently: some kernels add in the order in which their
threads arrive (atomic additions of `index_add`, of scatters, of some attentions), and two
communicators may add over the data-parallel ranks in different orders. Copies would drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.zero.partial_and_tied_gradients import ranks_along


def is_copied(spec: ShardSpec) -> bool:
    """Return whether several tensor-parallel ranks hold this very shard, and are no data-parallel
    ranks of each other."""
    return len(spec.tp_replicas) > 1 and not spec.expert


def take_first_copies(
    mesh: Mesh, gradients: Iterable[tuple[ShardSpec, Tensor | None]], bucket_bytes: int
) -> None:
    """Overwrite the gradients of copied parameters by those of the first rank that holds them.
    Collective over tensor-parallel ranks.

    One broadcast for each set of ranks and each type of gradients, of at most `bucket_bytes`,
    except for a single larger gradient.

    Args:
        gradients: this rank's reduced gradients, or its pieces of them: the same parameters,
            elements and order on all ranks with a copy. None where no rank has a gradient.
    """
    found: dict[tuple[int, tuple[int, ...], str], list[Tensor]] = {}
    for spec, gradient in gradients:
        if is_copied(spec) and gradient is not None and gradient.numel():
            ranks = ranks_along(mesh, "tp", spec.tp_replicas)
            found.setdefault((len(ranks), ranks, str(gradient.dtype)), []).append(gradient)
    # in one order on all ranks, as partial gradients are
    for (_, ranks, _), tensors in sorted(found.items(), key=lambda item: item[0]):
        for bucket in _buckets(tensors, bucket_bytes):
            _broadcast(bucket, ranks[0], mesh.rank, mesh.group_for(ranks))


def _broadcast(tensors: Sequence[Tensor], first: int, own: int, group: dist.ProcessGroup) -> None:
    """Copy `tensors` of rank `first` to the others of the group."""
    sizes = [tensor.numel() for tensor in tensors]
    if own == first:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    else:
        flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    dist.broadcast(flat, src=first, group=group)
    if own != first:
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
