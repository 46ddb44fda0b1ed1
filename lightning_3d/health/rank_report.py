"""What a rank says of itself when a run makes no progress. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class LastCollective:
    """A collective of one group that a rank has called and that has not ended, or the last one that
    has.

    Attributes:
        number: 1 for the first collective of the group.
        kind: such as "all_reduce".
        shape: shapes and types of the inputs.
        pending: whether it has not ended.
    """

    number: int
    kind: str
    shape: str
    pending: bool

    @property
    def words(self) -> str:
        return f"{self.kind} of {self.shape}" if self.shape else self.kind


@dataclass(frozen=True)
class GroupState:
    """What a rank knows of one of its groups.

    Attributes:
        purpose: such as "tp", or "dp+cp".
        ranks: global ranks, rising.
        last: the last collectives, oldest first.
    """

    purpose: str
    ranks: tuple[int, ...]
    last: tuple[LastCollective, ...] = ()

    @property
    def called(self) -> int:
        """Number of the last collective that this rank has called."""
        return self.last[-1].number if self.last else 0

    @property
    def oldest_pending(self) -> LastCollective | None:
        return next((one for one in self.last if one.pending), None)

    def find(self, number: int) -> LastCollective | None:
        return next((one for one in self.last if one.number == number), None)

    @property
    def words(self) -> str:
        return f"group {self.purpose} (ranks {' '.join(map(str, self.ranks))})"


@dataclass(frozen=True)
class RankStatus:
    """What a rank does when a run makes no progress.

    Attributes:
        rank: global rank.
        host: name of its machine.
        activity: phase and action, such as "training step 7: forward, stage 2, micro-batch 5".
        seconds: time for which it has done that.
        where: place in the code, such as "model.py:12 in forward".
        blocked: whether it is inside of torch's collectives or of this package, and not in other
            code.
        overdue: whether that is longer than it may take.
        waits_for: (global rank, message) of the pipeline that it waits for, if it does.
        groups: its groups, by their names in torch.
    """

    rank: int
    host: str
    activity: str
    seconds: float
    where: str
    blocked: bool
    overdue: bool
    waits_for: tuple[int, str] | None = None
    groups: dict[str, GroupState] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankStatus:
        values: dict[str, Any] = json.loads(text)
        waits, groups = values.pop("waits_for"), values.pop("groups")
        return cls(
            **values,
            waits_for=tuple(waits) if waits else None,
            groups={name: _group(group) for name, group in groups.items()},
        )


def _group(values: dict[str, Any]) -> GroupState:
    last = tuple(LastCollective(**one) for one in values["last"])
    return GroupState(values["purpose"], tuple(values["ranks"]), last)
