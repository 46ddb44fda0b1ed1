"""Parity with one process: every model, degree, schedule and ZeRO stage, alone and in pairs.

``pytest`` runs all pairs of degrees, schedules and modes that fit on four ranks, with the models in
turn; ``pytest -m full`` some cells on eight, and a set that covers triples of all, models too, and
goes on where it stopped.
"""

import dataclasses
import hashlib
import json
import os
import sys
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import models
import parity
import pytest
import torch
from covering import covering_set, covers
from parity import LOOPED_SCHEDULES, SCHEDULES, V_SCHEDULES, Cell
from reference import Noise, Recipe, compare, reference, train
from sweeps import by_default

PAIRWISE_LIMIT, FULL_LIMIT = 30, 400
MAX_RANKS = 8
# every degree of 4, which few ranks leave no room for, beside tensor parallelism or a pipeline
LARGE = [
    Cell("gpt_neox", tp=4, pp=2, schedule="InterleavedZeroBubble"),
    Cell("gemma3", tp=2, pp=4, schedule="ZBVZeroBubble"),
    Cell("llama", tp=2, dp=4, zero=1),
    Cell("qwen3", pp=2, dp=4, schedule="Interleaved1F1B", zero=1),
]
ROOT = Path(__file__).parents[2]
SPLIT = [Cell("gpt_neox", tp=4)]  # and that of tensor parallelism by itself
SOURCES = ("ranks.py", "models.py", "reference.py", "parity.py")


def valid_cells() -> list[Cell]:
    """All combinations that a user may run on at most 8 ranks; schedules with several stages per
    rank need pp > 1."""
    degrees = (1, 2, 4)
    modes = ((0, "float64"), (0, "float32"), (1, "float32"))
    cells = [
        Cell(model, tp, pp, dp, schedule, zero, dtype)
        for model, tp, pp, dp, schedule, (zero, dtype) in product(
            models.MODELS, degrees, degrees, degrees, SCHEDULES, modes
        )
    ]
    looped = LOOPED_SCHEDULES + V_SCHEDULES
    return [
        cell
        for cell in cells
        if cell.world_size <= MAX_RANKS and not (cell.pp == 1 and cell.schedule in looped)
    ]


def factors(cell: Cell) -> tuple:
    return cell.model, cell.tp, cell.pp, cell.dp, cell.schedule, (cell.zero, cell.dtype)


def small_cells() -> list[Cell]:
    return [cell for cell in valid_cells() if cell.world_size <= 4 and cell.tp <= 2]


def choose(strength: int, cells: list[Cell]) -> list[Cell]:
    """A covering set of the cells; those that take less time are preferred, else there is no
    preference."""
    by_factors = {factors(cell): cell for cell in cells}
    costs = {
        row: cell.world_size * cell.tp + zlib.crc32(cell.name.encode()) / 2**32
        for row, cell in by_factors.items()
    }
    return [by_factors[row] for row in covering_set(by_factors, strength, costs.__getitem__)]


