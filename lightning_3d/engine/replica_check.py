"""Ends a run whose ranks no longer hold the same weights or optimizer state where they should."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_3d.compat.rank_zero import rank_zero_warn
from lightning_3d.errors import ReplicaError, listed
from lightning_3d.health.replicas import Difference, Piece, ReplicaComparison

if TYPE_CHECKING:
    from lightning_3d.checkpoint.outcome import Saved
    from lightning_3d.engine.built_model import BuiltModel
    from lightning_3d.parallel.sharding import OptimizerShard, ShardSpec

WEIGHTS, STATE = "weights", "optimizer state"
_MOST_NAMED = 4
"""Parameters, and ranks, that a message lists."""


class ReplicaCheck:
    """Compares the ranks of one fit every n steps and before each checkpoint.

    What is compared depends on nothing but the keys of the pieces: data-parallel and
    context-parallel replicas, what tensor-parallel ranks replicate, tied parameters of two stages,
    experts that several ranks have. What ZeRO shards is compared where a shard has replicas
    (`zero_shard_size`).

    Args:
        every: compare before the optimizer's step n, 2 n and so on; None never compares, not before
            checkpoints either.
        device: device of this rank.
        writers: function that names the user's hooks that may write gradients, weights or buffers.

    Attributes:
        agreed: the last optimizer step after which all ranks agreed; None before the first
            comparison.
    """

    def __init__(
        self, every: int | None, device: torch.device, writers: Callable[[], list[str]]
    ) -> None:
        self.every = every
        self._comparison = ReplicaComparison(device)
        self._steps, self._writers = 0, writers
        self.agreed: int | None = None

    def before_optimizer(self, built: BuiltModel, steps: int, saved: Saved | None) -> None:
        """Compare, if it is time: after the backward, when the weights have been in memory for the
        whole step.

        Args:
            steps: optimizer steps taken before this one.
            saved: newest complete checkpoint of this fit.

        Raises:
            ReplicaError: on every rank.
            ConfigError: on every rank: something was written through `parameter.data`.
        """
        # The first step of a fit makes the optimizer's state, so that the pieces are known only
        # after it.
        self._steps += 1
        if self.every is not None and self._steps > 1 and (steps + 1) % self.every == 0:
            built.backend.require_seen_writes()
            self._compare(built, steps, saved)

    def before_checkpoint(self, built: BuiltModel, steps: int, saved: Saved | None) -> None:
        """Compare, so that no checkpoint has weights that only some ranks have. It costs less than
        copying them to the host.

        Raises:
            ReplicaError: on every rank.
        """
        if self.every is not None and self._steps > 0 and self.agreed != steps:
            self._compare(built, steps, saved)

    def _compare(self, built: BuiltModel, steps: int, saved: Saved | None) -> None:
        if built.mesh.layout.world_size == 1:
            return
        differences = self._comparison.compare(list(pieces_of(built)))
        if differences:
            raise ReplicaError(describe(differences, steps, self.agreed, saved, self._writers()))
        self.agreed = steps


def pieces_of(built: BuiltModel) -> Iterator[Piece]:
    """List the weights and the optimizer state that this rank holds, without numbers that belong to
    a whole parameter (step counts)."""
    specs = built.parts.specs
    shards = built.backend.weight_shards()
    if shards:
        yield from (piece for shard in shards for piece in _piece(shard, specs, WEIGHTS))
    else:
        for name, parameter in built.module.named_parameters():
            key = f"{_place(name, specs)} {tuple(parameter.shape)} {WEIGHTS}"
            yield Piece(key, _canonical(name, specs), WEIGHTS, (parameter.detach(),))
    for shard in built.backend.optimizer_shards():
        yield from _piece(shard, specs, STATE)


def _piece(shard: OptimizerShard, specs: dict[str, ShardSpec], kind: str) -> Iterator[Piece]:
    values = {
        key: value
        for key, value in sorted(shard.values.items())
        if isinstance(value, Tensor) and value.dim() > 0
    }
    numel = max((value.numel() for value in values.values()), default=0)
    if shard.start is not None and numel == 0:
        return
    part = "whole" if shard.start is None else f"{shard.start}+{numel}"
    yield Piece(
        f"{_place(shard.name, specs)} {part} {kind}",
        _canonical(shard.name, specs),
        kind,
        tuple(values.values()),
    )


def _place(name: str, specs: dict[str, ShardSpec]) -> str:
    """Say which part of the whole model's parameter this rank has: copies have the same text."""
    spec = specs.get(name)
    return (
        name
        if spec is None
        else f"{_canonical(name, specs)} {[(box.global_offset, box.shape) for box in spec.boxes]}"
    )


