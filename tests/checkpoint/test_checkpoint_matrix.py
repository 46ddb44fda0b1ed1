"""Any layout loads what any other saved: every bit of weights, buffers and optimizer state, and the
same training from there.

Each source runs 20 steps (6 in a session without the long sweeps) without interruption and saves
after half of them, in the middle of its epoch. Each target loads that into a model on meta, writes
it again before its first step, and runs the other half.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import parity
import pytest
import reference
from checkpoint_fits import SaveAtStart, all_tensors, assert_equal
from parity import Cell, Data, Module, Rows, StepValues, quiet_trainer, strategy_arguments
from ranks import run_ranks
from reference import data

from lightning_3d.checkpoint import read_manifest

LONG = reference.STEPS > 4
STEPS = 20 if LONG else 6
SAVED_AFTER = STEPS // 2
CLOSE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 2e-2}


def dense(
    layout: str,
    zero: int = 0,
    schedule: str = "1F1B",
    model: str = "llama",
    dtype: str = "float32",
    **options: Any,
) -> Cell:
    degrees = {part[:2]: int(part[2:]) for part in layout.split("_")}
    return Cell(
        model,
        schedule=schedule,
        zero=zero,
        dtype=dtype,
        options=tuple(sorted(options.items())),
        **degrees,
    )


def pairs(model: str, dtype: str, source: Cell, targets: Iterable[Cell]) -> list[tuple[Cell, Cell]]:
    return [
        tuple(replace(cell, model=model, dtype=dtype) for cell in (source, target))
        for target in targets
    ]  # type: ignore[misc]


THREE_D = dense("tp2_pp2_dp2", 1)
LOOPED = dense("pp4_vp2", schedule="Interleaved1F1B")
DEALT = dense("ep4_dp4", 1)
TWO_LEVELS = dense("dp4", 3, zero_shard_size=2)
EXPERTS_IN_TWO_LEVELS = dense("ep2_dp4", 3, zero_shard_size=2)

DEFAULT = [
    *pairs("llama", "float32", THREE_D, [dense("dp2", 3), dense("tp1")]),
    *pairs("llama", "float32", TWO_LEVELS, [dense("dp2", 2)]),
    *pairs("mixtral", "float32", DEALT, [dense("ep2_tp2_dp2", 2)]),
    *pairs("qwen2", "float64", dense("tp1"), [dense("tp2_pp2")]),
]
FULL = [
    *pairs(
        "llama",
        "float32",
        TWO_LEVELS,
        [dense("dp4", 3), dense("dp8", 1, zero_shard_size=4), dense("tp2_pp2")],
    ),
    *pairs(
        "llama", "float32", dense("dp4", 2), [TWO_LEVELS, dense("pp2_dp4", 1, zero_shard_size=2)]
    ),
    *pairs(
        "llama",
        "bfloat16",
        dense("tp2_dp4", 1, zero_shard_size=2),
        [dense("dp8", 3, zero_shard_size=2), dense("dp2")],
    ),
    *pairs("qwen2", "float64", dense("tp1"), [dense("tp2_pp2_dp2")]),
    *pairs("phi3", "float32", LOOPED, [dense("tp4")]),
    *pairs(
        "llama",
        "float32",
        THREE_D,
        [dense("dp8", 3), dense("pp4", schedule="GPipe"), dense("cp2_dp2", 2), dense("tp4_dp2", 1)],
    ),
    *pairs(
        "llama",
        "float32",
        dense("dp8", 3),
        [THREE_D, dense("tp1"), dense("tp2_cp2", 3), dense("pp2_dp2", 2)],
    ),
    *pairs(
        "llama",
        "float32",
        dense("dp4", 2),
        [dense("tp2_dp4", 1), dense("dp2", 3), dense("pp2", schedule="ZBVZeroBubble")],
    ),
    *pairs(
        "phi3",
        "float32",
        LOOPED,
        [dense("tp2_dp2", 3), dense("tp2_pp2", schedule="InterleavedZeroBubble")],
    ),
    *pairs(
        "phi3", "float32", dense("tp2_dp2", 1), [dense("tp4", 1), dense("pp4_dp2", 1), dense("tp1")]
    ),
    *pairs(
        "qwen2",
        "float32",
        dense("pp4", schedule="1F1B"),
        [dense("pp2_dp4", 1), dense("tp4"), dense("pp2", schedule="DualPipeV")],
    ),
    *pairs(
        "qwen2",
        "float64",
        dense("pp2_dp2", schedule="LoopedBFS"),
        [dense("tp4"), dense("dp4"), dense("cp2_tp2")],
    ),
    *pairs(
        "llama",
        "float64",
        dense("tp4"),
        [dense("pp4", schedule="InterleavedZeroBubble"), dense("dp8"), dense("tp1")],
    ),
    *pairs(
        "mixtral", "float32", DEALT, [dense("tp1"), dense("ep2_pp2_dp2", 1), dense("ep4_dp4", 3)]
    ),
    *pairs(
        "qwen3_moe", "float32", dense("tp2_ep2_dp2", 1), [dense("ep4_dp4", 2), dense("pp2_dp2", 1)]
    ),
    *pairs(
        "mixtral",
        "float32",
        EXPERTS_IN_TWO_LEVELS,
        [dense("ep4_dp4", 1), dense("tp2_ep2_dp4", 2, zero_shard_size=2), dense("tp1")],
    ),
    *pairs(
        "mixtral",
        "float32",
        dense("ep4_dp4", 2),
        [EXPERTS_IN_TWO_LEVELS, dense("tp2_ep4_dp4", 1, zero_shard_size=2)],
    ),
    *pairs("mixtral", "float64", dense("ep2_dp4"), [dense("tp2_ep4_dp2"), dense("pp2")]),
    *pairs("llama", "bfloat16", THREE_D, [dense("dp4", 3), dense("pp2_dp2"), dense("tp2_dp2", 2)]),
    *pairs("llama", "bfloat16", dense("dp4", 3), [dense("tp2_pp2", 0), dense("tp2_dp2", 1)]),
]


def name(pair: tuple[Cell, Cell]) -> str:
    source, target = pair
    return f"{source.model}-{source.dtype}: {place(source)} -> {place(target)}"


def place(cell: Cell) -> str:
    degrees = "_".join(part for part in cell.layout.split("_") if not part.endswith("1")) or "tp1"
    shards = dict(cell.options).get("zero_shard_size")
    return (
        f"{degrees}/zero{cell.zero}"
        + (f"/shard{shards}" if shards else "")
        + (f"/{cell.schedule}" if cell.schedule != "1F1B" else "")
    )


class SaveAfter(pl.Callback):
    """Saves in the middle of the epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


