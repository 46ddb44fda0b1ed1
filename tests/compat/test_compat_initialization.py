"""Contract tests of the private symbols of torch that initialization needs."""

import torch
from torch import nn

from lightning_3d.compat.torch import storage_key, watch_operations


def test_writes_are_told_from_reads_and_views() -> None:
    seen: list[tuple[str, list[int], list[int]]] = []
    a, b = torch.empty(3, device="meta"), torch.empty(3, device="meta")
    key = {storage_key(a): 0, storage_key(b): 1}

    def note(operator: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        seen.append(
            (operator, [key[storage_key(t)] for t in read], [key[storage_key(t)] for t in written])
        )

    with watch_operations(note):
        nn.init.normal_(a)
        a[1:].fill_(2)
        b.copy_(a)
        torch.add(a, b, out=b)
    assert [entry for entry in seen if entry[1] or entry[2]] == [
        ("normal_.default", [], [0]),
        ("fill_.Scalar", [], [0]),
        ("copy_.default", [0], [1]),
        ("add.out", [0, 1], [1]),
    ]


def test_views_and_data_share_the_key_of_a_storage() -> None:
    weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    assert (
        storage_key(weight)
        == storage_key(weight[1:])
        == storage_key(weight.data)
        == storage_key(weight.T)
    )
    assert storage_key(weight) != storage_key(torch.empty(4, 4, device="meta"))