def _canonical(name: str, specs: dict[str, ShardSpec]) -> str:
    """Name of the parameter that `name` may be tied to."""
    spec = specs.get(name)
    return name if spec is None else spec.tied_to or spec.name


def describe(
    differences: list[Difference],
    steps: int,
    agreed: int | None,
    saved: Saved | None,
    writers: Sequence[str] = (),
) -> str:
    """Write the message of ranks that differ after `steps` optimizer steps.

    Args:
        writers: hooks of the user's that may have written other values on some ranks.
    """
    lines = [_line(difference, steps) for difference in differences[:_MOST_NAMED]]
    if len(differences) > _MOST_NAMED:
        lines.append(f"{len(differences) - _MOST_NAMED} more groups of ranks differ.")
    last = (
        "They had not been compared before."
        if agreed is None
        else f"They last agreed after step {agreed}."
    )
    if saved is not None and (agreed is None or saved.step <= agreed):
        resume = (
            f'Resume the checkpoint {saved.path} (step {saved.step}) with ckpt_path="{saved.path}".'
        )
    elif agreed is not None:
        resume = f"Resume a checkpoint of step {agreed} or earlier."
    else:
        resume = "Resume the newest checkpoint of an earlier run."
    device = "If the same device is named again, take it out of use."
    if writers:
        hooks = [
            *writers[:_MOST_NAMED],
            *([f"{len(writers) - _MOST_NAMED} more"] if len(writers) > _MOST_NAMED else []),
        ]
        device = (
            f"Look first at {listed(hooks)}, which may write weights, gradients or buffers: what a"
            " hook writes must be the same on all ranks (no random numbers, no norm of a shard)."
            " Only if ranks differ without it, and the same device is named again, take the device"
            " out of use."
        )
    return "\n".join(
        [
            *lines,
            f"{last} {resume} {device}",
            (
                "If ranks may differ, because a callback changes weights on some of them, set"
                " trainer.check_replicas_every_n_steps=null (in a script:"
                ' Lightning3DStrategy(reliability={"check_replicas_every_n_steps": None})).'
            ),
        ]
    )


def _line(difference: Difference, steps: int) -> str:
    """Name the odd ranks and what they differ in."""
    odd = [
        f"rank {rank} ({host})" for rank, host in zip(difference.odd, difference.hosts, strict=True)
    ]
    shown = listed(
        [
            *odd[:_MOST_NAMED],
            *([f"{len(odd) - _MOST_NAMED} more"] if len(odd) > _MOST_NAMED else []),
        ]
    )
    names = [*difference.names[:_MOST_NAMED]]
    more = len(difference.names) - len(names)
    what = (
        f"{listed(difference.kinds)} of"
        f" {listed([*names, *([f'{more} more parameters'] if more > 0 else [])])}"
    )
    others = [rank for rank in difference.ranks if rank not in difference.odd]
    if not others:
        return (
            f"After step {steps}, {shown} hold different {what}, which should be equal; which of"
            " them is right is unknown."
        )
    verb = "holds" if len(odd) == 1 else "hold"
    than = f"rank {others[0]}" if len(others) == 1 else f"{len(others)} other ranks"
    return f"After step {steps}, {shown} {verb} other {what} than {than}, which should be equal."


def agrees(compare: Callable[[], None], *, interrupted: bool) -> bool:
    """Return whether a checkpoint may be saved. Of a fit that has failed already, one whose ranks
    differ is left out with a warning.

    Raises:
        ReplicaError: ranks differ.
    """
    try:
        compare()
    except ReplicaError as error:
        if not interrupted:
            raise
        rank_zero_warn(f"No checkpoint is written: {error}")
        return False
    return True
