"""The sizes of the batches of a ramp: Megatron's rule, closed forms against brute force, and what
is refused."""

import random
from typing import Any

import pytest

from lightning_3d import fitting_layout
from lightning_3d.errors import ConfigError, LayoutError
from lightning_3d.layout import Layout
from lightning_3d.layout.batch_ramp import BatchRamp
from lightning_3d.layout.batch_rules import check_batch, check_ramp, largest_micro_batch


def megatron(consumed: int, start: int, increment: int, ramp_samples: int, full: int) -> int:
    """`RampupBatchsizeNumMicroBatchesCalculator.update` of Megatron Core, with exact arithmetic."""
    if consumed > ramp_samples:
        return full
    increments = (full - start) // increment
    steps = consumed * increments // ramp_samples
    return min(start + steps * increment, full)


def drawn(seed: int) -> BatchRamp:
    generator = random.Random(seed)
    first, step, levels = generator.randint(1, 9), generator.randint(1, 7), generator.randint(1, 6)
    full = first + step * levels
    return BatchRamp.read(
        {"from": first, "step": step, "tokens": generator.randint(1, 900)}, full, 3
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_sizes_are_those_of_megatron(seed: int) -> None:
    ramp = drawn(seed)
    row, rows = 0, []
    for step in range(150):
        assert ramp.at(row) == megatron(row, ramp.first, ramp.step, ramp.rows, ramp.full)
        rows.append(row)
        row += ramp.at(row)
        assert ramp.after(step + 1) == row
    for start in rows[::29]:
        ends = [one for one in rows if one > start]
        for number, end in enumerate(ends, 1):
            assert ramp.count(start, end) == number
            assert ramp.count(start, end - 1) == number - 1
            assert ramp.after(number, start) == end
    cut = list(ramp.batches(rows[5], rows[60] + 1))
    assert [(one.start, one.stop) for one in cut] == [
        *zip(rows[5:60], rows[6:61], strict=True),
        (rows[60], rows[60] + 1),
    ]


def test_a_ramp_reaches_the_full_batch_at_its_tokens_and_the_batch_never_shrinks() -> None:
    ramp = BatchRamp.read({"from": 32, "step": 32, "tokens": 1e9}, 1024, 4096)
    assert ramp.rows == 244141 and len(ramp.sizes) == 32
    assert (ramp.at(0), ramp.at(ramp.rows - 1), ramp.at(ramp.rows)) == (32, 992, 1024)
    assert (
        BatchRamp.none(8).after(10**9) == 8 * 10**9
        and BatchRamp.none(8).count(0, 1 << 48) == 1 << 45
    )


BAD: dict[str, tuple[Any, str]] = {
    "number": (32, r"must have the keys from, step and tokens, for example .*; got 32"),
    "missing": ({"from": 8, "step": 8}, r"must have the keys .*; got \{from: 8, step: 8\}"),
    "unknown": ({"from": 8, "step": 8, "tokens": 9, "samples": 1}, "must have the keys"),
    "null": (
        {"from": None, "step": 8, "tokens": 9},
        r"data\.batch_ramp\.from must be a whole number; got null",
    ),
    "float": (
        {"from": 8.0, "step": 8, "tokens": 9},
        r"data\.batch_ramp\.from must be a whole number; got 8\.0",
    ),
    "zero": (
        {"from": 8, "step": 0, "tokens": 9},
        r"data\.batch_ramp\.step must be at least 1; got 0",
    ),
    "tokens": (
        {"from": 8, "step": 8, "tokens": 0},
        r"data\.batch_ramp\.tokens must be a number above 0; got 0",
    ),
    "text": (
        {"from": 8, "step": 8, "tokens": "1e9"},
        r"tokens must be a number above 0; got '1e9'",
    ),
    "full": (
        {"from": 64, "step": 8, "tokens": 9},
        r"from must be less than data\.global_batch_size=64; got 64. Use at most 63",
    ),
    "step": (
        {"from": 4, "step": 7, "tokens": 9},
        r"from 4 to data\.global_batch_size=64 in steps of 7.* not divide 60. Use .*step=5 or 6",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_ramp_is_refused(case: str) -> None:
    given, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        BatchRamp.read(given, 64, 8)


@pytest.mark.parametrize(
    ("layout", "schedule", "micro_batch", "ramp", "message"),
    [
        (
            "dp4",
            "1F1B",
            2,
            (12, 4, 64),
            (
                r"global batch of 12, which is not divisible by parallelism.micro_batch_size=2 \*"
                r" dp 4 = 8"
            ),
        ),
        (
            "dp4",
            "1F1B",
            1,
            (8, 14, 64),
            r"global batch of 22, .* divisible by parallelism.micro_batch_size=1 \* dp 4 = 4",
        ),
        (
            "pp4",
            "1F1B",
            2,
            (4, 4, 64),
            (
                r"global batch of 4, which gives each rank 2 micro-batches, which 1F1B cannot run"
                r" with pp 4"
            ),
        ),
        (
            "pp4_vp2",
            "Interleaved1F1B",
            1,
            (4, 2, 64),
            r"global batch of 14, which gives each rank 14 micro-batches, which Interleaved1F1B",
        ),
    ],
)
def test_a_ramp_that_the_layout_cannot_run_is_refused_with_one_that_works(
    layout: str, schedule: str, micro_batch: int, ramp: tuple[int, int, int], message: str
) -> None:
    first, step, full = ramp
    at, given = Layout.parse(layout), {"from": first, "step": step, "tokens": 1e6}
    with pytest.raises(LayoutError, match=message) as refused:
        check_ramp(at, BatchRamp.read(given, full, 8), micro_batch, schedule)
    words = str(refused.value)
    proposed = {
        key: int(words.split(f"data.batch_ramp.{key}=")[1].split()[0].rstrip(".,"))
        for key in ("from", "step")
    }
    works = BatchRamp.read(given | proposed, full, 8)
    for size in works.sizes:
        check_batch(at, size, micro_batch, schedule)
    check_ramp(at, works, micro_batch, schedule)


def test_a_micro_batch_that_is_left_open_suits_all_batches() -> None:
    layout = Layout.parse("pp2_dp2")
    assert largest_micro_batch(layout, "1F1B", 32) == 8
    assert largest_micro_batch(layout, "1F1B", 32, range(8, 33, 8)) == 2


def test_an_elastic_run_shrinks_to_a_layout_for_all_batches() -> None:
    few = {"ranks": 3, "global_batch_size": 24, "micro_batch_size": 1}
    assert fitting_layout("dp4", **few).name == "dp3"
    assert fitting_layout("dp4", **few, smaller_batches=(8, 16)).name == "dp2"
