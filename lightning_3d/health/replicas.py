"""Compares what several ranks hold alike, bit by bit, with one small all-gather.

A rank lists its pieces: a part of a parameter or of its optimizer state, with a key that says which
part. Ranks that list the same key must hold the same bits. So nothing here depends on how a layout
or a ZeRO stage places them.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.health.bit_hash import hash_bits, mixed
from lightning_3d.parallel.collectives import all_gather_flat


@dataclass(frozen=True)
class Piece:
    """What a rank holds of one parameter.

    Attributes:
        key: which part of which parameter it is, and of what kind.
        name: for messages: the parameter.
        kind: for messages: "weights" or "optimizer state".
        tensors: its bits.
    """

    key: str
    name: str
    kind: str
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Difference:
    """Ranks that should hold the same bits and do not; the same on every rank.

    Attributes:
        ranks: all ranks that should agree.
        odd: those that differ from the majority; all of them where there is no majority.
        hosts: host and device of each odd rank, in their order.
        kinds: "weights", "optimizer state" or both.
        names: parameters that differ, in order.
    """

    ranks: tuple[int, ...]
    odd: tuple[int, ...]
    hosts: tuple[str, ...]
    kinds: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Classes:
    """The classes of pieces: those that the same ranks hold.

    Attributes:
        members: by class, the ranks.
        slots: by rank, its classes in order.
        own: by slot of this rank, the places of its pieces in its list.
    """

    members: list[tuple[int, ...]]
    slots: list[list[int]]
    own: list[list[int]]


class ReplicaComparison:
    """Compares the pieces of all ranks.

    Args:
        device: device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts: list[str] = []
        self._keys: list[int] | None = None
        self._classes = _Classes([], [], [])

    def compare(self, pieces: Sequence[Piece]) -> list[Difference]:
        """Compare the pieces of all ranks: an all-gather of a few numbers over the world, which the
        host waits for.

        The first call, and one for which a rank has other keys than before, sends the keys too. A
        difference is followed by a gather that finds the parameters.

        Returns:
            What differs; empty if nothing does.
        """
        pieces = sorted(pieces, key=lambda piece: piece.key)
        table = self._hashes(pieces)
        found: dict[int, dict[int, int]] = {}
        for rank, slots in enumerate(self._classes.slots):
            for slot, one in enumerate(slots):
                found.setdefault(one, {})[rank] = table[rank][slot + 1]
        different = sorted(one for one, by_rank in found.items() if len(set(by_rank.values())) > 1)
        return [
            self._describe(one, found[one], described)
            for one, described in self._explain(different, pieces)
        ]

    def _hashes(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Gather for each rank the hashes of its classes, after a 0."""
        keys = [_number(piece.key) for piece in pieces]
        changed = keys != self._keys
        own = [torch.full((), int(changed), dtype=torch.int64, device=self._device)]
        if not changed:
            own += [
                hash_bits((t for place in places for t in pieces[place].tensors), self._device)
                for places in self._classes.own
            ]
        table = self._gather(own, 1 + max((len(slots) for slots in self._classes.slots), default=0))
        if not any(row[0] for row in table):
            return table
        self._keys, self._classes = keys, self._agree(keys)
        return self._hashes(pieces)

    def _gather(self, hashes: Sequence[Tensor], width: int) -> list[list[int]]:
        """Gather the hashes of all ranks."""
        ranks = dist.get_world_size()
        own = torch.zeros(width, dtype=torch.int64, device=self._device)
        own[: len(hashes)] = torch.stack(list(hashes))
        table = own.new_empty(ranks * width)
        world = dist.group.WORLD
        assert world is not None
        all_gather_flat(table, own, world).wait()
        return table.view(ranks, width).tolist()

    def _agree(self, keys: Sequence[int]) -> _Classes:
        """Find out which pieces which ranks hold: two all-gathers, once."""
        count = torch.tensor([len(keys)], dtype=torch.int64, device=self._device)
        longest = max(row[0] for row in self._gather([count[0]], 1))
        table = self._gather(
            [*torch.tensor([0, *keys], dtype=torch.int64, device=self._device)], longest + 1
        )
        holders: dict[int, list[int]] = {}
        for rank, row in enumerate(table):
            for key in dict.fromkeys(row):
                if key:
                    holders.setdefault(key, []).append(rank)
        shared = {key: tuple(ranks) for key, ranks in holders.items() if len(ranks) > 1}
        members = sorted(set(shared.values()))
        number = {ranks: one for one, ranks in enumerate(members)}
        slots = [sorted({number[shared[key]] for key in row if key in shared}) for row in table]
        mine = slots[dist.get_rank()]
        own = [
            [
                place
                for place, key in enumerate(keys)
                if key in shared and number[shared[key]] == one
            ]
            for one in mine
        ]
        return _Classes(members, slots, own)

    def _explain(
        self, different: list[int], pieces: Sequence[Piece]
    ) -> list[tuple[int, list[dict[str, dict[str, int]]]]]:
        """Gather the hash of each piece of the classes that differ: for each class, for each rank
        kind -> name -> hash."""
        if not different:
            return []
        rank = dist.get_rank()
        own: dict[int, dict[str, dict[str, int]]] = {}
        for slot, one in enumerate(self._classes.slots[rank]):
            if one in different:
                for piece in (pieces[place] for place in self._classes.own[slot]):
                    value = int(hash_bits(piece.tensors, self._device))
                    own.setdefault(one, {}).setdefault(piece.kind, {})[piece.name] = value
        everyone: list[tuple[str, dict[int, dict[str, dict[str, int]]]]] = [
            ("", {})
        ] * dist.get_world_size()
        dist.all_gather_object(everyone, (f"{socket.gethostname()}, {self._device}", own))
        self._hosts = [host for host, _ in everyone]
        return [(one, [of_rank.get(one, {}) for _, of_rank in everyone]) for one in different]

    def _describe(
        self, one: int, by_rank: dict[int, int], described: list[dict[str, dict[str, int]]]
    ) -> Difference:
        """Tell the odd ranks by majority, and what differs."""
        ranks = self._classes.members[one]
        [(usual, count)] = Counter(by_rank.values()).most_common(1)
        odd = (
            tuple(rank for rank in ranks if by_rank[rank] != usual)
            if 2 * count > len(ranks)
            else ranks
        )
        differing = [
            (kind, name)
            for kind, names in sorted(described[ranks[0]].items(), reverse=True)
            for name in names
            if len({described[rank].get(kind, {}).get(name) for rank in ranks}) > 1
        ]
        kinds, names = (
            tuple(dict.fromkeys(kind for kind, _ in differing)),
            tuple(dict.fromkeys(name for _, name in differing)),
        )
        return Difference(ranks, odd, tuple(self._hosts[rank] for rank in odd), kinds, names)


def _number(key: str) -> int:
    """A key as a number, never 0."""
    return mixed(int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")) or 1