def in_turn() -> list[Cell]:
    """Every pair of what is no model. Those with the same precision and as many layers are near
    each other, so they share a model."""
    chosen = choose(2, [cell for cell in small_cells() if cell.model == models.MODELS[0]])
    rows = sorted(chosen, key=lambda cell: (cell.dtype, cell.layers, cell.world_size))
    return [
        dataclasses.replace(row, model=models.MODELS[place * len(models.MODELS) // len(rows)])
        for place, row in enumerate(rows)
    ]


def ordered(cells: list[Cell]) -> list[Cell]:
    """Cells that share a reference next to each other."""
    return sorted(
        cells,
        key=lambda cell: (
            models.MODELS.index(cell.model),
            cell.dtype,
            cell.layers,
            cell.world_size,
        ),
    )


def small_and_large() -> list[Any]:
    small = [
        pytest.param(cell, marks=pytest.mark.slow) if is_slow(cell) else cell
        for cell in ordered(in_turn() + SPLIT)
    ]
    return [*small, *(pytest.param(cell, marks=pytest.mark.full) for cell in ordered(LARGE))]


def is_slow(cell: Cell) -> bool:
    """Whether the quick tests leave a cell out: all schedules are in those of float32."""
    return cell.pp > 1 and cell.dtype == "float64"


@pytest.mark.parametrize("cell", small_and_large(), ids=lambda cell: cell.name)
def test_pairs(cell: Cell) -> None:
    parity.check(cell)


TRIPLES = choose(3, valid_cells())


@pytest.mark.full
@pytest.mark.parametrize("cell", ordered(TRIPLES), ids=lambda cell: cell.name)
def test_triples(cell: Cell) -> None:
    done = finished_cells().get(cell.name)
    if done is not None:
        parity.TABLE.append(done)
        return
    append_result(parity.check(cell))


@pytest.mark.slow
@pytest.mark.parametrize("model", by_default(models.MODELS, models.MODELS.index("gemma3")))
def test_an_eager_model_keeps_its_values(model: str) -> None:
    parity.assert_same_training(model, "tp2_pp2_dp1", eager=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [pytest.param(("tp", "cp", "dp", "pp"), marks=pytest.mark.full), ("pp", "dp", "tp", "cp")],
)
def test_rank_order_changes_nothing(order: tuple[str, ...]) -> None:
    parity.assert_same_training("llama", "tp2_pp2_dp2", order=order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "schedule"),
    by_default([("pp2_vp4", "Interleaved1F1B"), ("pp2_dp2_vp3", "LoopedBFS")], 1),
)
def test_other_numbers_of_stages_per_rank(layout: str, schedule: str) -> None:
    parity.assert_same_training("llama", layout, schedule, zero=1)


def test_the_default_set_is_complete_and_small() -> None:
    chosen = in_turn()
    assert len(chosen) <= PAIRWISE_LIMIT and {cell.model for cell in chosen} == set(models.MODELS)
    assert covers(
        [factors(cell)[1:] for cell in chosen], [factors(cell)[1:] for cell in small_cells()], 2
    )
    assert set(LARGE + SPLIT) <= set(valid_cells())


def test_the_full_set_is_small() -> None:
    assert len(TRIPLES) <= FULL_LIMIT


def test_finished_cells_are_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A result counts as long as the sources are the same; a line that a killed session left
    unfinished does not."""
    monkeypatch.setenv("PARITY_RESULTS", str(tmp_path / "results" / "full.jsonl"))
    assert finished_cells() == {}
    noise = Noise(1e-8, 2e-8, 3e-8)
    measured = parity.Measured(
        Cell("qwen2", 2, 1, 4), noise, parity.limits("float32"), noise, 0.0, 1.5
    )
    append_result(measured)
    with results_file().open("a") as stream:
        stream.write('{"cell": "llama-tp1')
    assert finished_cells() == {measured.cell.name: measured}
    monkeypatch.setattr(sys.modules[__name__], "source_hash", lambda: "other sources")
    assert finished_cells() == {}


def test_the_comparison_sees_a_small_mistake() -> None:
    """A learning rate that is 5 % too high exceeds every limit."""
    recipe = Recipe(steps=6)
    right, noise = reference(recipe)
    wrong = train(dataclasses.replace(recipe, learning_rate=recipe.learning_rate * 1.05))
    error, limits = compare(wrong, right), parity.limits("float32", noise)
    assert (
        error.loss > 2 * limits.loss
        and error.grad_norm > 2 * limits.grad_norm
        and error.weight > 2 * limits.weight
    )


def results_file() -> Path:
    """Finished cells of the full set, one JSON object per line."""
    return Path(os.environ.get("PARITY_RESULTS", ROOT / ".pytest_cache" / "parity.jsonl"))


def source_hash() -> str:
    """Of everything that a result depends on: the package, these tests, the version of torch."""
    digest = hashlib.sha256(torch.__version__.encode())
    paths = (
        sorted((ROOT / "lightning_3d").rglob("*.py"))
        + [ROOT / "tests" / "support" / name for name in SOURCES]
        + [Path(__file__)]
    )
    for path in paths:
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def finished_cells() -> dict[str, parity.Measured]:
    """Results of cells that passed with exactly these sources, by cell name."""
    file = results_file()
    if not file.exists():
        return {}
    records = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return {
        record["cell"]: _measured(record["measured"])
        for record in records
        if record["source"] == source_hash()
    }


def append_result(measured: parity.Measured) -> None:
    file = results_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "cell": measured.cell.name,
        "source": source_hash(),
        "measured": dataclasses.asdict(measured),
    }
    with file.open("a") as stream:
        stream.write(json.dumps(record) + "\n")


def _measured(fields: dict) -> parity.Measured:
    noises = {name: Noise(**fields[name]) for name in ("error", "limits", "noise")}
    options = tuple((key, value) for key, value in fields["cell"].pop("options"))
    cell = Cell(**fields["cell"], options=options)
    return parity.Measured(cell=cell, drift=fields["drift"], seconds=fields["seconds"], **noises)
