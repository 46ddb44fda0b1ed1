"""The self-check finds faults that trained other models in silence, when their repairs are taken
out again."""

import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from family_training import Recipe, train_on_rank

PLANTED = {
    "longcat_flash": (
        "lightning_3d.parallel.tensor.rewrite.SilentIdentity",
        type("CountedByAll", (), {}),
        "LongcatFlashExperts",
    ),
    "inkling2_text": (
        "lightning_3d.engine.assembly.fit_styles",
        lambda module, plan, tp_size: plan,
        "Inkling2Experts",
    ),
    "gemma3n_text": (
        "lightning_3d.engine.assembly.fit_styles",
        lambda module, plan, tp_size: plan,
        "Gemma3nTextMLP",
    ),
    "gemma4_text": (
        "lightning_3d.parallel.tensor.sequence_parallel.SequenceBlock._deal_others",
        lambda self, args, kwargs: (args, kwargs),
        "Gemma4TextDecoderLayer",
    ),
}


def train(family: str, *, planted: bool, cache: str) -> str:
    """The message with which a family is refused on tp2, or nothing."""
    os.environ["XDG_CACHE_HOME"] = cache
    target, fault, _ = PLANTED[family]
    if not planted:
        return _message(family)
    with patch(target, fault):
        return _message(family)


def _message(family: str) -> str:
    found = train_on_rank(Recipe(family), "tp2", "always")
    return found if isinstance(found, str) else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.full) if "inkling" not in name else name
        for name in PLANTED
    ],
)
def test_a_planted_fault_is_found_and_named(family: str, tmp_path: Path) -> None:
    for message in run_ranks(train, 2, family, planted=True, cache=str(tmp_path)):
        assert message.startswith("PlanError: Self-check:")
        assert f"({PLANTED[family][2]})" in message
    assert run_ranks(train, 2, family, planted=False, cache=str(tmp_path)) == ["", ""]