def train(cell: Cell, layers: int, callback: pl.Callback, resume: str | None = None) -> list[float]:
    """Losses and gradient norms of the steps of one epoch, or of those that are left of it."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = replace(cell.recipe, layers=layers, steps=STEPS)
    values = StepValues()
    plan = Lightning3DStrategy(**strategy_arguments(cell), seed=recipe.seed)
    assert plan.layout is not None
    precision = parity.PRECISIONS[recipe.dtype]
    options: dict[str, Any] = {
        "max_epochs": 1,
        "gradient_clip_val": recipe.clip,
        "callbacks": [values, callback],
    }
    trainer = quiet_trainer(
        strategy=plan, devices=plan.layout.world_size, precision=precision, **options
    )
    trainer.fit(
        Module(recipe),
        datamodule=Data(Rows(data(recipe)), recipe.global_batch // plan.layout.dp),
        ckpt_path=resume,
    )
    return values.losses + values.grad_norms


LAYERS = 8 if LONG else 4  # so that every schedule has its stages, and all runs have the same model
SAVED: dict[Cell, tuple[Path, list[float]]] = {}  # one run for all targets of a source


def saved(source: Cell, folder: Path) -> tuple[Path, list[float]]:
    if source not in SAVED:
        path = folder / f"{len(SAVED)}.ckpt"
        values = run_ranks(
            train, source.world_size, source, LAYERS, SaveAfter(str(path)), timeout=600
        )[0]
        SAVED[source] = path, values
    return SAVED[source]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(pytest.param(*pair, id=name(pair)) for pair in DEFAULT),
        *(pytest.param(*pair, id=name(pair), marks=pytest.mark.full) for pair in FULL),
    ],
)
def test_f36_any_layout_loads_what_any_other_saved(
    source: Cell, target: Cell, folder: Path, tmp_path: Path
) -> None:
    path, uninterrupted = saved(source, folder)
    again = tmp_path / "again.ckpt"
    values = run_ranks(
        train, target.world_size, target, LAYERS, SaveAtStart(str(again)), str(path), timeout=600
    )[0]
    assert read_manifest(path)["global_step"] == read_manifest(again)["global_step"] == SAVED_AFTER
    assert_equal(all_tensors(again), all_tensors(path))
    left = uninterrupted[SAVED_AFTER:STEPS] + uninterrupted[STEPS + SAVED_AFTER :]
    assert values == pytest.approx(left, rel=CLOSE[source.dtype])


def test_there_are_enough_pairs() -> None:
    assert len(set(DEFAULT + FULL)) == len(DEFAULT + FULL) >= 30
