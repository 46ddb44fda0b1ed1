"""A model that is rewritten into another one is found before its first step: mistakes of newcomers, each exact or one message."""

import copy
from pathlib import Path
from typing import Any

import own_gpt
import pytest
import torch
from own_gpt import ATTENTION, GPT, MLP, PACKED, PIPELINE, PLAN, Fitted, one_process
from ranks import run_ranks
from torch import nn

from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.layout import Layout
from lightning_3d.self_check.model_copy import kept_blocks, kinds_of
from lightning_3d.self_check.remembered import recall
from lightning_3d.strategy import Lightning3DStrategy


def build(*arguments: Any, **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(*arguments, **options)


def fit(model: nn.Module, layout: str, cache: Path, plan: dict[str, Any] | None = None, **options: Any) -> Fitted:
    """Train on as many ranks; what rank 0 has."""
    return run_ranks(own_gpt.fit, Layout.parse(layout).world_size, model, layout, plan, str(cache), **options)[0]


def assert_exact(fitted: Fitted, model: nn.Module) -> None:
    assert fitted.losses == pytest.approx(one_process(model), rel=2e-6)


@pytest.mark.parametrize("attention", [own_gpt.Attention, own_gpt.NamedHeads, own_gpt.SharedKeys], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layout", ["tp2", "tp2_pp2", pytest.param("tp4", marks=pytest.mark.full)])
def test_heads_are_counted_whatever_their_attribute_is_called(attention: type[nn.Module], layout: str, tmp_path: Path) -> None:
    model = build(attention)
    fitted = fit(model, layout, tmp_path)
    assert_exact(fitted, model)
    assert f"self-check of GPT: as rewritten for {Layout.parse(layout).name} it computes what it computes whole" in fitted.printed


def test_a_packed_projection_that_says_what_it_packs_is_exact(tmp_path: Path) -> None:
    model = build(own_gpt.Packed)
    assert_exact(fit(model, "tp2", tmp_path, {"tp": PACKED | MLP, "pp": PIPELINE}), model)


@pytest.mark.parametrize("options", [{"tied": True}, {"dropout": 0.1}], ids=["tied", "dropout"])
def test_tied_weights_and_dropout_are_no_difference(options: dict[str, Any], tmp_path: Path) -> None:
    model = build(**options)
    fitted = fit(model, "tp2_pp2", tmp_path)
    assert "computes what it computes whole" in fitted.printed
    if "tied" in options:
        assert_exact(fitted, model)


def without(entries: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: style for name, style in entries.items() if name not in names}


MISTAKES: dict[str, tuple[type[nn.Module], str, dict[str, Any], str]] = {
    "wrong name": (own_gpt.Attention, "tp2", {"tp": {**ATTENTION, "h.*.upp": "colwise"}, "pp": PIPELINE}, "h.*.upp|all the names"),
    "half a pair": (own_gpt.Attention, "tp2", {"tp": ATTENTION | {"h.*.up": "colwise"}, "pp": PIPELINE}, "cuts up but names no 'rowwise'"),
    "other half": (own_gpt.Attention, "tp2", {"tp": ATTENTION | {"h.*.down": "rowwise"}, "pp": PIPELINE}, "cuts down but names no 'col"),
    "reversed pair": (own_gpt.Attention, "tp2", {"tp": ATTENTION | {"h.*.up": "rowwise", "h.*.down": "colwise"}, "pp": PIPELINE}, "'h.0'"),
    "missing parameter": (own_gpt.Attention, "pp2", {"tp": ATTENTION, "pp": without(PIPELINE, "wpe")}, "'net.wpe.weight' is in no module"),
    "fixed heads": (own_gpt.FixedHeads, "tp2", PLAN, r"'h.0.attn' \(FixedHeads\).*between q, k and v.*number of heads"),
    "packed by columns": (
        own_gpt.Packed,
        "tp2",
        {"tp": {"h.*.attn.c_attn": "colwise", "h.*.attn.proj": "rowwise"} | MLP, "pp": PIPELINE},
        r"'h.0.attn' \(Packed\).*packed_colwise",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake: str, tmp_path: Path) -> None:
    attention, layout, plan, message = MISTAKES[mistake]
    with pytest.raises(PlanError, match=message):
        fit(build(attention), layout, tmp_path, plan)
    assert not list(tmp_path.rglob("*.json"))  # what failed is not remembered


def test_heads_that_no_rank_can_count_are_found_where_training_would_go_on(tmp_path: Path) -> None:
    """Without the check the fit ends well, with other losses."""
    model = build(own_gpt.NamedHeads)
    unchecked = fit(model, "tp2", tmp_path, self_check="never")
    assert unchecked.losses != pytest.approx(one_process(model), rel=1e-4)
    assert "self-check" not in unchecked.printed


def test_a_check_is_remembered_with_what_it_found(tmp_path: Path) -> None:
    model = build(own_gpt.NamedHeads)
    first, second = fit(model, "tp2", tmp_path), fit(model, "tp2", tmp_path)
    assert "self-check" in first.printed
    assert "self-check" not in second.printed
    assert second.losses == first.losses
    assert "self-check" in fit(model, "tp2", tmp_path, self_check="always").printed
    other_plan = {"tp": {**PLAN["tp"], "wpe": "replicate"}, "pp": PIPELINE}
    assert "self-check" in fit(model, "tp2", tmp_path, other_plan).printed


def test_a_damaged_memory_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "lightning_3d" / "self_check" / "key.json"
    file.parent.mkdir(parents=True)
    for content in ("", "{}", '{"local_sizes": ["nh"]}', '{"local_sizes": {"nh": "two"}}'):
        file.write_text(content)
        assert recall("key") is None
    file.write_text('{"local_sizes": {"h.0.nh": 2}}')
    assert recall("key") == {"h.0.nh": 2}


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match='self_check must be auto, always or never; got "sometimes"'):
        Lightning3DStrategy("tp2", self_check="sometimes")


class Noting(own_gpt.Block):
    """The first block leaves a note for the ones behind it, which do without where there is none."""

    notes: dict[str, torch.Tensor]

    def __init__(self, notes: dict[str, torch.Tensor]) -> None:
        super().__init__(own_gpt.Attention, 0.0)
        self.notes = notes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.notes.get("first", 0.0)
        self.notes.setdefault("first", x)
        return super().forward(x)


class NotingGPT(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, torch.Tensor] = {}
        self.h = nn.ModuleList(Noting(self.notes) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.notes.clear()
        return super().forward(ids)


def test_a_value_that_does_not_pass_through_the_stages_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(PlanError, match="Without a pipeline it is right.*pp=1"):
        fit(NotingGPT(), "pp2", tmp_path)


class TestBlocks:
    def test_blocks_that_differ_in_their_index_alone_are_one_kind(self) -> None:
        blocks = [own_gpt.Block(own_gpt.Attention, 0.0) for _ in range(6)]
        for index, block in enumerate(blocks):
            block.layer_idx, block.window = index + 1, 8 if index % 2 else 4
        assert kinds_of(blocks) == [(0, 2, 4), (1, 3, 5)]
        assert kept_blocks(kinds_of(blocks)) == ([0, 1, 4, 5], 2)

    def test_one_block_of_each_kind(self) -> None:
        blocks = [own_gpt.Block(own_gpt.Attention, 0.0), own_gpt.Block(own_gpt.Packed, 0.0), own_gpt.Block(own_gpt.Attention, 0.1)]
        assert kept_blocks(kinds_of(copy.deepcopy(blocks))) == ([0, 1, 2], 1)


class Parts(own_gpt.Text):
    """A step that calls the modules of its model one by one."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (ids,) = batch
        logits = GPT.forward(self.net, ids)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_model_that_is_never_called_is_said_not_to_be_checked(tmp_path: Path) -> None:
    printed = run_ranks(own_gpt.fit, 2, build(), "tp2", None, str(tmp_path), module=Parts)[0].printed
    assert "could not run: the step does not call GPT itself" in printed


def test_an_evaluation_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'h.0.attn' \(FixedHeads\)"):
        run_ranks(own_gpt.validate, 2, build(own_gpt.FixedHeads), str(tmp_path))
    assert "computes what it computes whole" in run_ranks(own_gpt.validate, 2, build(own_gpt.NamedHeads), str(tmp_path))[0]
