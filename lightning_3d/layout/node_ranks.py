"""Ranks of a group by node. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence


def by_node(ranks: Sequence[int], node_size: int) -> list[tuple[int, ...]]:
    """Split global ranks, ascending, by node. Empty if all are on one node, or some node has more
    of them than another.

    Args:
        node_size: ranks of each node, which are filled in order.
    """
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // node_size, []).append(rank)
    even = len({len(node) for node in nodes.values()}) == 1
    return [tuple(node) for node in nodes.values()] if even and len(nodes) > 1 else []
