"""The number of neighbouring data-parallel ranks that ZeRO shards over. Imports no torch."""

from __future__ import annotations

from lightning_3d.errors import LayoutError, listed
from lightning_3d.layout.layout import Layout, divisors


def suits(size: int, layout: Layout) -> bool:
    """Return whether ZeRO can shard over groups of `size` data-parallel indices.

    Ranks that share the experts of a stage must be in one shard group. Each shard group then has
    all experts, equally many copies of each, and the copies of a rank's shard are on the same ranks
    for experts as for everything else. Experts over several shard groups would have fewer copies
    than there are shard groups, and nothing to shard in a group.
    """
    dp = layout.dp
    return size == dp or (
        1 < size < dp and dp % size == 0 and size * layout.cp * layout.tp % layout.ep == 0
    )


def check_shard_size(size: object, layout: Layout) -> None:
    """Refuse a shard size that does not divide the data-parallel ranks, that shards nothing, or
    that separates ranks that share experts.

    Raises:
        LayoutError: with the nearest sizes that work.
    """
    size, dp = _whole_number(size), layout.dp
    if suits(size, layout):
        return
    if dp == 1:
        raise LayoutError(
            f"zero_shard_size={size} needs several data-parallel ranks, but dp is 1. Omit"
            " zero_shard_size."
        )
    proper = [divisor for divisor in divisors(dp) if divisor < dp and suits(divisor, layout)]
    near = [one for one in proper if one <= size][-1:] + [one for one in proper if one > size][:1]
    works = (
        f"Use {listed([*map(str, near), 'null'], last='or')}; null shards over all {dp}"
        " data-parallel ranks."
    )
    if size == 1:
        raise LayoutError(
            f"zero_shard_size=1 would shard nothing over the data-parallel ranks. {works}"
            " zero_stage=0 replicates."
        )
    if size > 1 and dp % size == 0:
        ranks = f"{size} * tp * cp = {size * layout.tp * layout.cp}"
        raise LayoutError(
            f"zero_shard_size={size} makes groups of {ranks} ranks, but the experts of {layout} are"
            f" shared by {layout.ep} ranks, which must be in one group. {works}"
        )
    raise LayoutError(f"zero_shard_size must divide dp, which is {dp}; got {size}. {works}")


def require_possible(size: object, stage: int | None, ranks: int | None) -> None:
    """Refuse a shard size that suits no layout.

    Args:
        stage: ZeRO stage; None if it is not known yet.
        ranks: number of all ranks; None if it is not known.

    Raises:
        LayoutError: with sizes that work.
    """
    size = _whole_number(size)
    if size < 2:
        raise LayoutError(
            f"zero_shard_size must be at least 2; got {size}. Omit it to shard over all"
            " data-parallel ranks."
        )
    if stage == 0:
        raise LayoutError(
            f"zero_shard_size={size} needs zero_stage=1, 2 or 3; got 0, which shards nothing."
        )
    if ranks is not None and ranks % size:
        works = listed([str(divisor) for divisor in divisors(ranks) if divisor > 1], last="or")
        raise LayoutError(
            f"zero_shard_size must divide dp, but {size} divides no dp of a layout with {ranks}"
            f" ranks. Use {works or 'null'}."
        )


def _whole_number(size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int):
        raise LayoutError(
            f"zero_shard_size must be a whole number of data-parallel ranks; got {size!r}."
        )
    return size
