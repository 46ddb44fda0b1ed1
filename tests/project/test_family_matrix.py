"""The sweep over the families of Transformers: what it finds, what it calls it, and the families
that need a repair of their own."""

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Part
from ranks import POOL, RankTimeout
from sweeps import by_default

from lightning_3d.parallel.sharding import replicated

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from family_configs import NO_REFERENCE, families, is_held_out, tiny_config
from family_matrix import LAYOUTS, Matrix, main
from family_training import Difference, Reference, Run, judge


def name(value: str) -> str:
    """For ids, without reasons."""
    return value if " " not in value else ""


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return Matrix(timeout=120, pool=POOL)


PARTS = 8  # of all families, so that `make test-full` can continue after each

EXACT = [
    ("longcat_flash", "tp2", "experts without weights count once"),
    (
        "inkling2_text",
        "tp2",
        "a fused tensor is cut in both halves, though the family declares one run",
    ),
    ("gemma3n_text", "tp2", "an activation looks at whole rows"),
    ("gemma4_text", "tp2", "blocks get more than hidden states that has a row for every token"),
    ("reformer", "zero3", "blocks run again in a backward of their own"),
    ("aria_text", "ep2_dp2", "the number of experts has another name"),
    ("dbrx", "ep2_dp2", "declares no plan for its experts, whose rows are one after another"),
    ("roberta", "cp2", "positions do not begin at 0"),
    ("mamba", "pp2_cp2", "stages get a part of the tokens, and what mixes them all"),
    ("rwkv", "cp2", "its MLPs see the token before"),
    ("qwen3_next", "tp2_cp2", "plain attention next to gated delta nets"),
    ("llama4_text", "cp2", "attention in chunks"),
    (
        "llama4_text",
        "tp2_pp2",
        "with sequence parallelism, a mixture returns the rows one after the other",
    ),
    ("deepseek_v32", "cp2", "an indexer reads whole masks"),
    ("bart", "cp2", "its own forward computes the loss"),
]
REFUSED = [
    ("doge", "tp2", "one for each head"),
    ("doge", "cp2", "reads its mask itself"),
    ("llama", "ep2_dp2", "is dense: it has no experts"),
    ("jetmoe", "ep2_dp2", "the tokens of an expert cannot be sent to its rank"),
    ("longcat_flash", "ep2_dp2", "is an expert without weights"),
    ("cpmant", "cp2", "CpmAntTransformerBlock"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "why"), by_default(EXACT, 1, 4, 6), ids=name)
def test_families_that_compute_what_one_process_computes(
    matrix: Matrix, family: str, layout: str, why: str
) -> None:
    verdict = matrix.run(family, layout).verdict
    assert verdict.kind == "exact", (why, verdict)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "words"), REFUSED)
def test_families_that_are_refused(matrix: Matrix, family: str, layout: str, words: str) -> None:
    verdict = matrix.run(family, layout).verdict
    assert verdict.kind == "refused" and words in verdict.detail, verdict


