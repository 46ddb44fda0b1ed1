"""Frozen second models are sharded over tensor-parallel ranks, and compute what they compute on one
process."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import objectives
import pytest
import torch
from parity import assert_same_run
from ranks import run_ranks
from reference import Run
from torch import nn
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from lightning_3d.checkpoint import load_full_state_dict
from lightning_3d.engine.frozen_models import find_frozen_models
from lightning_3d.layout import Layout
from lightning_3d.parallel.context.inputs import splits

SIZE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FULL = pytest.mark.full
CASES: list[Any] = [
    ("qwen3", "tp2_pp2", {"sequence_parallel": True}),
    ("qwen3", "pp2_dp2", {"zero_stage": 3}),
    ("in_parts", "cp2", {}),
    ("qwen3", "tp2_cp2", {}),
    *(
        pytest.param(*case, marks=FULL)
        for case in (
            ("qwen3", "tp2", {}),
            ("qwen3", "tp4", {}),
            ("qwen3", "cp2", {}),
            ("qwen3", "pp2_cp2", {"cp_kind": "ulysses"}),
            ("in_parts", "tp2_cp2", {"zero_stage": 3}),
            ("qwen3", "tp2_dp2", {"zero_stage": 1}),
            ("qwen3", "tp2_pp2_dp2", {"zero_stage": 3}),
            ("qwen3", "tp2_pp2", {"schedule": "ZBVZeroBubble"}),
            ("qwen3", "tp2_pp2", {"schedule": "InterleavedZeroBubble", "zero_stage": 2}),
            ("gpt_neox", "tp2_pp2", {}),
            ("mixtral", "tp2", {}),
            ("mixtral", "tp2_dp2", {"zero_stage": 3}),
            ("dpo", "tp2_dp2", {"zero_stage": 1}),
            ("dpo", "tp2_dp2", {"zero_stage": 3}),
            ("dpo", "dp2", {"zero_stage": 3, "zero_offload": "parameters"}),
            ("mixtral", "dp2_cp2", {"zero_stage": 3}),
            ("qwen3", "pp2_dp2", {"zero_stage": 3, "zero_gather": "step"}),
            ("qwen3", "pp2_dp2", {"zero_stage": 3, "schedule": "ZBVZeroBubble"}),
            (
                "qwen3",
                "pp2_dp2",
                {
                    "zero_stage": 3,
                    "schedule": "InterleavedZeroBubble",
                    "recompute": "full",
                    "zero_reduce": "micro_batch",
                },
            ),
            ("dpo", "pp2_dp2", {"zero_stage": 3, "schedule": "DualPipeV"}),
            (
                "mixtral",
                "pp2_dp2",
                {"zero_stage": 3, "schedule": "ZBVZeroBubble", "zero_offload": "parameters"},
            ),
            ("qwen3", "pp2", {"schedule": "ZBVZeroBubble", "recompute": "full"}),
            ("dpo", "pp2", {"schedule": "DualPipeV", "recompute": "full"}),
            (
                "qwen3",
                "pp2_dp2",
                {"zero_stage": 3, "schedule": "Interleaved1F1B", "recompute": "full"},
            ),
        )
    ),
]


@lru_cache
def expected(kind: str, dtype: str, dp: int) -> Run:
    return objectives.one_process(kind, dtype, dp, micro_batch_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "options"), CASES, ids=str)
def test_a_sharded_frozen_model_computes_what_the_whole_one_does(
    kind: str, layout: str, options: dict[str, Any]
) -> None:
    parsed, dtype = Layout.parse(layout), "float32" if options.get("zero_stage") else "float64"
    found = run_ranks(
        objectives.fit_and_count, parsed.world_size, kind, dtype, layout, 2, **options, timeout=180
    )
    assert_same_run([part for part, _ in found], expected(kind, dtype, parsed.dp), dtype)
    if options.get("zero_stage") != 3:  # which makes parameters whole at the end of a fit
        whole = sum(
            parameter.numel()
            for parameter in objectives.other_model(kind, objectives.RECIPE).parameters()
        )
        last = max(count for _, count in found)
        # norms are whole on each rank, and two ranks share one of two heads of keys
        more = 1.2 if parsed.tp > 2 else 1.1
        assert last == whole if parsed.tp == 1 else last < more * whole / parsed.tp
        assert {count == 0 for _, count in found} == ({False, True} if parsed.pp > 1 else {False})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        ("tp2_pp2", "dp2", {}),
        pytest.param("pp2", "tp2_dp2", {}, marks=FULL),
        pytest.param("tp2_dp2", "tp2_pp2", {"zero_stage": 3}, marks=FULL),
    ],
)
def test_a_checkpoint_with_a_sharded_teacher_resumes_in_another_layout(
    before: str, after: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Its values are those of the teacher, whole and bit for bit. The resumed run begins with
    others, which the checkpoint replaces."""
    path, dtype = str(tmp_path / "one.ckpt"), "float32" if options else "float64"
    first, second = Layout.parse(before), Layout.parse(after)
    run_ranks(
        objectives.fit,
        first.world_size,
        "qwen3",
        dtype,
        before,
        2,
        save=path,
        **options,
        timeout=180,
    )
    recipe = replace(objectives.RECIPE, dtype=dtype)
    stored = load_full_state_dict(path)
    for name, value in objectives.other_model("qwen3", recipe).state_dict().items():
        assert torch.equal(stored[f"other.{name}"], value), name
    found = run_ranks(
        objectives.resume, second.world_size, "qwen3", dtype, after, 2, path, **options, timeout=180
    )
    wanted = expected("qwen3", dtype, second.dp)
    rest = replace(
        wanted,
        losses=wanted.losses[1:],
        grad_norms=wanted.grad_norms[1:],
        router_losses=wanted.router_losses[1:],
    )
    assert_same_run(found, rest, dtype)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2", "tp2_cp2"])
