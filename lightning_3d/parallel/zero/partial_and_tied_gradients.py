"""Sums of gradients of which each tensor-parallel rank, or each tied copy of a parameter, has only
a part.

Two kinds: a parameter that several tensor-parallel ranks hold and that sees only a part of its
gradient on each (`tp_grad_sum`), and a parameter that several pipeline ranks hold, an embedding
tied to the output head (`pp_replicas`). All parameters of a pipeline stage that are summed over the
same ranks are summed in one all-reduce per step, whatever the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.zero.gradient_buffers import (
    FlatGradients,
    GradientSums,
    end_to_end,
    sum_dtype,
)

Named = tuple[nn.Parameter, ShardSpec]


@dataclass(frozen=True)
class _Sum:
    """One all-reduce: the gradients of some parameters over the ranks that share them."""

    group: dist.ProcessGroup
    gradients: FlatGradients


class PartialSums:
    """The sums that a rank takes part in.

    Args:
        mesh: has the groups; those that are not whole axes must have been created (`Mesh.create`).
        parameters: those of this rank that are trained, with what they are. The order does not
            matter.
        waves: see `FlatGradients`.
    """

    def __init__(
        self, mesh: Mesh, parameters: Sequence[Named], waves: Mapping[int, int] | None = None
    ) -> None:
        waves = waves or {}
        partial = [pair for pair in parameters if len(pair[1].tp_grad_sum) > 1]
        tied = [pair for pair in parameters if len(pair[1].pp_replicas) > 1]
        by_wave: dict[int, list[tuple[tuple[int, ...], Named]]] = {}
        for parameter, spec in partial:
            ranks = ranks_along(mesh, "tp", spec.tp_grad_sum)
            by_wave.setdefault(waves.get(id(parameter), 0), []).append((ranks, (parameter, spec)))
        self._partial = {wave: _sums(mesh, by_wave[wave]) for wave in sorted(by_wave)}
        self._tied = _sums(
            mesh, [(ranks_along(mesh, "pp", pair[1].pp_replicas), pair) for pair in tied]
        )

    def reduce(self, sums: GradientSums, wave: int) -> None:
        """Sum over tensor-parallel ranks what is complete in `wave`: one all-reduce for each set of
        ranks and each type of gradients."""
        for entry in self._partial.get(wave, ()):
            entry.gradients.all_reduce(sums, entry.group)

    def reduce_tied(self, sums: GradientSums) -> None:
        """Sum over pipeline ranks, after `reduce`: a tied copy is sent when it is whole."""
        for entry in self._tied:
            entry.gradients.all_reduce(sums, entry.group)


def _sums(mesh: Mesh, members: list[tuple[tuple[int, ...], Named]]) -> list[_Sum]:
    """One sum for each set of ranks and each type, in an order that all ranks share: smaller sets
    first, then by rank.

    Ranks may be in several sets; any common order of the sets prevents a deadlock.
    """
    batches: dict[tuple[int, tuple[int, ...], str], list[Named]] = {}
    for ranks, pair in members:
        batches.setdefault((len(ranks), ranks, str(sum_dtype(pair[0]))), []).append(pair)
    sums = []
    for _, ranks, dtype in sorted(batches):
        # Tied copies have different names; sort by the canonical one, which is the same on all
        # ranks.
        pairs = sorted(
            batches[len(ranks), ranks, dtype], key=lambda pair: pair[1].tied_to or pair[1].name
        )
        slots = end_to_end(parameter for parameter, _ in pairs)
        sums.append(
            _Sum(mesh.group_for(ranks), FlatGradients(slots, slots[-1].stop, bucket_bytes=None))
        )
    return sums


def ranks_along(mesh: Mesh, axis: str, indices: Sequence[int]) -> tuple[int, ...]:
    """Global ranks at these indices of one axis and at this rank's place on all others, rising."""
    return tuple(sorted(mesh.layout.rank(**{**mesh.coordinates, axis: index}) for index in indices))
