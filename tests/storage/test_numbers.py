"""Sizes as people read them."""

import pytest

from lightning_3d.storage.numbers import gibibytes, gpu_memory, show_bytes, show_memory


@pytest.mark.parametrize(
    ("size", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1024, "1.02 kB", "1.00 KiB"),
        (2e6, "2.00 MB", "1.91 MiB"),
        (80e9, "80.0 GB", "74.5 GiB"),
        (2**40 * 5000, "5498 TB", "5000 TiB"),
    ],
)
def test_files_are_decimal_and_memory_is_binary(size: float, decimal: str, binary: str) -> None:
    assert (show_bytes(size), show_memory(size)) == (decimal, binary)


def test_sizes_side_by_side_have_one_unit() -> None:
    assert gibibytes(5e7) == "0.0 GiB" and gibibytes(2**40) == "1024.0 GiB"


def test_a_gpu_is_named_as_it_is_sold() -> None:
    assert gpu_memory(80e9) == "74.5 GiB (80 GB)"