VARIED = [
    ("bart", "pp2", "padding", "its own forward computes the loss, over all labels"),
    ("xlm", "zero3", "padding", "its last layer computes the loss"),
    ("llama", "cp2", "padding", "ranks have other numbers of targets"),
    ("mixtral", "pp2", "routers", "stages have other routers"),
    ("deepseek_v3", "ep2_dp2", "routers", "scores are sigmoids"),
    ("gpt2", "tp2_pp2", "dropout", "dropout of a model in evaluation mode does nothing"),
    ("llama", "pp2", "bf16", "master weights are float32"),
    ("mamba2", "tp2", "bf16", "a state in float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "variant", "why"), by_default(VARIED, 0, 3, 6), ids=name
)
def test_variants(family: str, layout: str, variant: str, why: str) -> None:
    verdict = Matrix(timeout=120, pool=POOL, variant=variant).run(family, layout).verdict
    assert verdict.kind == "exact", (why, verdict)


def test_a_family_without_routers_has_no_loss_of_routers() -> None:
    assert (
        "no routers"
        in Matrix(timeout=120, pool=POOL, variant="routers").run("llama", "tp2").verdict.detail
    )


@pytest.mark.full
def test_rounding_is_told_from_error_in_float64(matrix: Matrix) -> None:
    """Some gradients of Qwen 4's A_log are 1e-9, of which float32 knows one digit and Adam makes a
    step."""
    verdict = matrix.run("qwen4_exp_text", "ep2_dp2").verdict
    assert (
        verdict.kind == "exact" and "A_log" in verdict.detail and "in float64" in verdict.detail
    ), verdict
    assert verdict.error is not None and verdict.error.weight < 1e-10


@pytest.mark.slow
def test_two_families_on_one_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cells.csv"
    arguments = ["--layouts", "pp2", "--families", "llama", "git", "--out", str(out)]
    assert main(arguments) == 0
    rows = {row["family"]: row for row in csv.DictReader(out.open())}
    assert (rows["llama"]["verdict"], rows["git"]["verdict"]) == ("exact", "no reference")
    assert float(rows["llama"]["loss"]) < 1e-5
    capsys.readouterr()
    assert main([*arguments, "--resume"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [["pp2", *"100001"], ["held", "out", *"100001"]]


def test_a_third_of_the_families_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = families()
    held = set(filter(is_held_out, known))
    assert 0.25 < len(held) / len(known) < 0.4
    tried: list[str] = []
    monkeypatch.setattr(
        "family_matrix.sweep", lambda chosen, *others: tried.extend(chosen) or iter(())
    )
    main(["--held-out", "only"])
    assert tried == [family for family in known if family in held]
    tried.clear()
    main(["--held-out", "without"])
    assert tried == [family for family in known if family not in held]


def test_every_family_has_a_tiny_configuration() -> None:
    known = families()
    assert len(known) > 150 and NO_REFERENCE.keys() <= set(known)
    for family in ("llama", "mixtral", "mamba2", "gemma3"):
        text = tiny_config(family).get_text_config(decoder=True)
        assert text.vocab_size < 100 and text.num_hidden_layers == 4


def run_with(weights: torch.Tensor, losses: tuple[float, ...] = (4.0, 3.9)) -> Run:
    return Run(torch.tensor(losses).double(), torch.ones(2).double(), {"model.w": weights})


def part_with(weights: torch.Tensor, losses: tuple[float, ...] = (4.0, 3.9)) -> Part:
    return Part(
        list(losses), [1.0, 1.0], {"model.w": weights}, {"model.w": replicated("model.w", (4,), 1)}
    )


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([part_with(torch.ones(4))], "exact"),
        ([part_with(torch.ones(4) + 1e-4)], "WRONG"),
        ([part_with(torch.ones(4), (4.0, 3.91))], "WRONG"),
        ([part_with(torch.ones(4), (4.0, float("nan")))], "WRONG"),
        ([part_with(torch.tensor([1.0, 1.0, 1.0, float("nan")]))], "WRONG"),
        ([part_with(torch.ones(4)), part_with(torch.ones(4) + 1e-7)], "WRONG"),
        ([part_with(torch.ones(4)), part_with(torch.ones(4), (4.0, 3.8))], "WRONG"),
    ],
)
def test_verdicts_on_numbers(parts: list[Part], kind: str) -> None:
    expected = Reference(run_with(torch.ones(4)), Difference(0.0, 0.0, 0.0))
    assert judge(parts, expected, "float32").kind == kind


class Answers:
    """In the place of a pool of ranks."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def run(self, function: Any, world_size: int, arguments: tuple[Any, ...], *others: Any) -> Any:
        return (
            [Reference(run_with(torch.ones(4)), Difference(0.0, 0.0, 0.0))]
            if world_size == 1
            else self.answer()
        )

    def close(self) -> None: ...


def fail(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda: ["PlanError: no", "PlanError: no"], "refused"),
        (lambda: ["PlanError: no", part_with(torch.ones(4))], "crash"),
        (lambda: fail(ValueError("shape")), "crash"),
        (lambda: fail(RankTimeout("ranks [1] of 2")), "hang"),
        (lambda: [part_with(torch.zeros(4))] * 2, "WRONG"),
    ],
)
def test_verdicts_on_what_ranks_do(answer: Callable[[], Any], kind: str) -> None:
    pool: Any = Answers(answer)
    assert Matrix(timeout=1, pool=pool).run("llama", "tp2").verdict.kind == kind


def test_a_wrong_cell_ends_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = Answers(lambda: [part_with(torch.zeros(4))] * 2)
    monkeypatch.setattr("family_matrix.RankPool", lambda **limits: pool)
    assert main(["--layouts", "tp2", "--families", "llama"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(1, PARTS + 1))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_families(layout: str, part: int) -> None:
    assert main(["--layouts", layout, "--timeout", "180", "--shard", f"{part}/{PARTS}"]) == 0
