"""The layout of an elastic run on the ranks that are there. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout.batch_rules import check_batch, largest_micro_batch
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.resolve import check_expert_groups, resolve_layout
from lightning_3d.layout.shard_size import check_shard_size


def fitting_layout(
    layout: str | Layout,
    *,
    ranks: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    schedule: str | None = None,
    zero_shard_size: int | None = None,
    smaller_batches: Sequence[int] = (),
) -> Layout:
    """Return the largest layout up to `layout` that fits on a number of ranks. It differs in data
    parallelism only.

    The global batch stays the same, so each data-parallel rank gets more rows. A dp that does not
    divide them, or that `zero_shard_size` does not divide, is left out; then some ranks have no
    work.

    Args:
        layout: layout with all ranks.
        ranks: number of ranks that are there.
        global_batch_size: rows of an optimizer step over all data-parallel ranks.
        micro_batch_size: rows of a micro-batch; None if it may be any.
        schedule: name of the pipeline schedule; None for the default.
        zero_shard_size: data-parallel ranks that shard; None for all.
        smaller_batches: global batches of a batch ramp, which must suit the layout too.

    Raises:
        LayoutError: `layout` does not suit the batch, or one replica of the model needs more ranks
            than are there.
    """
    whole, name = resolve_layout(layout, schedule)

    def check(one: Layout) -> None:
        _check(one, name, global_batch_size, micro_batch_size, smaller_batches)
        if zero_shard_size not in (None, whole.dp):  # so many ranks as there are shard, too
            check_shard_size(zero_shard_size, one)

    check(whole)
    replica = whole.world_size // whole.dp
    found = _first(whole, range(min(whole.dp, ranks // replica), 0, -1), check)
    if found is not None:
        return found
    smallest = _first(whole, range(1, whole.dp + 1), check) or whole
    raise LayoutError(
        f"{ranks} rank{'s are' if ranks != 1 else ' is'} here, but the smallest layout to which"
        f" {whole} can shrink is {smallest}, with {smallest.world_size} ranks. Start more ranks, or"
        " name a layout with a smaller tp, pp or cp."
    )


def whole_layout(elastic: object, layout: Layout) -> Layout:
    """Return the layout that an elastic run has with all ranks.

    Args:
        elastic: its name; False where `layout` is the whole one.
        layout: layout that is used, which differs in data parallelism only.

    Raises:
        ConfigError: `elastic` is no such name.
    """
    if elastic is False or elastic is None:
        return layout
    try:
        named = Layout.parse(elastic) if isinstance(elastic, str) else None
    except LayoutError:
        named = None
    if named is None or replace(named, dp=1, vp=1) != replace(
        Layout.parse(layout.name), dp=1, vp=1
    ):
        raise ConfigError(
            f"elastic must be the name of a layout that differs from {layout} in dp only; got"
            f" {elastic!r}."
        )
    return replace(layout, dp=named.dp)


def whole_dp(elastic: object, layout: Layout | None, micro_batch_size: int | None) -> int | None:
    """Return the data parallelism that an elastic run has with all ranks; None for a run that is
    not elastic.

    Args:
        elastic: name of the layout with all ranks; False for a run that is not elastic.
        layout: layout that is used.
        micro_batch_size: rows of a micro-batch.

    Raises:
        ConfigError: `elastic` does not suit the layout, or the size of a micro-batch is not given.
    """
    if elastic is False or elastic is None:
        return None
    if layout is None or micro_batch_size is None:
        raise ConfigError(
            "elastic needs a layout and a micro_batch_size. lightning_3d.fitting_layout chooses the"
            " layout."
        )
    return whole_layout(elastic, layout).dp


def _first(whole: Layout, degrees: Iterable[int], check: Callable[[Layout], None]) -> Layout | None:
    """Return the layout with the first degree of data parallelism that `check` accepts; None if
    none does."""
    for dp in degrees:
        smaller = replace(whole, dp=dp)
        try:
            check(smaller)
        except LayoutError:
            continue
        return smaller
    return None


def _check(
    layout: Layout,
    schedule: str,
    global_batch: int,
    micro_batch: int | None,
    smaller: Sequence[int],
) -> None:
    """Raise LayoutError if a layout does not suit its experts or one of the global batches."""
    check_expert_groups(layout)
    if micro_batch is None:
        micro_batch = largest_micro_batch(layout, schedule, global_batch, smaller)
    for batch in (global_batch, *smaller):
        check_batch(layout, batch, micro_batch, schedule)
