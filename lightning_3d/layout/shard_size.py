"""The number of neighbouring data-parallel ranks that ZeRO shards over. Imports no torch."""

from __future__ import annotations

from lightning_3d.errors import LayoutError, listed
from lightning_3d.layout.layout import divisors


def check_shard_size(size: object, dp: int) -> None:
    """Refuse a shard size that does not divide the data-parallel ranks, or that shards nothing.

    Raises:
        LayoutError: with the nearest sizes that work.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise LayoutError(f"zero_shard_size must be a whole number of data-parallel ranks; got {size!r}.")
    if size == dp or (size > 1 and dp % size == 0):
        return
    if dp == 1:
        raise LayoutError(f"zero_shard_size={size} needs several data-parallel ranks, but dp is 1. Omit zero_shard_size.")
    proper = [divisor for divisor in divisors(dp) if 1 < divisor < dp]
    near = [one for one in proper if one <= size][-1:] + [one for one in proper if one > size][:1]
    works = f"Use {listed([*map(str, near), 'null'], last='or')}; null shards over all {dp} data-parallel ranks."
    if size == 1:
        raise LayoutError(f"zero_shard_size=1 would shard nothing over the data-parallel ranks. {works} zero_stage=0 replicates.")
    raise LayoutError(f"zero_shard_size must divide dp, which is {dp}; got {size}. {works}")
