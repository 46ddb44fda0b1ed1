"""Agreement of ranks on a save or a load: small objects go through rank 0, and an error of one rank
is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from lightning_3d.errors import CheckpointError, StorageError, StorageHangs, listed, reason

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class RankMessage(Generic[T]):
    """Message of a rank: a value, or the text and class of an error."""

    value: T | None = None
    failure: str | None = None
    error: type[CheckpointError] = CheckpointError


def attempt(action: Callable[[], T]) -> RankMessage[T]:
    """Run `action` and turn any error into text, because the other ranks wait for a message."""
    try:
        return RankMessage(action())
    except Exception as error:
        return RankMessage(failure=reason(error), error=_kind(error))


def _kind(error: BaseException) -> type[CheckpointError]:
    if isinstance(error, StorageHangs):
        return StorageHangs
    return StorageError if isinstance(error, (OSError, StorageError)) else CheckpointError


def through_rank_zero(
    local: Callable[[], T],
    combine: Callable[[list[T]], list[R]],
    group: dist.ProcessGroup | None = None,
) -> R:
    """Gather every rank's `local()` on rank 0, and scatter the results of `combine`.

    Collective: a gather and a scatter of objects.

    Raises:
        CheckpointError, StorageError, StorageHangs: on all ranks, if `combine` failed, or `local`
            on any rank.
    """
    own = attempt(local)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return _result(attempt(lambda: combine([_result(own)])[0]))
    count, leads = dist.get_world_size(group), dist.get_rank(group) == 0
    gathered: list[Any] | None = [None] * count if leads else None
    dist.gather_object(own, gathered, group=group, group_dst=0)
    answers = _answers(gathered, combine) if gathered is not None else None
    received: list[Any] = [None]
    dist.scatter_object_list(received, answers, group=group, group_src=0)
    return _result(received[0])


def _answers(
    outcomes: list[RankMessage[T]], combine: Callable[[list[T]], list[R]]
) -> list[RankMessage[R]]:
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.failure is not None}
    if failed:
        return [_joined(failed)] * len(outcomes)
    combined = attempt(lambda: combine([_result(outcome) for outcome in outcomes]))
    if combined.value is None:
        return [RankMessage(failure=combined.failure, error=combined.error)] * len(outcomes)
    return [RankMessage(value) for value in combined.value]


def _joined(failed: Mapping[int, RankMessage[Any]]) -> RankMessage[Any]:
    """Merge failures into one outcome; ranks with the same failure are named together."""
    texts: dict[str, list[int]] = {}
    for rank, outcome in failed.items():
        texts.setdefault(str(outcome.failure), []).append(rank)
    text = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}: {text}"
        for text, ranks in texts.items()
    )
    kinds = {outcome.error for outcome in failed.values()}
    return RankMessage(
        failure=text,
        error=(
            kinds.pop()
            if len(kinds) == 1
            else StorageHangs
            if StorageHangs in kinds
            else CheckpointError
        ),
    )


def _result(outcome: RankMessage[T]) -> T:
    if outcome.failure is not None:
        raise outcome.error(outcome.failure)
    return outcome.value  # type: ignore[return-value]


def on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on rank 0 and broadcast its result or error to all ranks. Collective: one
    broadcast of an object.

    Raises:
        CheckpointError, StorageError: the action failed, on every rank.
    """
    if not dist.is_initialized():
        return _result(attempt(action))
    outcome: list[Any] = [attempt(action) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    return _result(outcome[0])
