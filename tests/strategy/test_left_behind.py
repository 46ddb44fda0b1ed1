"""What blocks of other stages leave in attributes and hooks is not answered: exact where every rank
has it, else refused by name."""

from pathlib import Path
from typing import Any

import left_behind
import pytest
from ranks import run_ranks
from sweeps import by_default

from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.layout import Layout

EXACT = ("side", "constants", "late", "set before", "set between", "scaling hook")
REFUSED = {
    "attribute": r"'balance' of 'blocks\.0'",
    "assigned": r"'balance' of 'blocks\.0'",
    "counter": r"'calls' of 'blocks\.0'",
    "created": r"'fresh' of 'blocks\.0'",
    "list": r"'losses' of 'blocks\.0'",
    "dict": r"'stats' of 'blocks\.0'",
    "buffer": r"'load' of 'blocks\.0'",
    "inner": r"'balance' of 'blocks\.0\.gate'",
    "loop": r"'balance' of 'blocks\.0'",
    "logged": r"'balance' of 'blocks\.0'",
    "early": "earlier stage",
    "weight": r"earlier stage|'network\.blocks\.\d\.gate\.weight'",
    "hook": r"hook.*'blocks\.\d'",
    "inner hook": r"hook.*'blocks\.\d\.gate'|'blocks\.\d'.*seen'",
    "global": r"'left_behind\.SINK'",
    "outside": "total'",
    "set after": "'flag' of 'blocks.0' after",
}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("pp2", {"schedule": "InterleavedZeroBubble", "vp": 2}),
    ("tp2_pp2", {"plan": "auto"}),
    ("pp2", {"schedule": "ZBVZeroBubble"}),
    ("pp2", {"recompute": "full"}),
]


def fit(
    hows: tuple[str, ...], layout: str, folder: Path, **options: Any
) -> list[dict[str, list[float]]]:
    return run_ranks(
        left_behind.fit,
        Layout.parse(layout).world_size,
        hows,
        layout,
        str(folder),
        timeout=120,
        **options,
    )


def assert_exact(parts: list[dict[str, list[float]]]) -> None:
    for part in parts:
        for how, losses in part.items():
            assert losses == pytest.approx(left_behind.one_process(how), rel=1e-5), how


def test_what_every_rank_has_is_exact(tmp_path: Path) -> None:
    assert_exact(fit(EXACT, "pp2", tmp_path))


def test_attributes_are_those_of_the_micro_batch_where_no_block_is_elsewhere(
    tmp_path: Path,
) -> None:
    """Equal values of all rows: the mean over micro-batches is that over the batch."""
    assert_exact(fit(("attribute", "list", "hook", "loop"), "dp2", tmp_path, micro_batch_size=2))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), by_default(LAYOUTS, 0, 1), ids=str)
def test_what_every_rank_has_is_exact_in_other_layouts(
    layout: str, options: dict[str, Any], tmp_path: Path
) -> None:
    assert_exact(fit(EXACT, layout, tmp_path, **options))


@pytest.mark.parametrize("how", REFUSED)
def test_what_only_another_stage_has_is_refused_by_name(how: str, tmp_path: Path) -> None:
    with pytest.raises((PlanError, ConfigError), match=REFUSED[how]):
        fit((how,), "pp2", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["attribute", "list", "hook", "inner hook", "loop", "weight"])
def test_a_rank_with_several_stages_does_not_answer_for_another_micro_batch(
    how: str, tmp_path: Path
) -> None:
    with pytest.raises((PlanError, ConfigError), match=r"blocks|earlier stage"):
        fit((how,), "pp2", tmp_path, vp=2, self_check="never")


@pytest.mark.slow
def test_terms_of_the_loss_in_attributes_are_refused_with_a_drafted_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'balance' of 'blocks\.0'"):
        fit(("assigned",), "tp2_pp2", tmp_path, plan="auto")
