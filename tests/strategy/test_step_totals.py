"""The numbers of one batch that ranks share survive packing, summing and unpacking."""

import math

import pytest
import torch

from lightning_3d.engine.step.totals import BatchTotals
from lightning_3d.errors import ConfigError

CPU = torch.device("cpu")


def packed(loss: float, weight: float, log_keys: float, *, extras: bool = False) -> torch.Tensor:
    sums = [
        torch.tensor([loss * part, weight / 2, 1 / 2], dtype=torch.float64)
        for part in (weight / 2, weight / 2)
    ]
    return BatchTotals.pack(sums, log_keys, extras=extras, device=CPU)


def test_totals_of_ranks_with_the_last_stage_and_of_one_before_it() -> None:
    totals = BatchTotals.unpack(
        packed(2.0, 4.0, 65537.0)
        + packed(5.0, 8.0, 65537.0, extras=True)
        + BatchTotals.nothing(CPU)
    )
    totals.require_equal_keys()
    assert (totals.mean_loss, totals.weight, totals.checksum, totals.extras) == (
        4.0,
        12.0,
        65537,
        True,
    )


def test_a_batch_without_targets_has_no_loss() -> None:
    totals = BatchTotals.unpack(BatchTotals.pack([], 0.0, extras=False, device=CPU))
    assert math.isnan(totals.mean_loss) and (totals.weight, totals.checksum, totals.extras) == (
        0.0,
        0,
        False,
    )


@pytest.mark.parametrize("keys", [(7.0, 8.0), (0.0, 65537.0), (65536.0, 65537.0, 65536.0)])
def test_ranks_that_logged_different_names_are_refused(keys: tuple[float, ...]) -> None:
    totals = BatchTotals.unpack(torch.stack([packed(1.0, 2.0, key) for key in keys]).sum(0))
    with pytest.raises(
        ConfigError, match="names passed to self.log in a step differ between data-parallel ranks"
    ):
        totals.require_equal_keys()


def test_equal_names_on_many_ranks_are_accepted() -> None:
    ranks = 10_000
    totals = BatchTotals.unpack(packed(1.0, 2.0, 65536.0) * ranks)
    totals.require_equal_keys()
    assert totals.checksum == 65536
