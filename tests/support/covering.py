"""Small sets of combinations that cover all pairs, or triples, of values.

The greedy method of AETG (Cohen et al., 1997), made deterministic: every round looks at the valid
combinations and takes the one that covers most of what is left. With a few thousand of them an
exhaustive look is quick.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations

Row = tuple[Hashable, ...]
Tuples = frozenset[tuple[tuple[int, Hashable], ...]]


def covering_set(
    rows: Iterable[Row], strength: int = 2, cost: Callable[[Row], float] = lambda row: 0.0
) -> list[Row]:
    """Choose rows such that every ``strength`` values that occur together in some row occur
    together in a chosen one.

    Args:
        rows: all valid combinations, one value per factor.
        strength: 2 for pairs, 3 for triples.
        cost: among rows that cover equally much, the cheapest is taken, then the first.
    """
    left = [(row, _tuples(row, strength)) for row in sorted(rows, key=cost)]
    uncovered: set = set().union(*(tuples for _, tuples in left))
    chosen: list[Row] = []
    while uncovered:
        row, tuples = max(left, key=lambda item: len(item[1] & uncovered))
        chosen.append(row)
        uncovered -= tuples
        left = [item for item in left if item[1] & uncovered]
    return chosen


def covers(chosen: Sequence[Row], rows: Iterable[Row], strength: int) -> bool:
    """Whether ``chosen`` covers all that ``rows`` contain."""
    covered = set().union(*(_tuples(row, strength) for row in chosen))
    return all(_tuples(row, strength) <= covered for row in rows)


def _tuples(row: Row, strength: int) -> Tuples:
    return frozenset(combinations(enumerate(row), strength))
