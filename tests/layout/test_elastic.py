"""The largest layout that fits on the ranks that are there."""

from __future__ import annotations

import pytest

from lightning_3d import fitting_layout
from lightning_3d.errors import LayoutError
from lightning_3d.layout.batch_rules import check_batch
from lightning_3d.layout.layout import Layout


@pytest.mark.parametrize(
    ("layout", "ranks", "batch", "micro_batch", "fits"),
    [
        ("tp2_dp4", 8, 24, 2, "tp2_dp4"),
        ("tp2_dp4", 7, 24, 2, "tp2_dp3"),
        ("tp2_dp4", 6, 8, None, "tp2_dp2"),  # 3 does not divide the batch
        ("tp2_pp2_dp4", 12, 24, 1, "tp2_pp2_dp3"),
        ("dp4_ep2", 3, 24, 1, "dp2_ep2"),  # groups of two expert ranks
        ("pp2_dp4_vp2", 7, 24, 1, "pp2_dp3_vp2"),
        ("cp2_dp2", 2, 4, 1, "cp2"),
    ],
)
def test_f48_the_largest_that_fits(
    layout: str, ranks: int, batch: int, micro_batch: int | None, fits: str
) -> None:
    assert (
        fitting_layout(
            layout, ranks=ranks, global_batch_size=batch, micro_batch_size=micro_batch
        ).name
        == fits
    )


def test_no_larger_degree_would_have_fitted() -> None:
    """By brute force, over all numbers of ranks."""
    for batch, micro_batch in ((16, 1), (48, 2), (60, 1)):
        for ranks in range(2, 9):
            found = fitting_layout(
                "tp2_dp4", ranks=ranks, global_batch_size=batch, micro_batch_size=micro_batch
            )
            possible = [
                dp for dp in range(1, 5) if 2 * dp <= ranks and batch % (dp * micro_batch) == 0
            ]
            assert found == Layout(tp=2, dp=max(possible))
            check_batch(found, batch, micro_batch)


@pytest.mark.parametrize(
    ("ranks", "shard", "fits"), [(7, 2, "dp6"), (5, 4, "dp4"), (8, 4, "dp8"), (3, 2, "dp2")]
)
def test_shard_groups_stay_whole(ranks: int, shard: int, fits: str) -> None:
    assert (
        fitting_layout(
            "dp8", ranks=ranks, global_batch_size=24 * 7, micro_batch_size=1, zero_shard_size=shard
        ).name
        == fits
    )


def test_too_few_ranks_for_a_shard_group_are_refused() -> None:
    with pytest.raises(
        LayoutError,
        match=(
            "3 ranks are here, but the smallest layout to which dp8 can shrink is dp4, with 4 ranks"
        ),
    ):
        fitting_layout("dp8", ranks=3, global_batch_size=24, micro_batch_size=1, zero_shard_size=4)
    everyone = fitting_layout(
        "dp8", ranks=7, global_batch_size=24 * 7, micro_batch_size=1, zero_shard_size=8
    )
    assert everyone.name == "dp7", "all data-parallel ranks shard, as many as there are"
    with pytest.raises(
        LayoutError, match="zero_shard_size must divide dp, which is 8; got 3. Use 2, 4 or null"
    ):
        fitting_layout("dp8", ranks=8, global_batch_size=24, micro_batch_size=1, zero_shard_size=3)


def test_too_few_ranks_are_refused() -> None:
    with pytest.raises(
        LayoutError,
        match=(
            "1 rank is here, but the smallest layout to which tp2_dp4 can shrink is tp2, with 2"
            " ranks"
        ),
    ):
        fitting_layout("tp2_dp4", ranks=1, global_batch_size=24)
    with pytest.raises(LayoutError, match="data.global_batch_size=7 is not divisible"):
        fitting_layout("tp2_dp4", ranks=8, global_batch_size=7, micro_batch_size=2)
