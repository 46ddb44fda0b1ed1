"""What a batch must be before it is split into micro-batches."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.engine.step.micro_batches import require_token_ids, require_whole_micro_batches
from lightning_3d.errors import DataError

TEN = TensorDataset(torch.zeros(10, 3, dtype=torch.long))


def test_a_full_batch_that_micro_batches_do_not_divide_is_refused_with_what_does() -> None:
    loader = DataLoader(TEN, batch_size=6)
    full, last = [rows for (rows,) in loader]
    with pytest.raises(DataError) as refused:
        require_whole_micro_batches(full, loader, 4)
    assert (
        str(refused.value)
        == "micro_batch_size=4 does not divide the 6 rows of this rank's batch. Use"
        " micro_batch_size=1, 2 or 3, or a DataLoader with batch_size=8."
    )
    require_whole_micro_batches(last, loader, 3)
    require_whole_micro_batches(full, loader, 3)
    require_whole_micro_batches(full, loader, None)


def test_a_micro_batch_larger_than_the_batch_is_refused() -> None:
    loader = DataLoader(TEN, batch_size=2)
    with pytest.raises(
        DataError, match="Use micro_batch_size=1 or 2, or a DataLoader with batch_size=4."
    ):
        require_whole_micro_batches(torch.zeros(2, 3), loader, 4)
    with pytest.raises(
        DataError,
        match=(
            "batch_size=4. If the data module divides by trainer.world_size: 4 ranks read the same"
            " rows"
        ),
    ):
        require_whole_micro_batches(torch.zeros(2, 3), loader, 4, 4)


def test_only_the_last_batch_may_be_shorter() -> None:
    loader = DataLoader(TEN, batch_size=4)
    require_whole_micro_batches(torch.zeros(2, 3), loader, 4)


def test_a_loader_that_does_not_tell_its_rows_is_not_checked() -> None:
    require_whole_micro_batches(
        torch.zeros(3, 3), DataLoader([torch.zeros(3, 3)], batch_size=None), 2
    )
    require_whole_micro_batches(torch.zeros(3, 3), None, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_token_ids_must_be_integers(dtype: torch.dtype) -> None:
    with pytest.raises(
        DataError, match=f"input_ids are {str(dtype)[6:]}, but token ids must be integers"
    ):
        require_token_ids({"input_ids": torch.zeros(2, 3, dtype=dtype)})


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.zeros(2, 3, dtype=torch.int32)},
        {"pixels": torch.zeros(2, 3)},
        torch.zeros(2, 3),
    ],
)
def test_other_batches_are_left_alone(batch: object) -> None:
    require_token_ids(batch)