def test_a_frozen_model_that_does_not_divide_stays_whole_and_computes_the_same(layout: str) -> None:
    found = run_ranks(
        objectives.fit_and_count,
        Layout.parse(layout).world_size,
        "odd",
        "float64",
        layout,
        2,
        timeout=180,
    )
    assert_same_run([part for part, _ in found], expected("odd", "float64", 1), "float64")
    assert {count for _, count in found} == {
        sum(p.numel() for p in objectives.other_model("odd", objectives.RECIPE).parameters())
    }


class Pair(nn.Module):
    """A trained model, and what is given outside it."""

    def __init__(self, **others: nn.Module) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = LlamaForCausalLM(LlamaConfig(**SIZE))
        for name, module in others.items():
            self.add_module(name, module)


def frozen(**more: Any) -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**SIZE, **more})).requires_grad_(False)


def test_all_frozen_models_with_a_plan_are_found_and_trained_ones_are_not() -> None:
    """One is inside a wrapper whose head has no plan."""
    with torch.device("meta"):
        wrapper = nn.ModuleDict({"body": frozen().model, "head": nn.Linear(32, 1)}).requires_grad_(
            False
        )
        critic = LlamaForCausalLM(LlamaConfig(**SIZE))
    root = Pair(
        teacher=frozen(hidden_size=64),
        reward=wrapper,
        several=nn.ModuleList([frozen(), frozen()]),
        critic=critic,
    )
    assert [found.name for found in find_frozen_models(root, "model", Layout(tp=2))] == [
        "teacher",
        "reward.body",
        "several.0",
        "several.1",
    ]
    assert find_frozen_models(root, "model", Layout(dp=2)) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "heads",
            (
                "'other' .LlamaForCausalLM, .* is not sharded over the 2 .*does not divide 3"
                " heads.*Each of them holds all of it"
            ),
        ),
        (
            "no plan",
            (
                "'other' .Sequential, .* is not sharded over the 2 tensor-parallel ranks: it"
                " declares no tensor-parallel plan"
            ),
        ),
        (
            "shared",
            (
                "'other' .LlamaForCausalLM, .* is not sharded .*A parameter of it is also"
                " 'embedding.weight'"
            ),
        ),
    ],
)
def test_a_warning_says_which_model_stays_whole_and_what_it_costs(name: str, says: str) -> None:
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).requires_grad_(False)
    made = {
        "heads": frozen(num_attention_heads=3, hidden_size=48),
        "no plan": plain,
        "shared": frozen(),
    }[name]
    root = Pair(other=made)
    if name == "shared":
        root.embedding = nn.Embedding(67, 32, device="meta").requires_grad_(False)
        root.embedding.weight = made.model.embed_tokens.weight  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match=says):
        assert find_frozen_models(root, "model", Layout(tp=2)) == []


def test_ranks_split_the_sequences_of_causal_models_in_which_only_attention_mixes_tokens() -> None:
    with torch.device("meta"):
        # reads the last token of a sequence
        classifier = LlamaForSequenceClassification(LlamaConfig(**SIZE)).requires_grad_(False)
        mixes = FalconMambaForCausalLM(
            FalconMambaConfig(vocab_size=67, hidden_size=32, num_hidden_layers=2)
        ).requires_grad_(False)
    root = Pair(
        teacher=frozen(),
        small=frozen(num_attention_heads=3, hidden_size=48),
        classifier=classifier,
        mixes=mixes,
    )

    def split(cp_kind: str) -> list[str]:
        return [
            found.name
            for found in find_frozen_models(root, "model", Layout(cp=2), cp_kind=cp_kind)
            if found.split
        ]

    assert split("ring") == ["teacher", "small"]
    assert split("ulysses") == ["teacher"], "3 heads"


@pytest.mark.parametrize(
    ("more", "split"),
    [
        ({}, True),
        ({"attention_mask": torch.ones(1, 8), "use_cache": False}, True),
        ({"input_ids": torch.ones(1, 10, dtype=torch.long)}, False),
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, False),
        *(
            ({name: torch.ones(1, 8, dtype=torch.long)}, False)
            for name in ("labels", "shift_labels")
        ),
        *(
            ({name: True}, False)
            for name in ("use_cache", "output_attentions", "output_router_logits", "logits_to_keep")
        ),
    ],
)
def test_calls_whose_results_are_not_those_of_single_tokens_run_whole_sequences(
    more: dict[str, Any], split: bool
) -> None:
    assert splits({"input_ids": torch.ones(1, 8, dtype=torch.long)} | more, 2) is split


def test_a_users_plan_is_also_that_of_a_frozen_copy_and_of_no_other_class() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    class Other(Net):
        pass

    plan = {"tp": {"up": "colwise", "down": "rowwise"}}
    root = nn.ModuleDict(
        {
            "model": Net(),
            "copy": Net().requires_grad_(False),
            "other": Other().requires_grad_(False),
        }
    )
    [found] = find_frozen_models(root, "model", Layout(tp=2), plan)
    assert (found.name, found.declared) == ("copy", False)
