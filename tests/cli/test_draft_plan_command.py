"""`lightning-3d draft-plan`: a plan to paste, checked on ranks of this machine."""

from pathlib import Path
from typing import Any

import foreign_gpts
import pytest
from command_line import Result, assert_refused, run_commands

from lightning_3d.app.verification.plan_check import check_plan
from lightning_3d.engine.plan_draft.inputs import Inputs
from lightning_3d.errors import PlanError
from lightning_3d.layout import Layout

pytestmark = pytest.mark.slow

LINES = {
    "help": ["--help"],  # first: it does not import torch
    "nano": ["foreign_gpts:NanoGPT", "heads=8"],
    "unchecked": ["foreign_gpts:LitGPT", "--tp", "4", "--no-check"],
    "does not run": ["foreign_gpts:NanoGPT", "heads=5"],
    "no colon": ["foreign_gpts"],
    "no module": ["no_such_module:Model"],
    "no name": ["foreign_gpts:NanoGTP"],
    "no equals": ["foreign_gpts:NanoGPT", "heads"],
    "no such argument": ["foreign_gpts:NanoGPT", "head=4"],
    "a number": ["foreign_gpts:WIDTH"],
    "no such option": ["foreign_gpts:NanoGPT", "--nocheck"],
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Result]:
    return dict(
        zip(LINES, run_commands([["draft-plan", *line] for line in LINES.values()]), strict=True)
    )


def test_plan_is_checked_and_printed_as_code(answers: dict[str, Result]) -> None:
    answer = answers["nano"]
    assert answer.code == 0, answer.output
    assert "self-check of NanoGPT: passed; tp2_pp2 reproduces the whole model" in answer.output
    code = answer.output[
        answer.output.index("from lightning_3d import Cut") : answer.output.index("\n}\n") + 3
    ]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["plan"]["tp"]["transformer.h.*.attn.c_attn"].units == 8
    assert 'pass it as Lightning3DStrategy("tp2_pp2", plan=plan)' in answer.output


def test_incomplete_plan_says_what_is_missing(answers: dict[str, Result]) -> None:
    answer = answers["unchecked"]
    assert answer.code == 2 and "was not checked on ranks" in answer.output
    assert (
        "# tp: 'transformer.h.0.attn.attn' and" in answer.output
        and "tp=4 does not divide; tp=2 works" in answer.output
    )
    assert '"transformer.h.*.mlp.fc_1": "colwise"' in answer.output


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("no colon", ["MODULE:NAME", '"foreign_gpts"']),
        ("no module", ["no module no_such_module"]),
        ("no name", ['no "NanoGTP"', 'Did you mean "NanoGPT"']),
        ("no equals", ["KEY=VALUE", '"heads"']),
        ("no such argument", ["foreign_gpts:NanoGPT cannot be called", "'head'"]),
        ("does not run", ["NanoGPT does not run", "example_input_array"]),
        ("a number", ["must be an nn.Module", "returns one; got int"]),
        ("no such option", ["--no-check"]),
    ],
)
def test_mistake_gets_one_message(answers: dict[str, Result], line: str, says: list[str]) -> None:
    assert_refused(answers[line], says)


def test_help_explains_the_words(answers: dict[str, Result]) -> None:
    assert answers["help"].code == 0 and not answers["help"].torch
    assert all(
        word in answers["help"].output
        for word in ("MODULE:NAME", "KEY=VALUE", "--tp N", "--no-check")
    )


@pytest.mark.full
def test_wrong_plan_does_not_pass_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    import torch

    model, inputs = foreign_gpts.NanoGPT(), Inputs((torch.randint(0, 64, (2, 8)),))
    plan = {
        "tp": {"transformer.h.*.attn.c_attn": "colwise", "transformer.h.*.attn.c_proj": "rowwise"}
    }
    with pytest.raises(PlanError, match="Self-check: NanoGPT"):
        check_plan(model, plan, Layout(tp=2), inputs)
