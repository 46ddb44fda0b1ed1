"""Lets the ranks of a pipeline stage step the matrices of Muon together, whatever parts of them
their optimizers train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.compat.torch_fake import is_fake
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.zero.matrix_exchange import MatrixExchange, pretended_table
from lightning_3d.parallel.zero.matrix_pieces import HeldPiece, pieces_of
from lightning_3d.parallel.zero.muon import MuonWithAdamW
from lightning_3d.parallel.zero.trained import Trained, TrainedParameters

AXES = ("tp", "cp", "dp")
"""Ranks along these axes share the matrices of a stage."""


@dataclass(frozen=True)
class TrainedRange:
    """A range of a local parameter in a tensor that the optimizer trains.

    Attributes:
        tensor: the tensor.
        offset: first element of the range in the flattened tensor.
        entry: the parameter.
        first: first element of the range in the flattened parameter.
        numel: number of elements.
    """

    tensor: Tensor
    offset: int
    entry: Trained
    first: int
    numel: int


def share_matrices(
    optimizer: Optimizer,
    trained: TrainedParameters,
    ranges: Iterable[TrainedRange],
    *,
    sharded: bool,
) -> None:
    """Plan how the ranks of each stage step matrices. Collective over the world; does nothing for
    other optimizers than Muon.

    Args:
        optimizer: its groups have the tensors of `ranges`.
        trained: parameters of this rank.
        ranges: what this rank trains of them.
        sharded: whether ZeRO shards the optimizer's state.

    Raises:
        ConfigError: a parameter that is not contiguous.
    """
    if not isinstance(optimizer, MuonWithAdamW):
        return
    members = {id(tensor) for group in optimizer.matrix_groups for tensor in group["params"]}
    held: list[HeldPiece] = []
    for each in ranges:
        if id(each.tensor) not in members:
            continue
        if not each.tensor.is_contiguous():
            raise ConfigError(
                f"Muon needs parameters that are contiguous in memory, but '{each.entry.name}' is"
                " not. Use .contiguous()."
            )
        held += pieces_of(each.tensor, each.offset, each.entry.spec, each.first, each.numel)
    mesh = trained.mesh
    mesh.create(mesh.layout.groups(*AXES))
    group = mesh.group_for(mesh.ranks(*AXES))
    table = None
    if any(is_fake(parameter) for parameter in trained.parameters):
        table = pretended_table(
            [each.piece for each in held],
            dist.get_world_size(group),
            dist.get_rank(group),
            sharded=sharded,
        )
    optimizer.share_matrices(MatrixExchange(held, group, trained.device, table))


def step_matrices(optimizer: Optimizer, gradient_of: Callable[[Tensor], Tensor | None]) -> None:
    """Step the matrices of Muon, before the optimizer's own step. Does nothing for other
    optimizers. All ranks of a stage call it."""
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.step_matrices(gradient_of)
